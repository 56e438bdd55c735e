"""Admission: bounds, turns between tenants, deadlines and shedding."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from core.clock import FakeClock, SystemClock
from core.errors import DeadlineExceeded, Overloaded, Unavailable
from router.admit import MAX_RETRY_S, MIN_RETRY_S, Admission

pytestmark = pytest.mark.timeout(10)


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def ask(admission: Admission, tenant: str, order: list[str], deadline_s: float | None = None) -> None:
    async with admission.admitted(tenant, deadline_s):
        order.append(tenant)


async def test_tenants_that_wait_are_served_in_turn_whatever_they_piled_up() -> None:
    admission = Admission(1, 10, FakeClock())
    order: list[str] = []
    async with asyncio.TaskGroup() as group, admission.admitted("holder", None):
        for tenant in ("greedy", "greedy", "greedy", "greedy", "modest", "other"):
            group.create_task(ask(admission, tenant, order))
            await settle()
        assert admission.queued == 6
        admission.check()
    assert order == ["greedy", "modest", "other", "greedy", "greedy", "greedy"]
    assert (admission.in_flight, admission.queued) == (0, 0)


async def test_no_more_than_the_limit_runs_at_once() -> None:
    admission = Admission(3, 50, FakeClock())
    running = most = 0

    async def work() -> None:
        nonlocal running, most
        async with admission.admitted("", None):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(work() for _ in range(40)))
    assert most == 3
    admission.check()


async def test_a_full_queue_sheds_with_a_hint_of_when_to_come_back() -> None:
    admission = Admission(1, 2, FakeClock())
    order: list[str] = []
    async with asyncio.TaskGroup() as group, admission.admitted("a", None):
        for _ in range(2):
            group.create_task(ask(admission, "a", order))
            await settle()
        with pytest.raises(Overloaded) as caught:
            await ask(admission, "a", order)
    assert caught.value.retry_after_s is not None
    assert MIN_RETRY_S <= caught.value.retry_after_s <= MAX_RETRY_S


async def test_a_tenant_that_waits_less_takes_a_place_from_the_one_that_waits_most() -> None:
    admission = Admission(1, 3, FakeClock())
    order: list[str] = []
    async with admission.admitted("holder", None):
        greedy = [asyncio.create_task(ask(admission, "greedy", order)) for _ in range(3)]
        await settle()
        modest = asyncio.create_task(ask(admission, "modest", order))
        await settle()
    results = await asyncio.gather(*greedy, modest, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), Overloaded, type(None)]
    assert sorted(order) == ["greedy", "greedy", "modest"]


async def test_a_deadline_that_has_passed_is_told_before_anything_is_counted() -> None:
    clock = FakeClock(now_s=10.0)
    admission = Admission(1, 2, clock)
    with pytest.raises(DeadlineExceeded):
        await ask(admission, "", [], deadline_s=9.0)
    assert admission.in_flight == 0


async def test_a_deadline_in_the_queue_leaves_no_trace() -> None:
    clock = SystemClock()
    admission = Admission(1, 2, clock)
    async with admission.admitted("", None):
        with pytest.raises(DeadlineExceeded):
            await ask(admission, "", [], deadline_s=clock.now_s() + 0.02)
        assert admission.queued == 0
    admission.check()


async def test_cancelling_whoever_waits_or_was_just_admitted_loses_no_turn() -> None:
    admission = Admission(1, 5, FakeClock())
    order: list[str] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.admitted("holder", None))
        first = asyncio.create_task(ask(admission, "first", order))
        await settle()
        second = asyncio.create_task(ask(admission, "second", order))
        await settle()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert order == ["second"]
    assert (admission.in_flight, admission.queued) == (0, 0)
    admission.check()


async def test_drain_refuses_who_waits_and_who_comes_and_waits_for_who_runs() -> None:
    admission = Admission(1, 5, FakeClock())
    order: list[str] = []
    async with admission.admitted("holder", None):
        waiting = asyncio.create_task(ask(admission, "waiting", order))
        await settle()
        draining = asyncio.create_task(admission.drain(5.0))
        await settle()
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await ask(admission, "late", order)
        assert not draining.done()
    assert await draining == 0
    assert order == []


async def test_drain_tells_how_many_outlast_the_grace() -> None:
    admission = Admission(2, 5, FakeClock())
    async with admission.admitted("a", None):
        assert await admission.drain(0.0) == 1
