"""A decode worker: the engine thread, the event loop's side of every request, drain and status."""

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from core.clock import Clock, SystemClock
from core.errors import FailedPrecondition, Internal, Overloaded, ServiceError, Unavailable
from core.identity import WorkerIdentity
from core.metrics import LoadGauges, Metrics
from core.prefix_hash import PrefixKey, extend_block_hashes
from core.settings import DecodeSettings, GrpcSettings, HandoffSettings
from core.ticket import TicketKeys
from core.tokenizer import Tokenizer
from decode.bring_in import Admissions, BringIn
from decode.choice import Ended, Event, Request
from decode.drafters.registry import build_drafters
from decode.drafting import Drafting
from decode.grammar_intake import GrammarIntake
from decode.handoff import HandoffClient
from decode.intake import RequestFactory
from decode.job import DecodeJob, JobLimits, check_claims, check_job, job_from_wire
from decode.live import LiveRequest
from decode.loop import DecodeLoop
from decode.outbox import Delta
from decode.pace import Pace
from decode.self_check import take_off_unfit
from decode.target import Target
from decode.warm_up import warm_up
from engine.engine import Engine
from engine.engine_thread import EngineThread
from engine.peer_info import describe_peer
from engine.pipeline import PipelinedEngine
from outrider.v1 import decode_pb2

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0


class DecodeWorker:
    """Made once a process; `start` before the first request, `close` at the end. Event loop only.

    Owns the engine's KV and the drafters, not the engine itself.
    """

    def __init__(
        self,
        engine: Engine,
        settings: DecodeSettings,
        handoff: HandoffSettings,
        identity: WorkerIdentity,
        tokenizer: Tokenizer,
        ticket_keys: TicketKeys,
        grpc: GrpcSettings,
        *,
        bearer_token: str | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.metrics = metrics or Metrics()
        self.clock = clock or SystemClock()
        self.draining = False
        self.ready = False
        self._pace = Pace(settings.step_tokens)
        self.drafters = build_drafters(
            settings.drafters, engine, tokenizer, clock=self.clock, step_seconds=self._pace.step_seconds
        )
        self.unfit: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._settings = settings
        self._ticket_keys = ticket_keys
        self._numerics = engine.numerics.digest()
        self.peer = describe_peer(identity, engine.kv.layout, engine.numerics)
        self.limits = _limits(engine, tokenizer, settings)
        drafting = Drafting(
            self.drafters, self._pace, self.metrics, self.clock, settings, self.limits.vocab_size
        )
        self._loop = DecodeLoop(
            Target(engine, self.limits.vocab_size),
            settings,
            drafting,
            self.clock,
            self.metrics,
            self._deliver,
            self._prefix_key,
        )
        self._thread = EngineThread(self._loop.turn, self.clock, engine.turns, self._loop.has_work)
        self._factory = RequestFactory(self.drafters, settings, tokenizer, engine.kv, self.limits)
        self._grammars = GrammarIntake(tokenizer, engine.config.vocab_size, self.clock)
        self._client = HandoffClient(
            self.peer,
            engine.kv.layout,
            engine.config.vocab_size,
            handoff,
            grpc,
            bearer_token=bearer_token,
            clock=self.clock,
        )
        self._bring_in = BringIn(self._thread, self._loop, engine.kv, self._client, handoff, self.clock)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[tuple[str, int], LiveRequest] = {}
        self._idle = asyncio.Event()
        self._keys = itertools.count(1)

    async def start(self) -> None:
        """Start the engine thread, warm everything up, and be ready."""
        self._event_loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()
        await self._thread.call(
            lambda: warm_up(self.engine, self._pace, self.clock, self._settings.step_tokens)
        )
        self.unfit = await self._thread.call(
            lambda: take_off_unfit(self.engine, self.drafters, self._tokenizer)
        )
        self.metrics.observe_load(self.gauges)
        self.ready = True

    async def close(self) -> None:
        """End what still lives with UNAVAILABLE, then the thread. Idempotent."""
        self.ready = False
        await self.drain(0.0)
        self._grammars.close()
        await self._client.close()
        closed = await asyncio.to_thread(self._thread.close, _CLOSE_TIMEOUT_S)
        if not closed:
            _LOG.error("the engine thread did not end within %s s", _CLOSE_TIMEOUT_S)

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests; wait at most `grace_s` for the others, then end them. How many were ended."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        remaining = list(self._live.values())
        for live in remaining:
            live.outbox.fail(Unavailable("the worker is going away"))
        if remaining:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._idle.wait()
            except TimeoutError:
                for live in list(self._live.values()):
                    live.interrupt(Unavailable("the worker is going away"))
        return len(remaining)

    async def idle(self) -> None:
        """Waits until nothing is served."""
        await self._idle.wait()

    @property
    def num_live(self) -> int:
        """Requests that are being served."""
        return len(self._live)

    @property
    def num_handoffs(self) -> int:
        """Fetch streams that are open."""
        return self._client.num_live

    def gauges(self) -> LoadGauges:
        """What is held now."""
        return self._loop.gauges()

    def healthy(self) -> bool:
        """Whether the engine thread has finished a turn, or idled, within `engine_stall_s`."""
        return self._thread.stalled_s() <= self._settings.engine_stall_s

    def beyond_help(self) -> bool:
        """Whether the engine thread has died, as it does with half of a pipelined target: nothing is served again."""
        return math.isinf(self._thread.stalled_s())

    async def check(self) -> None:
        """Raise on a broken invariant; when idle, on anything left over."""
        await self._thread.call(self._loop.check)

    def faults(self) -> dict[str, float]:
        """Steps that failed, and invariants found broken, in this worker's life. Both should stay 0."""
        return {
            "failed_steps": float(self._loop.num_failed_steps),
            "failed_checks": float(self._loop.num_failed_checks),
        }

    async def pipeline_steps(self) -> list[dict[str, int | float]]:
        """The times of a pipelined target's latest steps, where it keeps them (`engine/pipeline_timeline.py`)."""
        timeline = self.engine.timeline if isinstance(self.engine, PipelinedEngine) else None
        return [] if timeline is None else await self._thread.call(timeline.steps)

    async def on_engine_thread(self, action: Callable[[], Result]) -> Result:
        """Run `action` between two turns; its result, or its exception."""
        return await self._thread.call(action)

    async def drop_cached(self) -> None:
        """Forget the prefix cache (tests, benchmarks)."""
        await self._thread.call(self._loop.drop_cached)

    def accept(self, request: decode_pb2.DecodeRequest) -> LiveRequest:
        """Check ticket, input and room in the queue; the request is live until `serve` has ended.

        Raises ServiceErrors, having kept nothing.
        """
        if self.draining or not self.ready:
            raise Unavailable("this worker takes no new requests")
        claims = self._ticket_keys.verify(request.ticket, self.clock.unix_ms())
        job = job_from_wire(request, claims)
        check_claims(job, self.identity, self._numerics)
        check_job(job, self.limits)
        if job.key in self._live:
            raise FailedPrecondition("ticket.request_id", "this attempt is live already")
        if len(self._live) >= self._settings.max_waiting + self._settings.max_running:
            raise Overloaded("the queue of this decode worker is full")
        live = LiveRequest(
            job,
            self._settings.outbox_deltas,
            self._settings.merge_interval_s if job.merge_deltas else 0.0,
            self._settings.slow_reader_timeout_s,
            self.clock,
            self._thread.wake,
        )
        live.metrics = self.metrics
        company = Counter(other.request.choices[0].drafter.name for other in self._live.values())
        live.request = self._factory.make(next(self._keys), job, live, self._hashes(job), company)
        self._live[job.key] = live
        self._idle.clear()
        return live

    async def serve(
        self,
        live: LiveRequest,
        deadline_s: float | None,
        started: Callable[[LiveRequest], Awaitable[None]],
        send: Callable[[Delta], Awaitable[None]],
    ) -> None:
        """Run an accepted request to its end; everything it held is free when this returns or raises.

        `started` is awaited once, before the first delta. Raises the ServiceError that ended it.
        """
        error: ServiceError | None = None
        try:
            async with asyncio.timeout(None) as scope:
                live.limit(scope, deadline_s)
                async with asyncio.TaskGroup() as tasks:
                    bringing = tasks.create_task(self._bring(live, deadline_s))
                    error = await _relay(live, started, send)
                    if error is not None:
                        bringing.cancel()
        except TimeoutError:
            error = live.timeout_error()
        finally:
            live.close()
            live.account()
            await asyncio.shield(asyncio.ensure_future(self._release(live)))
        if error is not None:
            raise error

    async def _bring(self, live: LiveRequest, deadline_s: float | None) -> None:
        request = live.request
        live.tell_ended()
        if request.open_choices == 0:
            live.outbox.end()
            return
        admissions = Admissions()
        request.on_admitted = admissions.announce
        try:
            await self._grammars.constrain(request)
            live.handoff = await self._bring_in.run(request, admissions, deadline_s)
        except ServiceError as error:
            live.outbox.fail(error)
        except Exception:  # boundary: a fault of ours ends this request only
            _LOG.exception("bringing in %s failed", live.job.claims.request_id)
            live.outbox.fail(Internal("bringing the prompt in failed"))

    async def _release(self, live: LiveRequest) -> None:
        try:
            await self._thread.call(lambda: self._loop.drop(live.request))
            self._factory.learn(live.request)
        finally:
            self._live.pop(live.job.key, None)
            if not self._live:
                self._idle.set()

    def _deliver(self, events: list[Event]) -> None:
        """Engine thread: all events of a turn, one wake of the event loop."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(_dispatch, events)

    def _hashes(self, job: DecodeJob) -> list[bytes]:
        block_size = self.engine.kv.layout.block_size
        return extend_block_hashes([], job.prompt_ids, block_size, self._key_digest(job))

    def _prefix_key(self, request: Request) -> bytes:
        return self._key_digest(request.job)

    def _key_digest(self, job: DecodeJob) -> bytes:
        hidden_layers = self.engine.kv.layout.hidden_layers
        key = PrefixKey(self._numerics, job.claims.cache_salt, job.claims.adapter, hidden_layers)
        return key.digest()


def _limits(engine: Engine, tokenizer: Tokenizer, settings: DecodeSettings) -> JobLimits:
    return JobLimits(
        vocab_size=min(tokenizer.vocab_size, engine.config.vocab_size),
        max_context=engine.max_context,
        pool_tokens=engine.kv.stats().total * engine.kv.layout.block_size,
        block_size=engine.kv.layout.block_size,
        max_running=settings.max_running,
        step_tokens=settings.step_tokens,
    )


async def _relay(
    live: LiveRequest,
    started: Callable[[LiveRequest], Awaitable[None]],
    send: Callable[[Delta], Awaitable[None]],
) -> ServiceError | None:
    """Hand deltas on until the end; the error that it ended with."""
    try:
        delta = await live.outbox.get()
        await started(live)
        while delta is not None:
            await send(delta)
            delta = await live.outbox.get()
    except ServiceError as error:
        return error
    return None


def _dispatch(events: list[Event]) -> None:
    for event in events:
        request = event.request if isinstance(event, Ended) else event.choice.request
        try:
            request.listener.take(event)
        except Exception:  # boundary: what one request cannot take must not cost the others their news
            _LOG.exception("an event of a request was lost; the request ends")
            request.listener.take(Ended(request, Internal("an event of this request was lost")))
