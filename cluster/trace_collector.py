"""A tiny OTLP receiver: takes spans from every process by gRPC, and draws a trace as a tree.

For the demo and for tests. It keeps the newest traces only, and takes metrics without keeping them,
since exporters send both to one endpoint.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

MAX_TRACES: Final = 4096
MAX_SPANS_A_TRACE: Final = 256

AttributeValue = str | int | float | bool | tuple["AttributeValue", ...] | None


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One finished span, and the process that sent it. `parent_id` is empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_unix_ns: int
    end_unix_ns: int
    failed: bool
    attributes: dict[str, AttributeValue] = field(hash=False)

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return (self.end_unix_ns - self.start_unix_ns) / 1e9


@dataclass(frozen=True, slots=True)
class SpanNode:
    """A span and its children, in order of their start. `missing_parent`: the parent never arrived."""

    span: CollectedSpan
    children: tuple["SpanNode", ...]
    missing_parent: bool = False


class TraceCollector:
    """Listens on loopback while it is entered; any thread may read. `endpoint` is what exporters are given."""

    def __init__(self, port: int = 0) -> None:
        self._arrived = threading.Condition()
        self._traces: OrderedDict[str, list[CollectedSpan]] = OrderedDict()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="collector"))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_TraceService(self._take), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsService(), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=0.2).wait()

    def spans(self, trace_id: str) -> tuple[CollectedSpan, ...]:
        """What has arrived of a trace so far."""
        with self._arrived:
            return tuple(self._traces.get(trace_id, ()))

    def trace_ids(self) -> tuple[str, ...]:
        """The traces kept, the oldest first."""
        with self._arrived:
            return tuple(self._traces)

    def wait(
        self, trace_id: str, complete: Callable[[Sequence[CollectedSpan]], bool], timeout_s: float
    ) -> tuple[CollectedSpan, ...]:
        """The trace's spans once `complete` says so of them, or what there is after `timeout_s`."""
        with self._arrived:
            self._arrived.wait_for(lambda: complete(self._traces.get(trace_id, ())), timeout_s)
            return tuple(self._traces.get(trace_id, ()))

    def _take(self, spans: Sequence[CollectedSpan]) -> None:
        with self._arrived:
            for span in spans:
                kept = self._traces.setdefault(span.trace_id, [])
                if len(kept) < MAX_SPANS_A_TRACE:
                    kept.append(span)
            while len(self._traces) > MAX_TRACES:
                self._traces.popitem(last=False)
            self._arrived.notify_all()


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, take: Callable[[Sequence[CollectedSpan]], None]) -> None:
        self._take = take

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._take([span for group in request.resource_spans for span in _spans_of(group)])
        return trace_service_pb2.ExportTraceServiceResponse()


class _MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _spans_of(group: ResourceSpans) -> list[CollectedSpan]:
    resource = _attributes(group.resource.attributes)
    service = str(resource.get("service.name", ""))
    instance = str(resource.get("service.instance.id", ""))
    return [_collected(span, service, instance) for scope in group.scope_spans for span in scope.spans]


def _collected(span: Span, service: str, instance: str) -> CollectedSpan:
    return CollectedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        instance=instance,
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    match kind:
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
        case "array_value":
            return tuple(_value(item) for item in value.array_value.values)
        case _:
            return None


def span_tree(spans: Sequence[CollectedSpan]) -> tuple[SpanNode, ...]:
    """The roots of a trace: spans without a parent, and spans whose parent never arrived."""
    known = {span.span_id for span in spans}
    children: dict[str, list[CollectedSpan]] = {}
    roots: list[CollectedSpan] = []
    for span in sorted(spans, key=lambda one: (one.start_unix_ns, one.span_id)):
        if span.parent_id in known and span.parent_id != span.span_id:
            children.setdefault(span.parent_id, []).append(span)
        else:
            roots.append(span)

    def node(span: CollectedSpan) -> SpanNode:
        below = tuple(node(child) for child in children.get(span.span_id, ()))
        return SpanNode(span, below, missing_parent=bool(span.parent_id) and span.parent_id not in known)

    return tuple(node(root) for root in roots)
