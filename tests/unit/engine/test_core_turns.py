"""Turns on the cores: one at a time, in order of asking, and nobody who stopped can hold up the rest."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.errors import InvalidArgument
from engine import core_turns
from engine.core_turns import CoreTurns, turn_of


def test_one_at_a_time(tmp_path: Path) -> None:
    inside = 0
    most = 0
    entries = 0

    def work() -> None:
        nonlocal inside, most, entries
        turns = CoreTurns(tmp_path / "turns")
        for _ in range(20):
            with turn_of(turns):
                inside += 1
                most = max(most, inside)
                entries += 1
                time.sleep(0.001)
                inside -= 1
        turns.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, entries) == (1, 60)


def test_who_asks_again_at_once_comes_after_who_waits(tmp_path: Path) -> None:
    greedy, patient = CoreTurns(tmp_path / "turns"), CoreTurns(tmp_path / "turns")
    order: list[str] = []

    def wait_once() -> None:
        with turn_of(patient):
            order.append("patient")

    thread = threading.Thread(target=wait_once)
    with turn_of(greedy):
        thread.start()
        time.sleep(0.05)
    with turn_of(greedy):
        order.append("greedy")
    thread.join()
    assert order == ["patient", "greedy"]


def test_a_killed_holder_gives_its_turn_back(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from engine.core_turns import CoreTurns, turn_of\n"
        "with turn_of(CoreTurns(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "turns")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    began_s = time.monotonic()
    with turn_of(CoreTurns(tmp_path / "turns")):
        assert time.monotonic() - began_s < 1.0


def test_a_stopped_holder_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_turns, "_PATIENCE_S", 0.2)
    stopped, other = CoreTurns(tmp_path / "turns"), CoreTurns(tmp_path / "turns")
    with turn_of(stopped):
        durations = []
        for _ in range(3):
            began_s = time.monotonic()
            with turn_of(other):
                durations.append(time.monotonic() - began_s)
    assert durations[0] >= 0.2
    assert max(durations[1:]) < 0.1


def test_its_holder_may_take_it_again_and_only_the_last_give_back_counts(tmp_path: Path) -> None:
    mine, other = CoreTurns(tmp_path / "turns"), CoreTurns(tmp_path / "turns")
    calls = 0

    def give_up() -> None:
        nonlocal calls
        calls += 1
        raise InterruptedError

    with turn_of(mine):
        with turn_of(mine):
            pass
        with pytest.raises(InterruptedError):
            other.take(give_up)
    assert calls == 1
    began_s = time.monotonic()
    with turn_of(other):
        assert time.monotonic() - began_s < 1.0


def test_a_folder_that_is_not_there_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"engine\.core_turns.*nowhere"):
        CoreTurns(tmp_path / "nowhere" / "turns")
