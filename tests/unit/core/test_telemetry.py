"""Trace context in metadata, and a collector that is down."""

import socket

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.clock import SystemClock
from core.settings import TelemetrySettings
from core.telemetry import (
    Telemetry,
    context_from_metadata,
    metadata_with_context,
    otlp_span_exporter,
    trace_id_of,
)

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def test_a_context_survives_the_way_through_metadata() -> None:
    context = context_from_metadata((("TraceParent", TRACEPARENT), ("x-other", b"bytes")))
    assert trace_id_of(context) == "0123456789abcdef0123456789abcdef"
    carried = metadata_with_context((("x-own", "1"),), context)
    assert dict(carried)["traceparent"] == TRACEPARENT
    assert dict(carried)["x-own"] == "1"


def test_an_older_traceparent_is_replaced_not_doubled() -> None:
    context = context_from_metadata((("traceparent", TRACEPARENT),))
    stale = "00-ffffffffffffffffffffffffffffffff-ffffffffffffffff-01"
    carried = metadata_with_context((("traceparent", stale),), context)
    assert [value for key, value in carried if key == "traceparent"] == [TRACEPARENT]


def test_malformed_and_missing_headers_give_an_empty_context() -> None:
    assert trace_id_of(context_from_metadata(None)) == ""
    assert trace_id_of(context_from_metadata((("traceparent", "garbage"),))) == ""
    assert metadata_with_context((("a", "b"),), Context()) == (("a", "b"),)


def test_a_span_started_under_a_received_context_is_its_child() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    parent = context_from_metadata((("traceparent", TRACEPARENT),))
    provider.get_tracer("test").start_span("child", context=parent).end()
    Telemetry(provider).shutdown(5.0)
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert format(span.context.trace_id, "032x") == "0123456789abcdef0123456789abcdef"
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "0123456789abcdef"


def test_a_collector_that_is_down_costs_neither_spans_nor_shutdown_any_time() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        settings = TelemetrySettings.model_validate(
            {"otlp_endpoint": f"http://127.0.0.1:{held.getsockname()[1]}"}
        )
        exporter = otlp_span_exporter(settings)
        assert exporter is not None
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        clock = SystemClock()
        started_s = clock.now_s()
        for _ in range(2000):
            provider.get_tracer("test").start_span("lost").end()
        assert clock.now_s() - started_s < 2.0
        started_s = clock.now_s()
        Telemetry(provider).shutdown(0.5)
        assert clock.now_s() - started_s < 2.0


def test_without_an_endpoint_nothing_is_exported() -> None:
    assert otlp_span_exporter(TelemetrySettings.model_validate({})) is None
