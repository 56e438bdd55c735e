"""`outrider train`: what drafts are trained on, and the trainings of `train_heads.py` and `train_models.py`."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cluster.cli import options as o
from cluster.cli.train_heads import (
    HEAD_COMMANDS,
    eagle3_command,
    exit_command,
    head_command,
    judge_command,
    medusa_command,
)
from cluster.cli.train_import import import_command
from cluster.cli.train_models import MEDUSA2, draft_command, medusa2_command
from cluster.cli.train_plot import plot_command
from cluster.cli.train_progress import say, shown_progress, stopping
from cluster.cli.train_run import alone_in
from core.environment import cache_directory
from core.model_store import resolve_model

if TYPE_CHECKING:
    from training.rollout_store import RolloutStore
    from training.rollouts import RolloutRun

train_app = typer.Typer(no_args_is_help=True, help="Train drafts on what the target says itself.")
train_app.command("eagle3")(eagle3_command)
for kind in HEAD_COMMANDS:
    train_app.command(kind.name, help=f"{kind.help} Ctrl-C checkpoints; the same command goes on.")(
        head_command(kind)
    )
train_app.command("medusa")(medusa_command)
train_app.command("exit")(exit_command)
train_app.command("draft")(draft_command)
train_app.command(MEDUSA2)(medusa2_command)
train_app.command("judge")(judge_command)
train_app.command("plot")(plot_command)
train_app.command("import")(import_command)
TEMPERATURES: Final = (0.0, 0.0, 0.0, 0.7, 1.0)
"""Of answers: mostly greedy."""


@train_app.callback()
def _group() -> None:
    """Train drafts on what the target says itself."""


@train_app.command("rollouts")
def rollouts_command(
    out: Annotated[Path, typer.Option(help="Folder; one with rollouts of the same recipe is extended.")],
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens that it is to hold.")] = 1_000_000,
    model: Annotated[
        str, typer.Option(help="The target: alias, directory or hub id.")
    ] = "smollm2-135m-instruct",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same rollouts.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rollouts at a time; changes speed only.")] = 128,
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
    from engine.linear import WIDE_PLANS
    from training.excluded import ExcludedPrompts
    from training.rollout_store import Recipe, RolloutStore
    from training.rollouts import RolloutRun, blocks_needed
    from training.seeds import CLASSES

    with o.refusals(), alone_in(out):
        excluded = ExcludedPrompts.of_files(exclude or [])
        directory = resolve_model(model, cache_directory(), say)
        tokenizer = Tokenizer.from_directory(directory)
        settings = EngineSettings(num_threads=threads)
        num_blocks = blocks_needed(user_tokens, answer_tokens, batch, settings.block_size)
        settings = settings.model_copy(update={"num_blocks": num_blocks})
        engine = Engine.load(directory, settings, row_plans=WIDE_PLANS)
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
    report = {"rollouts": len(store.numbers), "answer_tokens": store.num_answer_tokens}
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out} holds {len(store.numbers):,} rollouts, {store.num_answer_tokens:,} answer tokens")


def _roll_out(run: "RolloutRun", store: "RolloutStore", tokens: int) -> None:
    with shown_progress() as progress, stopping() as stop:
        task = progress.add_task("answer tokens", total=tokens, completed=store.num_answer_tokens)
        try:
            while store.num_answer_tokens < tokens and not stop.is_set():
                for rollout in run.step():
                    store.add(rollout)
                    progress.update(task, completed=min(tokens, store.num_answer_tokens))
        finally:
            store.flush()
            run.close()
