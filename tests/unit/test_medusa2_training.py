"""Medusa-2: heads and backbone learn together, the original teaches, and the result is a model of its own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from core.drafter_settings import MedusaSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.medusa_artifact import read_weights
from decode.drafters.shipped_heads import shipped_heads
from decode.drafters.vocabulary import vocabulary_digest
from engine.engine import Engine
from engine.weights import layer_shapes, open_model
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rollouts import command, done, make_tiny_target
from training.batch import Batch, TargetHead, make_batch, wanted_of
from training.features import FeatureCache, Features, compute
from training.heads import read_head
from training.medusa import MedusaHeads
from training.medusa2 import HEADS_WEIGHT, Medusa2, Medusa2Options
from training.rollout_store import Rollout
from training.trainer import Trainer, TrainingPlan

VOCAB = 256
IDS = range(3, 203)
SETTINGS = EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(0,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, logit_scale=0.1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, SETTINGS)


def made_up(engine: Engine, number: int, length: int) -> Features:
    ids = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return compute(engine, Rollout(number, "code", 0.5, 4, tuple(ids)))


def target_of(engine: Engine) -> TargetHead:
    embedding = engine.weights.embedding.clone()
    return TargetHead(embedding, embedding, engine.weights.final_norm.clone())


def batch_of(engine: Engine) -> Batch:
    return make_batch([made_up(engine, number, length) for number, length in ((0, 12), (1, 17))], 100)


def fresh(engine: Engine, model: Path, backbone_layers: int | None = 2) -> Medusa2:
    head = Medusa2Options(200, 3, backbone_layers).make(engine.config, IDS)
    head.begin(open_model(model), target_of(engine))
    return head


@torch.no_grad()
@pytest.mark.parametrize("backbone_layers", [None, 3, 2])
def test_it_begins_as_the_target_with_heads_that_say_the_next_token(
    engine: Engine, model: Path, backbone_layers: int | None
) -> None:
    head, target, batch = fresh(engine, model, backbone_layers), target_of(engine), batch_of(engine)
    states = head.states(batch, target)
    torch.testing.assert_close(states[1], batch.final[1], atol=1e-3, rtol=1e-3)
    same, total = head.agreement(batch, target)
    assert total == 12 - 4 + 17 - 4
    assert same == total
    first, *others = head.losses(batch, target)
    probs = torch.softmax(batch.final[batch.counted.roll(-1, 1)] @ target.output.T, -1)
    torch.testing.assert_close(first, -(probs * probs.log()).sum(-1).mean(), atol=1e-3, rtol=1e-3)
    assert len(others) == 3


@torch.no_grad()
def test_heads_read_the_trained_layers_and_the_original_teaches(engine: Engine, model: Path) -> None:
    head, target, batch = fresh(engine, model), target_of(engine), batch_of(engine)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    states = head.states(batch, target)
    wanted = wanted_of(batch, target.reduced(head.target_ids), 3)
    losses = head.losses(batch, target)
    for place in range(3):
        terms = []
        for row, token, probs in zip(wanted.rows.tolist(), wanted.tokens.tolist(), wanted.probs, strict=True):
            said = target.output[list(IDS)] @ head.heads.states(states[row, token - 2 - place], place)
            terms.append(-(probs * functional.log_softmax(said, -1)).sum())
        torch.testing.assert_close(losses[1 + place], torch.stack(terms).mean(), atol=1e-4, rtol=1e-3)
    starts = torch.tensor([0]), torch.tensor([5])
    best = target.output[list(IDS)] @ head.heads.states(states[0, 5], 0)
    assert int(head.draft_ids(batch, target, starts, 1)[0, 0, 0]) == IDS[int(best.argmax())]


def test_losses_are_weighed_and_the_backbone_learns_slower(engine: Engine, model: Path) -> None:
    head = fresh(engine, model)
    assert [head.loss_weight(place) for place in range(3)] == pytest.approx(
        [1.0, 0.8 * HEADS_WEIGHT, 0.64 * HEADS_WEIGHT]
    )
    (share, heads), (backbone_share, backbone) = head.learning_rates()
    assert (share, backbone_share) == (1.0, 0.05)
    assert len(heads) + len(backbone) == len(list(head.parameters()))
    with pytest.raises(InvalidArgument, match="backbone_layers: must be 1 to 3"):
        Medusa2Options(backbone_layers=4).trained_layers(engine.config)


class InMemory(FeatureCache):
    def __init__(self, found: list[Features]) -> None:
        self.rollouts = [features.rollout for features in found]
        self.revision, self.layers = "made up", (0,)
        self._found = found

    @property
    def num_parts(self) -> int:
        return 1

    def read(self, number: int) -> Iterator[Features]:
        return iter(self._found)


def test_the_trainer_gives_each_group_its_rate_and_goes_on_exactly(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    plan = TrainingPlan(epochs=6, batch=4, warm_up_steps=2, save_steps=2)
    cache = InMemory([made_up(engine, number, 14) for number in range(8)])

    def train(folder: Path, stops: list[int]) -> Medusa2:
        for stop in stops:
            head = fresh(engine, model)
            trainer = Trainer(head, target_of(engine), cache, plan, folder)
            trainer.run(lambda trainer=trainer, stop=stop: trainer.progress.step >= stop, lambda *_: None)  # type: ignore[misc]
        return head

    whole, parts = train(tmp_path / "whole", [12]), train(tmp_path / "parts", [1, 5, 12])
    original = fresh(engine, model)
    moved: dict[str, float] = {}
    for (name, ours), theirs, before in zip(
        whole.named_parameters(), parts.parameters(), original.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        group = name.partition(".")[0]
        moved[group] = max(moved.get(group, 0.0), float((ours - before).detach().abs().max()))
    assert 0 < moved["stack"] < 0.2 * moved["heads"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder of target, rollouts and run; the directory that the command made."""
    folder = tmp_path_factory.mktemp("built")
    model, rollouts = make_tiny_target(folder, logit_scale=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        line = f"train medusa2 --model {model} --rollouts {rollouts} --out {folder}/run --heads 2 --epochs 2"
        report = done(f"{line} --draft-vocab 128 --backbone-layers 1 --threads 1 --json")
    assert json.loads(report.stdout)["all"]["chains"] > 0
    assert "tokens are as the original says them" in " ".join(report.stderr.split())
    return folder, folder / "cache" / "models" / "tiny@medusa2"


def test_only_the_trained_layers_differ_from_the_original(built: tuple[Path, Path]) -> None:
    folder, directory = built
    ours, theirs = open_model(directory), open_model(folder / "tiny")
    same = {"model.embed_tokens.weight": (300, 64)}
    for layer in range(2):
        for suffix, shape in layer_shapes(ours.config).items():
            same[f"model.layers.{layer}.{suffix}.weight"] = shape  # type: ignore[assignment]
    for name, wanted in same.items():
        assert torch.equal(ours.take(name, wanted), theirs.take(name, wanted).bfloat16())
    changed = "model.layers.2.mlp.down_proj.weight"
    assert not torch.equal(ours.take(changed, (64, 128)), theirs.take(changed, (64, 128)).bfloat16())


def test_the_heads_are_bound_to_the_new_revision(built: tuple[Path, Path]) -> None:
    folder, directory = built
    head, manifest = read_head(directory / "heads" / "medusa")
    assert isinstance(head, MedusaHeads)
    assert manifest.target_revision == open_model(directory).revision()
    assert manifest.recipe["made_of"] == open_model(folder / "tiny").revision()
    assert manifest.tokenizer == vocabulary_digest(Tokenizer.from_directory(directory))
    assert manifest.recipe["options"]["backbone_layers"] == 1
    assert 0 < manifest.recipe["agreement"] <= 1
    assert manifest.shape == {"hidden_dim": 64, "num_heads": 2, "draft_vocab": 128}
    assert len(manifest.acceptance["all"]) == 2
    assert (folder / "run" / "warmup" / "checkpoint" / "curve.jsonl").exists()


def test_the_same_command_again_makes_the_same_model(
    built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, directory = built
    before = open_model(directory).revision()
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
    line = f"train medusa2 --model {folder}/tiny --rollouts {folder}/rollouts --out {folder}/run --heads 2"
    done(f"{line} --epochs 2 --draft-vocab 128 --backbone-layers 1 --threads 1")
    assert open_model(directory).revision() == before
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == ["tiny@medusa2"]


def test_heads_of_the_original_are_not_served_with_the_model_that_was_made_of_it(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, directory = built
    original = folder / "tiny"
    line = f"train medusa --model {original} --rollouts {folder}/rollouts --out {tmp_path}/heads --heads 2"
    done(f"{line} --epochs 1 --draft-vocab 64 --threads 1 --features {tmp_path}/features")
    model = tmp_path / "tiny@medusa2"
    shutil.copytree(directory, model)
    shutil.rmtree(model / "heads")
    shutil.copytree(tmp_path / "heads", model / "heads" / "medusa")
    assert shipped_heads(open_model(model).revision(), tmp_path, model) == {}
    engine = Engine.load(model, EngineSettings(num_threads=1, num_blocks=8, hidden_layers=(2,)))
    settings = MedusaSettings(artifact=str(model / "heads" / "medusa"))
    with pytest.raises(FailedPrecondition, match="was trained for another target"):
        read_weights(settings, engine, Tokenizer.from_directory(model))
    engine.close()


def test_a_model_of_another_original_is_not_overwritten(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, directory = built
    path = directory / "heads" / "medusa" / "manifest.json"
    text = path.read_text()
    values = json.loads(text)
    path.write_text(json.dumps({**values, "recipe": {**values["recipe"], "made_of": "another"}}))
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
    line = f"train medusa2 --model {folder}/tiny --rollouts {folder}/rollouts --out {tmp_path}/run"
    refused = command(f"{line} --threads 1")
    path.write_text(text)
    assert refused.exit_code == 2
    assert "was made of another model of that name" in " ".join(refused.stderr.split())
