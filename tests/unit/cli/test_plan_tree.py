"""`outrider plan-tree` prints the best tree for each number of nodes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app


@pytest.fixture
def measurements(tmp_path: Path) -> Path:
    path = tmp_path / "m.json"
    values = {
        "rank_rates": [0.8, 0.5],
        "step_seconds": {"1": 0.02, "4": 0.022, "12": 0.06},
        "draft_level_seconds": 0.001,
    }
    path.write_text(json.dumps(values))
    return path


def test_it_lists_every_budget_and_names_the_fastest(measurements: Path) -> None:
    done = CliRunner().invoke(
        app, ["plan-tree", str(measurements), "--max-nodes", "8", "--max-depth", "3", "--json"]
    )
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [tree["nodes"] for tree in plan["trees"]] == list(range(9))
    assert plan["trees"][0]["tokens_per_step"] == 1.0
    assert plan["trees"][0]["seconds_per_step"] == pytest.approx(0.02)
    assert plan["trees"][2]["children"] == [1, 1, 0], "0.8 · 0.8 is more than 0.2 · 0.5"
    assert plan["best"] == max(plan["trees"], key=lambda tree: tree["tokens_per_second"])


def test_it_prints_a_table_with_the_fastest_marked(measurements: Path) -> None:
    done = CliRunner().invoke(app, ["plan-tree", str(measurements), "--max-nodes", "4"])
    assert done.exit_code == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["nodes", "depth", "tokens/step"]
    assert len(lines) == 5
    assert sum(line.endswith("*") for line in lines) == 1


def test_bad_measurements_end_it_with_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"rank_rates": [7]}')
    done = CliRunner().invoke(app, ["plan-tree", str(path)])
    assert done.exit_code == 2
    assert "rank_rates" in done.stderr
