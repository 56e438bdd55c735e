"""The whole table of bad input over a real socket, beside a healthy request that must not notice (CASES B51)."""

import asyncio

import grpc
import pytest

from tests.support.router_stand import collect, request, router_stand
from tests.support.scripted_decode import answer_ids
from tests.unit.router.test_router_validate import BAD, MODEL, SETTINGS, changed

pytestmark = pytest.mark.timeout(60)


async def test_every_bad_request_gets_invalid_argument_with_its_field_and_the_neighbour_its_answer() -> None:
    settings = SETTINGS.model_copy(update={"registry_poll_s": 0.05})
    async with router_stand(settings=settings, model=MODEL) as stand:
        stand.workers[0].gate.clear()
        healthy = asyncio.create_task(collect(stand.inference.Generate(request("hello", 40))))
        await stand.workers_running(1)
        for field, change in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stand.inference.Generate(changed(change)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(caught.value.trailing_metadata() or ())["outrider-error-field"] == field
        for letter in "xé":
            long_name = request("hello", 40)
            long_name.speculation.drafter = 20_000 * letter
            with pytest.raises(grpc.aio.AioRpcError, match=letter) as caught:
                await collect(stand.inference.Generate(long_name))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "its message fits into a trailer"
        stand.workers[0].gate.set()
        reply = await healthy
        assert len(stand.workers[0].requests) == 1
    assert reply.token_ids == {0: answer_ids(7, 0, 5, 40)}
