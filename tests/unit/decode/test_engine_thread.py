"""The engine thread outlives what it runs, and tells when it is stuck."""

import threading

import pytest

from core.clock import FakeClock
from decode.engine_thread import EngineThread


async def test_results_and_exceptions_come_back_to_the_caller() -> None:
    thread = EngineThread(lambda: False, FakeClock())
    thread.start()
    assert await thread.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    thread.post(lambda: 1 // 0)  # type: ignore[arg-type]
    assert await thread.call(lambda: 8) == 8
    assert thread.close(5.0)


async def test_it_takes_turns_while_there_is_work_and_then_waits_to_be_woken() -> None:
    turns: list[int] = []
    waiting = threading.Event()

    def turn() -> bool:
        turns.append(1)
        if len(turns) in (3, 5):
            waiting.set()
            return False
        return True

    thread = EngineThread(turn, FakeClock())
    thread.start()
    assert waiting.wait(5)
    waiting.clear()
    thread.wake()
    assert waiting.wait(5)
    assert thread.close(5.0)
    assert len(turns) == 5


async def test_a_turn_that_does_not_end_is_a_stall_and_idling_is_none() -> None:
    clock = FakeClock()
    entered, leave = threading.Event(), threading.Event()

    def turn() -> bool:
        entered.set()
        leave.wait(5)
        return False

    thread = EngineThread(turn, clock)
    thread.start()
    assert entered.wait(5)
    clock.advance(9.0)
    assert not thread.stalled(10.0)
    clock.advance(2.0)
    assert thread.stalled(10.0)
    leave.set()
    assert thread.close(5.0)
    assert not thread.stalled(10.0)
