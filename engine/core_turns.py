"""Taking turns on a machine's cores, step by step, between workers that share them.

Two processes that compute at once with as many threads as there are cores keep waiting for threads that the
other has displaced: both together take longer than one after the other.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from core.clock import SystemClock
from core.errors import InvalidArgument

_CLOCK: Final = SystemClock()
_LOOK_AGAIN_S: Final = 0.0002
_PATIENCE_S: Final = 2.0
"""So long does one wait for a turn: who holds it may have been stopped. It must not stop the others."""


class Turns(Protocol):
    """Who holds a turn may compute. `take` may be called again by its holder; each needs its `give_back`."""

    def take(self, while_waiting: Callable[[], None] = ...) -> None:
        """Wait for a turn, calling `while_waiting` again and again; what it raises ends the waiting."""
        ...

    def give_back(self) -> None:
        """The last one lets the next asker compute."""
        ...

    def close(self) -> None:
        """Leave. Once."""
        ...


def _nothing() -> None:
    pass


class NoTurns:
    """Cores that are shared with nobody."""

    def take(self, while_waiting: Callable[[], None] = _nothing) -> None:
        """See `Turns`."""

    def give_back(self) -> None:
        """See `Turns`."""

    def close(self) -> None:
        """See `Turns`."""


class CoreTurns:
    """Turns between all that name the same `path`: at most one computes, in order of asking.

    Locks of the operating system on `path` and on a second file beside it: they end with their process. Who waits
    in vain for two seconds computes anyway, and no longer waits until it got a turn again. One thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgument naming `engine.core_turns` where the files cannot be made."""
        self._turn = _open(path)
        try:
            self._queue = _open(path.with_name(path.name + ".queue"))
        except InvalidArgument:
            os.close(self._turn)
            raise
        self._patience_s = _PATIENCE_S
        self._depth = 0

    def take(self, while_waiting: Callable[[], None] = _nothing) -> None:
        """See `Turns`."""
        if self._depth == 0:
            deadline_s = _CLOCK.now_s() + self._patience_s
            try:
                _lock(self._queue, deadline_s, while_waiting)
                held = _lock(self._turn, deadline_s, while_waiting)
            finally:
                fcntl.flock(self._queue, fcntl.LOCK_UN)
            self._patience_s = _PATIENCE_S if held else 0.0
        self._depth += 1

    def give_back(self) -> None:
        """See `Turns`."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """See `Turns`."""
        os.close(self._turn)
        os.close(self._queue)


@contextmanager
def turn_of(turns: Turns, while_waiting: Callable[[], None] = _nothing) -> Iterator[None]:
    """A turn for as long as the block runs."""
    turns.take(while_waiting)
    try:
        yield
    finally:
        turns.give_back()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidArgument(
            "engine.core_turns",
            f"{path} cannot be opened for writing ({error.strerror}): name a file in a folder of ours",
        ) from error


def _lock(descriptor: int, deadline_s: float, while_waiting: Callable[[], None]) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _CLOCK.now_s() >= deadline_s:
                return False
            while_waiting()
            time.sleep(_LOOK_AGAIN_S)
        else:
            return True
