"""Spans: set up once a process, trace context carried in gRPC metadata.

Without an endpoint nothing is exported, but contexts are made and passed on all the same. A collector that is
down costs dropped spans, never a caller's time: spans are queued and sent by a thread of their own.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.settings import TelemetrySettings
from core.telemetry_names import INSTRUMENTATION, SCHEMA_URL, WORKER_ID, WORKER_ROLE

MetadataPairs = tuple[tuple[str, str | bytes], ...]
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_EXPORT_INTERVAL_MS: Final = 500
_EXPORT_TIMEOUT_S: Final = 5


class Telemetry:
    """The process's tracer provider. `shutdown` is called once, at the end."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued, for at most `timeout_s`; then gives up."""
        thread = threading.Thread(target=self._provider.shutdown, name="telemetry-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)


def resource(settings: TelemetrySettings, role: str, worker_id: str) -> Resource:
    """What every span and metric of this process says about where it comes from."""
    return Resource.create(
        {
            "service.name": f"outrider-{role}",
            "service.namespace": settings.service_namespace,
            "service.instance.id": worker_id,
            WORKER_ID: worker_id,
            WORKER_ROLE: role,
        },
        schema_url=SCHEMA_URL,
    )


def setup_telemetry(
    settings: TelemetrySettings, role: str, worker_id: str, exporter: SpanExporter | None = None
) -> Telemetry:
    """Installs the process's tracer provider. Called once at start. `exporter` replaces OTLP (tests)."""
    provider = TracerProvider(resource=resource(settings, role, worker_id), shutdown_on_exit=False)
    chosen = exporter or otlp_span_exporter(settings)
    if chosen is not None:
        provider.add_span_processor(
            BatchSpanProcessor(
                chosen,
                max_queue_size=4096,
                schedule_delay_millis=_EXPORT_INTERVAL_MS,
                max_export_batch_size=512,
                export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
            )
        )
    trace.set_tracer_provider(provider)
    return Telemetry(provider)


def otlp_span_exporter(settings: TelemetrySettings) -> SpanExporter | None:
    """An OTLP exporter for the configured endpoint, or None."""
    if settings.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=not settings.otlp_endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )


def tracer() -> trace.Tracer:
    """The tracer that all our spans come from."""
    return trace.get_tracer(INSTRUMENTATION, schema_url=SCHEMA_URL)


def metadata_with_context(
    metadata: Iterable[tuple[str, str | bytes]] = (), context: Context | None = None
) -> MetadataPairs:
    """`metadata` plus the W3C headers of `context` (None: the current one), which replace older ones."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    kept = tuple((key, value) for key, value in metadata if key.lower() not in carrier)
    return kept + tuple(carrier.items())


def context_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context; an empty one where there is none or it is malformed."""
    carrier = {key.lower(): value for key, value in metadata or () if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def trace_id_of(context: Context | None = None) -> str:
    """The trace id of `context` (None: the current one), 32 hex digits; empty where there is none."""
    span_context = trace.get_current_span(context).get_span_context()
    return format(span_context.trace_id, "032x") if span_context.is_valid else ""
