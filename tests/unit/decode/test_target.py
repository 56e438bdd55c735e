"""Ids beyond the tokenizer's cannot be drawn (CASES B34)."""

from pathlib import Path

import pytest
import torch

from core.settings import EngineSettings
from decode.target import Target
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize("vocab_size", [256, 300])
def test_padding_of_the_head_has_no_chance_and_the_rest_is_untouched(tmp_path: Path, vocab_size: int) -> None:
    engine = Engine.load(
        make_tiny_model(tmp_path / "model", vocab=300),
        EngineSettings(dtype="float32", num_threads=1, num_blocks=8),
    )
    table = engine.kv.open()
    engine.kv.reserve(table, 3)
    step = SequenceStep(table, 0, (1, 2, 3))
    plain = engine.step([step]).logits.clone()
    logits = Target(engine, vocab_size).step([step]).logits
    assert torch.equal(logits[:, :vocab_size], plain[:, :vocab_size])
    assert bool((logits[:, vocab_size:] == -torch.inf).all())
    engine.kv.close(table)
