"""From rollouts to a trained draft of any kind: features, training, judging on rollouts held back, writing."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import torch

from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import FORMAT, ArtifactManifest, require_own_folder
from decode.drafters.vocabulary import vocabulary_digest
from engine.engine import Engine
from engine.linear import WIDE_PLANS
from engine.model_config import ModelConfig
from engine.weights import open_model
from training.batch import TargetHead, draft_vocabulary
from training.curve import CHECKPOINTS
from training.draft_model import DraftModelOptions
from training.features import FeatureCache, Features
from training.head import DraftHead, HeadOptions
from training.heads import read_head
from training.judge import Judgement, is_judged, judge
from training.rollout_store import Recipe, Rollout
from training.trainer import Progress, Trainer, TrainingPlan

HELD_OUT_OF: Final = 16
_HELD: Final = 5
_JUDGED_ROLLOUTS: Final = 200
_WATCHED_ROLLOUTS: Final = 12

Stage = Callable[[str, int], Callable[[int, str], None]]
"""Begins a stage of so many units; what it returns is told units done, and a word about them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run finds and keeps things. `model`: the target's directory; `features`: cache folder."""

    model: Path
    features: Path
    num_threads: int = 2


@dataclass(frozen=True, slots=True)
class HeadRun:
    """What to train, and `out`, the artifact's folder. `start`: an artifact whose weights it begins with."""

    place: Place
    out: Path
    options: HeadOptions
    plan: TrainingPlan
    start: Path | None = None


def is_held(rollout: Rollout) -> bool:
    """Whether a rollout is kept for judging: one in `HELD_OUT_OF`, by number, whichever head is trained."""
    return rollout.number % HELD_OUT_OF == _HELD


def train_head(
    run: HeadRun, recipe: Recipe, rollouts: Sequence[Rollout], stage: Stage, stop: Callable[[], bool]
) -> dict[str, Judgement] | None:
    """Trains, or goes on, and writes what was trained; what it reaches on held rollouts. None: `stop` came first.

    Raises InvalidArgument where rollouts, sizes or an earlier checkpoint do not fit, or `out` holds a model.
    """
    require_own_folder(run.out, draft_model=isinstance(run.options, DraftModelOptions))
    begun = begin(run, recipe, rollouts, stage, stop)
    if begun is None:
        return None
    trainer = begun.trainer(begun.head, run.plan, run.out)
    train_to_end(trainer, "training", stage, stop)
    if not trainer.done:
        return None
    judged = judge(begun.head, begun.target, all_of(begun.judging))
    manifest = manifest_of(run, begun, trainer.progress, judged)
    begun.head.write(run.out, manifest, run.place.model)
    return judged


@dataclass(frozen=True, slots=True)
class Started:
    """The trained head that a training begins with; `digest` is of its weights."""

    artifact: Path
    head: DraftHead
    manifest: ArtifactManifest
    digest: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A head that is about to be trained, and what it is trained and judged on. `started_with`: see `HeadRun.start`."""

    head: DraftHead
    target: TargetHead
    training: FeatureCache
    judging: FeatureCache
    recipe: Recipe
    config: ModelConfig
    started_with: Started | None

    def trainer(self, head: DraftHead, plan: TrainingPlan, out: Path) -> Trainer:
        """Of `head`, with its checkpoint under `out`. Raises InvalidArgument where one there does not fit."""
        watched = tuple(islice(all_of(self.judging), _WATCHED_ROLLOUTS))
        start = "" if self.started_with is None else self.started_with.digest
        return Trainer(head, self.target, self.training, plan, out / CHECKPOINTS, watched, start)


def begin(
    run: HeadRun, recipe: Recipe, rollouts: Sequence[Rollout], stage: Stage, stop: Callable[[], bool]
) -> Begun | None:
    """Computes the features that are missing, and makes the head; None: `stop` came first.

    Raises InvalidArgument for what does not fit.
    """
    kept = [rollout for rollout in rollouts if not is_held(rollout)]
    held = [rollout for rollout in rollouts if is_held(rollout)][:_JUDGED_ROLLOUTS]
    if not kept or not held:
        raise InvalidArgument("rollouts", f"{len(rollouts)} rollouts are too few to train and to judge on")
    files = open_model(run.place.model)
    config = files.config
    layers = run.options.trained_layers(config)
    before = None if run.start is None else _read_start(run.start, recipe, layers)
    prepared = _prepared(run.place, recipe, layers, (kept, held), stage, stop)
    if prepared is None:
        return None
    target, (training, judging) = prepared
    torch.manual_seed(run.plan.seed)
    ids = draft_vocabulary(kept, min(run.options.draft_vocab, config.vocab_size))
    head = run.options.make(config, ids)
    head.begin(files, target)
    if before is not None:
        _start(head, before)
    _require_judged(held, head.depth)
    return Begun(head, target, training, judging, recipe, config, before)


def _read_start(artifact: Path, recipe: Recipe, layers: tuple[int, ...]) -> Started:
    """Raises InvalidArgument where it is of another target or was trained on other layers."""
    head, manifest = read_head(artifact)
    wanted = {
        "target_revision": (manifest.target_revision, recipe.model_revision),
        "recipe.trained_layers": (_trained_layers(manifest), layers),
    }
    _require_equal(artifact, wanted)
    digest = hashlib.blake2b(digest_size=16)
    for tensor in head.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return Started(artifact, head, manifest, digest.hexdigest())


def _start(head: DraftHead, before: Started) -> None:
    """Gives `head` its weights and draft vocabulary. Raises InvalidArgument where it is of another kind or size."""
    theirs, ours = before.head.sizes(), head.sizes()
    wanted: dict[str, tuple[object, object]] = {"kind": (before.head.kind, head.kind)}
    wanted |= {f"shape.{name}": (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    _require_equal(before.artifact, wanted)
    head.load_state_dict(before.head.state_dict())


def _require_equal(artifact: Path, wanted: Mapping[str, tuple[object, object]]) -> None:
    for name, (theirs, ours) in wanted.items():
        if theirs != ours:
            raise InvalidArgument("start", f"{artifact}: {name} is {theirs}, this training's {ours}")


@dataclass(frozen=True, slots=True)
class JudgedArtifact:
    """An artifact judged again: now, and what its manifest says (rates by class)."""

    judged: Mapping[str, Judgement]
    promised: Mapping[str, list[float]]


def judge_artifact(
    place: Place, artifact: Path, recipe: Recipe, rollouts: Sequence[Rollout], stage: Stage
) -> JudgedArtifact:
    """Judges an artifact on the rollouts that no training sees. Raises InvalidArgument where something does not fit."""
    head, manifest = read_head(artifact)
    held = [rollout for rollout in rollouts if is_held(rollout)][:_JUDGED_ROLLOUTS]
    if not held:
        raise InvalidArgument("rollouts", f"none of {len(rollouts)} rollouts is one held back for judging")
    if manifest.target_revision != recipe.model_revision:
        raise InvalidArgument("rollouts", f"{artifact} was trained for another model than rolled them out")
    layers = _trained_layers(manifest)
    _require_judged(held, head.depth)
    prepared = _prepared(place, recipe, layers, (held,), stage, lambda: False)
    assert prepared is not None
    target, (judging,) = prepared
    return JudgedArtifact(judge(head, target, all_of(judging)), manifest.acceptance)


def _require_judged(held: Sequence[Rollout], depth: int) -> None:
    if not any(is_judged(rollout, depth) for rollout in held):
        raise InvalidArgument(
            "rollouts",
            f"none of {len(held)} held back is greedy and long enough for drafts of depth {depth}; more are needed",
        )


def _trained_layers(manifest: ArtifactManifest) -> tuple[int, ...]:
    """The planes that a head of this artifact was trained on. Raises InvalidArgument naming the field."""
    layers = manifest.recipe.get("trained_layers")
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise InvalidArgument("artifact.recipe", "trained_layers is no list of layers")
    return tuple(layers)


def _prepared(
    place: Place,
    recipe: Recipe,
    layers: tuple[int, ...],
    parts: Sequence[Sequence[Rollout]],
    stage: Stage,
    stop: Callable[[], bool],
) -> tuple[TargetHead, tuple[FeatureCache, ...]] | None:
    """The target's head, and the features of each part on disk; None: `stop` came first."""
    if vocabulary_digest(Tokenizer.from_directory(place.model)) != recipe.tokenizer:
        raise InvalidArgument(
            "rollouts", f"they were rolled out with another tokenizer than {place.model} has"
        )
    longest = max(len(rollout.token_ids) for part in parts for rollout in part)
    caches = tuple(FeatureCache(place.features, part, recipe.model_revision, layers) for part in parts)
    told = stage("features", sum(len(rollout.token_ids) for part in parts for rollout in part))
    with _engine(place, layers, longest) as engine:
        if engine.numerics.model_revision != recipe.model_revision:
            raise InvalidArgument("rollouts", "they were rolled out by another model")
        if not all(cache.prepare(engine, lambda done: told(done, ""), stop) for cache in caches):
            return None
        embedding = engine.weights.embedding.clone()
        everything = torch.arange(engine.config.vocab_size)
        output = embedding if engine.config.tied_embeddings else engine.output_rows(everything).clone()
        frequencies = torch.from_numpy(engine.config.inverse_frequencies())
        target = TargetHead(embedding, output, engine.weights.final_norm.clone(), frequencies)
    torch.set_num_threads(place.num_threads)
    return target, caches


@contextmanager
def _engine(place: Place, layers: tuple[int, ...], longest: int) -> Iterator[Engine]:
    num_blocks = max(8, -(-longest // 16) + 2)
    engine = Engine.load(
        place.model,
        EngineSettings(num_threads=place.num_threads, hidden_layers=layers, num_blocks=num_blocks),
        row_plans=WIDE_PLANS,
    )
    try:
        yield engine
    finally:
        engine.close()


def train_to_end(trainer: Trainer, name: str, stage: Stage, stop: Callable[[], bool]) -> None:
    """Of its plan, as the stage `name`, unless `stop` comes first."""
    told = stage(name, trainer.total_tokens)
    seen = trainer.progress.tokens
    told(seen, "")

    def report(progress: Progress, losses: list[float]) -> None:
        nonlocal seen
        told(progress.tokens - seen, f"loss {losses[0]:.3f}")
        seen = progress.tokens

    trainer.run(stop, report)


def all_of(cache: FeatureCache) -> Iterator[Features]:
    """The features of all its rollouts."""
    return chain.from_iterable(cache.read(part) for part in range(cache.num_parts))


def manifest_of(
    run: HeadRun, begun: Begun, progress: Progress, judged: Mapping[str, Judgement]
) -> ArtifactManifest:
    """What the head of a run is."""
    trained: dict[str, Any] = {
        "rollouts": asdict(begun.recipe),
        "plan": asdict(run.plan),
        "options": asdict(run.options),
        "trained_layers": list(run.options.trained_layers(begun.config)),
        "steps": progress.step,
        "tokens": progress.tokens,
    }
    if begun.started_with is not None:
        trained["started_with"] = dict(begun.started_with.manifest.recipe)
    return ArtifactManifest(
        format=FORMAT,
        kind=begun.head.kind,
        target_revision=begun.recipe.model_revision,
        tokenizer=begun.recipe.tokenizer,
        hidden_layers=run.options.hidden_layers(begun.config),
        shape=begun.head.sizes(),
        recipe=trained,
        acceptance={name: [round(rate, 4) for rate in found.rates] for name, found in judged.items()},
        rank_acceptance=[[round(rate, 4) for rate in row] for row in judged["all"].rank_rates],
    )
