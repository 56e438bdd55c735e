"""`outrider train plot`: the curve of a run as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import options as o


def plot_command(
    run: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The `--out` of a training, ended or not.")
    ],
    out: Annotated[Path, typer.Option(help="PNG file.")],
) -> None:
    """Loss and held acceptance by step, as a PNG. Needs matplotlib, which the extra `plots` of outrider brings."""
    from training.plot import plot_run

    with o.refusals():
        plot_run(run, out)
    print(out)
