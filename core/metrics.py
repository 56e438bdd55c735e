"""The instruments of every process, on the OpenTelemetry metrics API; read as Prometheus text and by OTLP.

Labels are closed sets (role, drafter, class, status, outcome, depth): never ids, prompts or error texts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeterProvider, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

from core import telemetry_names as names
from core.errors import FailedPrecondition
from core.records import SpeculationReport
from core.settings import TelemetrySettings
from core.telemetry import resource

_SECONDS_BUCKETS: Final = (
    *(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_MAX_DEPTH: Final = 64
_OTLP_INTERVAL_MS: Final = 5000


@dataclass(frozen=True, slots=True)
class LoadGauges:
    """What a process holds at this moment. Blocks are None where it has no KV pool."""

    running: int = 0
    waiting: int = 0
    free_blocks: int | None = None
    used_blocks: int | None = None
    cached_blocks: int | None = None


class Metrics:
    """One set of instruments a process. Every method is cheap and callable from any thread; none raises."""

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or NoOpMeterProvider().get_meter(names.INSTRUMENTATION)
        self._meter = meter
        self._totals: Counter[str] = Counter()
        self._counters = {
            name: meter.create_counter(name)
            for name in (
                *(names.METRIC_REQUESTS, names.METRIC_TOKENS, names.METRIC_STEPS, names.METRIC_STEP_ROWS),
                *(names.METRIC_PROPOSED, names.METRIC_ACCEPTED, names.METRIC_SPECULATION_STEPS),
                *(names.METRIC_POSITION_OFFERED, names.METRIC_POSITION_ACCEPTED),
                *(names.METRIC_SPECULATION_TOKENS, names.METRIC_FALLBACKS, names.METRIC_PREEMPTIONS),
                *(names.METRIC_HANDOFFS, names.METRIC_HANDOFF_BYTES),
            )
        }
        self._step_s = meter.create_histogram(names.METRIC_STEP_DURATION, unit="s")
        self._draft_s = meter.create_histogram(names.METRIC_DRAFT_DURATION, unit="s")
        self._first_token_s = meter.create_histogram(names.METRIC_TTFT, unit="s")
        self._inter_token_s = meter.create_histogram(names.METRIC_ITL, unit="s")

    def request_finished(self, status: str, request_class: str = "", drafter: str = "") -> None:
        """Once a request; `status` is `OK` or a gRPC status name."""
        self._add(names.METRIC_REQUESTS, 1, {"status": status, "class": request_class, "drafter": drafter})

    def tokens(self, kind: str, count: int) -> None:
        """`kind`: prompt | completion | cached | prefilled."""
        self._add(names.METRIC_TOKENS, count, {"kind": kind})

    def step(self, rows: int, duration_s: float) -> None:
        """Once a full-depth target forward."""
        self._add(names.METRIC_STEPS, 1, {})
        self._add(names.METRIC_STEP_ROWS, rows, {})
        self._step_s.record(duration_s)

    def draft(self, drafter: str, duration_s: float) -> None:
        """Once a step and drafter: what its proposals took."""
        self._draft_s.record(duration_s, {"drafter": drafter})

    def speculation(self, report: SpeculationReport) -> None:
        """Once an attempt, with its whole report."""
        labels = {"drafter": report.drafter, "class": report.request_class}
        self._add(names.METRIC_SPECULATION_STEPS, report.steps, labels)
        self._add(names.METRIC_SPECULATION_TOKENS, report.step_tokens, labels)
        self._add(names.METRIC_PROPOSED, report.proposed_nodes, labels)
        self._add(names.METRIC_ACCEPTED, report.accepted_tokens, labels)
        self._positions(names.METRIC_POSITION_OFFERED, report.position_offered, labels)
        self._positions(names.METRIC_POSITION_ACCEPTED, report.position_accepted, labels)

    def fallback(self, drafter: str, reason: str) -> None:
        """A request served without its drafter; `reason` from a closed set."""
        self._add(names.METRIC_FALLBACKS, 1, {"drafter": drafter, "reason": reason})

    def preempted(self) -> None:
        """A running request gave its blocks back."""
        self._add(names.METRIC_PREEMPTIONS, 1, {})

    def handoff(self, outcome: str, transport: str, num_bytes: int) -> None:
        """Once a hand-off; `outcome`: ok | none_needed | own_prefill | retried | failed | released."""
        labels = {"outcome": outcome, "transport": transport}
        self._add(names.METRIC_HANDOFFS, 1, labels)
        self._add(names.METRIC_HANDOFF_BYTES, num_bytes, labels)

    def time_to_first_token(self, seconds: float) -> None:
        """From a request's arrival at this process to its first token."""
        self._first_token_s.record(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """The time between two deliveries, divided by the tokens that the second one brought."""
        if tokens > 0:
            self._inter_token_s.record(seconds / tokens)

    def observe_load(self, read: Callable[[], LoadGauges]) -> None:
        """Registers, once, where queue and block gauges are read from at every scrape."""

        def load(_: CallbackOptions) -> Iterable[Observation]:
            gauges = read()
            yield Observation(gauges.running, {"state": "running"})
            yield Observation(gauges.waiting, {"state": "waiting"})

        def blocks(_: CallbackOptions) -> Iterable[Observation]:
            gauges = read()
            pairs = (
                ("free", gauges.free_blocks),
                ("used", gauges.used_blocks),
                ("cached", gauges.cached_blocks),
            )
            yield from (Observation(value, {"state": state}) for state, value in pairs if value is not None)

        self._meter.create_observable_gauge(names.METRIC_LOAD, callbacks=[load])
        self._meter.create_observable_gauge(names.METRIC_BLOCKS, callbacks=[blocks])

    def observe_cache(
        self, held: Callable[[], Mapping[str, int]], events: Callable[[], Mapping[str, int]]
    ) -> None:
        """Registers, once, where the cache of earlier answers is read from at every scrape: by kind, by event."""

        def read_held(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(count, {"kind": kind}) for kind, count in held().items()]

        def read_events(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(count, {"event": event}) for event, count in events().items()]

        self._meter.create_observable_gauge(names.METRIC_CACHE_HELD, callbacks=[read_held])
        self._meter.create_observable_counter(names.METRIC_CACHE_EVENTS, callbacks=[read_events])

    def totals(self) -> Mapping[str, float]:
        """Sums since the process started, by instrument name without labels (for Admin.Status)."""
        return {name: float(value) for name, value in self._totals.items()}

    def _positions(self, name: str, counts: tuple[int, ...], labels: Mapping[str, str]) -> None:
        for depth, count in enumerate(counts[:_MAX_DEPTH], start=1):
            self._add(name, count, {**labels, "depth": str(depth)})

    def _add(self, name: str, count: int, labels: Mapping[str, str]) -> None:
        if count > 0:
            self._totals[name] += count
            self._counters[name].add(count, labels)


class MetricsServer:
    """A process's `Metrics` and, unless switched off, its Prometheus endpoint on loopback."""

    def __init__(self, settings: TelemetrySettings, role: str, worker_id: str) -> None:
        self.address = ""
        self._stop_http: Callable[[], None] = lambda: None
        readers: list[MetricReader] = []
        if settings.metrics_port is not None:
            readers.append(self._start_http(settings.metrics_port))
        if settings.otlp_endpoint is not None:
            readers.append(_otlp_reader(settings.otlp_endpoint))
        seconds = ExplicitBucketHistogramAggregation(boundaries=_SECONDS_BUCKETS)
        self._provider = MeterProvider(
            metric_readers=readers,
            resource=resource(settings, role, worker_id),
            views=[View(instrument_unit="s", instrument_name="outrider.*", aggregation=seconds)],
            shutdown_on_exit=False,
        )
        self.metrics = Metrics(self._provider.get_meter(names.INSTRUMENTATION, schema_url=names.SCHEMA_URL))

    def _start_http(self, port: int) -> MetricReader:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        try:
            server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise FailedPrecondition(
                "telemetry.metrics_port", f"127.0.0.1:{port} cannot be bound ({error.strerror})"
            ) from error
        self.address = f"127.0.0.1:{server.server_port}"

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(1.0)

        self._stop_http = stop
        return PrometheusMetricReader(registry=registry)

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Ends the endpoint and sends what is left, for at most `timeout_s`."""
        self._stop_http()
        self._provider.shutdown(timeout_millis=timeout_s * 1000)


def _otlp_reader(endpoint: str) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPMetricExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=2)
    return PeriodicExportingMetricReader(
        exporter, export_interval_millis=_OTLP_INTERVAL_MS, export_timeout_millis=2000
    )
