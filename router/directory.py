"""Who serves: the last known state of the worker registry (DESIGN §9: soft state).

The registry is polled. While it cannot be read the last answer stays in use; a worker that is missing from an answer is
kept, not believed, until it has been silent for `stale_report_s`, so an emptied Redis takes nobody out of service.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from core.clock import Clock, SystemClock
from core.errors import Unavailable
from core.records import WorkerRecord, WorkerRole
from core.settings import RouterSettings
from router.load import LoadBook
from router.views import Offer, WorkerView

_LOG = logging.getLogger(__name__)


class Registry(Protocol):
    """What is read of `core.control_state.ControlState`. Raises Unavailable where the registry cannot be read."""

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose record has not expired."""
        ...


@dataclass(slots=True)
class _Entry:
    record: WorkerRecord
    joined_s: float
    changed_s: float
    in_flight_at_report: int = 0
    listed: bool = True
    suspected: bool = False


class WorkerDirectory:
    """Snapshots of the workers. Ages are measured on this router's clock, so clocks of hosts may differ.

    `loads` is this router's own count of its requests by worker epoch. Used by the event loop alone.
    `start` before use, `close` at the end.
    """

    def __init__(self, registry: Registry, settings: RouterSettings, clock: Clock | None = None) -> None:
        self._registry = registry
        self._poll_s = settings.registry_poll_s
        self._stale_s = settings.stale_report_s
        self._clock = clock if clock is not None else SystemClock()
        self.loads = LoadBook()
        self._entries: dict[str, _Entry] = {}
        self._seen_before = False
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self.reachable = False

    async def start(self) -> None:
        """Reads once, then keeps polling. An unreadable registry is no error."""
        await self.refresh()
        self._poller = asyncio.create_task(self._poll(), name="worker-directory")

    async def close(self) -> None:
        """Ends the polling."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None

    async def refresh(self) -> None:
        """Reads the registry now."""
        try:
            records = await self._registry.list_workers()
        except Unavailable as error:
            if self.reachable:
                _LOG.warning(
                    "worker registry unreadable, the last known state stays in use: %s", error.message
                )
            self.reachable = False
            return
        self.reachable = True
        self.observe(records)

    def observe(self, records: Iterable[WorkerRecord]) -> None:
        """Takes in one answer of the registry."""
        now_s = self._clock.now_s()
        listed = {record.worker_id: record for record in records if record.role != "router"}
        for worker_id, record in listed.items():
            self._take(worker_id, record, now_s)
        for worker_id, entry in list(self._entries.items()):
            entry.listed = worker_id in listed
            if not entry.listed and now_s - entry.changed_s > self._stale_s:
                del self._entries[worker_id]
        self._seen_before = self._seen_before or bool(listed)
        self._changed.set()
        self._changed = asyncio.Event()

    def _take(self, worker_id: str, record: WorkerRecord, now_s: float) -> None:
        entry = self._entries.get(worker_id)
        if entry is None or entry.record.epoch != record.epoch:
            joined_s = now_s if self._seen_before else float("-inf")
            self._entries[worker_id] = _Entry(record, joined_s, now_s)
        elif record.reported_unix_ms != entry.record.reported_unix_ms:
            entry.record, entry.changed_s, entry.suspected = record, now_s, False
            entry.in_flight_at_report = self.loads.in_flight(record.epoch)

    def suspect(self, epoch: str) -> None:
        """That life of a worker failed a call: not used until it reports again."""
        for entry in self._entries.values():
            if entry.record.epoch == epoch:
                entry.suspected = True

    def views(self, role: WorkerRole) -> list[WorkerView]:
        """The workers of a role as of now."""
        now_s = self._clock.now_s()
        views: list[WorkerView] = []
        for entry in self._entries.values():
            if entry.record.role != role:
                continue
            fresh = entry.listed and now_s - entry.changed_s <= self._stale_s
            in_flight = self.loads.in_flight(entry.record.epoch)
            views.append(
                WorkerView(
                    record=entry.record,
                    in_flight=in_flight,
                    reported_load=entry.record.running + entry.record.waiting if fresh else 0,
                    sent_since_report=max(0, in_flight - entry.in_flight_at_report) if fresh else 0,
                    fresh=fresh,
                    suspected=entry.suspected,
                    seen_s=now_s - entry.joined_s,
                )
            )
        return views

    def records(self) -> list[WorkerRecord]:
        """All known workers, by id."""
        return sorted((entry.record for entry in self._entries.values()), key=lambda record: record.worker_id)

    def epochs(self) -> frozenset[str]:
        """The lives that are known."""
        return frozenset(entry.record.epoch for entry in self._entries.values())

    def offer(self) -> Offer:
        """What the known decode workers offer together."""
        workers = [record for record in self.records() if record.role == "decode"]
        drafters = frozenset(name for record in workers for name in record.drafters)
        longest = max((record.max_draft_length for record in workers), default=0)
        return Offer(drafters, longest, known=bool(workers))

    async def changed(self, timeout_s: float) -> bool:
        """Waits for the next answer of the registry; False where none came in time."""
        event = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except Exception:  # boundary: a malformed record must not end the polling
                _LOG.exception("worker registry: unusable answer")
