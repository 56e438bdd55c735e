"""A draft model in training: it computes what the engine does, is taught by the target, ends as a model directory."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from core.drafter_settings import DraftModelSettings
from core.errors import FailedPrecondition, InvalidArgument, ServiceError
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import draft_model_manifest
from decode.drafters.draft_model import DraftModelDrafter
from engine.engine import Engine
from engine.truncate import truncate_model
from engine.weights import open_model
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rollouts import command, done, make_tiny_target
from training.batch import TargetHead, counted_places, make_batch
from training.draft_model import DraftModel, DraftModelOptions
from training.features import Features, compute
from training.heads import read_head
from training.llama_stack import LlamaStack
from training.loss import distilled_cross_entropy
from training.rollout_store import Rollout, RolloutStore, read_recipe
from training.run_head import HeadRun, Place, is_held, train_head
from training.trainer import TrainingPlan

VOCAB = 256
SETTINGS = EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(0,))
SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_up(engine: Engine, number: int, length: int) -> Features:
    ids = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return compute(engine, Rollout(number, "code", 0.5, 4, tuple(ids)))


def target_of(engine: Engine) -> TargetHead:
    embedding = engine.weights.embedding.clone()
    return TargetHead(embedding, embedding, engine.weights.final_norm.clone())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, so that cutting it rounds nothing."""
    folder = tmp_path_factory.mktemp("model")
    return truncate_model(make_tiny_model(folder / "whole", vocab=VOCAB), 3, folder / "rounded")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, SETTINGS)


@torch.no_grad()
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_the_stack_computes_what_the_engine_computes(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocab=VOCAB)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "rope_scaling": scaling}))
    engine = Engine.load(model, SETTINGS)
    features = made_up(engine, 0, 90)
    batch = make_batch([features, made_up(engine, 1, 100)], 200)
    whole = LlamaStack(engine.config, range(3))
    whole.read(open_model(model))
    states = whole(engine.weights.embedding[batch.token_ids])
    torch.testing.assert_close(states[0, :90], features.final, atol=2e-3, rtol=1e-3)
    upper = LlamaStack(engine.config, range(1, 3))
    upper.read(open_model(model))
    again = upper(batch.planes)
    torch.testing.assert_close(again[0, :90], states[0, :90], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(again[1], states[1], atol=2e-3, rtol=1e-3)


def test_distillation_over_chunks_is_the_plain_cross_entropy_and_so_is_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, final = (torch.randn(600, 16, generator=generator) for _ in range(2))
    matrix = torch.randn(50, 16, generator=generator)
    gradients = []
    losses = []
    for chunked in (True, False):
        leaf = hidden.clone().requires_grad_()
        if chunked:
            loss = distilled_cross_entropy(leaf, final, matrix)
        else:
            probs = torch.softmax(final @ matrix.T, -1)
            loss = -(probs * functional.log_softmax(leaf @ matrix.T, -1)).sum(-1).mean()
        (2 * loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    assert float(distilled_cross_entropy(hidden[:0], final[:0], matrix)) == 0.0


@torch.no_grad()
def test_loss_and_drafts_are_those_of_the_truncated_model(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    draft = DraftModelOptions(2, 3).make(engine.config, range(VOCAB))
    target = target_of(engine)
    draft.begin(open_model(model), target)
    found = [made_up(engine, number, length) for number, length in ((0, 9), (1, 14))]
    batch = make_batch(found, 100)
    cut = Engine.load(truncate_model(model, 2, tmp_path / "cut"), SETTINGS)
    states = [compute(cut, features.rollout).final for features in found]
    terms = []
    for features, said in zip(found, states, strict=True):
        for token in range(4, len(features.rollout.token_ids)):
            wanted = torch.softmax(target.output @ features.final[token - 1], -1)
            terms.append(-(wanted * functional.log_softmax(target.output @ said[token - 1], -1)).sum())
    (loss,) = draft.losses(batch, target)
    torch.testing.assert_close(loss, torch.stack(terms).mean(), atol=1e-2, rtol=1e-3)
    rows, starts = torch.tensor([0, 1, 1]), torch.tensor([3, 3, 9])
    ids = draft.draft_ids(batch, target, (rows, starts), 2)
    assert ids.shape == (3, 3, 2)
    for place, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        best = (states[row] @ target.output.T).topk(2).indices
        assert torch.equal(ids[place], best[start + 1 : start + 4])


def unheard(name: str, total: int) -> Callable[[int, str], None]:
    return lambda done, word: None


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that is surer of some tokens than of others, and its rollouts."""
    return make_tiny_target(tmp_path_factory.mktemp("soft"), logit_scale=0.1)


@torch.no_grad()
def divergence(draft: DraftModel, target: TargetHead, found: list[Features]) -> float:
    """Mean KL of the target from the draft over answer tokens."""
    batch = make_batch(found, 100)
    rows, tokens = counted_places(batch)
    said = torch.softmax(batch.final[rows, tokens - 1] @ target.output.T, -1)
    entropy = -(said * said.log()).sum(-1).mean()
    return float(draft.losses(batch, target)[0] - entropy)


def run_of(soft: tuple[Path, Path], folder: Path, plan: TrainingPlan) -> HeadRun:
    place = Place(soft[0], soft[0].parent / "features", 1)
    return HeadRun(place, folder, DraftModelOptions(1, 3), plan)


def trained(run: HeadRun, rollouts: Path, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    recipe = read_recipe(rollouts)
    return train_head(run, recipe, list(RolloutStore(rollouts, recipe)), unheard, stop)


def test_training_teaches_it_more_than_the_layers_it_began_as(
    soft: tuple[Path, Path], tmp_path: Path
) -> None:
    plan = TrainingPlan(epochs=20, batch=8, learning_rate=3e-3, warm_up_steps=5, save_steps=1000)
    judged = trained(run_of(soft, tmp_path / "draft", plan), soft[1])
    assert judged is not None
    manifest = draft_model_manifest(tmp_path / "draft")
    assert manifest is not None
    assert manifest.target_revision == open_model(soft[0]).revision()
    assert manifest.shape == {"num_layers": 1, "hidden_dim": 64, "vocab_size": 300}
    assert manifest.recipe["options"] == {"num_layers": 1, "depth": 3}
    assert manifest.acceptance["all"] == pytest.approx(judged["all"].rates, abs=1e-4)
    again, _ = read_head(tmp_path / "draft")
    assert isinstance(again, DraftModel)
    assert (again.depth, again.sizes()) == (3, manifest.shape)
    engine = Engine.load(soft[0], SETTINGS)
    rollouts = list(RolloutStore(soft[1], read_recipe(soft[1])))
    kept = [compute(engine, rollout) for rollout in rollouts if not is_held(rollout)]
    fresh = DraftModelOptions(1, 3).make(engine.config, range(300))
    target = target_of(engine)
    fresh.begin(open_model(soft[0]), target)
    before, after = (divergence(draft, target, kept) for draft in (fresh, again))
    assert after < 0.7 * before


def test_a_stopped_run_ends_with_the_bytes_of_one_that_was_not(
    soft: tuple[Path, Path], tmp_path: Path
) -> None:
    plan = TrainingPlan(epochs=2, batch=8, warm_up_steps=2, save_steps=3)
    assert trained(run_of(soft, tmp_path / "whole", plan), soft[1]) is not None
    asked = iter(range(1000))
    assert trained(run_of(soft, tmp_path / "parts", plan), soft[1], lambda: next(asked) >= 4) is None
    assert not (tmp_path / "parts" / "config.json").exists()
    assert trained(run_of(soft, tmp_path / "parts", plan), soft[1]) is not None
    for name in ("model.safetensors", "config.json", "tokenizer.json", "outrider-draft.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.fixture(scope="module")
def by_command(soft: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Target, rollouts and draft model."""
    model, rollouts = soft
    out = tmp_path_factory.mktemp("command") / "draft"
    line = f"train draft --model {model} --rollouts {rollouts} --out {out} --layers 2 --depth 3 --epochs 1"
    report = done(f"{line} --threads 1 --features {out.parent}/features --json")
    assert json.loads(report.stdout)["all"]["chains"] > 0
    return model, rollouts, out


def load(target: Path, draft: Path) -> DraftModelDrafter:
    engine = Engine.load(target, EngineSettings(dtype="float32", num_threads=1, num_blocks=32))
    settings = DraftModelSettings(model=str(draft))
    return DraftModelDrafter.load(settings, engine, Tokenizer.from_directory(target))


def test_the_command_makes_a_model_directory_that_draft_model_takes(
    by_command: tuple[Path, Path, Path],
) -> None:
    model, _, out = by_command
    files = open_model(out)
    assert (files.config.num_layers, files.config.tied_embeddings) == (2, True)
    shape = (300, 64)
    words = "model.embed_tokens.weight"
    assert torch.equal(files.take(words, shape), open_model(model).take(words, shape).bfloat16())
    assert Tokenizer.from_directory(out).encode("hi") == Tokenizer.from_directory(model).encode("hi")
    drafter = load(model, out)
    manifest = draft_model_manifest(out)
    assert manifest is not None
    assert drafter.promised_rate == manifest.acceptance["all"][0]


def test_the_manifest_of_another_target_is_refused_and_no_manifest_is_not(
    by_command: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, out = by_command
    other = make_tiny_model(tmp_path / "other", vocab=300, seed=4)
    with pytest.raises(FailedPrecondition, match=r"outrider-draft\.json was trained for another target"):
        load(other, out)
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "outrider-draft.json").unlink()
    assert load(other, copy).promised_rate is None
    values = json.loads((out / "outrider-draft.json").read_text())
    (copy / "outrider-draft.json").write_text(json.dumps({**values, "kind": "eagle"}))
    with pytest.raises(InvalidArgument, match=r"artifact\.kind"):
        load(model, copy)
    (copy / "outrider-draft.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="is no manifest"):
        load(model, copy)


def test_judging_it_again_gives_what_its_manifest_says(by_command: tuple[Path, Path, Path]) -> None:
    model, rollouts, out = by_command
    line = f"train judge {out} --rollouts {rollouts} --model {model} --threads 1 --json"
    report = json.loads(done(f"{line} --features {out.parent}/features").stdout)
    assert report["judged"].keys() == report["manifest"].keys()
    for name, rates in report["manifest"].items():
        assert report["judged"][name]["rates"] == pytest.approx(rates, abs=0.1)


def test_a_draft_model_of_another_tokenizer_is_refused_by_the_token(
    by_command: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, out = by_command
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    values = json.loads((copy / "tokenizer.json").read_text())
    values["added_tokens"][0]["content"] = "<|renamed|>"
    (copy / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(FailedPrecondition, match=r"token 256 is '<.256.>' for the target"):
        load(model, copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ServiceError, match="tokenizer"):
        load(model, copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ServiceError, match="tokenizer"):
        load(model, copy)


def test_a_draft_model_that_was_killed_while_it_was_written_again_is_no_model(
    by_command: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, out = by_command
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    head, manifest = read_head(copy)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").mkdir()
    with pytest.raises(OSError):
        head.write(copy, manifest, model)
    with pytest.raises(InvalidArgument, match=r"config\.json: cannot be read"):
        open_model(copy)


def test_more_layers_than_the_target_has_are_refused(soft: tuple[Path, Path], tmp_path: Path) -> None:
    model, rollouts = soft
    line = f"train draft --model {model} --rollouts {rollouts} --out {tmp_path}/draft --layers 4 --threads 1"
    refused = command(f"{line} --features {tmp_path}/features")
    assert refused.exit_code == 2
    assert "layers: must be 1 to 3, got 4" in refused.stderr
