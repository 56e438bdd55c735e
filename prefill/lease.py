"""One prompt that a Fetch stream has asked for: what the engine thread reads of it, and what it reports."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from core.errors import ServiceError


@dataclass(frozen=True, slots=True)
class PromptJob:
    """The work behind a lease. `hashes` of its full blocks. `deadline_s` in monotonic seconds."""

    token_ids: Sequence[int]
    hashes: Sequence[bytes]
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is. All K, V and hidden planes of tokens < `num_computed` are in place.

    slots: Tensor  # [prompt tokens] int32, fixed from admission to release
    logits: Tensor | None  # [vocabulary] float32 of the last token, once all is computed
    """

    slots: Tensor
    num_cached: int
    num_computed: int
    logits: Tensor | None = None
    prefill_s: float = 0.0


class Lease:
    """A prompt's state as its stream sees it. All methods run on the event loop.

    The engine thread calls `report` and `fail` through `loop.call_soon_threadsafe`; one task waits.
    """

    def __init__(self, key: tuple[str, int], job: PromptJob) -> None:
        self.key = key
        self.job = job
        self.progress: Progress | None = None
        self._error: ServiceError | None = None
        self._changed = asyncio.Event()

    def report(self, progress: Progress) -> None:
        """The prompt has come further."""
        self.progress = progress
        self._changed.set()

    def fail(self, error: ServiceError) -> None:
        """The prompt or its stream has ended badly; the first error stays."""
        self._error = self._error or error
        self._changed.set()

    def notify(self) -> None:
        """Something else that the stream waits for has changed."""
        self._changed.set()

    def raise_failure(self) -> None:
        """The error that it failed with, where it did: what was copied since may be somebody else's."""
        if self._error is not None:
            raise self._error

    async def wait_until(self, reached: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Whether it was reached in time. Raises the error that the lease failed with."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.raise_failure()
                    if reached():
                        return True
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
