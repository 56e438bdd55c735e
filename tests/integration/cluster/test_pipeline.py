"""A served target in two stages: the text is plain decoding's, and the stages end together."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cluster.local import LocalCluster
from core.grpc_admin import AdminClient
from outrider import Client, FailedPreconditionError, Result, UnavailableError
from tests.integration.cluster.conftest import SMALL
from tests.support.held import wait_until_nothing_is_held
from tests.support.processes import gone, title_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PIPELINED = {
    **SMALL,
    "engine.pipeline_stages": 2,
    "telemetry.pipeline_timeline": "true",
    "decode_worker.drafters.ngram.min_match": 1,
}
PROMPT = "one two three one two three one two "
GONE_S = 10.0


@pytest.fixture(scope="module")
def pipelined(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One decode worker whose target runs in two processes."""
    log_path = tmp_path_factory.mktemp("pipelined") / "serve.log"
    with LocalCluster(
        model=tiny_model, prefill=0, decode=1, settings=PIPELINED, log_path=log_path
    ) as cluster:
        yield cluster


def last_stage(cluster: LocalCluster) -> psutil.Process:
    """The process of the decode worker's last stage."""
    worker = psutil.Process(cluster.worker("decode", 0).process_id)
    (found,) = [child for child in worker.children() if "cluster.stage_process" in title_of(child)]
    return found


def asked(cluster: LocalCluster, drafter: str, max_tokens: int = 48) -> Result:
    """One sampled answer, from a cache of its own."""
    with Client(cluster.address, timeout_s=120.0) as client:
        return client.generate(
            PROMPT,
            max_tokens=max_tokens,
            temperature=12.0,
            seed=5,
            ignore_eos=True,
            drafter=drafter,
            draft_length=None if drafter == "none" else 2,
            cache_salt=drafter,
        )


def test_text_does_not_depend_on_the_drafter(pipelined: LocalCluster) -> None:
    plain = asked(pipelined, "none")
    drafted = {name: asked(pipelined, name) for name in ("ngram", "lookahead", "pass")}
    assert {name: answer.token_ids for name, answer in drafted.items()} == dict.fromkeys(
        drafted, plain.token_ids
    )
    report = drafted["pass"].speculation
    assert report.drafter == "pass"
    assert not report.fallback_reason
    assert sum(report.position_offered) > 0
    wait_until_nothing_is_held(pipelined)


def test_the_times_of_both_stages_are_told_where_they_are_kept(pipelined: LocalCluster) -> None:
    asked(pipelined, "none")
    status = AdminClient(pipelined.worker("decode", 0).address).status(timeline=True)
    steps = json.loads(status.pipeline_timeline)
    assert len(steps) > 40
    times = ("first_began_s", "first_ended_s", "last_began_s", "last_ended_s", "answered_s")
    for step in steps:
        assert [step[name] for name in times] == sorted(step[name] for name in times)
    assert pipelined.worker("decode", 0).pipeline_timeline == ""


def test_a_whole_target_refuses_pass_by_the_setting(deployment: LocalCluster) -> None:
    with Client(deployment.address) as client, pytest.raises(FailedPreconditionError) as refused:
        client.generate(PROMPT, max_tokens=8, drafter="pass")
    assert "engine.pipeline_stages" in str(refused.value)


def test_the_worker_starts_anew_when_its_last_stage_dies_while_nothing_runs(pipelined: LocalCluster) -> None:
    before = asked(pipelined, "none")
    old_epoch = pipelined.worker("decode", 0).epoch
    last_stage(pipelined).kill()
    pipelined.wait_for_restart("decode", 0, old_epoch)
    assert asked(pipelined, "pass").token_ids == before.token_ids
    wait_until_nothing_is_held(pipelined)


def test_kill_9_of_the_last_stage_costs_a_running_answer_no_token(pipelined: LocalCluster) -> None:
    expected = asked(pipelined, "none", 1200)
    worker = pipelined.worker("decode", 0)
    old = last_stage(pipelined)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, pipelined, "pass", 1200)
        pipelined.wait_until(
            lambda: True if pipelined.worker("decode", 0).running == 1 else None, 20, "a running answer"
        )
        old.send_signal(signal.SIGKILL)
        assert not answer.done(), "the fault came too late"
        try:
            assert answer.result(120).token_ids == expected.token_ids
        except UnavailableError as error:
            assert str(error)
    pipelined.wait_for_restart("decode", 0, worker.epoch)
    pipelined.wait_until(lambda: gone(old) or None, GONE_S, "the last stage gone")
    assert last_stage(pipelined).pid != old.pid
    wait_until_nothing_is_held(pipelined)


def test_kill_9_of_the_worker_takes_its_last_stage_along(pipelined: LocalCluster) -> None:
    old = last_stage(pipelined)
    epoch = pipelined.kill("decode", 0)
    pipelined.wait_until(lambda: gone(old) or None, GONE_S, "the last stage gone")
    pipelined.wait_for_restart("decode", 0, epoch)


def test_nothing_is_left_when_the_deployment_ends(tiny_model: Path, tmp_path: Path) -> None:
    with LocalCluster(
        model=tiny_model, prefill=0, decode=1, settings=PIPELINED, log_path=tmp_path / "serve.log"
    ) as cluster:
        family = cluster.processes()
        assert last_stage(cluster) in family
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    assert alive == []
