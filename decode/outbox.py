"""What a request has to tell its caller, bounded, between the engine and the stream.

Everything here runs on the event loop, except that the engine thread reads `blocked`. A reader that falls
behind gets its deltas merged; one that falls behind further is not scheduled (`blocked`); what ends it
after a while is the worker's timer. The batch never waits for a reader.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ServiceError
from core.records import ChoiceFinish, SpeculationReport, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice. `report` counts the attempt so far, this delta included."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    report: SpeculationReport
    finish: ChoiceFinish | None = None

    def followed_by(self, later: "Delta") -> "Delta":
        """Both as one."""
        return Delta(
            index=self.index,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            report=later.report,
            finish=later.finish,
        )


class Outbox:
    """The deltas of one request. `on_blocked(True)`: the reader is too far behind; `(False)`: it caught up.

    `merge_interval_s` > 0: the reader wants the whole answer. What is behind the first delta then waits for more,
    so long at most, and comes merged: each message costs three processes some of the time that a step needs.
    """

    def __init__(
        self, max_deltas: int, on_blocked: Callable[[bool], None], merge_interval_s: float = 0.0
    ) -> None:
        self.blocked = False
        self._max_deltas = max_deltas
        self._on_blocked = on_blocked
        self._deltas: deque[Delta] = deque()
        self._merged_tokens = 0
        self._merge_interval_s = merge_interval_s
        self._begun = False
        self._num_released = 0
        self._ended = False
        self._enough = asyncio.Event()
        self._error: ServiceError | None = None
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, delta: Delta) -> None:
        """Append a delta, or merge it where the reader has left too many."""
        if len(self._deltas) < self._max_deltas or not self._merge(delta):
            self._deltas.append(delta)
        if len(self._deltas) > self._max_deltas // 2:
            self._enough.set()
        self._news.set()

    def end(self) -> None:
        """No more deltas; the reader gets those that are left, then the end."""
        self._ended = True
        self._news.set()
        self._enough.set()

    def fail(self, error: ServiceError) -> None:
        """As `end`, with an error behind the deltas that are left. The first error counts."""
        self._error = self._error or error
        self.end()

    async def get(self) -> Delta | None:
        """The next delta; None at the end. Raises the error that ended it."""
        while not self._deltas:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._news.clear()
            await self._news.wait()
        if self._merge_interval_s:
            if self._num_released == 0:
                await self._release_merged()
            self._num_released -= 1
        delta = self._deltas.popleft()
        if len(self._deltas) <= self._max_deltas // 2:
            self._merged_tokens = 0
            if self.blocked:
                self._set_blocked(False)
        return delta

    async def _release_merged(self) -> None:
        """Merge what has come by choice, once the interval is over, the answer has ended, or much has come."""
        if self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._merge_interval_s):
                    await self._enough.wait()
        self._begun = True
        if not self._ended:
            self._enough.clear()
        merged: dict[int, Delta] = {}
        for delta in self._deltas:
            earlier = merged.get(delta.index)
            merged[delta.index] = delta if earlier is None else earlier.followed_by(delta)
        self._deltas = deque(merged.values())
        self._num_released = len(merged)

    def _merge(self, delta: Delta) -> bool:
        for position in range(len(self._deltas) - 1, -1, -1):
            earlier = self._deltas[position]
            if earlier.index == delta.index:
                self._deltas[position] = earlier.followed_by(delta)
                self._merged_tokens += len(delta.token_ids)
                if self._merged_tokens >= self._max_deltas and not self.blocked:
                    self._set_blocked(True)
                return True
        return False

    def _set_blocked(self, blocked: bool) -> None:
        self.blocked = blocked
        self._merged_tokens = 0
        self._on_blocked(blocked)
