"""The curve of a run: JSON lines beside its checkpoint.

One a step holds step, epoch, tokens, learning_rate and losses (by depth); one a checkpoint holds step, tokens,
acceptance_length and rates (by depth) on rollouts held back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from core.errors import InvalidArgument
from core.whole_file import written_whole

CHECKPOINTS: Final = "checkpoint"
"""The folder of a run's checkpoint and curve, under its own."""

CURVE: Final = "curve.jsonl"


class Curve:
    """Appends to a file; each line is whole once `add` returns."""

    def __init__(self, path: Path, step: int) -> None:
        """Lines of steps past `step` are dropped, all of them where it is 0: those steps will be taken again.

        Raises InvalidArgument where the file is something else.
        """
        self._path = path
        kept: list[str] = []
        if path.exists():
            try:
                lines = path.read_text().splitlines(keepends=True)
                whole = [line for line in lines if line.endswith("\n")]
                kept = [line for line in whole if json.loads(line)["step"] <= step]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidArgument("out", f"{path} is no curve of a training: {error}") from error
        with written_whole(path) as beside:
            beside.write_text("".join(kept) if step else "")

    def add(self, entry: Mapping[str, Any]) -> None:
        """One line."""
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The points of a run whose checkpoint lies in `folder`, in order; a last line that is not whole is none.

    Raises InvalidArgument where there are none.
    """
    path = folder / CURVE
    try:
        lines = path.read_text().splitlines(keepends=True)
        points = [json.loads(line) for line in lines if line.endswith("\n")]
        for point in points:
            _require_point(point)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("run", f"{path} is no curve of a training: {error}") from error
    if not points:
        raise InvalidArgument("run", f"{path} holds no step yet")
    return points


def _require_point(point: dict[str, Any]) -> None:
    """Raises as `float` and look-ups do."""
    float(point["step"])
    for value in (*point.get("losses", ()), *point.get("rates", ())):
        float(value)
    if "rates" in point:
        float(point["acceptance_length"])
