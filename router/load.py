"""This router's own count of what it has sent where. The only load figure that is never stale."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class LoadBook:
    """Requests in flight by worker epoch. Used by the event loop alone."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def in_flight(self, epoch: str) -> int:
        """This router's requests on that life of a worker."""
        return self._counts[epoch]

    @contextmanager
    def holding(self, epoch: str) -> Iterator["Hold"]:
        """Counts one request until the block ends or the hold is released, whichever comes first."""
        hold = Hold(self._counts, epoch)
        try:
            yield hold
        finally:
            hold.release()

    def total(self) -> int:
        """All of them; 0 when idle."""
        return self._counts.total()

    def epochs(self) -> frozenset[str]:
        """The lives of workers that have requests of this router."""
        return frozenset(self._counts)

    def check(self) -> None:
        """States the invariant: no count is negative, none is kept at zero."""
        assert all(count > 0 for count in self._counts.values()), dict(self._counts)


class Hold:
    """One request counted on one worker. `release` is idempotent."""

    def __init__(self, counts: Counter[str], epoch: str) -> None:
        self._counts = counts
        self._epoch: str | None = epoch
        counts[epoch] += 1

    def release(self) -> None:
        """Counts it no longer."""
        if self._epoch is None:
            return
        self._counts[self._epoch] -= 1
        if self._counts[self._epoch] == 0:
            del self._counts[self._epoch]
        self._epoch = None
