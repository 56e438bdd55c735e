"""Attempts at one answer: place, sign, call, relay; and again elsewhere from the tokens sent when a worker is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

from core.clock import Clock
from core.errors import DeadlineExceeded, FailedPrecondition, Overloaded, ServiceError, Unavailable
from core.prefix_hash import prompt_digest
from core.records import GREEDY_TEMPERATURE, PrefillPeer, TicketClaims, WorkerRecord
from core.settings import RouterSettings
from core.telemetry import trace_id_of, tracer
from core.telemetry_names import REQUEST_ATTEMPT, ROUTE_REASON, SPAN_PLACE, WORKER_ID
from core.ticket import TicketKeys
from core.wire import (
    peer_to_wire,
    report_to_wire,
    sampling_to_wire,
    speculation_to_wire,
    thinking_to_wire,
    verification_to_wire,
)
from outrider.v1 import common_pb2, decode_pb2, inference_pb2
from router.answer import AnswerState
from router.directory import WorkerDirectory
from router.dispatch import WorkerLost
from router.placer import Placer
from router.policy import DraftPlan, keep_drafter, without_drafter
from router.views import Placement, Prepared, ServedModel

RESUME_WAIT_S = 60.0
"""How long an answer that has begun, or has lost a worker, waits for another if its deadline allows."""
FIRST_WAIT_POLLS = 3
"""How many registry polls a request that has not begun waits for one: long enough to forget a suspicion."""
LOSSES_WITH_A_DRAFTER = 2
"""So many workers may be lost under a begun answer before it goes on without its drafter, which may be why."""
TICKET_SLACK_S = 30.0
"""By how much a ticket outlives the deadline, since clocks of hosts differ; the deadline travels with the call."""

_OTHER_LIFE = "ticket.decode_"
"""Fields by which a worker says that a ticket is for another worker or another life of it."""

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class DecodeCalls(Protocol):
    """What is used of `router.dispatch.WorkerCalls`."""

    def generate(
        self, worker: WorkerRecord, request: decode_pb2.DecodeRequest, timeout_s: float | None
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """The events of one attempt."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What attempts work with; one set for the router. `plan_drafting` is the policy of now."""

    settings: RouterSettings
    model: ServedModel
    directory: WorkerDirectory
    placer: Placer
    calls: DecodeCalls
    keys: TicketKeys
    clock: Clock
    plan_drafting: Callable[[Prepared, WorkerRecord], DraftPlan]


@dataclass(slots=True)
class Outcome:
    """What the caller's span and the metrics say of an answer. Filled while it runs, so it holds for failures too."""

    request_class: str = ""
    drafter: str = ""
    route_reason: str = ""
    attempts: int = 0
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Attempts:
    """One answer from placement to its end. `run` is called once, by the request's own task."""

    def __init__(self, services: Services, prepared: Prepared, write: Write, outcome: Outcome) -> None:
        self._services = services
        self._prepared = prepared
        self._write = write
        self._outcome = outcome
        self._state = AnswerState(prepared.sampling.n, prepared.resume_token_ids, prepared.request_class)
        self._numerics_class: str | None = None
        self._drafter = ""
        self._losses = 0
        self._losses_begun = 0
        self._wait_until_s: float | None = None
        self._streaming = False

    async def run(self, arrived_s: float, queue_s: float) -> None:
        """Answers the request. Raises the ServiceError that it ends with where no attempt brings it to its end.

        At most `max_attempts` workers may be lost. A full worker is no loss: another one is asked, and an answer that
        has begun waits for room. A worker that took the request is overloaded by a slow reader only: that is the end.
        Behind `LOSSES_WITH_A_DRAFTER` losses an answer that has begun goes on without its drafter.
        """
        busy: frozenset[str] = frozenset()
        failure: ServiceError = Unavailable("no decode worker is ready")
        while self._losses < self._services.settings.max_attempts:
            placement = await self._place(failure, busy)
            self._outcome.attempts += 1
            finished: decode_pb2.DecodeFinished | None = None
            try:
                finished = await self._attempt(placement)
            except Overloaded as error:
                if self._streaming:
                    raise
                busy, failure = busy | {placement.decode.epoch}, error
            except (WorkerLost, FailedPrecondition) as error:
                if isinstance(error, FailedPrecondition) and not (error.field or "").startswith(_OTHER_LIFE):
                    raise
                self._services.directory.suspect(placement.decode.epoch)
                self._losses += 1
                self._losses_begun += self._numerics_class is not None and isinstance(error, WorkerLost)
                self._wait_until_s = None
                failure, finished = error, self._finished_without_worker()
            if finished is not None:
                await self._finish(finished, arrived_s, queue_s)
                self._remember(placement)
                return
        raise failure

    async def _place(self, failure: ServiceError, busy: frozenset[str]) -> Placement:
        """Waits, within bounds, for a worker that may take the next attempt. Raises `failure` where none comes."""
        services, moved = self._services, self._losses > 0 or self._numerics_class is not None
        with tracer().start_as_current_span(SPAN_PLACE, record_exception=False) as span:
            while True:
                placement = services.placer.place(self._prepared, self._numerics_class, busy, moved)
                if placement is not None:
                    span.set_attribute(WORKER_ID, placement.decode.worker_id)
                    span.set_attribute(ROUTE_REASON, placement.reason)
                    span.set_attribute(REQUEST_ATTEMPT, self._outcome.attempts + 1)
                    return placement
                if not await services.directory.changed(self._patience_s(failure)):
                    raise failure
                busy = frozenset()

    def _patience_s(self, failure: ServiceError) -> float:
        """How long to wait on for a worker; 0: no longer. Progress renews it, see `_relay`."""
        now_s = self._services.clock.now_s()
        if self._wait_until_s is None:
            wait_s = FIRST_WAIT_POLLS * self._services.settings.registry_poll_s
            if self._numerics_class is not None or self._losses > 0:
                wait_s = RESUME_WAIT_S
            elif isinstance(failure, Overloaded):
                wait_s = 0.0
            self._wait_until_s = now_s + wait_s
        return max(0.0, self._wait_until_s - now_s)

    async def _attempt(self, placement: Placement) -> decode_pb2.DecodeFinished:
        """One call to a decode worker, relayed. Returns its last message, not yet relayed."""
        worker = placement.decode
        self._streaming = False
        plan = self._services.plan_drafting(self._prepared, worker)
        if self._numerics_class is not None:
            plan = keep_drafter(plan, self._outcome.drafter, frozenset(worker.drafters))
        if self._losses_begun >= LOSSES_WITH_A_DRAFTER:
            plan = without_drafter(plan)
        self._state.begin_attempt(plan.fallback)
        self._drafter = plan.speculation.drafter
        loads = self._services.directory.loads
        with ExitStack() as holds:
            holds.enter_context(loads.holding(worker.epoch))
            prefill_holds = [holds.enter_context(loads.holding(peer.epoch)) for peer in placement.prefill[:1]]
            request = self._decode_request(placement, plan)
            stream = self._services.calls.generate(worker, request, self._remaining_s())
            async with aclosing(stream) as events:  # type: ignore[type-var]
                async for event in events:
                    self._streaming = True
                    if event.HasField("started") and event.started.drafter:
                        self._drafter = event.started.drafter
                    await self._begin(placement, plan)
                    if event.HasField("delta"):
                        for hold in prefill_holds:
                            hold.release()
                        await self._relay(event.delta)
                    elif event.HasField("finished"):
                        return event.finished
        raise WorkerLost(f"decode worker {worker.worker_id} ended its stream early")

    async def _begin(self, placement: Placement, plan: DraftPlan) -> None:
        """Sends the first message, once: from then on the answer is bound to its numerics class."""
        if self._numerics_class is not None:
            return
        prepared = self._prepared
        self._numerics_class = placement.decode.numerics_class
        self._outcome.drafter = self._drafter
        self._outcome.route_reason = f"{prepared.class_reason}; {plan.reason}; {placement.reason}"
        sampling = prepared.sampling
        started = inference_pb2.Started(
            request_id=prepared.request_id,
            seed=sampling.seed,
            drafter=self._drafter,
            request_class=prepared.request_class,
            numerics_class=placement.decode.numerics_class,
            model=self._services.model.name,
            route_reason=self._outcome.route_reason,
            verification=verification_to_wire(plan.speculation.verification),
            approximate=bool(plan.speculation.approximation),
            prompt_tokens=len(prepared.token_ids),
            effective_temperature=0.0 if sampling.temperature < GREEDY_TEMPERATURE else sampling.temperature,
            trace_id=trace_id_of(),
        )
        if plan.speculation.draft_length is not None:
            started.draft_length = plan.speculation.draft_length
        await self._send(inference_pb2.GenerateResponse(started=started))

    async def _relay(self, delta: decode_pb2.DecodeDelta) -> None:
        self._state.take(delta)
        if not delta.token_ids and not delta.text:
            return
        self._wait_until_s = None
        if self._outcome.first_token_s is None:
            self._outcome.first_token_s = self._services.clock.now_s()
        message = inference_pb2.Delta(
            index=delta.index, text=delta.text, token_ids=delta.token_ids, logprobs=delta.logprobs
        )
        await self._send(inference_pb2.GenerateResponse(delta=message))

    async def _send(self, message: inference_pb2.GenerateResponse) -> None:
        """Waits for the client's flow control, but not for ever. Raises Overloaded."""
        try:
            async with asyncio.timeout(self._services.settings.slow_reader_timeout_s):
                await self._write(message)
        except TimeoutError:
            raise Overloaded("the caller reads too slowly") from None

    def _finished_without_worker(self) -> decode_pb2.DecodeFinished | None:
        """A worker lost after its last token costs nothing: all that it had to say is known."""
        if not self._state.complete:
            return None
        usage = common_pb2.Usage(
            prompt_tokens=len(self._prepared.token_ids), completion_tokens=self._state.num_tokens()
        )
        return decode_pb2.DecodeFinished(choices=self._state.choices(), usage=usage)

    async def _finish(self, finished: decode_pb2.DecodeFinished, arrived_s: float, queue_s: float) -> None:
        """Sends the last message: reports added up over attempts, times as this router saw them."""
        self._state.close(finished)
        report = self._state.report(self._drafter)
        self._outcome.prompt_tokens = finished.usage.prompt_tokens
        self._outcome.completion_tokens = finished.usage.completion_tokens
        timing = common_pb2.Timing()
        timing.CopyFrom(finished.timing)
        timing.queue_s += queue_s
        timing.total_s = self._services.clock.now_s() - arrived_s
        first_s = self._outcome.first_token_s
        timing.time_to_first_token_s = timing.total_s if first_s is None else first_s - arrived_s
        message = inference_pb2.Finished(
            choices=self._state.choices(),
            usage=finished.usage,
            speculation=report_to_wire(report),
            timing=timing,
            trace_id=trace_id_of(),
            attempts=self._outcome.attempts,
        )
        await self._send(inference_pb2.GenerateResponse(finished=message))

    def _remember(self, placement: Placement) -> None:
        self._services.placer.remember_answer(self._prepared, self._state.token_ids[0], placement.decode)

    def _decode_request(self, placement: Placement, plan: DraftPlan) -> decode_pb2.DecodeRequest:
        prepared = self._prepared
        return decode_pb2.DecodeRequest(
            ticket=self._services.keys.sign(self._claims(placement.decode, placement.prefill)),
            token_ids=prepared.token_ids,
            sampling=sampling_to_wire(prepared.sampling),
            speculation=speculation_to_wire(plan.speculation),
            draft_length_fixed=plan.fixed,
            committed=self._state.committed(),
            prefill_peers=[peer_to_wire(peer) for peer in placement.prefill],
            request_class=prepared.request_class,
            bad_word_ids=[common_pb2.TokenIds(ids=ids) for ids in prepared.sampling.bad_word_ids],
            eos_token_ids=prepared.sampling.eos_token_ids,
            merge_deltas=prepared.merge_deltas,
            thinking=None if plan.thinking is None else thinking_to_wire(plan.thinking),
            auto_drafters=plan.candidates,
        )

    def _claims(self, worker: WorkerRecord, peers: tuple[PrefillPeer, ...]) -> TicketClaims:
        prepared, services = self._prepared, self._services
        assert prepared.sampling.seed is not None, "the router fixes the seed first"
        remaining_s = self._remaining_s()
        lifetime_s = services.settings.ticket_lifetime_s
        if remaining_s is not None:
            lifetime_s = min(lifetime_s, remaining_s + TICKET_SLACK_S)
        return TicketClaims(
            request_id=prepared.request_id,
            attempt=self._outcome.attempts,
            tenant=prepared.caller.tenant,
            prompt_digest=prompt_digest(prepared.token_ids),
            model_revision=services.model.revision,
            adapter=prepared.adapter,
            numerics_class=worker.numerics_class,
            seed=prepared.sampling.seed,
            decode_worker_id=worker.worker_id,
            decode_epoch=worker.epoch,
            prefill_worker_ids=tuple(peer.worker_id for peer in peers),
            expires_unix_ms=services.clock.unix_ms() + int(lifetime_s * 1000),
            cache_salt=prepared.salt,
        )

    def _remaining_s(self) -> float | None:
        """What is left of the caller's time. Raises DeadlineExceeded where nothing is."""
        deadline_s = self._prepared.caller.deadline_s
        if deadline_s is None:
            return None
        remaining_s = deadline_s - self._services.clock.now_s()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed")
        return remaining_s
