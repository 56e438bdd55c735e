"""The decode worker on the wire: `Decode.Generate`, and its own part of `Admin`."""

import json
import logging
import os
from typing import NoReturn, TypeVar

import grpc.aio
import psutil
from grpc.aio import ServicerContext
from opentelemetry.trace import Span, SpanKind, StatusCode

from core import telemetry_names as names
from core.errors import Internal, InvalidArgument, ServiceError
from core.grpc_errors import error_trailers, status_code
from core.records import SpeculationReport
from core.telemetry import context_from_metadata, tracer
from core.wire import finish_to_wire, logprobs_to_wire, report_to_wire, timing_to_wire, usage_to_wire
from decode.live import LiveRequest
from decode.outbox import Delta
from decode.worker import DecodeWorker
from outrider.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc

_LOG = logging.getLogger(__name__)
Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
EventContext = ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeEvent]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """One call a request attempt; cancelling it frees everything."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: EventContext
    ) -> None:  # gRPC names it
        """See decode.proto."""
        parent = context_from_metadata(context.invocation_metadata())
        with tracer().start_as_current_span(
            names.SPAN_DECODE, context=parent, kind=SpanKind.SERVER, record_exception=False
        ) as span:
            try:
                live = self._worker.accept(request)
            except ServiceError as error:
                _end_span(span, error.status)
                self._worker.metrics.request_finished(error.status)
                await _refuse(context, error)
            await self._serve(live, context, span)

    async def _serve(self, live: LiveRequest, context: EventContext, span: Span) -> None:
        """Run an accepted request; one status, one report and one count on every path."""
        status = "CANCELLED"
        refusal: ServiceError | None = None
        try:
            await self._relay(live, context)
            status = (
                "OK"  # also where the router, having read the last message, hangs up before the write returns
            )
            await context.write(decode_pb2.DecodeEvent(finished=_finished_to_wire(live)))
        except ServiceError as error:
            refusal = error
        except Exception:  # boundary: a fault of ours is one request's INTERNAL
            _LOG.exception("a request failed")
            refusal = Internal("the decode worker failed on this request")
        finally:
            status = refusal.status if refusal is not None else status
            report = live.final_report()
            _describe(span, live)
            _end_span(span, status)
            self._worker.metrics.request_finished(status, report.request_class, report.drafter)
            self._worker.metrics.speculation(report)
        if refusal is not None:
            await _refuse(context, refusal)

    async def _relay(self, live: LiveRequest, context: EventContext) -> None:
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else self._worker.clock.now_s() + remaining_s

        async def started(live: LiveRequest) -> None:
            event = decode_pb2.DecodeStarted(
                cached_prompt_tokens=live.request.cached_tokens, drafter=live.final_report().drafter
            )
            await context.write(decode_pb2.DecodeEvent(started=event))

        async def send(delta: Delta) -> None:
            await context.write(decode_pb2.DecodeEvent(delta=_delta_to_wire(delta)))

        await self._worker.serve(live, deadline_s, started, send)


class DecodeAdminService(admin_pb2_grpc.AdminServicer):
    """Status and drain of this worker. What only the router knows is answered there."""

    def __init__(self, worker: DecodeWorker, model: str = "") -> None:
        self._worker = worker
        self._model = model

    async def Status(  # gRPC names it
        self, request: admin_pb2.StatusRequest, context: ServicerContext[object, object]
    ) -> admin_pb2.WorkerStatus:
        """See admin.proto."""
        status = worker_status(self._worker, self._model)
        if request.timeline:
            status.pipeline_timeline = json.dumps(await self._worker.pipeline_steps())
        return status

    async def Drain(  # gRPC names it
        self, request: admin_pb2.DrainRequest, context: ServicerContext[object, object]
    ) -> admin_pb2.DrainResponse:
        """See admin.proto; returns when the worker is empty or the grace time is over."""
        if request.worker_id not in ("", self._worker.identity.worker_id):
            await _refuse(context, InvalidArgument("worker_id", f"{request.worker_id!r} is not this worker"))
        return admin_pb2.DrainResponse(remaining=await self._worker.drain(max(0.0, request.grace_s)))


def add_decode_services(server: grpc.aio.Server, worker: DecodeWorker, model: str = "") -> None:
    """Register both services."""
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server)
    admin_pb2_grpc.add_AdminServicer_to_server(DecodeAdminService(worker, model), server)


def worker_status(worker: DecodeWorker, model: str = "") -> admin_pb2.WorkerStatus:
    """What this worker says of itself."""
    gauges = worker.gauges()
    identity = worker.identity
    return admin_pb2.WorkerStatus(
        worker_id=identity.worker_id,
        role=identity.role,
        epoch=identity.epoch,
        address=identity.address,
        ready=worker.ready and not worker.draining,
        draining=worker.draining,
        model=model,
        peer=worker.peer,
        running=gauges.running,
        waiting=gauges.waiting,
        total_blocks=worker.engine.kv.stats().total,
        free_blocks=gauges.free_blocks,
        cached_blocks=gauges.cached_blocks,
        used_blocks=gauges.used_blocks,
        leases=worker.num_handoffs,
        tasks=worker.num_live,
        resident_bytes=psutil.Process().memory_info().rss,
        process_id=os.getpid(),
        drafters=sorted(worker.drafters),
        counters={**worker.metrics.totals(), **worker.faults()},
    )


def _delta_to_wire(delta: Delta) -> decode_pb2.DecodeDelta:
    return decode_pb2.DecodeDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_wire(entry) for entry in delta.logprobs],
        report=report_to_wire(delta.report),
        finish=None if delta.finish is None else finish_to_wire(delta.finish),
    )


def _finished_to_wire(live: LiveRequest) -> decode_pb2.DecodeFinished:
    handoff = live.handoff
    message = decode_pb2.DecodeFinished(
        choices=[finish_to_wire(finish) for finish in live.finishes()],
        usage=usage_to_wire(live.usage()),
        timing=timing_to_wire(live.timing()),
        handoff=decode_pb2.HandoffReport(
            outcome=handoff.outcome,
            transport=handoff.transport,
            bytes=handoff.num_bytes,
            blocks=handoff.blocks,
            prefill_worker_id=handoff.prefill_worker_id,
        ),
    )
    message.report.CopyFrom(report_to_wire(live.final_report()))
    return message


def _end_span(span: Span, status: str) -> None:
    span.set_attribute(names.STATUS, status)
    if status not in ("OK", "CANCELLED"):
        span.set_status(StatusCode.ERROR, status)


def _describe(span: Span, live: LiveRequest) -> None:
    """The span's attributes: totals and per-position arrays, and what came of the hand-off."""
    claims, sampling, usage = live.job.claims, live.job.sampling, live.usage()
    report = live.final_report()
    attributes: dict[str, str | int | float] = {
        names.GEN_AI_RESPONSE_ID: claims.request_id,
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_SEED: claims.seed,
        names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
        names.REQUEST_ATTEMPT: claims.attempt,
        names.REQUEST_CLASS: live.job.request_class,
        names.CACHED_TOKENS: usage.cached_prompt_tokens,
        names.HANDOFF_OUTCOME: live.handoff.outcome,
        names.HANDOFF_TRANSPORT: live.handoff.transport,
        names.HANDOFF_SIZE: live.handoff.num_bytes,
        names.HANDOFF_BLOCKS: live.handoff.blocks,
        names.VERIFICATION: live.job.speculation.verification,
        names.APPROXIMATE: bool(live.job.speculation.approximation),
    }
    span.set_attributes(attributes)
    span.set_attribute(names.GEN_AI_FINISH_REASONS, [finish.reason.value for finish in live.finishes()])
    _describe_speculation(span, report)


def _describe_speculation(span: Span, report: SpeculationReport) -> None:
    attributes: dict[str, str | int | float | None] = {
        names.DRAFTER_NAME: report.drafter,
        names.DRAFTER_VERSION: report.drafter_version,
        names.DRAFT_LENGTH_REQUESTED: report.draft_length_requested,
        names.DRAFT_LENGTH_MEAN: report.draft_length_mean,
        names.STEPS: report.steps,
        names.PROPOSED_NODES: report.proposed_nodes,
        names.ACCEPTED_TOKENS: report.accepted_tokens,
        names.ACCEPTANCE_RATE: report.acceptance_rate,
        names.ACCEPTANCE_LENGTH: report.acceptance_length,
        names.FALLBACK_REASON: report.fallback_reason,
    }
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)
    span.set_attribute(names.POSITION_OFFERED, list(report.position_offered))
    span.set_attribute(names.POSITION_ACCEPTED, list(report.position_accepted))


async def _refuse(context: ServicerContext[Asked, Answered], error: ServiceError) -> NoReturn:
    await context.abort(status_code(error), error.message, error_trailers(error))
    raise AssertionError("abort raises")
