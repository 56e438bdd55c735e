"""A prefill worker: computes prompts for decode workers, and never samples."""

import asyncio
import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor

import psutil
from opentelemetry.context import Context
from opentelemetry.trace import StatusCode

from core.clock import Clock, SystemClock
from core.errors import FailedPrecondition, Overloaded, ServiceError, Unavailable
from core.identity import WorkerIdentity
from core.metrics import LoadGauges, Metrics
from core.peer import GRPC_TRANSPORT, require_compatible
from core.settings import HandoffSettings, PrefillSettings
from core.telemetry import tracer
from core.telemetry_names import (
    CACHED_TOKENS,
    GEN_AI_INPUT_TOKENS,
    HANDOFF_OUTCOME,
    HANDOFF_SIZE,
    HANDOFF_TRANSPORT,
    REQUEST_ATTEMPT,
    SPAN_HANDOFF,
    SPAN_PREFILL,
)
from core.ticket import TicketKeys
from engine.peer_info import describe_peer
from outrider.v1 import admin_pb2, common_pb2, prefill_pb2
from prefill.lease import Lease
from prefill.request import FetchRequest, ServedLimits, check_fetch
from prefill.runner import ForwardEngine, PrefillRunner
from prefill.stream import FetchCall, PrefillStream

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 2.0
_THREAD_TIMEOUT_S = 10.0


class PrefillWorker:
    """Made once a process; `start` before the first call, `close` at the end. Event loop only.

    `identity` may be replaced once the server's address is known; its name and epoch stay.
    """

    def __init__(
        self,
        engine: ForwardEngine,
        settings: PrefillSettings,
        handoff: HandoffSettings,
        identity: WorkerIdentity,
        ticket_keys: TicketKeys,
        *,
        model: str = "",
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.identity = identity
        self.draining = False
        self.model = model
        self.metrics = metrics or Metrics()
        self.peer = describe_peer(identity, engine.kv.layout, engine.numerics)
        self._kv = engine.kv
        self._settings = settings
        self._handoff = handoff
        self._ticket_keys = ticket_keys
        self._clock = clock or SystemClock()
        self._runner = PrefillRunner(engine, settings.chunk_tokens, self._clock, self.metrics)
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="prefill-copy")
        self._limits = ServedLimits(
            peer=self.peer,
            layout=engine.kv.layout,
            num_blocks=engine.kv.stats().total,
            max_context=engine.max_context,
            vocab_size=engine.config.vocab_size,
        )
        self._leases: dict[tuple[str, int], Lease] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._started = False

    async def start(self) -> None:
        """Start the engine thread."""
        self._runner.start()
        self.metrics.observe_load(self.gauges)
        self._started = True

    async def close(self) -> None:
        """End what still runs with UNAVAILABLE, then the threads."""
        self.draining = True
        self._started = False
        for lease in self._leases.values():
            lease.fail(Unavailable(f"{self.identity.worker_id} has stopped"))
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("%d hand-offs did not end within %s s", len(self._leases), _CLOSE_TIMEOUT_S)
        if not await self._runner.close(_THREAD_TIMEOUT_S):
            _LOG.error("the engine thread did not end within %s s", _THREAD_TIMEOUT_S)
        self._copies.shutdown(wait=True)

    async def drain(self, grace_s: float) -> int:
        """Refuse new prompts, wait at most `grace_s` for the others; how many are left."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.idle()
        except TimeoutError:
            pass
        return len(self._leases)

    async def drop_cached(self) -> None:
        """Forget the prefix cache."""
        await self._runner.call(self._kv.drop_cached)

    async def idle(self) -> None:
        """Until no hand-off lives and all blocks have come back; then the pool's accounts are checked."""
        await self._idle.wait()
        await self._runner.call(self._kv.check)

    @property
    def patience_s(self) -> float:
        """How long a receiver may be silent."""
        return self._handoff.progress_timeout_s

    @property
    def ready(self) -> bool:
        """Whether new prompts can be computed: started, not draining, and the pool is not stuck."""
        return self._started and not self.draining and not self._stuck()

    def stalled_s(self) -> float:
        """How long the engine thread has been inside one turn; infinite once it has died."""
        return self._runner.stalled_s()

    def gauges(self) -> LoadGauges:
        """What it holds at this moment."""
        state = self._runner.state
        return LoadGauges(
            running=state.leased,
            waiting=state.waiting,
            free_blocks=state.kv.free,
            used_blocks=state.kv.used,
            cached_blocks=state.kv.cached,
        )

    def status(self) -> admin_pb2.WorkerStatus:
        """All that Admin.Status tells of it."""
        state = self._runner.state
        return admin_pb2.WorkerStatus(
            worker_id=self.identity.worker_id,
            role=self.identity.role,
            epoch=self.identity.epoch,
            address=self.identity.address,
            ready=self.ready,
            draining=self.draining,
            model=self.model,
            peer=self.peer,
            running=state.running,
            waiting=state.waiting,
            total_blocks=state.kv.total,
            free_blocks=state.kv.free,
            cached_blocks=state.kv.cached,
            used_blocks=state.kv.used,
            leases=len(self._leases),
            tasks=len(self._leases),
            resident_bytes=psutil.Process().memory_info().rss,
            process_id=os.getpid(),
            counters=self.metrics.totals(),
        )

    def handshake(self, theirs: common_pb2.PeerInfo) -> common_pb2.PeerInfo:
        """Who we are. Raises FailedPrecondition naming what does not fit."""
        require_compatible(self.peer, theirs)
        return self.peer

    async def serve(
        self,
        message: prefill_pb2.FetchOpen,
        call: FetchCall,
        context: Context,
        timeout_s: float | None = None,
    ) -> None:
        """Serve one Fetch until it is acknowledged. Raises ServiceError; its blocks are given back on every path.

        `context`: the caller's trace. `timeout_s`: what its deadline leaves.
        """
        status = "CANCELLED"
        with tracer().start_as_current_span(
            SPAN_PREFILL, context=context, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                request = self._check(message, timeout_s)
                span.set_attribute(GEN_AI_INPUT_TOKENS, len(request.job.token_ids))
                span.set_attribute(REQUEST_ATTEMPT, request.key[1])
                await self._serve(request, call)
                status = "OK"
            except ServiceError as error:
                status = error.status
                raise
            finally:
                if status != "OK":
                    span.set_status(StatusCode.ERROR, status)
                self.metrics.request_finished(status)

    async def _serve(self, request: FetchRequest, call: FetchCall) -> None:
        lease = Lease(request.key, request.job)
        stream = PrefillStream(
            request, lease, self._handoff, self._kv, self._copies, lambda: self._runner.state.num_steps
        )
        outcome = "released"
        self._leases[request.key] = lease
        self._idle.clear()
        self._runner.submit(lease)
        with tracer().start_as_current_span(
            SPAN_HANDOFF, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                await stream.run(call, self.peer)
                outcome = "ok"
            except ServiceError:
                outcome = "failed"
                raise
            finally:
                self._runner.release(lease)
                del self._leases[request.key]
                if not self._leases:
                    self._idle.set()
                self.metrics.handoff(outcome, GRPC_TRANSPORT, stream.num_bytes)
                span.set_attribute(HANDOFF_TRANSPORT, GRPC_TRANSPORT)
                span.set_attribute(HANDOFF_OUTCOME, outcome)
                span.set_attribute(HANDOFF_SIZE, stream.num_bytes)
                span.set_attribute(CACHED_TOKENS, 0 if lease.progress is None else lease.progress.num_cached)

    def _check(self, message: prefill_pb2.FetchOpen, timeout_s: float | None) -> FetchRequest:
        if self.draining or not self._started:
            raise Unavailable(f"{self.identity.worker_id} takes no new prompts")
        claims = self._ticket_keys.verify(message.ticket, self._clock.unix_ms())
        deadline_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        request = check_fetch(message, claims, self._limits, deadline_s)
        if request.key in self._leases:
            raise FailedPrecondition(
                "ticket.request_id", "this attempt of the request is being fetched already"
            )
        if len(self._leases) >= self._settings.max_leases:
            raise Overloaded(f"{len(self._leases)} hand-offs are under way")
        waiting = sum(1 for lease in self._leases.values() if lease.progress is None)
        if waiting >= self._settings.max_waiting:
            raise Overloaded(f"{waiting} prompts wait")
        return request

    def _stuck(self) -> bool:
        """Prompts wait for blocks, and none has moved for as long as a receiver may be silent."""
        state = self._runner.state
        if math.isinf(self._runner.stalled_s()):
            return True
        if state.waiting == 0 or state.running > 0:
            return False
        return self._clock.now_s() - state.changed_s > self._handoff.progress_timeout_s
