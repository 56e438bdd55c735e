"""Kill −9 of redis: running streams go on, new requests are served, workers register again by themselves."""

from pathlib import Path

import pytest

from cluster.local import LocalCluster
from outrider import Client, GenerateOptions
from tests.faults.conftest import asked_with
from tests.support.held import wait_until_nothing_is_held
from tests.support.processes import gone, redis_server

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(180)]


def test_service_goes_on_when_redis_is_killed(short_prompt: list[int], tmp_path: Path) -> None:
    with (
        LocalCluster(log_path=tmp_path / "log") as cluster,
        Client(cluster.address, timeout_s=60.0) as client,
    ):
        options: GenerateOptions = {"max_tokens": 120, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        expected = client.generate(short_prompt, **asked_with(options, "none"))
        stream = client.stream(short_prompt, **asked_with(options, "ngram"))
        old = redis_server(cluster)
        assert old
        killed = False
        for _ in stream:
            if not killed:
                old.kill()
                killed = True
        assert gone(old), "redis was not killed"
        assert stream.result.token_ids == expected.token_ids
        meanwhile = client.generate(short_prompt, **asked_with(options, "ngram", "meanwhile"))
        assert meanwhile.token_ids == expected.token_ids

        def registered_again() -> bool | None:
            server = redis_server(cluster)
            ready = {worker.worker_id for worker in cluster.workers() if worker.ready}
            return (
                server is not None and server.pid != old.pid and ready >= {"prefill-0", "decode-0"}
            ) or None

        cluster.wait_until(registered_again, 30.0, "a new redis and both workers in it")
        afterwards = client.generate(short_prompt, **asked_with(options, "auto", "afterwards"))
        assert afterwards.token_ids == expected.token_ids
        wait_until_nothing_is_held(cluster)
