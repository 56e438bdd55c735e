"""The curve of a run as a picture, by the command and after a training."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from core.errors import InvalidArgument
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rollouts import command, done, make_tiny_target
from training.curve import CHECKPOINTS, CURVE, read_curve
from training.plot import _draw_losses, plot_run

PNG = b"\x89PNG\r\n\x1a\n"


POINTLESS: tuple[tuple[str, list[str]], ...] = (
    ("no number", ['{"step": "x"}']),
    ("text", ['{"step": 1, "losses": "abc"}']),
    ("no list", ['{"step": 1, "losses": 1}']),
    ("no length", ['{"step": 1, "rates": [0.5]}']),
    ("no rate", ['{"step": 1, "rates": [null]}']),
)


def run_with(folder: Path, lines: list[str]) -> Path:
    (folder / CHECKPOINTS).mkdir(parents=True)
    (folder / CHECKPOINTS / CURVE).write_text("".join(f"{line}\n" for line in lines))
    return folder


def steps(count: int, judged_every: int = 0) -> list[str]:
    points: list[dict[str, object]] = []
    for step in range(1, count + 1):
        points.append({"step": step, "tokens": 9 * step, "losses": [4 / step, 5 / step]})
        if judged_every and step % judged_every == 0:
            points.append({"step": step, "acceptance_length": 1.5, "rates": [0.5, 0.25]})
    return [json.dumps(point) for point in points]


@pytest.mark.parametrize(("count", "judged_every"), [(1, 0), (7, 3), (450, 50)])
def test_a_curve_becomes_a_png(count: int, judged_every: int, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", steps(count, judged_every))
    out = tmp_path / "pictures" / "curve.png"
    assert done(f"train plot {run} --out {out}").stdout.strip() == str(out)
    assert out.read_bytes().startswith(PNG)
    assert [path.name for path in out.parent.iterdir()] == ["curve.png"]


def test_losses_of_deeper_drafts_are_drawn_where_the_first_steps_have_none(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "losses": [1.0] if step < 6 else [1.0, 2.0]}) for step in range(1, 12)]
    axes = Figure().subplots()
    _draw_losses(axes, read_curve(run_with(tmp_path / "run", lines) / CHECKPOINTS))
    first, second = axes.get_lines()
    for drawn, begin, loss in ((first, 1, 1.0), (second, 6, 2.0)):
        xs, ys = (np.asarray(values).tolist() for values in (drawn.get_xdata(), drawn.get_ydata()))
        assert xs == list(range(begin, 12))
        assert {*ys} == {loss}


def test_a_line_that_was_cut_off_by_a_kill_is_no_point(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", steps(3))
    with (run / CHECKPOINTS / CURVE).open("a") as file:
        file.write('{"step": 4, "los')
    assert [point["step"] for point in read_curve(run / CHECKPOINTS)] == [1, 2, 3]
    done(f"train plot {run} --out {tmp_path}/curve.png")


def test_a_place_that_can_be_no_picture_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", steps(3))
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "curve.png"):
        refused = command(f"train plot {run} --out {out}")
        assert refused.exit_code == 2
        assert "plot: " in refused.stderr


def test_what_is_no_curve_is_named(tmp_path: Path) -> None:
    for name, lines in (("empty", []), ("odd", ["{}"]), ("words", ["hello"]), ("list", ["[1]"]), *POINTLESS):
        with pytest.raises(InvalidArgument, match=r"curve\.jsonl"):
            read_curve(run_with(tmp_path / name, lines) / CHECKPOINTS)
    (tmp_path / "nothing").mkdir()
    refused = command(f"train plot {tmp_path}/nothing --out {tmp_path}/curve.png")
    assert refused.exit_code == 2
    assert "is no curve" in " ".join(refused.stderr.split())


def test_without_matplotlib_the_extra_is_named_before_a_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "rollouts").mkdir()
    for line in (
        f"train plot {run_with(tmp_path / 'run', steps(2))} --out {tmp_path}/curve.png",
        f"train medusa --rollouts {tmp_path}/rollouts --out {tmp_path}/heads --plot {tmp_path}/curve.png "
        f"--model {make_tiny_model(tmp_path / 'model')}",
    ):
        refused = command(line)
        assert refused.exit_code == 1
        assert "pip install outrider[plots]" in " ".join(refused.stderr.split())
    assert not (tmp_path / "heads").exists()


def test_a_training_draws_its_curve(tmp_path: Path) -> None:
    model, rollouts = make_tiny_target(tmp_path, tokens=700)
    line = f"train eagle --model {model} --rollouts {rollouts} --out {tmp_path}/head --draft-vocab 128"
    done(
        f"{line} --depth 2 --epochs 1 --threads 1 --features {tmp_path}/features --plot {tmp_path}/curve.png"
    )
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    first = (tmp_path / "curve.png").read_bytes()
    plot_run(tmp_path / "head", tmp_path / "again.png")
    assert len((tmp_path / "again.png").read_bytes()) == len(first)
