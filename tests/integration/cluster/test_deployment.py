"""A running deployment: answers, restarts, traces, sockets, secrets."""

import socket
from contextlib import suppress

import psutil
import pytest
import redis

from cluster.local import LocalCluster
from cluster.trace_collector import TraceCollector
from core.grpc_admin import AdminClient
from core.records import WorkerRole
from outrider import Client
from tests.integration.cluster.conftest import TICKET_KEY
from tests.support.processes import redis_server, title_of

pytestmark = pytest.mark.cluster

PROMPT = "one two three one two three one two "
EXPECTED_SPANS = {
    "outrider.router.generate",
    "outrider.decode.generate",
    "outrider.decode.fetch",
    "outrider.prefill.fetch",
}
RAY_PROGRAMS = ("gcs_server", "raylet", "ray::", "/ray/")
"""Marks of processes that are Ray's own: their ports take no address, and belong to a trusted plane (DESIGN §11)."""


def answer(cluster: LocalCluster, drafter: str = "none") -> list[int]:
    """The token ids of one greedy answer."""
    with Client(cluster.address) as client:
        result = client.generate(PROMPT, max_tokens=24, temperature=0, drafter=drafter)
    return list(result.token_ids)


def test_every_worker_is_ready_with_an_epoch_of_its_own(deployment: LocalCluster) -> None:
    workers = {status.worker_id: status for status in deployment.workers()}
    assert sorted(workers) == ["decode-0", "decode-1", "prefill-0", "router-0"]
    assert all(status.ready for status in workers.values())
    assert len({status.epoch for status in workers.values()}) == 4
    for status in workers.values():
        assert AdminClient(status.address).is_serving()


def test_an_answer_comes_through_both_pools_and_does_not_depend_on_the_drafter(
    deployment: LocalCluster,
) -> None:
    assert answer(deployment) == answer(deployment, "ngram")


@pytest.mark.parametrize(("role", "index"), [("decode", 0), ("prefill", 0), ("router", 0)])
def test_a_killed_worker_comes_back_with_a_new_epoch_and_serves(
    deployment: LocalCluster, role: WorkerRole, index: int
) -> None:
    before = answer(deployment)
    old_epoch = deployment.kill(role, index)
    new_epoch = deployment.wait_for_restart(role, index, old_epoch)
    assert new_epoch != old_epoch
    deployment.wait_until(lambda: answer(deployment) == before or None, 20, "the same answer")


def test_a_killed_redis_comes_back_and_the_workers_register_by_themselves(deployment: LocalCluster) -> None:
    before = answer(deployment)
    old = redis_server(deployment)
    assert old
    old.kill()
    psutil.wait_procs([old], timeout=5)
    assert answer(deployment) == before

    def all_registered() -> bool | None:
        url = redis_url(deployment)
        with redis.Redis.from_url(url) as direct:
            return direct.scard("outrider:workers") == 4 or None

    deployment.wait_until(all_registered, 20, "four records in the new redis")
    assert redis_server(deployment) not in (None, old)
    assert answer(deployment) == before


def redis_url(cluster: LocalCluster) -> str:
    """The embedded redis-server's socket."""

    def found() -> str | None:
        server = redis_server(cluster)
        path = title_of(server).partition("unixsocket:")[2].strip() if server else ""
        return f"unix://{path}" if path else None

    return cluster.wait_until(found, 10, "a redis-server")


def test_one_request_is_one_trace_with_the_right_parents(
    deployment: LocalCluster, collector: TraceCollector
) -> None:
    with Client(deployment.address) as client:
        result = client.generate("a prompt that no cache has seen yet", max_tokens=8, temperature=0)
    spans = collector.wait(
        result.trace_id, lambda found: {span.name for span in found} >= EXPECTED_SPANS, timeout_s=10
    )
    by_name = {span.name: span for span in spans}
    parents = {
        name: next((other.name for other in spans if other.span_id == span.parent_id), "")
        for name, span in by_name.items()
    }
    assert parents["outrider.decode.generate"] == "outrider.router.generate"
    assert parents["outrider.decode.fetch"] == "outrider.decode.generate"
    assert parents["outrider.prefill.fetch"] == "outrider.decode.fetch"
    assert {by_name[name].service for name in parents if name.startswith("outrider.prefill")} == {
        "outrider-prefill"
    }


def listening_addresses(process: psutil.Process) -> list[str]:
    """Where it takes connections or datagrams; nothing when it has ended."""
    with suppress(psutil.NoSuchProcess):
        return [
            connection.laddr.ip
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
        ]
    return []


def test_only_ray_listens_beyond_loopback(deployment: LocalCluster) -> None:
    ours = {status.process_id for status in deployment.workers()}
    assert len(ours) == 4
    for process in deployment.processes():
        title = title_of(process)
        listening = listening_addresses(process)
        beyond = [address for address in listening if not address.startswith(("127.", "::1", "::ffff:127."))]
        if process.pid in ours:
            assert len(listening) - len(beyond) >= 1, f"{title}: our own server is seen"
        if process.pid in ours or "cluster.supervisor" in title:
            assert len(beyond) <= 1, f"{title}: one port of Ray's is in every process that takes part in it"
        elif beyond:
            assert any(mark in title for mark in RAY_PROGRAMS), title


def test_secrets_are_in_no_argument_and_not_in_redis(deployment: LocalCluster) -> None:
    for process in deployment.processes():
        assert TICKET_KEY not in title_of(process)
    with redis.Redis.from_url(redis_url(deployment)) as direct:
        keys = list(direct.scan_iter())
        values = [direct.get(key) if direct.type(key) == b"string" else b"" for key in keys]
    assert keys
    assert not any(TICKET_KEY.encode() in (value or b"") for value in values)


def test_metrics_of_every_worker_are_served_on_loopback(deployment: LocalCluster) -> None:
    from urllib.request import urlopen

    answer(deployment)
    expected = {
        "router": b"outrider_requests",
        "prefill": b"outrider_kv_blocks",
        "decode": b"outrider_kv_blocks",
    }
    for status in deployment.workers():
        assert status.metrics_address.startswith("127.0.0.1:")
        with urlopen(f"http://{status.metrics_address}/metrics", timeout=5) as reply:
            assert expected[status.role] in reply.read()
