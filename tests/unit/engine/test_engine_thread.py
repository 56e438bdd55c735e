"""The engine thread outlives what it runs, and tells when it is stuck."""

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from core.clock import FakeClock
from engine.core_turns import CoreTurns
from engine.engine_thread import EngineThread


async def test_results_and_exceptions_come_back_to_the_caller() -> None:
    thread = EngineThread(lambda: False, FakeClock())
    thread.start()
    assert await thread.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    thread.post(lambda: 1 // 0)  # type: ignore[arg-type]
    assert await thread.call(lambda: 8) == 8
    assert thread.close(5.0)


async def test_an_answer_may_come_turns_later_and_what_asking_raises_is_one() -> None:
    given: list[Callable[[Exception | None], None]] = []

    def turn() -> bool:
        for answer in given:
            answer(ValueError("late"))
        given.clear()
        return False

    thread = EngineThread(turn, FakeClock())
    thread.start()
    with pytest.raises(ValueError, match="late"):
        await thread.answer_to(given.append)
    with pytest.raises(ZeroDivisionError):
        await thread.answer_to(lambda _: 1 // 0)  # type: ignore[arg-type]
    assert thread.close(5.0)


async def test_idle_it_looks_again_when_told_to() -> None:
    turns: list[int] = []
    again = threading.Event()

    def turn() -> bool:
        turns.append(1)
        if len(turns) > 1:
            again.set()
        return False

    thread = EngineThread(turn, FakeClock(), idle_s=lambda: 0.01)
    thread.start()
    assert again.wait(5)
    assert thread.close(5.0)


async def test_idling_for_ages_is_no_error() -> None:
    idled = threading.Event()

    def ages() -> float:
        idled.set()
        return 3.6e11

    thread = EngineThread(lambda: False, FakeClock(), idle_s=ages)
    thread.start()
    assert idled.wait(5)
    assert await thread.call(lambda: 7) == 7
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
    assert thread.stalled_s() == 9.0
    clock.advance(2.0)
    assert thread.stalled_s() == 11.0
    leave.set()
    assert thread.close(5.0)
    assert thread.stalled_s() == 0.0


async def test_what_comes_while_it_waits_for_the_cores_is_part_of_the_turn(tmp_path: Path) -> None:
    mine, other = CoreTurns(tmp_path / "turns"), CoreTurns(tmp_path / "turns")
    arrived: list[int] = []
    seen: list[int] = []
    done = threading.Event()

    def turn() -> bool:
        seen.extend(arrived)
        done.set()
        return False

    thread = EngineThread(turn, FakeClock(), mine, lambda: not done.is_set())
    other.take()
    thread.start()
    await thread.call(lambda: arrived.append(1))
    await thread.call(lambda: arrived.append(2))
    assert not done.is_set(), "it did not wait for its turn"
    other.give_back()
    assert done.wait(5)
    assert thread.close(5.0)
    assert seen[:2] == [1, 2]


async def test_a_turn_that_raises_ends_the_thread_and_that_is_an_endless_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: told.set())

    def turn() -> bool:
        raise RuntimeError("half of the target is gone")

    thread = EngineThread(turn, FakeClock())
    thread.start()
    assert told.wait(5)
    thread._thread.join(5)
    assert thread.stalled_s() == math.inf
    assert thread.close(5.0)
