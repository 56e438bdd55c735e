"""The router: one request from validation to its last message, and what `Admin` asks of it. Knows no gRPC."""

import asyncio
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace

from opentelemetry.trace import Span, SpanKind, StatusCode

from core import telemetry_names as names
from core.auth import bearer_metadata
from core.clock import Clock, SystemClock
from core.errors import DeadlineExceeded, InvalidArgument, ServiceError
from core.identity import WorkerIdentity
from core.metrics import Metrics
from core.prefix_hash import tenant_salt
from core.records import RequestClass, SamplingParams, WorkerRecord
from core.settings import ClassPolicy, GrpcSettings, RouterSettings, SecuritySettings
from core.telemetry import context_from_metadata, tracer
from core.ticket import TicketKeys
from outrider.v1 import admin_pb2, inference_pb2
from router.admit import Admission
from router.attempts import Attempts, Outcome, Services, Write
from router.classify import GRAMMAR_GIVEN, Classification, classify
from router.directory import WorkerDirectory
from router.dispatch import WorkerCalls
from router.grammar import GrammarGate
from router.idempotency import LiveCalls, seed_of
from router.placer import Placer
from router.policy import NO_DRAFTING, DraftPlan, choose_drafting, load_policies
from router.tokenise import PromptTokenizer, TokenisingPool
from router.validate import check_request, fit_context
from router.views import Caller, CheckedRequest, Prepared, ServedModel


class Router:
    """One for the process. `start`, then any number of `generate` at once, `drain`, `close`."""

    def __init__(
        self,
        settings: RouterSettings,
        security: SecuritySettings,
        grpc: GrpcSettings,
        directory: WorkerDirectory,
        tokenizer: PromptTokenizer,
        model: ServedModel,
        identity: WorkerIdentity,
        *,
        metrics: Metrics | None = None,
        metrics_address: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Raises InvalidArgument where the ticket keys or the policy file are unusable."""
        self._settings = settings
        self._model = model
        self._identity = identity
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._metrics = metrics if metrics is not None else Metrics()
        self._metrics_address = metrics_address
        self._salt_secret = (security.cache_salt_secret or "").encode()
        self.directory = directory
        self.calls = WorkerCalls(grpc, bearer_metadata(security.bearer_token))
        self._pool = TokenisingPool(tokenizer)
        self._grammars = GrammarGate(settings.grammar_timeout_s)
        self._admission = Admission(settings.max_in_flight, settings.max_queue, self._clock)
        self._live = LiveCalls()
        self._policies: Mapping[RequestClass, ClassPolicy] = load_policies(settings.policy_file)
        self._placer = Placer(directory, model.revision)
        self._draining = False
        self._services = Services(
            settings=settings,
            model=model,
            directory=directory,
            placer=self._placer,
            calls=self.calls,
            keys=TicketKeys(security.ticket_keys),
            clock=self._clock,
            plan_drafting=self._plan_drafting,
        )

    async def start(self) -> None:
        """Learns who serves. Requests may come from now on."""
        await self.directory.start()

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests, gives running ones `grace_s`; returns how many still run."""
        self._draining = True
        return await self._admission.drain(grace_s)

    async def close(self) -> None:
        """Ends channels, polling and threads. Requests that still run end UNAVAILABLE."""
        await self.calls.close()
        await self.directory.close()
        self._pool.close()
        self._grammars.close()

    async def generate(self, request: inference_pb2.GenerateRequest, caller: Caller, write: Write) -> None:
        """Answers one request through `write`, which may wait for a slow client. Called in a task of the request's own.

        Raises the ServiceError that the request ends with. Cancelling the task cancels everything behind it.
        """
        outcome = Outcome()
        with tracer().start_as_current_span(
            names.SPAN_ROUTER,
            context=context_from_metadata(caller.metadata),
            kind=SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            status = "INTERNAL"
            try:
                with self._live.running(caller, _body(request, caller)):
                    await self._answer(request, caller, write, outcome)
                status = "OK"
            except ServiceError as error:
                status = error.status
                raise
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            finally:
                self._conclude(span, status, outcome)

    async def _answer(
        self, request: inference_pb2.GenerateRequest, caller: Caller, write: Write, outcome: Outcome
    ) -> None:
        arrived_s = self._clock.now_s()
        checked = check_request(request, self._model, self.directory.offer(), self._settings)
        async with self._admission.admitted(caller.tenant, caller.deadline_s) as queue_s:
            remaining_s = None if caller.deadline_s is None else caller.deadline_s - self._clock.now_s()
            try:
                async with asyncio.timeout(remaining_s):
                    prepared = await self._prepare(checked, caller)
                    outcome.request_class = prepared.request_class
                    await self.calls.keep_only(self.directory.epochs() | self.directory.loads.epochs())
                    await Attempts(self._services, prepared, write, outcome).run(arrived_s, queue_s)
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed") from None
        if outcome.first_token_s is not None:
            self._metrics.time_to_first_token(outcome.first_token_s - arrived_s)

    async def _prepare(self, checked: CheckedRequest, caller: Caller) -> Prepared:
        """Tokenises, classifies, fixes the seed: all that one request is, but not where it runs."""
        await self._grammars.check(checked.sampling.grammar)
        token_ids = await self._pool.prompt_ids(checked.prompt)
        max_tokens = fit_context(checked, len(token_ids), self._model, self._placer.pool_tokens())
        with tracer().start_as_current_span(names.SPAN_CLASSIFY) as span:
            found = await self._classify(checked)
            span.set_attribute(names.REQUEST_CLASS, found.request_class)
        sampling = replace(
            checked.sampling,
            max_tokens=max_tokens,
            seed=seed_of(caller, checked.sampling.seed),
            bad_word_ids=await self._pool.bad_word_ids(checked.sampling.bad_words),
            eos_token_ids=self._pool.eos_token_ids,
        )
        if sampling.grammar is not None and not sampling.eos_token_ids:
            raise InvalidArgument("sampling.grammar", "this model has no token that could end the answer")
        _check_unfinished(checked.resume_token_ids, sampling)
        return Prepared(
            request_id=secrets.token_hex(16),
            caller=caller,
            token_ids=token_ids,
            sampling=sampling,
            speculation=checked.speculation,
            resume_token_ids=checked.resume_token_ids,
            request_class=found.request_class,
            class_reason=f"class {found.request_class} ({found.reason})",
            adapter=checked.adapter,
            salt=tenant_salt(self._salt_secret, caller.tenant, checked.cache_salt),
            merge_deltas=checked.merge_deltas,
        )

    async def _classify(self, checked: CheckedRequest) -> Classification:
        if checked.request_class is not None:
            return Classification(checked.request_class, "given")
        if checked.sampling.grammar is not None:
            return GRAMMAR_GIVEN
        return classify(await self._pool.classified_text(checked.prompt))

    def _plan_drafting(self, prepared: Prepared, worker: WorkerRecord) -> DraftPlan:
        if prepared.sampling.beam_width > 1:
            return NO_DRAFTING
        policy = self._policies[prepared.request_class]
        return choose_drafting(
            prepared.speculation, policy, frozenset(worker.drafters), worker.max_draft_length
        )

    def _conclude(self, span: Span, status: str, outcome: Outcome) -> None:
        span.set_attribute(names.STATUS, status)
        span.set_attribute(names.REQUEST_CLASS, outcome.request_class)
        span.set_attribute(names.ROUTE_REASON, outcome.route_reason)
        span.set_attribute(names.DRAFTER_NAME, outcome.drafter)
        span.set_status(StatusCode.OK if status == "OK" else StatusCode.ERROR)
        self._metrics.request_finished(status, outcome.request_class, outcome.drafter)
        self._metrics.tokens("prompt", outcome.prompt_tokens)
        self._metrics.tokens("completion", outcome.completion_tokens)

    async def reload_policies(self) -> int:
        """Reads the policy file again; a bad one raises InvalidArgument and changes nothing. Returns how many."""
        self._policies = await asyncio.to_thread(load_policies, self._settings.policy_file)
        return len(self._policies)

    def worker(self, worker_id: str) -> WorkerRecord:
        """A known worker. Raises InvalidArgument."""
        for record in self.directory.records():
            if record.worker_id == worker_id:
                return record
        raise InvalidArgument("worker_id", f"{worker_id!r} is not known")

    async def list_workers(self) -> list[admin_pb2.WorkerStatus]:
        """This router and all known workers, each asked now; who does not answer is listed as not ready."""
        records = self.directory.records()
        return [self.status(), *await asyncio.gather(*(self._status_of(record) for record in records))]

    async def _status_of(self, record: WorkerRecord) -> admin_pb2.WorkerStatus:
        try:
            status = await self.calls.status(record)
            status.metrics_address = record.metrics_address
            return status
        except ServiceError:
            return admin_pb2.WorkerStatus(
                worker_id=record.worker_id,
                role=record.role,
                epoch=record.epoch,
                address=record.address,
                ready=False,
                draining=record.draining,
                model=record.model,
                process_id=record.process_id,
                metrics_address=record.metrics_address,
            )

    def list_drafters(self) -> list[admin_pb2.DrafterInfo]:
        """What can be asked for by name, and where it is hosted. `max_draft_width` 0: not told by the workers."""
        workers = [record for record in self.directory.records() if record.role == "decode"]
        found: list[admin_pb2.DrafterInfo] = []
        for name in sorted({"none"} | {name for record in workers for name in record.drafters}):
            hosts = [record for record in workers if name == "none" or name in record.drafters]
            longest = 0 if name == "none" else max(record.max_draft_length for record in hosts)
            worker_ids = [record.worker_id for record in hosts]
            found.append(admin_pb2.DrafterInfo(name=name, max_draft_length=longest, workers=worker_ids))
        return found

    def status(self) -> admin_pb2.WorkerStatus:
        """This router. Every counter but `channels` and `registry_reachable` is 0 when idle."""
        counters = {
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "worker_load": self.directory.loads.total(),
            "idempotency_keys": len(self._live),
            "channels": self.calls.num_channels(),
            "registry_reachable": float(self.directory.reachable),
        }
        return admin_pb2.WorkerStatus(
            worker_id=self._identity.worker_id,
            role="router",
            epoch=self._identity.epoch,
            address=self._identity.address,
            ready=not self._draining and self._has_worker(),
            draining=self._draining,
            model=self._model.name,
            running=self._admission.in_flight,
            waiting=self._admission.queued,
            tasks=self._admission.in_flight + self._admission.queued,
            drafters=sorted({"none"} | self.directory.offer().drafters),
            process_id=os.getpid(),
            metrics_address=self._metrics_address,
            counters=counters,
        )

    def _has_worker(self) -> bool:
        views = self.directory.views("decode")
        return any(view.record.ready and not view.record.draining and not view.suspected for view in views)

    def check(self) -> None:
        """States the invariants of all counters; raises AssertionError."""
        self._admission.check()
        self.directory.loads.check()


def _body(request: inference_pb2.GenerateRequest, caller: Caller) -> bytes:
    """What makes two requests the same, for an idempotency key; nothing where there is none."""
    return b"" if caller.idempotency_key is None else request.SerializeToString(deterministic=True)


def _check_unfinished(resume_token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
    if ends.intersection(resume_token_ids):
        raise InvalidArgument("resume_token_ids", "hold a token that ends the answer; nothing is left to add")
