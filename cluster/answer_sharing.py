"""Earlier answers through Redis: what a worker's cache learns reaches the others, and the worker's next life.

A tenant's answers lie in one of a few capped streams, chosen by its digest: the number of keys is bounded whatever
tenants there are, and a busy one can push out only the answers of those in its shard; the shares of the cache hold
again where they are read. Only the event loop talks to Redis. Redis being away is no reason to stop: the next
interval tries again, and meanwhile the oldest answers of a bounded queue are lost to the others.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from core.control_state import ControlState, ControlStateUnavailable
from core.drafter_settings import CacheSettings
from decode.drafters.answer_link import AnswerLink
from decode.drafters.answer_record import AnswerRecord, decode_record, encode_record

NUM_SHARDS: Final = 8
_SENT_AT_ONCE: Final = 64
_LOGGER: Final = logging.getLogger(__name__)


def lineage_of(model_revision: str, vocabulary: str) -> str:
    """What workers must have in common to share answers: the model and the meaning of token ids."""
    return hashlib.sha256(f"{model_revision}\n{vocabulary}".encode()).hexdigest()[:32]


def shard_of(record: AnswerRecord) -> int:
    """Where a tenant's answers lie."""
    return record.owner.tenant[0] % NUM_SHARDS


class AnswerSharing:
    """The event loop's end of a link. `take_in` is awaited where answers wait for the engine thread: if that is idle,
    it may have them all at once; in its steps it takes a few.

    A stream is read by ids that Redis draws from its clock; one that is set back hides new answers until it has caught
    up, or the worker starts again.
    """

    def __init__(
        self,
        link: AnswerLink,
        state: ControlState,
        lineage: str,
        settings: CacheSettings,
        take_in: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._state = state
        self._lineage = lineage
        self._settings = settings
        self._take_in = take_in
        self._cursors = dict.fromkeys(range(NUM_SHARDS), b"0")
        self._unsent: list[AnswerRecord] = []
        self._task: asyncio.Task[None] | None = None
        self._lost = False

    async def catch_up(self) -> None:
        """Reads what there is, before the first request; no more than the streams may hold."""
        left = self._settings.shared_answers
        while left > 0 and (num_read := await self.exchange()) > 0:
            left -= num_read

    def start(self, interval_s: float) -> None:
        """Exchanges every `interval_s` from now on. Called once, on the worker's loop."""
        self._task = asyncio.create_task(self._run(interval_s), name="answer-sharing")

    async def stop(self) -> None:
        """Ends it, and sends what is left if Redis answers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._send()
        except ControlStateUnavailable as error:
            self._missed(error)

    async def exchange(self) -> int:
        """Once: sends what is new here, reads what is new elsewhere. The number of records read; 0 if Redis is away."""
        num_read = 0
        try:
            await self._send()
            num_read = await self._read()
        except ControlStateUnavailable as error:
            self._missed(error)
        else:
            self._lost = False
        if self._link.has_incoming:
            await self._take_in()
        return num_read

    async def _run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.exchange()
            except Exception:  # boundary: what goes wrong in sharing costs hits, never the worker
                _LOGGER.exception("sharing answers failed; it goes on")

    async def _send(self) -> None:
        """Whatever was taken from the link stays here until Redis has it."""
        settings = self._settings
        while True:
            self._unsent += self._link.outgoing(_SENT_AT_ONCE - len(self._unsent))
            if not self._unsent:
                return
            records = [(shard_of(record), encode_record(record)) for record in self._unsent]
            per_shard = max(1, settings.shared_answers // NUM_SHARDS)
            await self._state.add_answers(self._lineage, records, per_shard, settings.shared_for_s)
            self._unsent.clear()

    async def _read(self) -> int:
        per_shard = self._link.room // NUM_SHARDS
        if per_shard < 1:
            return 0
        entries = await self._state.read_answers(self._lineage, self._cursors, per_shard)
        for shard, cursor, data in entries:
            self._cursors[shard] = cursor
            record = decode_record(data, self._link.limits)
            if record is None:
                self._link.num_bad += 1
            else:
                self._link.hand_in(record)
        return len(entries)

    def _missed(self, error: ControlStateUnavailable) -> None:
        self._link.num_failed += 1
        if not self._lost:
            _LOGGER.warning("answers are not shared for now: %s", error)
        self._lost = True
