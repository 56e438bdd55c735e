"""Leaving no process behind: who adopts orphans, who dies with whom, and how a whole family ends (Linux)."""

import ctypes
import signal
from typing import Final

import psutil

from core.clock import Clock, SystemClock

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process `number` when its parent dies. Called by the child, first thing."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def end_descendants(timeout_s: float, clock: Clock | None = None) -> int:
    """Kills everything below this process, adopted orphans included. Returns how many are left after `timeout_s`.

    A killed parent's children are seen in the next round, since they are adopted (see `adopt_orphans`).
    """
    clock = clock or SystemClock()
    deadline_s = clock.now_s() + timeout_s
    while True:
        family = psutil.Process().children(recursive=True)
        if not family:
            return 0
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        remaining_s = deadline_s - clock.now_s()
        if remaining_s <= 0:
            return len(family)
        psutil.wait_procs(family, timeout=min(remaining_s, 1.0))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
