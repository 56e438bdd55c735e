"""`outrider train eagle | eagle3 | mtp | medusa | exit`: heads on the target's hidden states; and `train judge`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cluster.cli import options as o
from cluster.cli.train_progress import shown_progress, stages_of
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
    ShallowShare,
    Start,
    Threads,
    Tokens,
    place_of,
    report_of,
    shown_rates,
    train_head_command,
)
from core.errors import InvalidArgument

if TYPE_CHECKING:
    from training.head import HeadOptions
    from training.run_head import JudgedArtifact


@dataclass(frozen=True, slots=True)
class HeadCommand:
    """A kind of head that drafts from its own output, with no options of its own.

    `options`: of a draft vocabulary and a depth; imports what it needs, as torch is slow to load.
    """

    name: str
    help: str
    options: Callable[[int, int], "HeadOptions"]


def _eagle(draft_vocab: int, depth: int) -> "HeadOptions":
    from training.eagle import EagleOptions

    return EagleOptions(draft_vocab, depth)


def _mtp(draft_vocab: int, depth: int) -> "HeadOptions":
    from training.mtp import MtpOptions

    return MtpOptions(draft_vocab, depth)


_TRAINED: Final = "Drafts of this depth are trained."
HEAD_COMMANDS: Final = (
    HeadCommand("eagle", "Train an EAGLE-1 head, which eagle2 serves too.", _eagle),
    HeadCommand("mtp", "Train a multi-token-prediction module.", _mtp),
)


def head_command(kind: HeadCommand) -> Callable[..., None]:
    """The command of a row of `HEAD_COMMANDS`."""

    def command(
        rollouts: Rollouts,
        out: Out,
        model: Model = DEFAULT_MODEL,
        draft_vocab: DraftVocab = 8192,
        depth: Annotated[int, typer.Option(min=1, max=16, help=_TRAINED)] = 4,
        shallow_share: ShallowShare = 0.0,
        start: Start = None,
        epochs: Epochs = 2,
        tokens: Tokens = None,
        batch: BatchSize = 4,
        learning_rate: LearningRate = 1e-3,
        seed: Seed = 0,
        features: FeatureFolder = None,
        threads: Threads = 2,
        plot: Plot = None,
        as_json: o.Json = False,
    ) -> None:
        chosen = Chosen(
            rollouts,
            out,
            model,
            epochs,
            tokens,
            batch,
            learning_rate,
            seed,
            features,
            threads,
            plot,
            as_json,
            shallow_share,
            start,
        )
        train_head_command(lambda: kind.options(draft_vocab, depth), chosen)

    return command


def eagle3_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    layers: Annotated[str | None, typer.Option(help="Captured layers, by comma. Absent: 3, spread.")] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help=_TRAINED)] = 5,
    shallow_share: ShallowShare = 0.0,
    start: Start = None,
    epochs: Epochs = 2,
    tokens: Tokens = None,
    batch: BatchSize = 4,
    learning_rate: LearningRate = 1e-3,
    seed: Seed = 0,
    features: FeatureFolder = None,
    threads: Threads = 2,
    plot: Plot = None,
    as_json: o.Json = False,
) -> None:
    """Train an EAGLE-3 head on rollouts, judge it on some held back. Ctrl-C checkpoints; the same command goes on."""

    def options() -> "HeadOptions":
        from training.eagle3 import Eagle3Options

        return Eagle3Options(draft_vocab, _numbers(layers), depth)

    chosen = Chosen(
        rollouts,
        out,
        model,
        epochs,
        tokens,
        batch,
        learning_rate,
        seed,
        features,
        threads,
        plot,
        as_json,
        shallow_share,
        start,
    )
    train_head_command(options, chosen)


def medusa_command(
    rollouts: Rollouts,
    out: Out,
    model: Model = DEFAULT_MODEL,
    draft_vocab: DraftVocab = 8192,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that a draft may be long.")] = 4,
    start: Start = None,
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
    """Train Medusa heads. Ctrl-C checkpoints; the same command goes on."""

    def options() -> "HeadOptions":
        from training.medusa import MedusaOptions

        return MedusaOptions(draft_vocab, heads)

    chosen = Chosen(
        rollouts,
        out,
        model,
        epochs,
        tokens,
        batch,
        learning_rate,
        seed,
        features,
        threads,
        plot,
        as_json,
        start=start,
    )
    train_head_command(options, chosen)


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
    plot: Plot = None,
    as_json: o.Json = False,
) -> None:
    """Train an exit for layerskip on rollouts, judge it on some held back. Ctrl-C checkpoints, as with the others."""

    def options() -> "HeadOptions":
        from training.exit_head import ExitOptions

        return ExitOptions(exit_layer, draft_vocab, width, depth)

    chosen = Chosen(
        rollouts, out, model, epochs, tokens, batch, learning_rate, seed, features, threads, plot, as_json
    )
    train_head_command(options, chosen)


def judge_command(
    artifact: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of a trained head or draft model.")
    ],
    rollouts: Rollouts,
    model: Model = DEFAULT_MODEL,
    features: FeatureFolder = None,
    threads: Threads = 2,
    as_json: o.Json = False,
) -> None:
    """Acceptance of a trained head by class and depth on rollouts held back, beside what its manifest says."""
    from training.rollout_store import RolloutStore, read_recipe
    from training.run_head import judge_artifact

    with o.refusals(), shown_progress() as progress:
        recipe = read_recipe(rollouts)
        found = judge_artifact(
            place_of(model, features, threads),
            artifact,
            recipe,
            list(RolloutStore(rollouts, recipe)),
            stages_of(progress),
        )
    if as_json:
        print(json.dumps({"judged": report_of(found.judged), "manifest": dict(found.promised)}))
    else:
        _print_compared(found)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise InvalidArgument("layers", f"{text!r} is no list of layers") from error


def _print_compared(found: "JudgedArtifact") -> None:
    for name, now in found.judged.items():
        promised = found.promised.get(name)
        before = "not in the manifest" if promised is None else f"manifest {shown_rates(promised)}"
        length = f"{now.acceptance_length:.2f}"
        print(f"{name}: acceptance length {length}, by depth {shown_rates(now.rates)}; {before}")
