"""`outrider train NAME` and `outrider train judge`: one command a kind of head, over one shared run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options as o
from cluster.cli.train_progress import say, shown_progress, stages_of, stopping
from core.environment import cache_directory
from core.errors import InvalidArgument, ServiceError
from core.model_store import resolve_model

if TYPE_CHECKING:
    from training.judge import Judgement
    from training.run_head import HeadRun, JudgedArtifact, Place

Rollouts = Annotated[Path, typer.Option(exists=True, help="Folder that `train rollouts` filled.")]
Out = Annotated[Path, typer.Option(help="Folder of the artifact; a run that was stopped goes on there.")]
Model = Annotated[str, typer.Option(help="The target: alias, directory or hub id.")]
DraftVocab = Annotated[
    int, typer.Option(min=16, help="Token ids that may be drafted: the most frequent ones.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the rollouts.")]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Ends after this many answer tokens, if that is sooner.")
]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Rollouts a step.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="At its highest, after the warm-up.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights and of the order.")]
FeatureFolder = Annotated[
    Path | None,
    typer.Option(
        "--features", help="Cache of features, 1 to 5 KB a token. Absent: in Outrider's cache folder."
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads.")]
DEFAULT_MODEL = "smollm2-135m-instruct"


def eagle3_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    layers: Annotated[str | None, typer.Option(help="Captured layers, by comma. Absent: 3, spread.")] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are trained.")] = 5,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Train an EAGLE-3 head on rollouts, judge it on some held back. Ctrl-C checkpoints; the same command goes on."""
    from training.eagle3 import Eagle3Options
    from training.run_head import HeadRun
    from training.trainer import TrainingPlan

    plan = TrainingPlan(epochs, tokens, batch, learning_rate, seed=seed)
    with _refusals():
        options = Eagle3Options(draft_vocab, _numbers(layers), depth)
        run = HeadRun(_place(model, features, threads), out, options, plan)
        judged = _train(rollouts, run)
    _print_judged(judged, as_json)


def eagle_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are trained.")] = 4,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Train an EAGLE-1 head, which eagle2 serves too. Ctrl-C checkpoints; the same command goes on."""
    from training.eagle import EagleOptions
    from training.run_head import HeadRun
    from training.trainer import TrainingPlan

    plan = TrainingPlan(epochs, tokens, batch, learning_rate, seed=seed)
    with _refusals():
        run = HeadRun(_place(model, features, threads), out, EagleOptions(draft_vocab, depth), plan)
        judged = _train(rollouts, run)
    _print_judged(judged, as_json)


def mtp_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are trained.")] = 4,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Train a multi-token-prediction module. Ctrl-C checkpoints; the same command goes on."""
    from training.mtp import MtpOptions
    from training.run_head import HeadRun
    from training.trainer import TrainingPlan

    plan = TrainingPlan(epochs, tokens, batch, learning_rate, seed=seed)
    with _refusals():
        run = HeadRun(_place(model, features, threads), out, MtpOptions(draft_vocab, depth), plan)
        judged = _train(rollouts, run)
    _print_judged(judged, as_json)


def medusa_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that a draft may be long.")] = 4,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Train Medusa heads on rollouts, judge them on some held back. Ctrl-C checkpoints; the same command goes on."""
    from training.medusa import MedusaOptions
    from training.run_head import HeadRun
    from training.trainer import TrainingPlan

    plan = TrainingPlan(epochs, tokens, batch, learning_rate, seed=seed)
    with _refusals():
        run = HeadRun(_place(model, features, threads), out, MedusaOptions(draft_vocab, heads), plan)
        judged = _train(rollouts, run)
    _print_judged(judged, as_json)


def exit_command(
    rollouts: Rollouts,
    out: Out,
    exit_layer: Annotated[int, typer.Option(min=1, help="Layers of the target that a draft runs.")],
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    width: Annotated[int, typer.Option(min=16, help="Width of the adapter behind them.")] = 1536,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are judged.")] = 5,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Train an exit for layerskip on rollouts, judge it on some held back. Ctrl-C checkpoints, as with the others."""
    from training.exit_head import ExitOptions
    from training.run_head import HeadRun
    from training.trainer import TrainingPlan

    plan = TrainingPlan(epochs, tokens, batch, learning_rate, seed=seed)
    with _refusals():
        options = ExitOptions(exit_layer, draft_vocab, width, depth)
        run = HeadRun(_place(model, features, threads), out, options, plan)
        judged = _train(rollouts, run)
    _print_judged(judged, as_json)


def judge_command(
    artifact: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a trained head.")],
    rollouts: Rollouts,
    model: Model = DEFAULT_MODEL,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Acceptance of a trained head by class and depth on rollouts held back, beside what its manifest says."""
    from training.rollout_store import RolloutStore, read_recipe
    from training.run_head import judge_artifact

    with _refusals(), shown_progress() as progress:
        recipe = read_recipe(rollouts)
        found = judge_artifact(
            _place(model, features, threads),
            artifact,
            recipe,
            list(RolloutStore(rollouts, recipe)),
            stages_of(progress),
        )
    if as_json:
        print(json.dumps({"judged": _report(found.judged), "manifest": dict(found.promised)}))
    else:
        _print_compared(found)


def _train(rollouts: Path, run: "HeadRun") -> "Mapping[str, Judgement]":
    """Of any kind; ends the command with a line where it was stopped."""
    from training.rollout_store import RolloutStore, read_recipe
    from training.run_head import train_head

    recipe = read_recipe(rollouts)
    with shown_progress() as progress, stopping() as stop:
        found = list(RolloutStore(rollouts, recipe))
        judged = train_head(run, recipe, found, stages_of(progress), stop.is_set)
    if judged is None:
        say(f"stopped; {run.out} keeps a checkpoint, the same command goes on")
        raise typer.Exit(1)
    return judged


def _place(model: str, features: Path | None, threads: int) -> "Place":
    from training.run_head import Place

    directory = resolve_model(model, cache_directory(), say)
    return Place(directory, features or cache_directory() / "features", threads)


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors of ours end the command with their line."""
    try:
        yield
    except ServiceError as error:
        o.fail(error)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise InvalidArgument("layers", f"{text!r} is no list of layers") from error


def _report(judged: "Mapping[str, Judgement]") -> dict[str, dict[str, object]]:
    return {
        name: {"acceptance_length": found.acceptance_length, "chains": found.chains, "rates": found.rates}
        for name, found in judged.items()
    }


def _print_judged(judged: "Mapping[str, Judgement]", as_json: bool) -> None:
    if as_json:
        print(json.dumps(_report(judged)))
        return
    for name, found in judged.items():
        print(f"{name}: acceptance length {found.acceptance_length:.2f}, by depth {_rates(found.rates)}")


def _print_compared(found: "JudgedArtifact") -> None:
    for name, now in found.judged.items():
        promised = found.promised.get(name)
        before = "not in the manifest" if promised is None else f"manifest {_rates(promised)}"
        print(
            f"{name}: acceptance length {now.acceptance_length:.2f}, by depth {_rates(now.rates)}; {before}"
        )


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
