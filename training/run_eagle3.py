"""From rollouts to an EAGLE-3 artifact: features, training, judging on rollouts held back, writing."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from core.errors import InvalidArgument
from core.settings import EngineSettings
from decode.drafters.artifact import FORMAT, ArtifactManifest, write_artifact
from engine.engine import Engine
from engine.weights import open_model
from training.eagle3 import Eagle3Head, Eagle3Shape
from training.features import FeatureCache
from training.judge import Judgement, judge
from training.rollout_store import Recipe, Rollout
from training.trainer import TargetHead, Trainer, TrainingPlan, draft_vocabulary

HELD_OUT_OF: Final = 16
_HELD: Final = 5
_JUDGED_ROLLOUTS: Final = 200


@dataclass(frozen=True, slots=True)
class Eagle3Run:
    """What to train and where. `features`: cache folder. `hidden_layers` None: early, middle and late."""

    model: Path
    out: Path
    features: Path
    plan: TrainingPlan
    draft_vocab: int
    hidden_layers: tuple[int, ...] | None = None
    num_threads: int = 2


Stage = Callable[[str, int], Callable[[int, str], None]]
"""Begins a stage of so many units; what it returns is told units done, and a word about them."""


def train_eagle3(
    run: Eagle3Run, recipe: Recipe, rollouts: Sequence[Rollout], stage: Stage, stop: Callable[[], bool]
) -> dict[str, Judgement] | None:
    """Trains, or goes on, and writes the artifact; what it reaches on held rollouts. None: `stop` came first.

    Raises InvalidArgument where rollouts, sizes or an earlier checkpoint do not fit.
    """
    kept = [rollout for rollout in rollouts if rollout.number % HELD_OUT_OF != _HELD]
    held = [rollout for rollout in rollouts if rollout.number % HELD_OUT_OF == _HELD][:_JUDGED_ROLLOUTS]
    if not kept or not held:
        raise InvalidArgument("rollouts", f"{len(rollouts)} rollouts are too few to train and to judge on")
    torch.manual_seed(run.plan.seed)
    files = open_model(run.model)
    layers = run.hidden_layers or _spread_layers(files.config.num_layers)
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    settings = EngineSettings(
        num_threads=run.num_threads, hidden_layers=layers, num_blocks=max(8, -(-longest // 16) + 2)
    )
    engine = Engine.load(run.model, settings)
    try:
        if engine.numerics.model_revision != recipe.model_revision:
            raise InvalidArgument("rollouts", "they were rolled out by another model")
        key = f"{recipe.model_revision[:16]}-{'-'.join(map(str, layers))}"
        training, judging = (FeatureCache(run.features, part, key) for part in (kept, held))
        num_tokens = sum(len(rollout.token_ids) for rollout in (*kept, *held))
        told = stage("features", num_tokens)
        for cache in (training, judging):
            cache.prepare(engine, lambda done: told(done, ""))
        target = _target_head(run.model, engine)
    finally:
        engine.close()
    torch.set_num_threads(run.num_threads)
    shape = Eagle3Shape.of(files.config, len(layers), min(run.draft_vocab, files.config.vocab_size))
    head = Eagle3Head(shape, draft_vocabulary(kept, shape.draft_vocab))
    trainer = Trainer(head, target, training, run.plan, run.out / "checkpoint")
    total_steps = run.plan.epochs * sum(math.ceil(size / run.plan.batch) for size in training.part_sizes)
    told = stage("training", total_steps)
    told(trainer.progress.step, "")
    trainer.run(total_steps, stop, lambda _, losses: told(1, f"loss {losses[0]:.3f}"))
    if trainer.progress.step < total_steps:
        return None
    found = chain.from_iterable(judging.read(part) for part in range(judging.num_parts))
    judged = judge(head, target, found, run.plan.depth)
    write_artifact(
        run.out, _manifest(run, recipe, layers, shape, judged, trainer.progress.step), _tensors(head)
    )
    return judged


def _spread_layers(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)}))


def _target_head(model: Path, engine: Engine) -> TargetHead:
    embedding = engine.weights.embedding.clone()
    config = engine.config
    if config.tied_embeddings:
        return TargetHead(embedding, embedding)
    output = open_model(model).take("lm_head.weight", (config.vocab_size, config.hidden_dim))
    return TargetHead(embedding, output.to(embedding.dtype))


def _tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """bfloat16, the id map in full width."""
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }


def _manifest(
    run: Eagle3Run,
    recipe: Recipe,
    layers: tuple[int, ...],
    shape: Eagle3Shape,
    judged: Mapping[str, Judgement],
    num_steps: int,
) -> ArtifactManifest:
    trained: dict[str, Any] = {"rollouts": asdict(recipe), "plan": asdict(run.plan), "steps": num_steps}
    return ArtifactManifest(
        FORMAT,
        "eagle3",
        recipe.model_revision,
        recipe.tokenizer,
        layers,
        asdict(shape),
        trained,
        {name: [round(rate, 4) for rate in found.rates] for name, found in judged.items()},
    )
