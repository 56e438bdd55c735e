"""The same two stages in two processes over gloo: the bits of the whole target, and an end in every way."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from cluster.engines import on_passing_thread
from cluster.last_stage import LastStage, load_pipeline
from cluster.stage_process import StageTask
from core.errors import Unavailable
from core.settings import EngineSettings
from engine.doctor import made_up_tokens
from engine.engine import Engine
from engine.kv_layout import PlaneKind
from engine.pipeline import PipelinedEngine
from engine.pipeline_messages import PipelineBroken
from engine.step_batch import SequenceStep
from tests.support.tiny_model import make_tiny_model

SETTINGS = EngineSettings(
    dtype="bfloat16",
    num_blocks=32,
    num_threads=1,
    max_context=128,
    hidden_layers=(1, 3, 4),
    pipeline_stages=2,
)
EPOCH = "0123456789abcdef" * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", layers=5)


@asynccontextmanager
async def pipeline(
    model: Path, silence_timeout_s: float = 20.0
) -> AsyncIterator[tuple[PipelinedEngine, LastStage]]:
    engine, last = await load_pipeline(
        model, SETTINGS, EPOCH, start_timeout_s=60.0, silence_timeout_s=silence_timeout_s
    )
    try:
        yield engine, last
    finally:
        engine.close()
        await last.close()
        assert not psutil.pid_exists(last.process_id)


def _answers(engine: Engine) -> list[Tensor]:
    """Logits of a prompt, trees, copies and a second sequence; the planes that they left."""
    found: list[Tensor] = []
    table = engine.kv.open()
    engine.kv.reserve(table, 40)
    prompt = made_up_tokens(40, 256, seed=2)
    found.append(engine.step([SequenceStep(table, 0, prompt, logit_rows="last")]).logits)
    engine.kv.commit(table, 40)
    for tree in range(12):
        start = table.num_tokens
        engine.kv.reserve(table, start + 6)
        step = SequenceStep(table, start, [tree, 4, 5, 6, 7, 8], [0, 0, 0, 1, 2, 4])
        found.append(engine.step([step]).logits)
        engine.kv.compact(table, start, [0, 2, 4, 5])
        engine.kv.commit(table, start + 4)
    other = engine.kv.fork(table)
    for owner in (table, other):
        engine.kv.reserve(owner, 89)
    both = [SequenceStep(table, 88, [9]), SequenceStep(other, 88, [10])]
    found.append(engine.step(both).logits)
    for owner in (table, other):
        engine.kv.commit(owner, 89)
        found.append(engine.kv.read_hidden(owner, 0, 89))
        slots = engine.kv.slots(owner, 0, 89)
        found += [
            engine.kv.read_plane(kind, layer, slots)
            for kind in (PlaneKind.KEY, PlaneKind.VALUE)
            for layer in range(3)
        ]
        engine.kv.close(owner)
    engine.kv.check()
    return found


async def test_two_processes_compute_the_bits_of_the_whole(model: Path) -> None:
    whole = Engine.load(model, SETTINGS)
    wanted = _answers(whole)
    async with pipeline(model) as (engine, last):
        found = await on_passing_thread(lambda: _answers(engine))
        assert len(found) == len(wanted)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
        assert engine.numerics.pipeline_split == "3+2"
        assert engine.numerics.digest() != whole.numerics.digest()
        assert len(engine._channel._sending) <= 3, "what was sent is let go of"  # type: ignore[attr-defined]
        assert _beyond_loopback(psutil.Process()) | _beyond_loopback(psutil.Process(last.process_id)) == set()


def _beyond_loopback(process: psutil.Process) -> set[str]:
    """Addresses that a process listens on, but for those of the loopback interface."""
    listening = {
        connection.laddr.ip
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }
    return {address for address in listening if not address.startswith(("127.", "::1", "::ffff:127."))}


async def test_a_killed_last_stage_is_noticed_by_the_step_and_by_its_parent(model: Path) -> None:
    async with pipeline(model) as (engine, last):
        assert last.alive
        os.kill(last.process_id, signal.SIGKILL)
        with pytest.raises(PipelineBroken, match="gone"):
            await on_passing_thread(engine.warm_up)
        async with asyncio.timeout(5):
            await last.close()
        assert not last.alive


async def test_a_last_stage_that_stands_still_is_noticed_in_time(model: Path) -> None:
    async with pipeline(model, silence_timeout_s=0.5) as (engine, last):
        os.kill(last.process_id, signal.SIGSTOP)
        with pytest.raises(PipelineBroken, match="silent"):
            await on_passing_thread(engine.warm_up)


async def test_a_child_that_cannot_load_is_told_at_once(tmp_path: Path) -> None:
    task = StageTask(
        model=tmp_path / "nothing here",
        engine=SETTINGS,
        init_method=f"file://{tmp_path}/store",
        connect_timeout_s=60.0,
        parent_id=os.getpid(),
    )
    last = await LastStage.start(task)
    with pytest.raises(Unavailable, match="ended with 1"):
        await last.unless_it_ends(asyncio.sleep(60))
    await last.close()


async def test_a_child_of_somebody_else_ends_at_once(model: Path, tmp_path: Path) -> None:
    task = StageTask(
        model=model,
        engine=SETTINGS,
        init_method=f"file://{tmp_path}/store",
        connect_timeout_s=60.0,
        parent_id=os.getppid(),
    )
    last = await LastStage.start(task)
    with pytest.raises(Unavailable, match="ended with 1"):
        await last.unless_it_ends(asyncio.sleep(60))
