"""What a small deployment of the real model holds in memory while nobody asks it anything."""

from pathlib import Path

import pytest

from cluster.local import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

LIMIT_BYTES = int(2.5 * 2**30)


def test_one_prefill_and_one_decode_worker_idle_within_two_and_a_half_gibibytes(tmp_path: Path) -> None:
    with LocalCluster(log_path=tmp_path / "serve.log") as cluster:
        held = {
            f"{process.pid} {' '.join(process.cmdline())[:60]}": process.memory_full_info().pss
            for process in cluster.processes()
        }
    total = sum(held.values())
    print(f"{total / 2**20:.0f} MiB in {len(held)} processes")
    assert len(held) > 6
    assert total <= LIMIT_BYTES, held
