"""Grammars at the front door: refused there, or handed to a worker with the class that they make."""

import asyncio

import grpc
import pytest

from outrider.v1 import common_pb2, inference_pb2
from router.classify import GRAMMAR_GIVEN
from tests.support.router_stand import collect, request, router_stand
from tests.unit.core.test_grammar import BAD, SCHEMA

pytestmark = pytest.mark.timeout(60)


def constrained(kind: str, text: str, **fields: str) -> inference_pb2.GenerateRequest:
    message = request("tell me a story", 12)
    message.sampling.MergeFrom(common_pb2.SamplingParams(**{kind: text}))  # type: ignore[arg-type]
    message.MergeFrom(inference_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    return message


async def test_bad_grammars_are_refused_by_name_and_no_worker_hears_of_them() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        healthy = asyncio.create_task(collect(stand.inference.Generate(request("hello", 40))))
        await stand.workers_running(1)
        for name, (kind, text) in BAD.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stand.inference.Generate(constrained(kind, text)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            field = dict(caught.value.trailing_metadata() or ())["outrider-error-field"]
            assert field == "sampling.grammar", name
            assert len(caught.value.details() or "") < 300
        stand.workers[0].gate.set()
        assert len((await healthy).token_ids[0]) == 40
        assert len(stand.workers[0].requests) == 1


async def test_ten_megabytes_of_schema_do_not_get_past_the_door() -> None:
    async with router_stand() as stand:
        for size in (70_000, 10 * 2**20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stand.inference.Generate(constrained("json_schema", "[" * size)))
            assert caught.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        await collect(stand.inference.Generate(request()))
        assert len(stand.workers[0].requests) == 1


async def test_a_grammar_reaches_the_worker_and_makes_the_request_structured() -> None:
    async with router_stand() as stand:
        reply = await collect(stand.inference.Generate(constrained("json_schema", SCHEMA)))
        (seen,) = stand.workers[0].requests
        assert seen.sampling.json_schema == SCHEMA
        assert reply.started.request_class == seen.request_class == GRAMMAR_GIVEN.request_class
        assert GRAMMAR_GIVEN.reason in reply.started.route_reason
        given = await collect(
            stand.inference.Generate(constrained("regex", "[a-z ]+", request_class="creative"))
        )
        assert given.started.request_class == "creative"
