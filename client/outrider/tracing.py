"""The client's span, through opentelemetry-api alone; without an SDK the trace context is made here."""

import secrets
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.errors import OutriderError
from outrider.results import Result

SPAN_CLIENT: Final = "outrider.client.generate"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
INSTRUMENTATION: Final = "outrider"
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
DRAFTER_NAME: Final = "outrider.speculation.drafter.name"
STATUS: Final = "outrider.status"

_PROPAGATOR = TraceContextTextMapPropagator()


class CallTrace:
    """One call's span, from start to `end`. Prompts and answers are never put on it."""

    def __init__(self, operation: str) -> None:
        tracer = trace.get_tracer(INSTRUMENTATION, schema_url=SCHEMA_URL)
        span = tracer.start_span(SPAN_CLIENT, kind=SpanKind.CLIENT, attributes={GEN_AI_OPERATION: operation})
        self._span: Span = span if span.get_span_context().is_valid else NonRecordingSpan(_new_context())
        self._ended = False

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The W3C trace context as call metadata."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=set_span_in_context(self._span))
        return tuple(carrier.items())

    def finish(self, result: Result) -> None:
        """Ends the span of a call that was answered. Later ends do nothing."""
        if self._ended:
            return
        self._span.set_attributes(
            {
                GEN_AI_RESPONSE_ID: result.request_id,
                GEN_AI_FINISH_REASONS: [choice.finish_reason for choice in result.choices],
                GEN_AI_INPUT_TOKENS: result.usage.prompt_tokens,
                GEN_AI_OUTPUT_TOKENS: result.usage.completion_tokens,
                DRAFTER_NAME: result.speculation.drafter,
            }
        )
        self._end("OK")

    def fail(self, error: OutriderError) -> None:
        """Ends the span of a call that failed. Later ends do nothing."""
        if not self._ended:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            self._end(error.status)

    def leave(self) -> None:
        """Ends the span of a call that the caller left. Later ends do nothing."""
        if not self._ended:
            self._end("CANCELLED")

    def _end(self, status: str) -> None:
        self._ended = True
        self._span.set_attribute(STATUS, status)
        self._span.end()


def _new_context() -> SpanContext:
    return SpanContext(
        trace_id=1 + secrets.randbelow(2**128 - 1),
        span_id=1 + secrets.randbelow(2**64 - 1),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
