"""Instruments: what is counted, what a scrape shows, what never becomes a label."""

from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core import telemetry_names as names
from core.metrics import LoadGauges, Metrics, MetricsServer
from core.records import SpeculationReport
from core.settings import TelemetrySettings

REPORT = SpeculationReport(
    drafter="ngram",
    request_class="code",
    steps=4,
    proposed_nodes=9,
    accepted_tokens=5,
    step_tokens=9,
    position_offered=(4, 3, 2),
    position_accepted=(3, 2, 0),
)


def samples(server: MetricsServer) -> dict[str, float]:
    """Everything at /metrics: `name{sorted labels}` → value, scope labels left out."""
    with urlopen(f"http://{server.address}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if not key.startswith("otel_")}
            found[sample.name + str(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(TelemetrySettings.model_validate({}), "decode", "decode-0")
    yield server
    server.shutdown()


def test_a_report_is_counted_by_drafter_class_and_depth(server: MetricsServer) -> None:
    server.metrics.speculation(REPORT)
    server.metrics.speculation(REPORT)
    found = samples(server)
    labels = [("class", "code"), ("drafter", "ngram")]
    assert found[f"outrider_speculation_accepted_tokens_total{labels}"] == 10
    assert found[f"outrider_speculation_proposed_nodes_total{labels}"] == 18
    first, second = ([("class", "code"), ("depth", depth), ("drafter", "ngram")] for depth in "12")
    assert found[f"outrider_speculation_position_offered_total{first}"] == 8
    assert found[f"outrider_speculation_position_accepted_total{second}"] == 4


def test_acceptance_length_by_hand_equals_the_counters(server: MetricsServer) -> None:
    server.metrics.speculation(REPORT)
    totals = server.metrics.totals()
    length = totals[names.METRIC_SPECULATION_TOKENS] / totals[names.METRIC_SPECULATION_STEPS]
    assert length == REPORT.acceptance_length == 9 / 4


def test_a_steps_duration_falls_into_its_bucket(server: MetricsServer) -> None:
    server.metrics.step(rows=3, duration_s=0.015)
    found = samples(server)
    assert found["outrider_engine_rows_total[]"] == 3
    assert found["outrider_engine_step_duration_seconds_bucket[('le', '0.01')]"] == 0
    assert found["outrider_engine_step_duration_seconds_bucket[('le', '0.02')]"] == 1


def test_latency_between_tokens_divides_by_the_tokens_that_came(server: MetricsServer) -> None:
    server.metrics.inter_token(0.12, tokens=4)
    server.metrics.inter_token(0.12, tokens=0)
    found = samples(server)
    assert found["outrider_inter_token_latency_seconds_count[]"] == 1
    assert found["outrider_inter_token_latency_seconds_sum[]"] == pytest.approx(0.03)


def test_gauges_are_read_at_the_scrape(server: MetricsServer) -> None:
    held = [LoadGauges(running=1, waiting=2, free_blocks=10, used_blocks=0, cached_blocks=0)]
    server.metrics.observe_load(lambda: held[0])
    assert samples(server)["outrider_kv_blocks[('state', 'free')]"] == 10
    held[0] = LoadGauges(running=0, waiting=0, free_blocks=7, used_blocks=3, cached_blocks=0)
    found = samples(server)
    assert found["outrider_kv_blocks[('state', 'free')]"] == 7
    assert found["outrider_load[('state', 'running')]"] == 0


def test_the_cache_of_earlier_answers_is_read_at_the_scrape(server: MetricsServer) -> None:
    held, events = {"answers": 1, "tokens": 30}, {"lookup": 2, "hit": 1}
    server.metrics.observe_cache(lambda: held, lambda: events)
    assert samples(server)["outrider_speculation_cache_held[('kind', 'tokens')]"] == 30
    held["tokens"], events["hit"] = 20, 5
    found = samples(server)
    assert found["outrider_speculation_cache_held[('kind', 'tokens')]"] == 20
    assert found["outrider_speculation_cache_events_total[('event', 'hit')]"] == 5


def test_depth_as_a_label_is_bounded(server: MetricsServer) -> None:
    deep = SpeculationReport(drafter="ngram", position_offered=(1,) * 500)
    server.metrics.speculation(deep)
    depths = [name for name in samples(server) if name.startswith("outrider_speculation_position_offered")]
    assert len(depths) == 64


def test_the_endpoint_is_on_loopback_and_ends_with_the_server() -> None:
    server = MetricsServer(TelemetrySettings.model_validate({}), "router", "router-0")
    assert server.address.startswith("127.0.0.1:")
    server.shutdown()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://{server.address}/metrics", timeout=5)


def test_metrics_switched_off_still_count_for_the_status() -> None:
    server = MetricsServer(TelemetrySettings.model_validate({"metrics_port": None}), "router", "router-0")
    assert server.address == ""
    server.metrics.request_finished("OK", "chat", "none")
    assert server.metrics.totals() == {names.METRIC_REQUESTS: 1.0}
    server.shutdown()


def test_a_part_without_a_meter_may_count_all_the_same() -> None:
    metrics = Metrics()
    metrics.preempted()
    assert metrics.totals() == {names.METRIC_PREEMPTIONS: 1.0}
