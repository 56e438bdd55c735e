"""Kill −9 of a worker in the middle of its work: the right text all the same, and every block back."""

from pathlib import Path

import psutil
import pytest

from cluster.local import LocalCluster
from core.records import WorkerRole
from outrider import Client, GenerateOptions
from outrider.v1 import admin_pb2
from tests.faults.conftest import Ask, asked_with
from tests.support.held import wait_until_nothing_is_held
from tests.support.processes import gone

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(240)]
SMALL_CHUNKS = {"prefill_worker.chunk_tokens": 16, "handoff.chunk_bytes": 65536}


def test_answer_is_right_when_the_prefill_worker_dies_in_the_middle_of_a_transfer(
    ask: Ask, long_prompt: list[int], tmp_path: Path
) -> None:
    with LocalCluster(settings=SMALL_CHUNKS, log_path=tmp_path / "log") as cluster:
        with Client(cluster.address, timeout_s=90.0) as client:
            expected = client.generate(long_prompt, max_tokens=24, seed=1, drafter="none", cache_salt="whole")
        wait_until_nothing_is_held(cluster)
        answer = ask(
            cluster.address,
            long_prompt,
            {"max_tokens": 24, "seed": 1, "drafter": "ngram", "cache_salt": "broken"},
        )

        def transferring() -> admin_pb2.WorkerStatus | None:
            sender, receiver = cluster.worker("prefill", 0), cluster.worker("decode", 0)
            return sender if sender.leases == 1 and receiver.used_blocks > 0 else None

        cluster.wait_until(transferring, 30.0, "a transfer that has begun")
        epoch = _kill(cluster, "prefill", 0)
        assert not answer.done(), "the fault came too late"
        assert answer.result(timeout=90.0).token_ids == expected.token_ids
        assert cluster.wait_for_restart("prefill", 0, epoch) != epoch
        wait_until_nothing_is_held(cluster)


def test_answer_is_right_when_the_decode_worker_dies_in_the_middle_of_it(
    short_prompt: list[int], tmp_path: Path
) -> None:
    with LocalCluster(decode=2, log_path=tmp_path / "log") as cluster:
        options: GenerateOptions = {"max_tokens": 160, "temperature": 0.8, "seed": 7, "ignore_eos": True}
        with Client(cluster.address, timeout_s=90.0) as client:
            expected = client.generate(short_prompt, **asked_with(options, "none"))
            stream = client.stream(short_prompt, **asked_with(options, "ngram"))
            token_ids: list[int] = []
            killed: list[str] = []
            for delta in stream:
                token_ids += delta.token_ids
                if not killed and len(token_ids) >= 20:
                    killed.append(_kill_the_busy_decode_worker(cluster))
            assert killed, "no worker was killed"
            assert len(token_ids) == len(expected.token_ids)
            assert stream.result.attempts == 2
            assert tuple(token_ids) == stream.result.token_ids == expected.token_ids
            assert stream.result.text == expected.text
        cluster.wait_until(
            lambda: True if sum(w.ready for w in cluster.workers() if w.role == "decode") == 2 else None,
            60.0,
            "both decode workers ready",
        )
        wait_until_nothing_is_held(cluster)


def _kill(cluster: LocalCluster, role: WorkerRole, index: int) -> str:
    """Kills a worker and waits until its process has ended; the epoch that it had."""
    process = psutil.Process(cluster.worker(role, index).process_id)
    epoch = cluster.kill(role, index)
    cluster.wait_until(lambda: gone(process) or None, 10.0, "the killed process gone")
    return epoch


def _kill_the_busy_decode_worker(cluster: LocalCluster) -> str:
    """Kills the decode worker that runs the only request; the epoch that it had."""
    statuses = [cluster.worker("decode", index) for index in range(2)]
    (busy,) = [index for index, status in enumerate(statuses) if status.running == 1]
    return _kill(cluster, "decode", busy)
