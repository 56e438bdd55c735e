"""A request's end on the event loop: it comes once, whatever else would end it."""

import asyncio
from typing import cast

import pytest

from core.clock import SystemClock
from core.errors import DeadlineExceeded, Unavailable
from core.records import SpeculationReport
from decode.job import DecodeJob
from decode.live import LiveRequest
from decode.outbox import Delta

REPORT = SpeculationReport(drafter="none")


def live_request(slow_reader_timeout_s: float) -> LiveRequest:
    """One whose reader may leave a single delta."""
    job = cast(DecodeJob, None)
    return LiveRequest(job, 1, 0.0, slow_reader_timeout_s, SystemClock(), lambda: None)


async def test_interrupting_a_request_whose_deadline_has_just_passed_does_no_harm() -> None:
    request = live_request(60.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as scope:
            request.limit(scope, SystemClock().now_s())
            try:
                await asyncio.Event().wait()
            finally:
                request.interrupt(Unavailable("the worker is going away"))


async def test_a_deadline_ends_a_request_as_such() -> None:
    request = live_request(60.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as scope:
            request.limit(scope, SystemClock().now_s())
            await asyncio.Event().wait()
    assert isinstance(request.timeout_error(), DeadlineExceeded)


async def test_news_behind_the_end_starts_no_timer_and_an_interruption_is_too_late() -> None:
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    request = live_request(0.0)
    async with asyncio.timeout(None) as scope:
        request.limit(scope, None)
        await asyncio.sleep(0)
    request.close()
    for token_id in range(3):
        request.outbox.put(Delta(0, (token_id,), "x", (), REPORT))
    assert request.outbox.blocked, "the reader never fell behind"
    request.interrupt(Unavailable("the worker is going away"))
    passed = asyncio.Event()
    loop.call_later(0.01, passed.set)
    await passed.wait()
    assert failures == []
