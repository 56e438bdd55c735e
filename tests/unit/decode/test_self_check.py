"""Trained drafters that do not fit their target any more are taken off before the first request."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.drafter_settings import HeadSettings, NgramSettings
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import read_manifest, read_tensors, write_artifact
from decode.drafters.heads import load_head
from decode.drafters.ngram import NgramDrafter
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import Drafter
from decode.drafters.specinfer import SpecInferDrafter
from decode.self_check import take_off_unfit
from engine.engine import Engine
from tests.support.tiny_heads import make_tiny_head
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target", vocab=300)


@pytest.fixture
def engine(model: Path) -> Engine:
    return Engine.load(
        model, EngineSettings(dtype="float32", num_blocks=64, num_threads=1, hidden_layers=(2,))
    )


def hosted(model: Path, engine: Engine, folder: Path, rate: float, *, damaged: bool) -> dict[str, Drafter]:
    """The head that repeats the last token, which the tiny model all but does; its manifest promises `rate`."""
    artifact = make_tiny_head(folder, model, "eagle")
    manifest = read_manifest(artifact)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(artifact / "model.safetensors").items()}
    tensors = read_tensors(artifact, shapes)
    if damaged:
        tensors["fc.weight"] = tensors["fc.weight"].flip(0)
    write_artifact(artifact, replace(manifest, acceptance={"all": [rate]}), tensors)
    tokenizer = Tokenizer.from_directory(model)
    head = load_head("eagle", HeadSettings(artifact=str(artifact)), engine, tokenizer)
    return {"none": NoneDrafter(), "eagle": head}


def test_a_fit_head_stays_and_leaves_nothing_behind(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafters = hosted(model, engine, tmp_path / "head", 0.5, damaged=False)
    assert take_off_unfit(engine, drafters, Tokenizer.from_directory(model)) == {}
    assert set(drafters) == {"none", "eagle"}
    drafters["eagle"].check()
    assert engine.kv.stats().used == 0


def test_a_damaged_head_is_taken_off(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafters = hosted(model, engine, tmp_path / "head", 0.5, damaged=True)
    unfit = take_off_unfit(engine, drafters, Tokenizer.from_directory(model))
    assert set(unfit) == {"eagle"}
    assert "its manifest promises 50%" in unfit["eagle"]
    assert set(drafters) == {"none"}


def test_a_head_that_was_never_measured_is_believed(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafters = hosted(model, engine, tmp_path / "head", 0.0, damaged=True)
    assert take_off_unfit(engine, drafters, Tokenizer.from_directory(model)) == {}


def test_what_is_made_of_an_unfit_head_goes_with_it(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafters = hosted(model, engine, tmp_path / "head", 0.5, damaged=True)
    drafters["ngram"] = NgramDrafter(NgramSettings())
    drafters["specinfer"] = SpecInferDrafter([drafters["ngram"], drafters["eagle"]])
    unfit = take_off_unfit(engine, drafters, Tokenizer.from_directory(model))
    assert set(unfit) == {"eagle", "specinfer"}
    assert unfit["specinfer"].startswith("it drafts with eagle")
    assert set(drafters) == {"none", "ngram"}


def test_a_pool_without_room_for_the_check_believes_the_promise(model: Path, tmp_path: Path) -> None:
    settings = EngineSettings(dtype="float32", num_blocks=16, block_size=4, num_threads=1, hidden_layers=(2,))
    engine = Engine.load(model, settings)
    drafters = hosted(model, engine, tmp_path / "head", 0.5, damaged=True)
    assert take_off_unfit(engine, drafters, Tokenizer.from_directory(model)) == {}
    assert engine.kv.stats().used == 0
