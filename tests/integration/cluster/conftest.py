"""One tiny model and one running deployment for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from cluster.trace_collector import TraceCollector
from tests.support.tiny_model import make_tiny_model

SMALL = {"engine.num_threads": 1, "engine.num_blocks": 128, "engine.dtype": "float32"}
"""Settings of every deployment here."""

TICKET_KEY = "5ec2e7" * 8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that loads in no time."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="package")
def collector() -> Iterator[TraceCollector]:
    """Where the deployment sends its spans."""
    with TraceCollector() as collector:
        yield collector


@pytest.fixture(scope="package")
def deployment(
    tiny_model: Path, collector: TraceCollector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """1 prefill and 2 decode workers, exporting to `collector`. Tests may kill workers and wait for their return."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OUTRIDER_TICKET_KEYS": TICKET_KEY}
    log_path = tmp_path_factory.mktemp("logs") / "serve.log"
    with LocalCluster(
        model=tiny_model, prefill=1, decode=2, settings=SMALL, variables=variables, log_path=log_path
    ) as cluster:
        yield cluster
