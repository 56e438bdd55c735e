"""A target split over two stages that talk answers as the unsplit one does: logits, planes, copies and all."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.clock import SystemClock
from core.settings import EngineSettings
from engine.doctor import made_up_tokens
from engine.engine import Engine
from engine.pipeline import PipelinedEngine, serve_last_stage
from engine.pipeline_channel import QueueChannel
from engine.pipeline_messages import PipelineBroken
from engine.stage import Stage, split_layers
from engine.step_batch import SequenceStep
from tests.support.tiny_model import make_tiny_model

SETTINGS = EngineSettings(
    dtype="float32", num_blocks=32, num_threads=1, max_context=128, hidden_layers=(0, 2, 3)
)
EPOCH = 77


class _Counts:
    """Draws nothing: answers with the number of logits rows, or is void where it is told so."""

    def is_void(self, verify: Tensor) -> bool:
        return bool(verify[0] == 0)

    def verdicts(self, verify: Tensor, logits: Tensor) -> Tensor:
        return torch.tensor([len(logits), int(verify[0])])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, layers=4)


@pytest.fixture
def split(model: Path) -> Iterator[PipelinedEngine]:
    ours, theirs = QueueChannel.pair()
    last = Stage.load(model, SETTINGS, split_layers(4, 2)[1])
    thread = threading.Thread(target=serve_last_stage, args=(last, theirs, _Counts(), SystemClock()))
    thread.start()
    engine = PipelinedEngine.load_first(model, SETTINGS, ours, EPOCH, SystemClock())
    yield engine
    engine.close()
    thread.join(10)
    assert not thread.is_alive()


def test_steps_trees_compaction_and_copies_are_those_of_the_whole(
    model: Path, split: PipelinedEngine
) -> None:
    whole = Engine.load(model, SETTINGS)
    prompt = made_up_tokens(21, 256, seed=3)
    seen: list[list[Tensor]] = []
    for engine in (whole, split):
        answers: list[Tensor] = []
        table = engine.kv.open()
        engine.kv.reserve(table, 21)
        answers.append(engine.step([SequenceStep(table, 0, prompt, logit_rows="last")]).logits)
        engine.kv.commit(table, 21)
        engine.kv.reserve(table, 27)
        tree = SequenceStep(table, 21, [3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 2, 4])
        answers.append(engine.step([tree]).logits)
        engine.kv.compact(table, 21, [0, 2, 4, 5])
        engine.kv.commit(table, 25)
        other = engine.kv.fork(table)
        for owner, token_id in ((table, 9), (other, 10)):
            engine.kv.reserve(owner, 26)
            answers.append(engine.step([SequenceStep(owner, 25, [token_id])]).logits)
            engine.kv.commit(owner, 26)
        answers.append(engine.kv.read_hidden(other, 0, 26))
        engine.kv.check()
        seen.append(answers)
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)
    assert split.numerics.pipeline_split == "2+2"


def test_two_steps_may_be_on_their_way_and_a_void_one_is_not_computed(split: PipelinedEngine) -> None:
    table = split.kv.open()
    split.kv.reserve(table, 16)
    first = split.launch([SequenceStep(table, 0, [1, 2, 3])], torch.tensor([1], dtype=torch.uint8))
    ahead = SequenceStep(table, 0, [1, 2, 3, 4, 5], num_written=3)
    second = split.launch([ahead], torch.tensor([0], dtype=torch.uint8))
    with pytest.raises(PipelineBroken, match="on their way already"):
        split.launch([SequenceStep(table, 0, [1])])
    with pytest.raises(PipelineBroken, match="in the order"):
        split.answer(second)
    assert split.answer(first).verdicts.tolist() == [3, 1]
    reply = split.answer(second)
    assert reply.verdicts.tolist() == []
    assert reply.planes.numel() == 0
    split.kv.close(table)


def test_a_silent_stage_is_noticed(model: Path) -> None:
    ours, _ = QueueChannel.pair(timeout_s=0.05)
    engine = PipelinedEngine.load_first(model, SETTINGS, ours, EPOCH, SystemClock())
    table = engine.kv.open()
    engine.kv.reserve(table, 4)
    with pytest.raises(PipelineBroken, match="silent"):
        engine.step([SequenceStep(table, 0, [1])])
    engine.close()


def test_exits_are_refused(split: PipelinedEngine) -> None:
    with pytest.raises(ValueError, match="no exits"):
        split.step([], exit_layer=1)
