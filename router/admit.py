"""Admission: so many requests at once, a bounded queue behind them, tenants served in turn (CASES B49).

Nothing is spent on a request before it is admitted. Used by the event loop alone.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.clock import Clock
from core.errors import DeadlineExceeded, Overloaded, Unavailable

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
_DECAY = 0.9


class _Waiter:
    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Admission:
    """The gate before all work. `admitted` is entered once a request."""

    def __init__(self, max_in_flight: int, max_queue: int, clock: Clock) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._clock = clock
        self._in_flight = 0
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._queued = 0
        self._service_s: float | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Admitted and not finished."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Waiting for their turn."""
        return self._queued

    @asynccontextmanager
    async def admitted(self, tenant: str, deadline_s: float | None) -> AsyncIterator[float]:
        """Waits for a turn, yields the seconds waited, counts the request until the block ends.

        Raises Overloaded (with a retry hint) where the queue is full, DeadlineExceeded where the deadline passes in it,
        Unavailable while draining.
        """
        arrived_s = self._clock.now_s()
        await self._enter(tenant, deadline_s)
        started_s = self._clock.now_s()
        try:
            yield started_s - arrived_s
        finally:
            self._note_service(self._clock.now_s() - started_s)
            self._leave()

    async def _enter(self, tenant: str, deadline_s: float | None) -> None:
        if self._closed:
            raise Unavailable("the router is draining")
        if deadline_s is not None and deadline_s <= self._clock.now_s():
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        if self._in_flight < self._max_in_flight and self._queued == 0:
            self._take()
            return
        self._make_room(tenant)
        waiter = _Waiter(tenant)
        self._queues.setdefault(tenant, deque()).append(waiter)
        self._queued += 1
        remaining_s = None if deadline_s is None else deadline_s - self._clock.now_s()
        admitted = False
        try:
            async with asyncio.timeout(remaining_s):
                await waiter.turn
            admitted = True
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed in the router's queue") from None
        finally:
            if not admitted:
                self._abandon(waiter)

    def _make_room(self, tenant: str) -> None:
        """With a full queue the tenant that waits most loses its newest request to one that waits less."""
        if self._queued < self._max_queue:
            return
        own = len(self._queues.get(tenant, ()))
        greediest = max(self._queues.values(), key=len, default=None)
        if greediest is None or len(greediest) <= own + 1:
            raise self._overloaded()
        shed = greediest[-1]
        self._remove(shed)
        if not shed.turn.done():
            shed.turn.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        return Overloaded(f"the router's queue of {self._max_queue} is full", self.retry_after_s())

    def retry_after_s(self) -> float:
        """About the time until the queue of now has been served."""
        service_s = 1.0 if self._service_s is None else self._service_s
        return min(MAX_RETRY_S, max(MIN_RETRY_S, service_s * (self._queued + 1) / self._max_in_flight))

    def _take(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _abandon(self, waiter: _Waiter) -> None:
        if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self._leave()
        else:
            self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.tenant)
        if queue is None or waiter not in queue:
            return
        queue.remove(waiter)
        self._queued -= 1
        if not queue:
            del self._queues[waiter.tenant]

    def _leave(self) -> None:
        self._in_flight -= 1
        self._admit_next()
        if self._in_flight == 0 and self._queued == 0:
            self._idle.set()

    def _admit_next(self) -> None:
        """The tenant at the head has its turn and goes to the end."""
        while self._queues and self._in_flight < self._max_in_flight:
            tenant, queue = next(iter(self._queues.items()))
            waiter = queue.popleft()
            self._queued -= 1
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if waiter.turn.done():
                continue
            self._take()
            waiter.turn.set_result(None)

    def _note_service(self, duration_s: float) -> None:
        known = self._service_s
        self._service_s = duration_s if known is None else _DECAY * known + (1 - _DECAY) * duration_s

    async def drain(self, grace_s: float) -> int:
        """Admits nobody any more, refuses who waits, gives the others `grace_s`; returns how many still run."""
        self._closed = True
        for waiter in [waiter for queue in self._queues.values() for waiter in queue]:
            self._remove(waiter)
            if not waiter.turn.done():
                waiter.turn.set_exception(Unavailable("the router is draining"))
        if self._in_flight == 0:
            self._idle.set()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._in_flight

    def check(self) -> None:
        """States the invariants of the counters."""
        assert 0 <= self._in_flight <= self._max_in_flight, self._in_flight
        assert self._queued == sum(len(queue) for queue in self._queues.values()), self._queued
        assert all(self._queues.values()), "an empty queue is kept"
