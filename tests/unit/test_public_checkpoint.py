"""Public EAGLE-3 checkpoints: taken over whole, or refused naming what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from core.drafter_settings import HeadSettings
from core.errors import FailedPrecondition, InvalidArgument, ServiceError
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.heads import load_head
from engine.engine import Engine
from engine.weights import open_model
from tests.support.tiny_heads import DRAFT_VOCAB, make_tiny_head
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rollouts import done, make_tiny_target
from training.public_checkpoint import PublicHead, import_eagle3

VOCAB = 300
Values = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target", vocab=VOCAB)


@pytest.fixture
def public(tmp_path: Path, target: Path) -> Path:
    """As others publish one: names of their own, a map from both sides, the embedding of the target."""
    artifact = make_tiny_head(tmp_path / "artifact", target, "eagle3")
    config = open_model(target).config
    folder = tmp_path / "public"
    folder.mkdir()
    tensors = load((artifact / "model.safetensors").read_bytes())
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[tensors["d2t"] + torch.arange(DRAFT_VOCAB)] = True
    tensors["t2d"] = marks
    save_file(tensors, folder / "model.safetensors")
    values = {
        "hidden_size": config.hidden_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


LLAMA3: Values = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def change(folder: Path, values: Callable[[Values], object], tensors: Callable[[Tensors], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    values(config)
    (folder / "config.json").write_text(json.dumps(config))
    held = load((folder / "model.safetensors").read_bytes())
    tensors(held)
    save_file(held, folder / "model.safetensors")


def keep(_: object) -> None:
    """Change nothing."""


def test_a_checkpoint_becomes_an_artifact_that_loads(public: Path, target: Path, tmp_path: Path) -> None:
    manifest = import_eagle3(PublicHead(public, target), tmp_path / "out")
    assert manifest.hidden_layers == (0, 1, 2)
    engine = Engine.load(
        target, EngineSettings(dtype="float32", num_blocks=32, num_threads=1, hidden_layers=(0, 1, 2))
    )
    head = HeadSettings(artifact=str(tmp_path / "out"))
    assert load_head("eagle3", head, engine, Tokenizer.from_directory(target)).needs.hidden_layers == (
        0,
        1,
        2,
    )
    engine.close()


def test_the_targets_own_embedding_beside_the_head_is_no_further_tensor(
    public: Path, target: Path, tmp_path: Path
) -> None:
    words = load((target / "model.safetensors").read_bytes())["model.embed_tokens.weight"]
    change(public, keep, lambda tensors: tensors.update({"embed_tokens.weight": words}))
    import_eagle3(PublicHead(public, target), tmp_path / "out")


def test_a_head_over_the_whole_vocabulary_may_leave_the_output_matrix_to_the_target(
    public: Path, target: Path, tmp_path: Path
) -> None:
    words = load((target / "model.safetensors").read_bytes())["model.embed_tokens.weight"]

    def whole(tensors: Tensors) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]
        tensors["embed_tokens.weight"] = words

    change(public, lambda values: values.pop("draft_vocab_size"), whole)
    manifest = import_eagle3(PublicHead(public, target), tmp_path / "out")
    assert manifest.shape["draft_vocab"] == VOCAB
    held = load((tmp_path / "out" / "model.safetensors").read_bytes())
    assert torch.equal(held["lm_head.weight"], words)


def test_an_import_overwrites_neither_checkpoint_nor_target(
    public: Path, target: Path, tmp_path: Path
) -> None:
    for folder in (public, target):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InvalidArgument, match=r"out: .* holds a model; take another folder"):
            import_eagle3(PublicHead(public, target), folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_imported_head_can_be_judged(tmp_path: Path) -> None:
    model, rollouts = make_tiny_target(tmp_path, tokens=700)
    artifact = make_tiny_head(tmp_path / "artifact", model, "eagle3")
    config = open_model(model).config
    values = {
        "hidden_size": config.hidden_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_dim,
        "rms_norm_eps": config.norm_epsilon,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "config.json").write_text(json.dumps(values))
    (artifact / "model.safetensors").rename(tmp_path / "public" / "model.safetensors")
    done(f"train import {tmp_path}/public --model {model} --out {tmp_path}/out")
    line = f"train judge {tmp_path}/out --rollouts {rollouts} --model {model} --threads 1 --json"
    report = json.loads(done(f"{line} --features {tmp_path}/features").stdout)
    assert len(report["judged"]["all"]["rates"]) == 5


def test_layers_may_count_the_embedding(public: Path, target: Path, tmp_path: Path) -> None:
    head = PublicHead(public, target, layers=(1, 2, 3), layer_base=1)
    assert import_eagle3(head, tmp_path / "out").hidden_layers == (0, 1, 2)


REFUSED: dict[str, tuple[str, Callable[[Values], object], Callable[[Tensors], object]]] = {
    "no output matrix": ("lm_head.weight is missing", keep, lambda t: t.pop("lm_head.weight")),
    "a layer's tensor": ("missing: .'midlayer.mlp", keep, lambda t: t.pop("midlayer.mlp.up_proj.weight")),
    "a tensor too many": ("belonging to nothing: .'scale", keep, lambda t: t.update(scale=torch.ones(1))),
    "another shape": ("norm.weight is", keep, lambda t: t.update({"norm.weight": torch.ones(3)})),
    "no map": ("without d2t", keep, lambda t: t.pop("d2t")),
    "maps at odds": ("contradict", keep, lambda t: t["t2d"].__setitem__(0, False)),
    "an id twice": ("twice", keep, lambda t: t["d2t"].__setitem__(1, -1)),
    "another embedding": (
        "not the target's",
        keep,
        lambda t: t.update({"embed_tokens.weight": torch.ones(VOCAB, 64)}),
    ),
    "another width": ("hidden_size is 32", lambda v: v.update(hidden_size=32), keep),
    "another rotary base": ("rope_theta is 5", lambda v: v.update(rope_theta=5.0), keep),
    "another scaling": (
        "kind='linear'",
        lambda v: v.update(rope_scaling={"rope_type": "linear", "factor": 2}),
        keep,
    ),
    "another scaling by its newer name": (
        "kind='linear'",
        lambda v: v.update(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 10000.0}),
        keep,
    ),
    "an unknown scaling": ("'yarn'", lambda v: v.update(rope_scaling={"rope_type": "yarn"}), keep),
    "two layers": ("num_hidden_layers is 2", lambda v: v.update(num_hidden_layers=2), keep),
    "no numbers": ("norm.weight holds", keep, lambda t: t["norm.weight"].fill_(torch.nan)),
    "bytes": (
        "fc.weight holds torch.int8",
        keep,
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
    ),
    "halves of ids": ("d2t is", keep, lambda t: t.update(d2t=t["d2t"].float())),
    "a map of two dimensions": ("d2t is", keep, lambda t: t.update(d2t=t["d2t"][None])),
    "a tensor twice": (
        "norm.weight is there with and without",
        keep,
        lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}),
    ),
    "a list of options": ("eagle_config must be an object", lambda v: v.update(eagle_config=[1]), keep),
    "no layers": ("layers", lambda v: v.update(eagle_config={"eagle_aux_hidden_state_layer_ids": []}), keep),
    "layers of text": (
        "layers 'abc'",
        lambda v: v.update(eagle_config={"eagle_aux_hidden_state_layer_ids": "abc"}),
        keep,
    ),
    "a scaling by name": ("rope_scaling must be", lambda v: v.update(rope_scaling="linear"), keep),
    "a base of text": ("rope_theta must be above 0", lambda v: v.update(rope_theta="1e4"), keep),
    "an epsilon of nothing": ("rms_norm_eps must be above 0", lambda v: v.update(rms_norm_eps=0), keep),
    "no heads": ("num_attention_heads", lambda v: v.pop("num_attention_heads"), keep),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(
    case: str, public: Path, target: Path, tmp_path: Path
) -> None:
    said, values, tensors = REFUSED[case]
    change(public, values, tensors)
    with pytest.raises(ServiceError, match=said) as refused:
        import_eagle3(PublicHead(public, target), tmp_path / "out")
    assert isinstance(refused.value, InvalidArgument | FailedPrecondition)
    assert str(public) in refused.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scaling", [None, {**LLAMA3, "factor": 8.0}])
def test_a_scaled_target_takes_heads_of_its_own_scaling_only(
    scaling: Values | None, public: Path, target: Path, tmp_path: Path
) -> None:
    scaled = shutil.copytree(target, tmp_path / "scaled")
    config = json.loads((scaled / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps({**config, "rope_scaling": LLAMA3}))
    change(public, lambda values: values.update(rope_scaling=scaling), keep)
    with pytest.raises(FailedPrecondition, match="the target has RopeScaling"):
        import_eagle3(PublicHead(public, scaled), tmp_path / "out")
    change(public, lambda values: values.update(rope_scaling=LLAMA3), keep)
    import_eagle3(PublicHead(public, scaled), tmp_path / "out")


def test_pickled_weights_are_not_opened(public: Path, target: Path, tmp_path: Path) -> None:
    (public / "model.safetensors").rename(public / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match="is pickled"):
        import_eagle3(PublicHead(public, target), tmp_path / "out")


def test_a_truncated_file_is_named(public: Path, target: Path, tmp_path: Path) -> None:
    path = public / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        import_eagle3(PublicHead(public, target), tmp_path / "out")
