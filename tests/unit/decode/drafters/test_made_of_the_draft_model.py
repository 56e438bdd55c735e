"""What is made of the draft model goes with it; what is approximate is no part of what is not."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from core.drafter_settings import (
    BildSettings,
    CascadeSettings,
    DraftersSettings,
    DraftModelSettings,
    SequoiaSettings,
)
from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import ArtifactManifest, write_manifest
from decode.drafters.registry import build_drafters
from decode.drafters.vocabulary import vocabulary_digest
from decode.self_check import take_off_unfit
from engine.engine import Engine
from engine.weights import open_model
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target")


@pytest.fixture
def engine(target: Path) -> Engine:
    return Engine.load(target, EngineSettings(dtype="float32", num_blocks=64, num_threads=1))


def settings_with(draft: Path, sequoia: SequoiaSettings | None = None) -> DraftersSettings:
    return DraftersSettings(
        draft_model=DraftModelSettings(model=str(draft)),
        bild=BildSettings(),
        cascade=CascadeSettings(),
        sequoia=sequoia,
        shipped=False,
    )


@pytest.mark.parametrize("base", ["bild", "cascade"])
def test_an_approximate_drafter_is_no_base_of_sequoia(target: Path, engine: Engine, base: str) -> None:
    settings = settings_with(target, SequoiaSettings(base=base))
    with pytest.raises(InvalidArgument, match=r"sequoia\.base"):
        build_drafters(settings, engine, Tokenizer.from_directory(target))


def test_bild_and_cascade_go_with_an_unfit_draft_model(tmp_path: Path, target: Path, engine: Engine) -> None:
    tokenizer = Tokenizer.from_directory(target)
    draft = make_tiny_model(tmp_path / "draft", seed=99, layers=1)
    weights = load_file(draft / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 30
    save_file(weights, draft / "model.safetensors")
    manifest = ArtifactManifest(
        format=1,
        kind="draft_model",
        target_revision=open_model(target).revision(),
        tokenizer=vocabulary_digest(tokenizer),
        hidden_layers=(),
        shape={},
        recipe={},
        acceptance={"all": [0.9]},
    )
    write_manifest(draft, manifest)
    hosted = build_drafters(settings_with(draft), engine, tokenizer)
    assert {"draft_model", "bild", "cascade"} <= set(hosted)
    assert "draft_model" in take_off_unfit(engine, hosted, tokenizer)
    assert not {"draft_model", "bild", "cascade"} & set(hosted)
