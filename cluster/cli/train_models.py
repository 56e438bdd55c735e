"""`outrider train draft | medusa2`: trainings that end in a whole model directory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options as o
from cluster.cli.train_progress import say
from cluster.cli.train_run import (
    DEFAULT_MODEL,
    BatchSize,
    Chosen,
    DraftVocab,
    Epochs,
    FeatureFolder,
    LearningRate,
    Model,
    Out,
    Plot,
    Rollouts,
    Seed,
    Threads,
    Tokens,
    Training,
    print_judged,
    train,
    train_head_command,
)
from core.environment import cache_directory
from core.model_variants import variant_directory

if TYPE_CHECKING:
    from training.head import HeadOptions
    from training.judge import Judgement
    from training.medusa2 import Medusa2Options
    from training.rollout_store import Recipe, Rollout
    from training.run_head import Stage

MEDUSA2 = "medusa2"


def draft_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    layers: Annotated[int, typer.Option(min=1, help="First layers of the target that it begins as.")] = 4,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are judged.")] = 5,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 5e-4,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    plot: Plot = None,
    as_json: o.Json = False,
) -> None:
    """Train a small model for draft_model by distillation. Ctrl-C checkpoints; the same command goes on."""

    def options() -> "HeadOptions":
        from training.draft_model import DraftModelOptions

        return DraftModelOptions(layers, depth)

    chosen = Chosen(
        rollouts, out, model, epochs, tokens, batch, learning_rate, seed, features, threads, plot, as_json
    )
    train_head_command(options, chosen)


def medusa2_command(
    rollouts: Rollouts,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was stopped goes on there.")],
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that a draft may be long.")] = 4,
    backbone_layers: Annotated[
        int | None, typer.Option(min=1, help="Last layers that are trained. Absent: all.")
    ] = None,
    backbone_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Learning rate of these layers, as a share of the heads'.")
    ] = 0.05,
    warm_up_epochs: Annotated[int, typer.Option(min=1, help="Passes of the heads alone, before.")] = 1,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    plot: Plot = None,
    as_json: o.Json = False,
) -> None:
    """Train Medusa heads and the target itself together: another model, served as NAME@medusa2.

    Ctrl-C checkpoints; the same command goes on.
    """
    chosen = Chosen(
        rollouts, out, model, epochs, tokens, batch, learning_rate, seed, features, threads, plot, as_json
    )
    with o.refusals():
        from training.medusa2 import Medusa2Options

        options = Medusa2Options(draft_vocab, heads, backbone_layers, backbone_rate)
        judged = train(chosen, _medusa2_training(chosen, options, warm_up_epochs))
    print_judged(judged, as_json)


def _medusa2_training(chosen: Chosen, options: "Medusa2Options", warm_up_epochs: int) -> Training:
    from training.run_head import HeadRun
    from training.run_medusa2 import Medusa2Run, train_medusa2

    built = variant_directory(chosen.model, MEDUSA2, cache_directory())
    joint = HeadRun(chosen.place(), chosen.out, options, chosen.plan())
    run = Medusa2Run(joint, replace(joint.plan, epochs=warm_up_epochs), built)

    def training(
        recipe: "Recipe", found: "Sequence[Rollout]", stage: "Stage", stop: Callable[[], bool]
    ) -> "Mapping[str, Judgement] | None":
        result = train_medusa2(run, recipe, found, stage, stop)
        if result is None:
            return None
        say(
            f"{built.name} lies in {built}; {result.agreement:.1%} of held tokens are as the original says them"
        )
        return result.judged

    return training
