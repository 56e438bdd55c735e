"""Ways in which `outrider serve` ends, or never starts. None of them leaves a process."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.local import LocalCluster, free_port
from core.clock import SystemClock
from outrider import Client, OutriderError
from tests.integration.cluster.conftest import SMALL
from tests.support.processes import gone, title_of
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.cluster

ALL_GONE_S = 10.0
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helpers of a node: with everybody else gone they notice, but only after a minute or so."""


def started(model: Path, tmp_path: Path) -> LocalCluster:
    """A small deployment whose logs, and so its own folder, lie under `tmp_path`."""
    variables = {"TMPDIR": "/tmp"}
    return LocalCluster(
        model=model, settings=SMALL, variables=variables, log_path=tmp_path / "serve.log"
    ).start()


def survivors(processes: tuple[psutil.Process, ...]) -> list[str]:
    """Who of `processes` still lives after the time that is allowed."""
    _, alive = psutil.wait_procs(processes, timeout=ALL_GONE_S)
    return [f"{process.pid} {title_of(process)[:120]}" for process in alive if not gone(process)]


def folders(cluster: LocalCluster) -> list[Path]:
    """The deployment's own folder in the temporary directory."""
    assert cluster.log_path is not None
    lines = cluster.log_path.read_text().splitlines()
    return [Path(line.split("logs: ")[1].rstrip(")")) for line in lines if "logs: " in line]


def test_sigterm_lets_a_running_answer_end_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    cluster = started(tiny_model, tmp_path)
    family = cluster.processes()
    assert len(family) > 6
    with Client(cluster.address) as client:
        stream = client.stream("a b c d e f", max_tokens=400, temperature=0, ignore_eos=True)
        deltas = iter(stream)
        next(deltas)
        cluster.signal(signal.SIGTERM)
        assert sum(1 for _ in deltas) > 1, "the answer went on after the signal"
    assert len(stream.result.token_ids) == 400
    assert cluster.wait_exit() == 0
    assert survivors(family) == []
    assert [folder for folder in folders(cluster) if folder.exists()] == []


def test_a_second_sigterm_ends_it_at_once(tiny_model: Path, tmp_path: Path) -> None:
    cluster = started(tiny_model, tmp_path)
    family = cluster.processes()
    with Client(cluster.address) as client:
        deltas = iter(client.stream("a b c d", max_tokens=1800, temperature=0, ignore_eos=True))
        next(deltas)
        clock = SystemClock()
        started_s = clock.now_s()
        cluster.signal(signal.SIGTERM)
        cluster.signal(signal.SIGTERM)
        with suppress(OutriderError):
            list(deltas)
        cluster.wait_exit()
        assert clock.now_s() - started_s < ALL_GONE_S
    assert survivors(family) == []


def test_sigterm_while_the_model_loads_ends_it_at_once(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "cluster.cli.app", "serve", "--model", str(tiny_model)]
    launcher = subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{free_port()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stderr is not None
    assert any("loading" in line for line in launcher.stderr)
    family = tuple(psutil.Process(launcher.pid).children(recursive=True))
    launcher.send_signal(signal.SIGTERM)
    stdout, _ = launcher.communicate(timeout=30)
    assert "ready" not in stdout
    assert len(family) > 2
    assert survivors(family) == []


def test_kill_9_of_the_launcher_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    cluster = started(tiny_model, tmp_path)
    family = cluster.processes()
    cluster.kill_launcher()
    assert survivors(family) == []
    assert [folder for folder in folders(cluster) if folder.exists()] == []


def test_kill_9_of_launcher_and_supervisor_together_ends_all_but_the_agents_of_ray(
    tiny_model: Path, tmp_path: Path
) -> None:
    cluster = started(tiny_model, tmp_path)
    agents = tuple(process for process in cluster.processes() if title_of(process).startswith(RAY_AGENTS))
    others = tuple(process for process in cluster.processes() if process not in agents)
    (supervisor,) = [process for process in others if "cluster.supervisor" in title_of(process)]
    os.kill(cluster.process_id, signal.SIGSTOP)
    os.kill(supervisor.pid, signal.SIGKILL)
    os.kill(cluster.process_id, signal.SIGKILL)
    cluster.wait_exit()
    try:
        assert survivors(others) == []
    finally:
        for process in agents:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_sigterm_to_the_supervisor_alone_drains_too(tiny_model: Path, tmp_path: Path) -> None:
    cluster = started(tiny_model, tmp_path)
    family = cluster.processes()
    (supervisor,) = [process for process in family if "cluster.supervisor" in title_of(process)]
    supervisor.terminate()
    assert cluster.wait_exit() == 0
    assert survivors(family) == []
    assert [folder for folder in folders(cluster) if folder.exists()] == []


def test_kill_9_of_the_supervisor_ends_the_launcher_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    cluster = started(tiny_model, tmp_path)
    family = cluster.processes()
    (supervisor,) = [process for process in family if "cluster.supervisor" in title_of(process)]
    os.kill(supervisor.pid, signal.SIGKILL)
    assert cluster.wait_exit() == 1
    assert "ended by itself" in cluster.log_tail()
    assert survivors(family) == []


def refused(*arguments: str) -> str:
    """The error of an `outrider serve` that must not start; its exit code is 2."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli.app", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_an_open_address_without_a_token_is_refused_before_anything_starts() -> None:
    assert "OUTRIDER_TOKEN" in refused("--listen", f"0.0.0.0:{free_port()}")


def test_an_unknown_setting_is_refused_naming_it() -> None:
    assert "engine.blocks" in refused("--set", "engine.blocks=3")


def serve_to_its_end(model: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "cluster.cli.app",
        "serve",
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = serve_to_its_end(tmp_path)
    assert done.returncode == 1
    assert "failed: model: " in done.stderr
    assert "starting redis" not in done.stderr
    assert "ready on" not in done.stdout


@pytest.mark.parametrize(
    "setting",
    [
        "decode_worker.drafters.rest.corpus=/nowhere/corpus",
        "decode_worker.drafters.eagle3.artifact=/nowhere/head",
        "decode_worker.drafters.versions.eagle3@next.artifact=/nowhere/head",
        "router.policy_file=/nowhere/policies.toml",
    ],
)
def test_a_path_that_is_not_there_is_refused_before_anything_starts(tiny_model: Path, setting: str) -> None:
    done = serve_to_its_end(tiny_model, "--set", setting)
    assert done.returncode == 1
    assert f"failed: {setting.partition('=')[0]}: " in done.stderr
    assert "starting redis" not in done.stderr


def test_a_model_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    weights = make_tiny_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = serve_to_its_end(tmp_path)
    assert done.returncode == 1
    assert "cannot start" in done.stderr
    assert "model.safetensors" in done.stderr
    assert "ready on" not in done.stdout
