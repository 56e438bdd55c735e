"""A target split into stages computes the bits of the unsplit one: logits, K, V and hidden planes."""

from pathlib import Path

import pytest
import torch

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.doctor import made_up_tokens
from engine.engine import Engine
from engine.stage import Stage, split_layers
from engine.step_batch import SequenceStep
from engine.step_rows import build_rows
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_two_stages_are_the_whole(tmp_path: Path, dtype: str, attention: str) -> None:
    model = make_tiny_model(tmp_path, layers=5)
    settings = EngineSettings.model_validate(
        {
            "dtype": dtype,
            "attention": attention,
            "num_blocks": 16,
            "num_threads": 1,
            "max_context": 128,
            "hidden_layers": (1, 2, 4),
        }
    )
    whole = Engine.load(model, settings)
    first, second = (Stage.load(model, settings, layers) for layers in split_layers(5, 2))
    assert (first.layers, second.layers) == (range(3), range(3, 5))
    assert first.is_first
    assert second.is_last
    assert not first.is_last
    assert (first.kv.layout.hidden_layers, second.kv.layout.hidden_layers) == ((1, 2), (4,))
    table = whole.kv.open()
    whole.kv.reserve(table, 64)
    tree = SequenceStep(table, 20, [3, 4, 5, 6, 7], [0, 0, 0, 1, 2])
    for step in (
        SequenceStep(table, 0, made_up_tokens(20, 256, seed=1), logit_rows="last"),
        tree,
        SequenceStep(table, 20, [9], logit_rows="none"),
    ):
        rows = build_rows([step], settings.block_size)
        wanted = whole.step([step]).logits
        residual = second.forward(rows, first.forward(rows))
        assert torch.equal(second.logits(rows, residual), wanted)
        if step.start == 0:
            whole.kv.commit(table, 20, keep_reserved=True)
    used = whole.kv.slots(table, 0, 25).long()
    for stage in (first, second):
        for plane, ours in ((whole.kv.keys, stage.kv.keys), (whole.kv.values, stage.kv.values)):
            assert torch.equal(ours[:, used], plane[stage.layers.start : stage.layers.stop][:, used])
        kept = [whole.kv.layout.hidden_layers.index(layer) for layer in stage.kv.layout.hidden_layers]
        assert stage.kv.hidden is not None
        assert whole.kv.hidden is not None
        assert torch.equal(stage.kv.hidden[:, used], whole.kv.hidden[kept][:, used])


def test_layers_are_shared_out() -> None:
    assert split_layers(30, 2) == (range(15), range(15, 30))
    assert split_layers(3, 2) == (range(2), range(2, 3))
    with pytest.raises(InvalidArgument, match="4 stages of 3"):
        split_layers(3, 4)
