"""From rollouts to a Medusa-2 model: heads warmed up on the target, then trained with its last layers; both written."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from core.errors import InvalidArgument
from core.whole_file import locked, staged
from decode.drafters.artifact import ArtifactManifest, read_manifest, write_artifact
from decode.drafters.medusa_artifact import KIND
from decode.drafters.shipped_heads import heads_folder
from engine.truncate import first_layers, write_layers
from engine.weights import open_model
from training.batch import make_batch
from training.judge import Judgement, judge
from training.loss import reduced_precision
from training.medusa2 import Medusa2
from training.rollout_store import Recipe, Rollout
from training.run_head import Begun, HeadRun, Stage, all_of, begin, manifest_of, train_to_end
from training.trainer import TrainingPlan

WARM_UP = "warmup"
"""The folder of the heads' own run, under that of the whole one."""


@dataclass(frozen=True, slots=True)
class Medusa2Run:
    """`joint`: the run of heads and backbone; its options are `Medusa2Options`. `built`: the model's directory."""

    joint: HeadRun
    warm_up: TrainingPlan
    built: Path


@dataclass(frozen=True, slots=True)
class Medusa2Result:
    """What the heads reach on held rollouts of the original, and the share of tokens there that the model says too."""

    judged: dict[str, Judgement]
    agreement: float


def train_medusa2(
    run: Medusa2Run, recipe: Recipe, rollouts: Sequence[Rollout], stage: Stage, stop: Callable[[], bool]
) -> Medusa2Result | None:
    """Trains, or goes on, and writes the model with its heads. None: `stop` came first.

    Raises InvalidArgument where rollouts, sizes or an earlier checkpoint do not fit, or `built` is of another model.
    """
    _require_same_original(run.built, recipe.model_revision)
    begun = begin(run.joint, recipe, rollouts, stage, stop)
    if begun is None:
        return None
    head = begun.head
    assert isinstance(head, Medusa2)
    warm_up = begun.trainer(head.heads, run.warm_up, run.joint.out / WARM_UP)
    train_to_end(warm_up, "warm-up", stage, stop)
    if not warm_up.done:
        return None
    trainer = begun.trainer(head, run.joint.plan, run.joint.out)
    train_to_end(trainer, "training", stage, stop)
    if not trainer.done:
        return None
    judged = judge(head, begun.target, all_of(begun.judging))
    result = Medusa2Result(judged, _agreement(head, begun))
    _write(run, manifest_of(run.joint, begun, trainer.progress, judged), head, result.agreement)
    return result


def _agreement(head: Medusa2, begun: Begun) -> float:
    same = total = 0
    with torch.no_grad(), reduced_precision():
        for features in all_of(begun.judging):
            batch = make_batch([features], len(features.rollout.token_ids))
            found = head.agreement(batch, begun.target)
            same, total = same + found[0], total + found[1]
    return same / total if total else 0.0


def _write(run: Medusa2Run, manifest: ArtifactManifest, head: Medusa2, agreement: float) -> None:
    """The heads lie in the model's own folder and are bound to its revision."""
    source = run.joint.place.model
    files = open_model(source)
    num_layers = files.config.num_layers
    with locked(run.built), staged(run.built, replace=True) as staging:
        write_layers(source, num_layers, first_layers(files, num_layers) | head.stack.tensors(), staging)
        bound = replace(
            manifest,
            kind=KIND,
            target_revision=open_model(staging).revision(),
            shape=head.heads.sizes(),
            recipe={
                **manifest.recipe,
                "trained_layers": [],
                "made_of": manifest.target_revision,
                "warm_up": asdict(run.warm_up),
                "agreement": round(agreement, 4),
            },
        )
        write_artifact(heads_folder(staging) / KIND, bound, head.heads.tensors())


def _require_same_original(built: Path, revision: str) -> None:
    if not built.exists():
        return
    heads = heads_folder(built) / KIND
    made_of = read_manifest(heads).recipe.get("made_of") if heads.is_dir() else None
    if made_of != revision:
        raise InvalidArgument("model", f"{built} was made of another model of that name; remove it first")
