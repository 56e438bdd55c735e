"""The router under load: overload, disconnects, floods of one prefix, large prompts, scaling, slow clients."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from core.settings import RouterSettings
from outrider.v1 import inference_pb2
from tests.support.router_stand import FAST, MODEL, Stand, collect, request, router_stand

pytestmark = pytest.mark.timeout(60)

OVERLOAD_DEADLINE_S = 0.4


async def outcome_of(
    stand: Stand, message: inference_pb2.GenerateRequest, timeout_s: float
) -> grpc.StatusCode:
    """How a call ends."""
    try:
        await collect(stand.inference.Generate(message, timeout=timeout_s))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_five_times_overload_sheds_and_recovers_without_spending_work_on_lost_requests() -> None:
    settings = RouterSettings(registry_poll_s=0.05, max_in_flight=4, max_queue=8)
    async with router_stand(settings=settings) as stand:
        worker = stand.workers[0]
        worker.service_s = 0.1
        fair_share = int(OVERLOAD_DEADLINE_S / worker.service_s) * settings.max_in_flight
        calls = [
            outcome_of(stand, request(f"p{index}", 3), OVERLOAD_DEADLINE_S) for index in range(5 * fair_share)
        ]
        outcomes = Counter(await asyncio.gather(*calls))
        reached = len(worker.requests)
        assert set(outcomes) <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
        assert outcomes[grpc.StatusCode.OK] >= settings.max_in_flight
        assert outcomes[grpc.StatusCode.RESOURCE_EXHAUSTED] >= fair_share
        assert reached <= outcomes.total() - outcomes[grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert all(remaining_s is not None and remaining_s > 0 for remaining_s in worker.remaining_s)
        assert worker.most_running <= settings.max_in_flight
        assert await outcome_of(stand, request("after"), 2.0) is grpc.StatusCode.OK
        await stand.idle()
        assert stand.router.status().waiting == 0


async def test_a_request_whose_deadline_passes_in_the_queue_never_reaches_a_worker() -> None:
    settings = RouterSettings(registry_poll_s=0.05, max_in_flight=1, max_queue=8)
    async with router_stand(settings=settings) as stand:
        stand.workers[0].gate.clear()
        first = asyncio.create_task(outcome_of(stand, request("first"), 20))
        await stand.workers_running(1)
        assert await outcome_of(stand, request("late"), 0.2) is grpc.StatusCode.DEADLINE_EXCEEDED
        stand.workers[0].gate.set()
        assert await first is grpc.StatusCode.OK
        assert len(stand.workers[0].requests) == 1


async def test_five_hundred_disconnects_leave_every_counter_at_zero() -> None:
    chance = random.Random(44)

    async def disconnect(stand: Stand, index: int) -> None:
        call = stand.inference.Generate(request(f"client {index}", 60))
        for _ in range(chance.randrange(6)):
            await call.read()
        call.cancel()

    async with router_stand(num_workers=2) as stand:
        for start in range(0, 500, 100):
            await asyncio.gather(*(disconnect(stand, index) for index in range(start, start + 100)))
        await stand.idle()
        status = stand.router.status()
        assert status.running == status.waiting == 0
        assert status.counters["worker_load"] == 0
        assert [worker.running for worker in stand.workers] == [0, 0]
        assert sum(worker.cancelled for worker in stand.workers) > 50


async def test_a_flood_of_one_prefix_is_spread_within_two_to_one() -> None:
    async with router_stand(num_workers=2) as stand:
        for worker in stand.workers:
            worker.gate.clear()
        prompt = "the same long preamble of everybody, " * 20
        calls = [asyncio.create_task(outcome_of(stand, request(prompt, 3), 30)) for _ in range(120)]
        await stand.workers_running(120)
        loads = sorted(worker.running for worker in stand.workers)
        for worker in stand.workers:
            worker.gate.set()
        assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.OK}
    assert loads[1] <= 2 * loads[0]


async def test_a_second_turn_goes_where_the_first_one_was_answered() -> None:
    async with router_stand(num_workers=3) as stand:
        prompt = "a conversation that is long enough to fill some blocks of the cache. " * 3
        for _ in range(5):
            await collect(stand.inference.Generate(request(prompt, 3)))
        served = [len(worker.requests) for worker in stand.workers]
    assert sorted(served) == [0, 0, 5]


async def test_new_workers_get_work_from_a_client_that_was_there_before() -> None:
    async with router_stand() as stand:
        stand.workers[0].service_s = 0.01
        done = asyncio.Event()

        async def keep_asking(client: int) -> None:
            while not done.is_set():
                await collect(stand.inference.Generate(request(f"client {client}", 3)))

        async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
            for client in range(8):
                clients.create_task(keep_asking(client))
            await stand.workers_running(4)
            newcomers = [await stand.add_worker("decode-1"), await stand.add_worker("decode-2")]
            while not all(worker.requests for worker in newcomers):
                await stand.router.directory.changed(1.0)
            done.set()
        assert all(worker.requests for worker in newcomers)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_prompts_are_taken_up_to_the_limit_and_refused_clearly_above_it(as_ids: bool) -> None:
    """3.9 MB is served by a model with room for it; 5 MB is refused by name; beyond a message gRPC itself refuses."""
    limit_bytes = 4 * 2**20

    def sized(size_bytes: int) -> inference_pb2.GenerateRequest:
        message = request("x", 3)
        if as_ids:
            message.token_ids.ids.extend([65] * (size_bytes // 4))
        else:
            message.text = "A" * size_bytes
        return message

    async with router_stand(model=replace(MODEL, max_context=8 * 2**20)) as stand:
        field = "token_ids" if as_ids else "text"
        assert await outcome_of(stand, sized(3_900_000), 30) is grpc.StatusCode.OK
        assert await outcome_of(stand, sized(4_100_000), 30) is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(sized(5_000_000)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(limit_bytes) in str(caught.value.details())
        assert dict(caught.value.trailing_metadata() or ())["outrider-error-field"] == field
        enormous = request("x", 3)
        enormous.text = "A" * (9 * 2**20)
        assert await outcome_of(stand, enormous, 30) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await outcome_of(stand, request("still there"), 5) is grpc.StatusCode.OK
        assert len(stand.workers[0].requests) == 3


async def test_a_prompt_beyond_the_context_is_refused_with_its_size_before_any_work() -> None:
    async with router_stand() as stand:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request("A" * 9000, 3)))
        assert not stand.workers[0].requests
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "9000" in str(caught.value.details())
    assert "8192" in str(caught.value.details())


async def test_a_client_that_does_not_read_holds_back_the_worker_and_nobody_else() -> None:
    async with router_stand(settings=FAST) as stand:
        worker = stand.workers[0]
        worker.text_bytes = 256 * 1024
        call = stand.inference.Generate(request("slow", 600))
        await call.read()
        before = -1
        while worker.sent_deltas != before:
            before = worker.sent_deltas
            for _ in range(4):
                await stand.router.directory.changed(1.0)
        assert 0 < worker.sent_deltas < 150
        worker.text_bytes = 0
        assert await outcome_of(stand, request("quick", 3), 5) is grpc.StatusCode.OK
        call.cancel()
        await stand.idle()
        assert worker.running == 0


async def test_a_client_that_never_reads_again_loses_its_place_and_ends_with_a_status() -> None:
    async with router_stand(settings=FAST.model_copy(update={"slow_reader_timeout_s": 0.5})) as stand:
        worker = stand.workers[0]
        worker.text_bytes = 256 * 1024
        call = stand.inference.Generate(request("slow", 600))
        await call.read()
        await stand.idle()
        assert worker.running == 0
        assert 0 < worker.sent_deltas < 150
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
