"""The prefill engine thread outlives what it is asked to run."""

import pytest

from core.clock import SystemClock
from core.metrics import Metrics
from prefill.runner import PrefillRunner
from tests.support.toy_engine import ToyEngine


async def test_an_action_that_raises_tells_its_caller_and_the_thread_lives_on() -> None:
    runner = PrefillRunner(ToyEngine(), 16, SystemClock(), Metrics())
    runner.start()
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError):
        await runner.call(lambda: ran.append(1 // 0))
    await runner.call(lambda: ran.append(1))
    assert ran == [1]
    assert runner.stalled_s() == 0.0
    assert await runner.close(5.0)
