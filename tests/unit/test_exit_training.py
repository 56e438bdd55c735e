"""The exit as it is trained says what the served one does, and training brings it nearer to the target."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import ArtifactManifest, write_artifact
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.vocabulary import vocabulary_digest
from engine.engine import Engine
from engine.model_config import ModelConfig
from engine.step_batch import SequenceStep
from tests.support.tiny_model import make_tiny_model
from training.batch import TargetHead, make_batch, wanted_of
from training.exit_head import ExitHead, ExitOptions
from training.features import Features, compute
from training.heads import read_head
from training.rollout_store import Recipe, Rollout
from training.run_head import HeadRun, Place, is_held, judge_artifact, train_head
from training.trainer import TrainingPlan

VOCAB = 256
IDS = range(3, 203)
OPTIONS = ExitOptions(exit_layer=2, draft_vocab=200, width=32, depth=3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(1,))
    return Engine.load(model, settings)


def head_of(engine: Engine, seed: int = 0, fresh: bool = False) -> ExitHead:
    torch.manual_seed(seed)
    head = OPTIONS.make(engine.config, IDS)
    if not fresh:
        torch.nn.init.normal_(head.down.weight, std=0.1)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(parameter.bfloat16())
    return head


def target_of(engine: Engine) -> TargetHead:
    embedding = engine.weights.embedding.clone()
    return TargetHead(embedding, embedding, engine.weights.final_norm.clone())


def rolled_out(engine: Engine, number: int, length: int, temperature: float = 0.0) -> Features:
    """An answer of the target itself, greedily, behind four tokens."""
    ids = torch.randint(1, VOCAB, (4,), generator=torch.Generator().manual_seed(number)).tolist()
    table = engine.kv.open()
    while len(ids) < length:
        engine.kv.reserve(table, len(ids))
        start = table.num_tokens
        logits = engine.step([SequenceStep(table, start, ids[start:], logit_rows="last")]).logits
        engine.kv.commit(table, len(ids))
        ids.append(int(logits[0].argmax()))
    engine.kv.close(table)
    return compute(engine, Rollout(number, "code", temperature, 4, tuple(ids)))


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_next_token_where_it_counts(engine: Engine) -> None:
    head, target = head_of(engine), target_of(engine)
    found = [rolled_out(engine, number, length, 0.5) for number, length in ((0, 9), (1, 14))]
    (loss,) = head.losses(make_batch(found, 100), target)
    terms: list[Tensor] = []
    for features in found:
        for token in range(4, len(features.rollout.token_ids)):
            scores = target.output @ features.final[token - 1]
            if int(scores.argmax()) not in IDS:
                continue
            state = functional.rms_norm(features.planes[token - 1, 0], (64,), eps=1e-5) * target.final_norm
            gate, up = head.gate(state), head.up(state)
            said = target.output[list(IDS)] @ (state + head.down(functional.silu(gate) * up))
            wanted = torch.softmax(scores[list(IDS)], -1)
            terms.append(-(wanted * functional.log_softmax(said, -1)).sum())
    assert terms
    torch.testing.assert_close(loss, torch.stack(terms).mean(), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_a_fresh_exit_is_the_targets_own(engine: Engine) -> None:
    head, target = head_of(engine, fresh=True), target_of(engine)
    features = rolled_out(engine, 0, 30)
    starts = torch.arange(3, 20)
    drafted = head.draft_ids(make_batch([features], 100), target, (torch.zeros_like(starts), starts), 2)
    table = engine.kv.open()
    ids = features.rollout.token_ids
    engine.kv.reserve(table, len(ids))
    logits = engine.step([SequenceStep(table, 0, ids)], exit_layer=2).logits
    engine.kv.close(table)
    best = logits[:, IDS.start : IDS.stop].topk(2).indices + IDS.start
    for place, start in enumerate(starts.tolist()):
        assert torch.equal(drafted[place], best[start + 1 : start + 4])


@torch.no_grad()
def test_the_served_exit_says_what_the_trained_one_does(engine: Engine, model: Path, tmp_path: Path) -> None:
    head, target = head_of(engine), target_of(engine)
    digest = vocabulary_digest(Tokenizer.from_directory(model))
    revision = engine.numerics.model_revision
    acceptance = {"all": [0.5, 0.5, 0.5]}
    manifest = ArtifactManifest(1, "exit", revision, digest, (), head.sizes(), {}, acceptance)
    write_artifact(tmp_path, manifest, head.tensors())
    adapter = ExitAdapter.load(tmp_path, engine, digest)
    features = rolled_out(engine, 0, 30)
    ids = features.rollout.token_ids
    table = engine.kv.open()
    engine.kv.reserve(table, len(ids))
    step = SequenceStep(table, 0, ids, logit_rows="none")
    hidden = engine.step([step], exit_layer=2, want_last_hidden=True).last_hidden
    engine.kv.close(table)
    assert hidden is not None
    served = adapter.logits(hidden)
    starts = torch.arange(3, 25)
    drafted = head.draft_ids(make_batch([features], 100), target, (torch.zeros_like(starts), starts), 1)
    assert torch.equal(served.argmax(-1)[4:26] + IDS.start, drafted[:, 0, 0])
    again, _ = read_head(tmp_path)
    assert isinstance(again, ExitHead)
    assert (again.shape, again.depth) == (head.shape, 3)
    for ours, theirs in zip(head.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(again.target_ids, head.target_ids)


@torch.no_grad()
def divergence(head: ExitHead, target: TargetHead, found: list[Features]) -> float:
    """Mean KL of the target from the exit over the places that count."""
    batch = make_batch(found, 100)
    probs = wanted_of(batch, target.reduced(head.target_ids), 0).probs
    entropy = -(probs * probs.log()).sum(-1).mean()
    return float(head.losses(batch, target)[0] - entropy)


def unheard(name: str, total: int) -> Callable[[int, str], None]:
    return lambda done, word: None


def test_training_brings_the_exit_nearer_to_the_target_and_writes_one_that_is_served(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "soft", vocab=VOCAB, logit_scale=0.1)
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(1,))
    engine = Engine.load(model, settings)
    tokenizer = vocabulary_digest(Tokenizer.from_directory(model))
    revision = engine.numerics.model_revision
    recipe = Recipe("tiny", revision, tokenizer, VOCAB, 0, 8, 30, ("code",), (0.0,))
    rollouts = [rolled_out(engine, number, 34).rollout for number in range(32)]
    place = Place(model, tmp_path / "features", 1)
    plan = TrainingPlan(epochs=80, batch=8, learning_rate=1e-2, warm_up_steps=5, save_steps=500)
    run = HeadRun(place, tmp_path / "exit", OPTIONS, plan)
    judged = train_head(run, recipe, rollouts, unheard, lambda: False)
    assert judged is not None
    trained, manifest = read_head(tmp_path / "exit")
    assert isinstance(trained, ExitHead)
    assert (manifest.kind, manifest.hidden_layers) == ("exit", ())
    fresh = OPTIONS.make(engine.config, trained.target_ids.tolist())
    kept = [compute(engine, rollout) for rollout in rollouts if not is_held(rollout)]
    target = target_of(engine)
    assert divergence(trained, target, kept) < 0.7 * divergence(fresh, target, kept)
    ExitAdapter.load(tmp_path / "exit", engine, tokenizer)
    again = judge_artifact(place, tmp_path / "exit", recipe, rollouts, unheard)
    assert again.judged["all"].chains == judged["all"].chains > 0
    with pytest.raises(InvalidArgument, match="exit_layer"):
        train_head(
            replace(run, options=replace(OPTIONS, exit_layer=3)), recipe, rollouts, unheard, lambda: False
        )


def test_an_exit_needs_a_layer_behind_it() -> None:
    config = ModelConfig(
        num_layers=3, hidden_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_dim=8, vocab_size=9,
        max_context=16, norm_epsilon=1e-5, rope_theta=1e4, rope_scaling=None, tied_embeddings=True,  # type: ignore[arg-type]
    )  # fmt: skip
    assert ExitOptions(2).trained_layers(config) == (1,)
    for layer in (0, 3):
        with pytest.raises(InvalidArgument, match="1 to 2"):
            ExitOptions(layer).trained_layers(config)
