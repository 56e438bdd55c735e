"""A truncated model is the first layers of its source, in files that load."""

import json
from pathlib import Path

import pytest
import torch

from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from engine.model_config import ModelConfig
from engine.truncate import truncate_model
from engine.weights import layer_shapes, open_model
from tests.support.tiny_model import make_tiny_model


def test_the_first_layers_are_those_of_the_source_in_bfloat16(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", layers=3)
    out = truncate_model(source, 2, tmp_path / "out")
    config = ModelConfig.from_directory(out)
    assert config.num_layers == 2
    whole, cut = open_model(source), open_model(out)
    for layer in range(2):
        for suffix, shape in layer_shapes(config).items():
            name = f"model.layers.{layer}.{suffix}.weight"
            assert torch.equal(whole.take(name, shape).bfloat16(), cut.take(name, shape))
    for name, shape in {"model.embed_tokens.weight": (256, 64), "model.norm.weight": (64,)}.items():
        assert torch.equal(whole.take(name, shape).bfloat16(), cut.take(name, shape))
    cut.finish()


def test_tokenizer_and_config_come_along(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    out = truncate_model(source, 1, tmp_path / "deep" / "out")
    assert Tokenizer.from_directory(out).encode("hi") == Tokenizer.from_directory(source).encode("hi")
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["torch_dtype"]) == (1, "bfloat16")


@pytest.mark.parametrize("num_layers", [-1, 0, 4])
def test_a_number_of_layers_that_there_is_not_is_refused(tmp_path: Path, num_layers: int) -> None:
    source = make_tiny_model(tmp_path / "source", layers=3)
    with pytest.raises(InvalidArgument) as caught:
        truncate_model(source, num_layers, tmp_path / "out")
    assert caught.value.field == "layers"
    assert not (tmp_path / "out").exists()


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    with pytest.raises(InvalidArgument, match="exists"):
        truncate_model(source, 1, source)
    assert ModelConfig.from_directory(source).num_layers == 3
