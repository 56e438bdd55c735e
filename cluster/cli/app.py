"""The `outrider` command. Nothing here or in the commands' modules loads torch or ray before it is needed."""

from importlib.metadata import version
from typing import Annotated

import typer

from cluster.cli.bench import bench_command
from cluster.cli.chat import chat_command
from cluster.cli.corpus import corpus_app
from cluster.cli.doctor import doctor_command
from cluster.cli.generate import generate_command
from cluster.cli.models import models_app
from cluster.cli.plan_tree import plan_tree_command
from cluster.cli.serve import down_command, serve_command
from cluster.cli.train import train_app

app = typer.Typer(
    name="outrider",
    help="Serve and ask large language models with exact speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def root_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before every command."""


app.command("serve")(serve_command)
app.command("down")(down_command)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("bench")(bench_command)
app.command("doctor")(doctor_command)
app.command("plan-tree")(plan_tree_command)
app.add_typer(models_app, name="models")
app.add_typer(corpus_app, name="corpus")
app.add_typer(train_app, name="train")


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
