"""The curve of a run as a picture: loss by step above, acceptance on held rollouts below.

Third party: matplotlib, of the optional extra `plots`; imported when a picture is drawn.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from core.errors import FailedPrecondition, InvalidArgument
from core.whole_file import written_whole
from training.curve import CHECKPOINTS, read_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES: Final = (8.0, 7.0)
_DOTS_PER_INCH: Final = 120
_SMOOTHED_POINTS: Final = 100
"""The mean loss is drawn over a hundredth of the run at a time, or its steps where they are fewer."""


def require_matplotlib() -> None:
    """Raises FailedPrecondition where it is not installed: before a run is begun, not after it."""
    try:
        import matplotlib.figure  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise FailedPrecondition(
            "plot", "matplotlib is not installed; `pip install outrider[plots]` brings it"
        ) from error


def require_plot(out: Path) -> None:
    """Before a run is begun: as `require_matplotlib`; raises InvalidArgument where `out` cannot become a file."""
    require_matplotlib()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument("plot", f"{out.parent} is no folder and cannot be made") from error
    if out.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise InvalidArgument("plot", f"{out} is a folder or cannot be written; name a PNG file")


def plot_run(run: Path, out: Path) -> None:
    """Draws the curve of the run in folder `run` as the PNG file `out`.

    Raises InvalidArgument where there is no curve or `out` can be no file, FailedPrecondition without matplotlib.
    """
    require_plot(out)
    from matplotlib.figure import Figure

    points = read_curve(run / CHECKPOINTS)
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_losses(above, points)
    _draw_acceptance(below, points)
    figure.suptitle(run.name)
    with written_whole(out) as path:
        figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


def _draw_losses(axes: "Axes", points: Sequence[Mapping[str, Any]]) -> None:
    """One line for each loss, over the steps that have it: those of a shallow share have the first only."""
    steps = [point for point in points if "losses" in point]
    width = max(1, len(steps) // _SMOOTHED_POINTS)
    for place in range(max((len(point["losses"]) for point in steps), default=0)):
        having = [point for point in steps if place < len(point["losses"])]
        groups = [having[start : start + width] for start in range(0, len(having), width)]
        means = [sum(point["losses"][place] for point in group) / len(group) for group in groups]
        axes.plot([group[-1]["step"] for group in groups], means, label=f"loss {place + 1}")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    if steps:
        axes.legend(fontsize="small")


def _draw_acceptance(axes: "Axes", points: Sequence[Mapping[str, Any]]) -> None:
    """One line for each depth: the rate given that all before were accepted."""
    judged = [point for point in points if "rates" in point]
    for depth in range(len(judged[0]["rates"]) if judged else 0):
        rates = [point["rates"][depth] for point in judged]
        axes.plot([point["step"] for point in judged], rates, marker="o", label=f"depth {depth + 1}")
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance, held rollouts")
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    if judged:
        axes.set_title(f"acceptance length {judged[-1]['acceptance_length']:.2f} at last", fontsize="medium")
        axes.legend(fontsize="small")
