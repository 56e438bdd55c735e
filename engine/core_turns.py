"""Taking turns on a machine's cores, step by step, between workers that share them.

Two processes that compute at once with as many threads as there are cores keep waiting for threads that the
other has displaced: both together take longer than one after the other.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from core.clock import SystemClock

_CLOCK: Final = SystemClock()
_LOOK_AGAIN_S: Final = 0.0002
_PATIENCE_S: Final = 2.0
"""So long does one wait for a turn: who holds it may have been stopped. It must not stop the others."""


class CoreTurns:
    """A context manager around one step: at most one of all that share `path` computes, in order of asking.

    Locks of the operating system on `path` and on a second file beside it: they end with their process. Who waits
    in vain for two seconds computes anyway, and no longer waits until it got a turn again. One thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the files cannot be made."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._turn = os.open(path, flags, 0o600)
        try:
            self._queue = os.open(path.with_name(path.name + ".queue"), flags, 0o600)
        except OSError:
            os.close(self._turn)
            raise
        self._patience_s = _PATIENCE_S

    def close(self) -> None:
        """Leave. Once."""
        os.close(self._turn)
        os.close(self._queue)

    def __enter__(self) -> None:
        deadline_s = _CLOCK.now_s() + self._patience_s
        queued = _lock(self._queue, deadline_s)
        held = _lock(self._turn, deadline_s)
        if queued:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        self._patience_s = _PATIENCE_S if held else 0.0

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)


def _lock(descriptor: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _CLOCK.now_s() >= deadline_s:
                return False
            time.sleep(_LOOK_AGAIN_S)
        else:
            return True
