"""The control state against a real redis-server: what it keeps, and what happens when it goes away."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from cluster.redis_server import RedisServer
from core.clock import SystemClock
from core.control_state import AcceptanceCounts, ControlState, ControlStateUnavailable
from core.records import WorkerRecord
from core.settings import RegistrySettings

SETTINGS = RegistrySettings.model_validate({"command_timeout_s": 0.5})
RECORD = WorkerRecord(
    worker_id="decode-0",
    role="decode",
    address="127.0.0.1:1",
    epoch="a" * 32,
    model="tiny",
    model_revision="r1",
    numerics_class="c1",
    ready=True,
    draining=False,
    running=1,
    waiting=0,
    free_blocks=3,
    total_blocks=4,
    block_size=16,
    max_context=256,
    drafters=("none", "ngram"),
    hidden_layers=(1, 2),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path, SETTINGS) as server:
        yield server


@pytest.fixture
async def state(server: RedisServer) -> AsyncIterator[ControlState]:
    state = ControlState(server.url, SETTINGS)
    yield state
    await state.close()


async def restarted(server: RedisServer, state: ControlState, old_id: int) -> None:
    """Waits until another redis-server answers."""
    async with asyncio.timeout(10):
        while True:
            try:
                await state.ping()
                if server.process_id != old_id:
                    return
            except ControlStateUnavailable:
                pass
            await asyncio.sleep(0.02)


async def test_records_come_back_as_they_were_published(state: ControlState) -> None:
    other = replace(RECORD, worker_id="prefill-0", role="prefill", drafters=(), hidden_layers=())
    await state.publish(other, ttl_s=5)
    await state.publish(RECORD, ttl_s=5)
    assert await state.list_workers() == (RECORD, other)


async def test_a_silent_worker_is_forgotten_after_its_time(state: ControlState) -> None:
    await state.publish(RECORD, ttl_s=0.05)
    assert await state.list_workers() == (RECORD,)
    async with asyncio.timeout(5):
        while await state.list_workers():  # noqa: ASYNC110  # redis tells nobody of an expiry
            await asyncio.sleep(0.01)
    await state.publish(RECORD, ttl_s=5)
    assert await state.list_workers() == (RECORD,)


async def test_an_earlier_life_cannot_withdraw_a_later_one(state: ControlState) -> None:
    later = replace(RECORD, epoch="b" * 32)
    await state.publish(later, ttl_s=5)
    await state.withdraw(RECORD.worker_id, RECORD.epoch)
    assert await state.list_workers() == (later,)
    await state.withdraw(later.worker_id, later.epoch)
    assert await state.list_workers() == ()


async def test_acceptance_adds_up_by_model_drafter_and_class(state: ControlState) -> None:
    first = AcceptanceCounts(requests=1, steps=4, step_tokens=9, offered=(4, 3), accepted=(3, 1))
    second = AcceptanceCounts(requests=1, steps=2, step_tokens=3, offered=(2, 1, 1), accepted=(1, 0, 0))
    await state.add_acceptance("tiny", "ngram", "code", first)
    await state.add_acceptance("tiny", "ngram", "code", second)
    found = await state.get_acceptance("tiny", "ngram", "code")
    assert (found.requests, found.steps, found.step_tokens) == (2, 6, 12)
    assert found.offered == (6, 4, 1)
    assert found.accepted == (4, 1)
    assert await state.get_acceptance("tiny", "ngram", "chat") == AcceptanceCounts()


async def test_an_emptied_redis_fills_by_the_next_heartbeat(server: RedisServer, state: ControlState) -> None:
    await state.publish(RECORD, ttl_s=5)
    async with redis.asyncio.Redis.from_url(server.url) as direct:
        await direct.flushall()
    assert await state.list_workers() == ()
    await state.publish(RECORD, ttl_s=5)
    assert await state.list_workers() == (RECORD,)


async def test_a_killed_redis_is_restarted_and_the_same_client_works_on(
    server: RedisServer, state: ControlState
) -> None:
    await state.publish(RECORD, ttl_s=5)
    old_id = server.process_id
    os.kill(old_id, signal.SIGKILL)
    await restarted(server, state, old_id)
    assert server.restarts == 1
    assert await state.list_workers() == ()
    await state.publish(RECORD, ttl_s=5)
    assert await state.list_workers() == (RECORD,)


async def test_a_frozen_redis_is_unavailable_within_the_command_timeout(
    server: RedisServer, state: ControlState
) -> None:
    await state.publish(RECORD, ttl_s=5)
    clock = SystemClock()
    os.kill(server.process_id, signal.SIGSTOP)
    try:
        started_s = clock.now_s()
        with pytest.raises(ControlStateUnavailable):
            await state.list_workers()
        assert clock.now_s() - started_s < SETTINGS.command_timeout_s + 0.5
    finally:
        os.kill(server.process_id, signal.SIGCONT)
    assert await state.list_workers() == (RECORD,)


async def test_a_task_that_calls_again_and_again_ends_when_it_is_cancelled(state: ControlState) -> None:
    async def calls() -> None:
        while True:
            await state.ping()

    for number in range(400):
        task = asyncio.create_task(calls())
        await asyncio.sleep(number % 20 * 1e-4)
        task.cancel()
        ended, _ = await asyncio.wait([task], timeout=2)
        assert ended, f"cancellation {number} was lost"


async def test_nobody_there_is_unavailable_not_a_redis_error(tmp_path: Path) -> None:
    state = ControlState(f"unix://{tmp_path}/nobody.sock", SETTINGS)
    with pytest.raises(ControlStateUnavailable):
        await state.publish(RECORD, ttl_s=1)
    await state.close()


async def test_nothing_is_listened_on_but_a_private_socket(server: RedisServer, tmp_path: Path) -> None:
    import psutil

    assert psutil.Process(server.process_id).net_connections("inet") == []
    assert (tmp_path / "redis.sock").stat().st_mode & 0o777 == 0o700
