"""Readiness and the registry record, beat by beat."""

from dataclasses import replace

from cluster.heartbeat import Heartbeat
from core.clock import FakeClock
from core.control_state import ControlStateUnavailable
from core.grpc_server import RpcServer, make_server
from core.records import WorkerRecord
from core.settings import GrpcSettings, ServeSettings

RECORD = WorkerRecord(
    worker_id="decode-0",
    role="decode",
    address="",
    epoch="a" * 32,
    model="tiny",
    model_revision="r1",
    numerics_class="c1",
    ready=True,
    draining=False,
    running=0,
    waiting=0,
    free_blocks=4,
    total_blocks=4,
    block_size=16,
    max_context=256,
)


class Worker:
    """A role whose state the test sets."""

    def __init__(self) -> None:
        self.said = RECORD
        self.moves = True

    def record(self) -> WorkerRecord:
        return self.said

    def healthy(self) -> bool:
        return self.moves

    def beyond_help(self) -> bool:
        return False

    async def drain(self, grace_s: float) -> int:
        return 0

    async def close(self) -> None:
        return None


class Registry:
    """Remembers the last record; can be away."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.away = False

    async def publish(self, record: WorkerRecord, ttl_s: float) -> None:
        self._answer()
        self.records[record.worker_id] = record

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        self._answer()
        if worker_id in self.records and self.records[worker_id].epoch == epoch:
            del self.records[worker_id]

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        self._answer()
        return tuple(self.records.values())

    def _answer(self) -> None:
        if self.away:
            raise ControlStateUnavailable("control state: away")


def parts() -> tuple[Worker, RpcServer, Registry, Heartbeat]:
    worker, registry = Worker(), Registry()
    rpc = make_server(GrpcSettings.model_validate({}))
    rpc.address = "127.0.0.1:7"
    heartbeat = Heartbeat(worker, rpc, registry, ServeSettings.model_validate({}), FakeClock(unix_ms=5))
    return worker, rpc, registry, heartbeat


async def test_a_beat_publishes_the_address_the_time_and_readiness() -> None:
    _, rpc, registry, heartbeat = parts()
    await heartbeat.beat()
    assert registry.records["decode-0"] == replace(RECORD, address="127.0.0.1:7", reported_unix_ms=5)
    assert rpc.ready


async def test_a_worker_whose_engine_thread_stands_still_is_not_ready_until_it_moves() -> None:
    worker, rpc, registry, heartbeat = parts()
    await heartbeat.beat()
    worker.moves = False
    await heartbeat.beat()
    assert not rpc.ready
    assert not registry.records["decode-0"].ready
    worker.moves = True
    await heartbeat.beat()
    assert rpc.ready


async def test_a_draining_worker_is_not_ready() -> None:
    worker, rpc, registry, heartbeat = parts()
    worker.said = replace(RECORD, draining=True)
    await heartbeat.beat()
    assert not rpc.ready
    assert registry.records["decode-0"].draining


async def test_a_worker_stays_ready_while_redis_is_away_and_is_back_with_the_next_beat() -> None:
    _, rpc, registry, heartbeat = parts()
    registry.away = True
    await heartbeat.beat()
    assert rpc.ready
    registry.away, registry.records = False, {}
    await heartbeat.beat()
    assert "decode-0" in registry.records


async def test_a_worker_that_leaves_takes_its_record_along_even_if_redis_is_away() -> None:
    _, _, registry, heartbeat = parts()
    await heartbeat.beat()
    await heartbeat.stop()
    assert registry.records == {}
    registry.away = True
    await heartbeat.stop()
