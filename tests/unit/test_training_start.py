"""A training that begins with the weights of a head trained before, and what may not be begun with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_rollouts import command, done, make_rollouts, make_tiny_target, training_line

HEADS = {
    "eagle3": "eagle3 --depth 2 --draft-vocab 64",
    "mtp": "mtp --depth 2 --draft-vocab 64",
    "medusa": "medusa --heads 2 --draft-vocab 64",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and its rollouts."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny"), tokens=700)


@pytest.fixture(scope="module")
def heads(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained head of each kind."""
    folder = tmp_path_factory.mktemp("heads")
    for name, options in HEADS.items():
        done(training_line(tiny, options, folder / name, folder / "features"))
    return folder


@pytest.fixture(scope="module")
def others(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and rollouts in which other tokens are the most frequent."""
    return tiny[0], make_rollouts(tiny[0], tmp_path_factory.mktemp("others") / "rollouts", tokens=700, seed=1)


@pytest.mark.parametrize("kind", HEADS)
def test_it_begins_with_the_weights_and_the_vocabulary_of_the_head(
    kind: str, others: tuple[Path, Path], heads: Path, tmp_path: Path
) -> None:
    line = training_line(others, HEADS[kind], tmp_path, heads / "features")
    done(f"{line} --tokens 1 --learning-rate 1e-12 --start {heads / kind}")
    before, after = (load_file(folder / "model.safetensors") for folder in (heads / kind, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    recipes = [
        json.loads((folder / "manifest.json").read_text())["recipe"] for folder in (heads / kind, tmp_path)
    ]
    assert recipes[1]["started_with"] == recipes[0]


@pytest.mark.parametrize(
    ("options", "start", "said"),
    [
        (HEADS["medusa"], "mtp", "start: {start}: kind is mtp, this training's medusa"),
        ("medusa --heads 3 --draft-vocab 64", "medusa", "start: {start}: shape."),
        (f"{HEADS['eagle3']} --layers 0,2", "eagle3", "start: {start}: recipe.trained_layers is "),
        (HEADS["eagle3"], "features", "is no manifest of a draft"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    options: str, start: str, said: str, tiny: tuple[Path, Path], heads: Path, tmp_path: Path
) -> None:
    line = training_line(tiny, options, tmp_path / "out", heads / "features")
    refused = command(f"{line} --start {heads / start}")
    assert refused.exit_code == 2, refused.output
    assert said.format(start=heads / start) in " ".join(refused.stderr.split())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_run_goes_on_from_its_own_start_only(tiny: tuple[Path, Path], heads: Path, tmp_path: Path) -> None:
    line = training_line(tiny, HEADS["medusa"], tmp_path, heads / "features") + " --tokens 1"
    done(f"{line} --start {heads / 'medusa'}")
    assert "another start; take another folder" in " ".join(command(line).stderr.split())
    done(f"{line} --start {heads / 'medusa'}")
