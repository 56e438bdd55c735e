"""`outrider models pull | list | truncate`."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import options as o
from core.environment import cache_directory
from core.model_store import list_models, pull, resolve_model

models_app = typer.Typer(no_args_is_help=True, help="Fetch, list and truncate models.")

Model = Annotated[str, typer.Argument(help="Alias, model directory, GGUF file or hub id.")]


def _progress(line: str) -> None:
    o.errors.print(f"[dim]·[/dim] {line}", soft_wrap=True)


@models_app.command("pull")
def pull_command(alias: Annotated[str, typer.Argument(help="One of `outrider models list`.")]) -> None:
    """Fetch a model into the cache, its digest checked; prints its directory."""
    with o.refusals():
        print(pull(alias, cache_directory(), _progress))


@models_app.command("list")
def list_command() -> None:
    """Every alias, its size, and where it lies."""
    for model in list_models(cache_directory()):
        where = model.directory if model.directory is not None else "not pulled"
        print(f"{model.alias}\t{model.size_bytes / 2**20:.0f} MiB\t{where}")


@models_app.command("truncate")
def truncate_command(
    model: Model,
    layers: Annotated[int, typer.Option(help="How many of the first layers to keep.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
) -> None:
    """Write a model's first layers as a model of their own, for the drafter draft_model."""
    from engine.truncate import truncate_model

    with o.refusals():
        source = resolve_model(model, cache_directory(), _progress)
        print(truncate_model(source, layers, out))
