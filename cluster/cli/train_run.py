"""What all commands of `outrider train` that train something have in common: options, the run, what they print."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options as o
from cluster.cli.train_progress import say, shown_progress, stages_of, stopping
from core.environment import cache_directory
from core.errors import FailedPrecondition, InvalidArgument
from core.model_store import resolve_model
from core.whole_file import held_alone

if TYPE_CHECKING:
    from training.head import HeadOptions
    from training.judge import Judgement
    from training.rollout_store import Recipe, Rollout
    from training.run_head import Place, Stage
    from training.trainer import TrainingPlan

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
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and of the order.")]
FeatureFolder = Annotated[
    Path | None,
    typer.Option(
        "--features", help="Cache of features, 1 to 5 KB a token. Absent: in Outrider's cache folder."
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads.")]
ShallowShare = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Of the training, at first: drafts of depth 1 only, which is faster."
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Head to go on from: an artifact of this kind. Absent: a fresh one.",
    ),
]
Plot = Annotated[
    Path | None, typer.Option(help="PNG file: loss and acceptance by step. Needs the extra `plots`.")
]
DEFAULT_MODEL = "smollm2-135m-instruct"

Training = Callable[
    ["Recipe", "Sequence[Rollout]", "Stage", Callable[[], bool]], "Mapping[str, Judgement] | None"
]
"""Trains on rollouts: told of stages, asking whether to stop; what was reached, None where it was stopped."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options that every training command has, in its order; then those that some have."""

    rollouts: Path
    out: Path
    model: str
    epochs: int
    tokens: int | None
    batch: int
    learning_rate: float
    seed: int
    features: Path | None
    threads: int
    plot: Path | None
    as_json: bool
    shallow_share: float = 0.0
    start: Path | None = None

    def plan(self) -> "TrainingPlan":
        """How long and how fast."""
        from training.trainer import TrainingPlan

        return TrainingPlan(
            self.epochs,
            self.tokens,
            self.batch,
            self.learning_rate,
            shallow_share=self.shallow_share,
            seed=self.seed,
        )

    def place(self) -> "Place":
        """Where the run finds and keeps things; fetches the target where it is an alias not there yet."""
        return place_of(self.model, self.features, self.threads)


def train_head_command(options: Callable[[], "HeadOptions"], chosen: Chosen) -> None:
    """Trains, judges and writes a draft of any kind, and prints what it reaches."""
    from training.run_head import HeadRun, train_head

    with o.refusals():
        run = HeadRun(chosen.place(), chosen.out, options(), chosen.plan(), chosen.start)
        judged = train(chosen, lambda recipe, found, stage, stop: train_head(run, recipe, found, stage, stop))
    print_judged(judged, chosen.as_json)


def train(chosen: Chosen, training: Training) -> "Mapping[str, Judgement]":
    """Any training; ends the command with a line where it was stopped. Draws the curve where one was asked for."""
    from training.plot import plot_run, require_plot
    from training.rollout_store import RolloutStore, read_recipe

    if chosen.plot is not None:
        require_plot(chosen.plot)
    recipe = read_recipe(chosen.rollouts)
    with alone_in(chosen.out), shown_progress() as progress, stopping() as stop:
        found = list(RolloutStore(chosen.rollouts, recipe))
        judged = training(recipe, found, stages_of(progress), stop.is_set)
    if judged is None:
        say(f"stopped; what there is is kept for {chosen.out}, the same command goes on")
        raise typer.Exit(1)
    if chosen.plot is not None:
        plot_run(chosen.out, chosen.plot)
    return judged


def place_of(model: str, features: Path | None, threads: int) -> "Place":
    """See `Chosen.place`."""
    from training.run_head import Place

    directory = resolve_model(model, cache_directory(), say)
    return Place(directory, features or cache_directory() / "features", threads)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Makes `out` and holds it against other commands, before anything is computed.

    Raises InvalidArgument where nothing could be kept there, FailedPrecondition where another command is at work.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument("out", f"{out} is no folder and cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise InvalidArgument("out", f"{out} cannot be written to")
    with ExitStack() as stack:
        try:
            stack.enter_context(held_alone(out))
        except BlockingIOError as error:
            raise FailedPrecondition(
                "out", f"another command is at work in {out}; take another folder, or wait"
            ) from error
        yield


def report_of(judged: "Mapping[str, Judgement]") -> dict[str, dict[str, object]]:
    """As JSON has it."""
    return {
        name: {"acceptance_length": found.acceptance_length, "chains": found.chains, "rates": found.rates}
        for name, found in judged.items()
    }


def print_judged(judged: "Mapping[str, Judgement]", as_json: bool) -> None:
    """By class."""
    if as_json:
        print(json.dumps(report_of(judged)))
        return
    for name, found in judged.items():
        print(f"{name}: acceptance length {found.acceptance_length:.2f}, by depth {shown_rates(found.rates)}")


def shown_rates(rates: Sequence[float]) -> str:
    """For a person."""
    return " ".join(f"{rate:.2f}" for rate in rates)
