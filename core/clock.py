"""The only reader of clocks. A part that needs time is handed a `Clock`; tests hand it a `FakeClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Monotonic seconds from an unknown start; for durations and deadlines."""
        ...

    def unix_ms(self) -> int:
        """Wall time, milliseconds since 1970; only for what leaves the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """See `Clock.unix_ms`."""
        return time.time_ns() // 1_000_000


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0, unix_ms: int = 1_700_000_000_000) -> None:
        self._now_s = now_s
        self._unix_ms = float(unix_ms)

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def unix_ms(self) -> int:
        """See `Clock.unix_ms`."""
        return int(self._unix_ms)

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward."""
        self._now_s += seconds
        self._unix_ms += seconds * 1000.0
