"""The collector takes spans of several processes by OTLP and puts them together."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import StatusCode

from cluster.trace_collector import CollectedSpan, TraceCollector, span_tree


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as running:
        yield running


def _provider(collector: TraceCollector, service: str) -> TracerProvider:
    attributes = {"service.name": service, "service.instance.id": f"{service}-0"}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True, timeout=5)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_spans_of_two_processes_become_one_tree(collector: TraceCollector) -> None:
    router, decode = _provider(collector, "router"), _provider(collector, "decode")
    with router.get_tracer("t").start_as_current_span("route") as root:
        trace_id = format(root.get_span_context().trace_id, "032x")
        with decode.get_tracer("t").start_as_current_span("decode") as span:
            span.set_attribute("position.accepted", (3, 2, 1))
            span.set_attribute("rate", 0.5)
            span.set_status(StatusCode.ERROR)
    spans = collector.wait(trace_id, lambda arrived: len(arrived) == 2, timeout_s=10)
    (tree,) = span_tree(spans)
    assert (tree.span.name, tree.span.service, tree.span.parent_id) == ("route", "router", "")
    (child,) = tree.children
    assert (child.span.name, child.span.instance, child.span.failed) == ("decode", "decode-0", True)
    assert child.span.attributes == {"position.accepted": (3, 2, 1), "rate": 0.5}
    assert child.span.duration_s >= 0


def test_span_whose_parent_never_arrived_is_a_marked_root() -> None:
    orphan = CollectedSpan("t", "b", "a", "orphan", "s", "i", 1, 2, False, {})
    (node,) = span_tree([orphan])
    assert node.missing_parent


def test_wait_returns_what_there_is_when_the_rest_never_comes(collector: TraceCollector) -> None:
    provider = _provider(collector, "router")
    with provider.get_tracer("t").start_as_current_span("alone") as span:
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    spans = collector.wait(trace_id, lambda arrived: len(arrived) == 2, timeout_s=0.2)
    assert [one.name for one in spans] == ["alone"]
    assert collector.trace_ids() == (trace_id,)
