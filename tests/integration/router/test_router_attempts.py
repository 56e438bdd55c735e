"""Dispatch over real sockets: whatever a decode worker does, the client sees each token once or one clear status."""

import asyncio
from collections import deque

import grpc
import pytest

from outrider.v1 import inference_pb2
from tests.support.router_stand import collect, request, router_stand
from tests.support.scripted_decode import Fault, FaultKind, answer_ids

pytestmark = pytest.mark.timeout(30)


async def test_an_answer_is_relayed_in_order_with_seed_class_and_usage() -> None:
    async with router_stand() as stand:
        reply = await collect(stand.inference.Generate(request("hello", 20)))
    expected = answer_ids(7, 0, 5, 20)
    assert reply.token_ids == {0: expected}
    assert reply.text == {0: bytes(expected).decode()}
    assert reply.started.seed == 7
    assert reply.started.drafter == "ngram"
    assert reply.started.request_class == "chat"
    assert reply.started.numerics_class == "class-a"
    assert reply.started.prompt_tokens == 5
    assert reply.finished.usage.completion_tokens == 20
    assert reply.finished.attempts == 1
    assert reply.finished.speculation.request_class == "chat"


@pytest.mark.parametrize("kind", ["unavailable", "die", "end_early"])
@pytest.mark.parametrize("after_tokens", [0, 3, 9, 20])
async def test_an_answer_goes_on_without_gap_or_repeat_when_its_worker_is_lost(
    kind: FaultKind, after_tokens: int
) -> None:
    async with router_stand(num_workers=2) as stand:
        once = deque([Fault(kind, after_tokens)])
        for worker in stand.workers:
            worker.faults = once
        reply = await collect(stand.inference.Generate(request("hello", 20)))
        assert sum(len(worker.fired) for worker in stand.workers) == 1
        assert stand.router.status().counters["worker_load"] == 0
    expected = answer_ids(7, 0, 5, 20)
    assert reply.token_ids == {0: expected}
    assert reply.text == {0: bytes(expected).decode()}
    assert reply.finished.usage.completion_tokens == 20
    assert reply.finished.speculation.step_tokens == 20


async def test_both_choices_of_a_broken_answer_are_resumed_each_from_its_own_tokens() -> None:
    async with router_stand(num_workers=2) as stand:
        once = deque([Fault("unavailable", 12)])
        for worker in stand.workers:
            worker.faults = once
        message = request("hello", 9)
        message.sampling.n = 2
        reply = await collect(stand.inference.Generate(message))
        assert not once
        committed = [
            entry for worker in stand.workers for made in worker.requests for entry in made.committed
        ]
    assert reply.token_ids == {0: answer_ids(7, 0, 5, 9), 1: answer_ids(7, 1, 5, 9)}
    assert any(entry.finished for entry in committed)


async def test_a_single_worker_that_restarts_gets_its_answer_back() -> None:
    async with router_stand() as stand:
        stand.workers[0].faults.append(Fault("die", 6))
        call = stand.inference.Generate(request("hello", 20))
        reading = asyncio.create_task(collect(call))
        while not stand.workers[0].fired:
            await stand.router.directory.changed(1.0)
        reborn = await stand.add_worker("decode-0")
        reply = await reading
        assert stand.workers[0].fired
        assert reborn.claims[0].attempt > stand.workers[0].claims[0].attempt
        assert list(reborn.requests[0].committed[0].token_ids) == answer_ids(7, 0, 5, 20)[:6]
    assert reply.token_ids == {0: answer_ids(7, 0, 5, 20)}
    assert reply.finished.attempts == reborn.claims[0].attempt


async def test_a_worker_that_always_fails_costs_max_attempts_and_one_unavailable() -> None:
    async with router_stand() as stand:
        stand.workers[0].faults.extend([Fault("unavailable", 3)] * 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request()))
        assert len(stand.workers[0].fired) == 4
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("second_after", [0, 3])
async def test_an_answer_under_which_two_workers_were_lost_goes_on_without_its_drafter(
    second_after: int,
) -> None:
    async with router_stand() as stand:
        stand.workers[0].faults.extend([Fault("unavailable", 3), Fault("unavailable", second_after)])
        reply = await collect(stand.inference.Generate(request("hello", 20)))
        asked = [made.speculation.drafter for made in stand.workers[0].requests]
    assert asked == ["ngram", "ngram", "none"]
    assert reply.token_ids == {0: answer_ids(7, 0, 5, 20)}
    assert reply.finished.speculation.fallback_reason == "workers_lost"


async def test_an_internal_error_of_a_worker_is_not_tried_elsewhere() -> None:
    async with router_stand(num_workers=2) as stand:
        for worker in stand.workers:
            worker.faults.append(Fault("internal", 3))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request()))
        assert sum(len(worker.requests) for worker in stand.workers) == 1
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_no_worker_at_all_is_unavailable_soon() -> None:
    async with router_stand(num_workers=0) as stand:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request(), timeout=5))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_full_worker_hands_over_to_another_and_two_full_ones_shed_with_a_hint() -> None:
    async with router_stand(num_workers=2) as stand:
        stand.workers[0].faults.append(Fault("overloaded"))
        stand.workers[1].faults.append(Fault("overloaded"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request()))
        assert [len(worker.fired) for worker in stand.workers] == [1, 1]
        stand.workers[0].faults.append(Fault("overloaded"))
        await collect(stand.inference.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata() or ())
    assert trailers["outrider-retry-after-ms"] == "250"


async def test_an_answer_that_its_worker_ends_for_a_slow_reader_is_not_begun_again() -> None:
    async with router_stand(num_workers=2) as stand:
        once = deque([Fault("overloaded", 9)])
        for worker in stand.workers:
            worker.faults = once
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request("hello", 20)))
        assert sum(len(worker.fired) for worker in stand.workers) == 1
        assert sum(len(worker.requests) for worker in stand.workers) == 1
        await stand.idle()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_deadline_and_the_trace_context_reach_the_worker() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with router_stand() as stand:
        call = stand.inference.Generate(request(), timeout=5, metadata=(("traceparent", traceparent),))
        await collect(call)
        remaining_s = stand.workers[0].remaining_s[0]
        seen = stand.workers[0].metadata[0]
        claims = stand.workers[0].claims[0]
    assert remaining_s is not None
    assert 3.0 < remaining_s < 5.2
    assert str(seen["traceparent"]).split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert claims.decode_worker_id == "decode-0"


async def test_a_deadline_in_mid_answer_ends_the_worker_call_too() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request(), timeout=0.3))
        await stand.idle()
        assert stand.workers[0].cancelled == 1
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_cancels_frees_the_worker_and_every_counter() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        call = stand.inference.Generate(request())
        first = await call.read()
        assert first.HasField("started")
        call.cancel()
        await stand.idle()
        assert stand.workers[0].cancelled == 1
        assert stand.router.status().counters["worker_load"] == 0


async def test_a_client_resumes_its_own_answer_elsewhere() -> None:
    whole = answer_ids(7, 0, 5, 20)
    async with router_stand() as stand:
        message = request("hello", 20)
        message.resume_token_ids.ids.extend(whole[:11])
        reply = await collect(stand.inference.Generate(message))
    assert reply.token_ids == {0: whole[11:]}
    assert reply.finished.usage.completion_tokens == 20


async def test_an_answer_whose_worker_dies_after_the_last_token_ends_all_the_same() -> None:
    async with router_stand() as stand:
        stand.workers[0].faults.append(Fault("end_early", 20))
        reply = await collect(stand.inference.Generate(request("hello", 20)))
        assert stand.workers[0].fired
        assert len(stand.workers[0].requests) == 1
    assert reply.token_ids == {0: answer_ids(7, 0, 5, 20)}
    assert [choice.index for choice in reply.finished.choices] == [0]


async def test_unknown_words_of_speculation_are_refused_and_named() -> None:
    async with router_stand() as stand:
        message = request()
        message.speculation.drafter = "oracle"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(message))
        assert not stand.workers[0].requests
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata() or ())["outrider-error-field"] == "speculation.drafter"


async def test_invalid_unicode_is_invalid_argument_and_the_channel_lives_on() -> None:
    surrogate = b"\xed\xa0\x80"
    raw = bytes([0x0A, len(surrogate)]) + surrogate
    async with router_stand() as stand:
        call = stand.channel.unary_stream(
            "/outrider.v1.Inference/Generate",
            request_serializer=bytes,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )(raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        await collect(stand.inference.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
