"""Public Medusa heads: taken over whole, drafting what they say; or refused naming file and tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor
from torch.nn import functional

from core.drafter_settings import MedusaSettings
from core.errors import FailedPrecondition, InvalidArgument, ServiceError
from core.records import SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.medusa import MedusaDrafter
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rollouts import command, done, make_tiny_target
from tests.unit.decode.drafters.test_medusa import Computed, prompt_of
from training.public_checkpoint import PublicHead
from training.public_medusa import import_medusa, is_medusa

VOCAB, HIDDEN, HEADS = 300, 64, 3
Tensors = dict[str, Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target", vocab=VOCAB)


def published(folder: Path, prefix: str = "", matrix: Tensor | None = None) -> Path:
    """As the authors' code saves them."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for head in range(HEADS):
        own = torch.randn(VOCAB, HIDDEN, generator=generator).half()
        tensors |= {
            f"{prefix}{head}.0.linear.weight": (
                0.2 * torch.randn(HIDDEN, HIDDEN, generator=generator)
            ).half(),
            f"{prefix}{head}.0.linear.bias": (0.2 * torch.randn(HIDDEN, generator=generator)).half(),
            f"{prefix}{head}.1.weight": own if matrix is None else matrix.clone(),
        }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    values = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/where"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def tensors_of(folder: Path) -> Tensors:
    return load((folder / "medusa_lm_head.safetensors").read_bytes())


def drafter_of(artifact: Path, target: Path, engine: Engine) -> MedusaDrafter:
    settings = MedusaSettings(artifact=str(artifact), min_probability=0.0)
    return MedusaDrafter.load(settings, engine, Tokenizer.from_directory(target))


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_heads_draft_with_their_own_matrices(prefix: str, target: Path, tmp_path: Path) -> None:
    public = published(tmp_path / "public", prefix)
    manifest = import_medusa(PublicHead(public, target), tmp_path / "out")
    sizes = {"hidden_dim": HIDDEN, "num_heads": HEADS, "draft_vocab": VOCAB, "own_matrices": 1}
    assert manifest.shape == sizes
    settings = EngineSettings(dtype="float32", num_blocks=32, num_threads=1, hidden_layers=(2,))
    engine = Engine.load(target, settings)
    drafter = drafter_of(tmp_path / "out", target, engine)
    sequence = Computed(engine, prompt_of(20), SamplingParams())
    drafter.start(sequence.request)
    named = {
        name.removeprefix(prefix): tensor.bfloat16().float() for name, tensor in tensors_of(public).items()
    }
    expected = []
    for head in range(HEADS):
        block = named[f"{head}.0.linear.weight"] @ sequence.final + named[f"{head}.0.linear.bias"]
        expected.append(named[f"{head}.1.weight"] @ (sequence.final + functional.silu(block)))
    for depth in (1, HEADS):
        said = drafter.logits([sequence.request, sequence.request], depth)
        assert said.shape == (2, depth, VOCAB)
        for row in said:
            torch.testing.assert_close(row, torch.stack(expected[:depth]), atol=1e-3, rtol=1e-4)
    (draft,) = drafter.propose([sequence.budget(HEADS)])
    assert draft.token_ids == tuple(int(logits.argmax()) for logits in expected)
    drafter.finish(sequence.request)
    drafter.check()
    engine.close()


def test_matrices_that_are_the_targets_are_left_out(target: Path, tmp_path: Path) -> None:
    words = load((target / "model.safetensors").read_bytes())["model.embed_tokens.weight"]
    public = published(tmp_path / "public", matrix=words)
    manifest = import_medusa(PublicHead(public, target), tmp_path / "out")
    assert "own_matrices" not in manifest.shape
    settings = EngineSettings(dtype="float32", num_blocks=32, num_threads=1, hidden_layers=(2,))
    engine = Engine.load(target, settings)
    drafter_of(tmp_path / "out", target, engine)
    engine.close()


def test_the_command_knows_them_and_they_can_be_judged(tmp_path: Path) -> None:
    model, rollouts = make_tiny_target(tmp_path, tokens=700)
    public = published(tmp_path / "public")
    assert is_medusa(public)
    told = done(f"train import {public} --model {model} --out {tmp_path}/out").stdout
    assert f"{tmp_path}/out holds 3 Medusa heads" in told
    line = f"train judge {tmp_path}/out --rollouts {rollouts} --model {model} --threads 1 --json"
    report = json.loads(done(f"{line} --features {tmp_path}/features").stdout)
    assert len(report["judged"]["all"]["rates"]) == HEADS
    refused = command(f"train import {public} --model {model} --out {tmp_path}/out --layers 1,2")
    assert refused.exit_code == 2
    assert "no layers may be named" in refused.stderr


def put(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(name, tensor)


REFUSED: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "a block missing": (r"tensor 1\.0\.linear\.weight is missing", lambda t: t.pop("1.0.linear.weight")),
    "a bias missing": (r"tensor 2\.0\.linear\.bias is missing", lambda t: t.pop("2.0.linear.bias")),
    "a matrix missing": (r"tensor 0\.1\.weight is missing", lambda t: t.pop("0.1.weight")),
    "a second block": (r"tensor 0\.1\.linear\.weight belongs", put("0.1.linear.weight", torch.ones(1))),
    "a base model": (r"tensor lm_head\.weight belongs", put("lm_head.weight", torch.ones(1))),
    "another width": (r"tensor 1\.0\.linear\.bias is \(3,\)", put("1.0.linear.bias", torch.ones(3))),
    "another vocabulary": (r"tensor 0\.1\.weight is \(9, 64\)", put("0.1.weight", torch.ones(9, HIDDEN))),
    "twice": ("with and without", put("medusa_head.0.1.weight", torch.ones(VOCAB, HIDDEN))),
    "no numbers": ("no finite", put("0.0.linear.bias", torch.full((HIDDEN,), torch.nan))),
    "eight bits": (
        "holds torch.float8",
        put("0.0.linear.weight", torch.zeros(HIDDEN, HIDDEN).to(torch.float8_e4m3fn)),
    ),
    "too many": ("1 to 16", put("16.1.weight", torch.ones(VOCAB, HIDDEN))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_file_and_tensor(case: str, target: Path, tmp_path: Path) -> None:
    said, change = REFUSED[case]
    public = published(tmp_path / "public")
    tensors = tensors_of(public)
    change(tensors)
    save_file(tensors, public / "medusa_lm_head.safetensors")
    with pytest.raises(ServiceError, match=said) as refused:
        import_medusa(PublicHead(public, target), tmp_path / "out")
    assert isinstance(refused.value, InvalidArgument | FailedPrecondition)
    assert str(public) in refused.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"medusa_num_layers": 2}, "medusa_num_layers is 2"),
        ({"medusa_num_heads": 4}, r"tensor 3\.0\.linear\.weight is missing"),
        ({"medusa_num_heads": "3"}, "medusa_num_heads must be a whole number"),
    ],
)
def test_a_config_that_the_tensors_contradict_is_refused(
    values: dict[str, object], said: str, target: Path, tmp_path: Path
) -> None:
    public = published(tmp_path / "public")
    (public / "config.json").write_text(json.dumps(values))
    with pytest.raises(ServiceError, match=said):
        import_medusa(PublicHead(public, target), tmp_path / "out")


def test_a_pickled_file_is_not_opened_and_the_mend_is_told(target: Path, tmp_path: Path) -> None:
    public = published(tmp_path / "public")
    (public / "medusa_lm_head.safetensors").rename(public / "medusa_lm_head.pt")
    assert is_medusa(public)
    refused = command(f"train import {public} --model {target} --out {tmp_path}/out")
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.split())
    assert "medusa_lm_head.pt is pickled" in told
    assert "make medusa_lm_head.safetensors of it" in told
