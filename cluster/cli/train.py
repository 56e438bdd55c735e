"""`outrider train`: what drafts are trained on."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli import options as o
from core.environment import cache_directory
from core.errors import InvalidArgument, ServiceError
from core.model_store import resolve_model

if TYPE_CHECKING:
    from training.judge import Judgement
    from training.rollout_store import RolloutStore
    from training.rollouts import RolloutRun
    from training.run_eagle3 import Stage

train_app = typer.Typer(no_args_is_help=True, help="Roll out the target: what drafts are trained on.")
TEMPERATURES: Final = (0.0, 0.0, 0.0, 0.7, 1.0)
"""Of answers: mostly greedy."""


@train_app.callback()
def _group() -> None:
    """Roll out the target: what drafts are trained on."""


@train_app.command("rollouts")
def rollouts_command(
    out: Annotated[Path, typer.Option(help="Folder; one with rollouts of the same recipe is extended.")],
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens that it is to hold.")] = 1_000_000,
    model: Annotated[
        str, typer.Option(help="The target: alias, directory or hub id.")
    ] = "smollm2-135m-instruct",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same rollouts.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rollouts at a time; changes speed only.")] = 32,
    user_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a user turn.")] = 160,
    answer_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 320,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 2,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Prompts (JSON lines) kept for judging: none may occur; repeatable."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Let the target write user turns and answer them. Ctrl-C keeps what there is; the same command goes on."""
    from core.settings import EngineSettings
    from core.tokenizer import Tokenizer
    from decode.drafters.vocabulary import vocabulary_digest
    from engine.engine import Engine
    from training.excluded import ExcludedPrompts
    from training.rollout_store import Recipe, RolloutStore
    from training.rollouts import RolloutRun, blocks_needed
    from training.seeds import CLASSES

    try:
        excluded = ExcludedPrompts.of_files(exclude or [])
        directory = resolve_model(model, cache_directory(), _say)
        tokenizer = Tokenizer.from_directory(directory)
        settings = EngineSettings(num_threads=threads)
        num_blocks = blocks_needed(user_tokens, answer_tokens, batch, settings.block_size)
        engine = Engine.load(directory, settings.model_copy(update={"num_blocks": num_blocks}))
        with closing(engine):
            recipe = Recipe(
                model=model,
                model_revision=engine.numerics.model_revision,
                tokenizer=vocabulary_digest(tokenizer),
                vocab_size=tokenizer.vocab_size,
                seed=seed,
                user_tokens=user_tokens,
                answer_tokens=answer_tokens,
                classes=CLASSES,
                temperatures=TEMPERATURES,
            )
            store = RolloutStore(out, recipe)
            run = RolloutRun(engine, tokenizer, recipe, batch, store.numbers.__contains__, excluded)
            _roll_out(run, store, tokens)
    except ServiceError as error:
        o.fail(error)
    report = {"rollouts": len(store.numbers), "answer_tokens": store.num_answer_tokens}
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out} holds {len(store.numbers):,} rollouts, {store.num_answer_tokens:,} answer tokens")


def _roll_out(run: "RolloutRun", store: "RolloutStore", tokens: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=o.errors, transient=True) as progress, _stopping() as stop:
        task = progress.add_task("answer tokens", total=tokens, completed=store.num_answer_tokens)
        try:
            while store.num_answer_tokens < tokens and not stop.is_set():
                for rollout in run.step():
                    store.add(rollout)
                    progress.update(task, completed=min(tokens, store.num_answer_tokens))
        finally:
            store.flush()
            run.close()


@train_app.command("eagle3")
def eagle3_command(
    rollouts: Annotated[Path, typer.Option(exists=True, help="Folder that `train rollouts` filled.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifact; a run that was stopped goes on there.")],
    model: Annotated[
        str, typer.Option(help="The target: alias, directory or hub id.")
    ] = "smollm2-135m-instruct",
    draft_vocab: Annotated[int, typer.Option(min=16, help="Token ids that may be drafted.")] = 8192,
    layers: Annotated[str | None, typer.Option(help="Captured layers, by comma. Absent: 3, spread.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the rollouts.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Rollouts a step.")] = 8,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Drafts of this depth are trained.")] = 5,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="At its highest.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and of the order.")] = 0,
    features: Annotated[
        Path | None, typer.Option(help="Cache of features, 5 KB a token. Absent: in Outrider's cache folder.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 2,
    as_json: o.Json = False,
) -> None:
    """Train an EAGLE-3 head on rollouts, judge it on some held back. Ctrl-C checkpoints; the same command goes on."""
    from training.rollout_store import RolloutStore, read_recipe
    from training.run_eagle3 import Eagle3Run, train_eagle3
    from training.trainer import TrainingPlan

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        recipe = read_recipe(rollouts)
        run = Eagle3Run(
            model=resolve_model(model, cache_directory(), _say),
            out=out,
            features=features or cache_directory() / "features",
            plan=TrainingPlan(
                epochs=epochs, batch=batch, depth=depth, learning_rate=learning_rate, seed=seed
            ),
            draft_vocab=draft_vocab,
            hidden_layers=_numbers(layers),
            num_threads=threads,
        )
        with Progress(*columns, console=o.errors, transient=True) as progress, _stopping() as stop:
            judged = train_eagle3(
                run, recipe, list(RolloutStore(rollouts, recipe)), _stages(progress), stop.is_set
            )
    except ServiceError as error:
        o.fail(error)
    if judged is None:
        _say(f"stopped; {out} keeps a checkpoint, the same command goes on")
        raise typer.Exit(1)
    _print_judged(judged, as_json)


def _stages(progress: Progress) -> "Stage":
    def stage(name: str, total: int) -> Callable[[int, str], None]:
        task = progress.add_task(name, total=total)

        def told(done: int, word: str) -> None:
            progress.update(task, advance=done, description=f"{name} {word}".strip())

        return told

    return stage


def _print_judged(judged: "Mapping[str, Judgement]", as_json: bool) -> None:
    if as_json:
        report = {
            name: {"acceptance_length": found.acceptance_length, "rates": found.rates}
            for name, found in judged.items()
        }
        print(json.dumps(report))
        return
    for name, found in judged.items():
        rates = " ".join(f"{rate:.2f}" for rate in found.rates)
        print(f"{name}: acceptance length {found.acceptance_length:.2f}, by depth {rates}")


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise InvalidArgument("layers", f"{text!r} is no list of layers") from error


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, so that the step under way ends and what there is is kept."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    o.errors.print(f"[dim]·[/dim] {line}", soft_wrap=True)
