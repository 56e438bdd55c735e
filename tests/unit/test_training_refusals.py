"""What a training cannot do it says before it computes, and it overwrites nothing that is not its own."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from core.whole_file import held_alone
from decode.drafters.vocabulary import vocabulary_digest
from engine.weights import open_model
from tests.support.made_up_features import HIDDEN, IDS, CacheInMemory, followable, followable_cache, target_of
from tests.support.tiny_rollouts import command, done, make_tiny_target, training_line
from training.eagle3 import Eagle3Options
from training.medusa import MedusaHeads, MedusaOptions
from training.rollout_store import Recipe, Rollout, RolloutStore, read_recipe
from training.run_head import HeadRun, Place, train_head
from training.trainer import Trainer, TrainingPlan

PLAN = TrainingPlan(epochs=1, batch=4, save_steps=2)


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


def told(line: str, status: int = 2) -> str:
    refused = command(line)
    assert refused.exit_code == status, refused.output
    return " ".join(refused.stderr.split())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["draft --layers 1", "medusa", "eagle3"])
def test_a_model_is_never_overwritten(kind: str, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny[0], model)
    before = contents(model)
    line = training_line((model, tiny[1]), kind, model, tmp_path / "features")
    assert f"out: {model} holds a model; take another folder" in told(line)
    assert contents(model) == before
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "weights.gguf").touch()
    line = training_line(tiny, kind, tmp_path / "gguf", tmp_path / "features")
    assert "gguf holds a model" in told(line)
    assert not (tmp_path / "features").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    features = tmp_path / "features"
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"out: {out} is no folder" in told(training_line(tiny, "mtp", out, features))
        assert f"out: {out} is no folder" in told(
            f"train rollouts --model {tiny[0]} --out {out} --tokens 1 --threads 1"
        )
    for plot in (tmp_path, tmp_path / "file" / "curve.png"):
        line = training_line(tiny, "mtp", tmp_path / "out", features)
        assert "plot: " in told(f"{line} --plot {plot}")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        status = 2 if out.exists() else 1
        assert str(tmp_path / "file") in told(f"models truncate {tiny[0]} --layers 1 --out {out}", status)
    assert not features.exists()
    assert not (tmp_path / "out").exists()
    assert "files: " in told(training_line(tiny, "mtp", tmp_path / "out", tmp_path / "file"), status=1)


def test_two_commands_are_not_at_work_in_one_folder(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    line = training_line(tiny, "medusa --heads 2 --draft-vocab 64", out, tmp_path / "features")
    with held_alone(out):
        assert f"out: another command is at work in {out}" in told(line, status=1)
        assert list(out.iterdir()) == []
    with held_alone(tiny[1]):
        done(line)  # rollouts are read while they grow
        grow = f"train rollouts --model {tiny[0]} --out {tiny[1]} --threads 1"
        assert "another command is at work" in told(grow, status=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("eagle3 --layers 0,3", "layers: must be 0 to 2, got 0, 3"),
        ("eagle3 --layers=-1,2", "layers: must be 0 to 2, got -1, 2"),
        ("medusa --learning-rate 0", "learning_rate: must be above 0"),
        ("medusa --learning-rate inf", "learning_rate: must be above 0"),
        ("medusa --seed 99999999999999999999", "--seed"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(
    options: str, said: str, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    assert said in told(training_line(tiny, options, tmp_path / "out", tmp_path / "features"))
    assert not (tmp_path / "features").exists()


def unheard(name: str, total: int) -> Callable[[int, str], None]:
    return lambda done, word: None


def train(run: HeadRun, recipe: Recipe, rollouts: list[Rollout], stop: Callable[[], bool]) -> bool:
    return train_head(run, recipe, rollouts, unheard, stop) is not None


def test_a_stop_ends_the_computing_of_features_and_the_same_run_goes_on(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = read_recipe(tiny[1])
    rollouts = list(RolloutStore(tiny[1], recipe))
    place = Place(tiny[0], tmp_path / "features", 1)
    run = HeadRun(place, tmp_path / "out", MedusaOptions(64, 2), PLAN)
    asked = iter(range(1000))
    assert not train(run, recipe, rollouts, lambda: next(asked) >= 3)
    assert next(asked) == 4  # at the fourth rollout, not behind the last
    assert list(place.features.rglob("*.*")) == []
    assert not run.out.exists()
    assert train(run, recipe, rollouts, lambda: False)


def test_a_checkpoint_of_other_layers_or_another_target_is_not_gone_on_from(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = read_recipe(tiny[1])
    rollouts = list(RolloutStore(tiny[1], recipe))
    place = Place(tiny[0], tmp_path / "features", 1)
    run = HeadRun(place, tmp_path / "out", Eagle3Options(64, (0, 1), 2), PLAN)
    assert train(run, recipe, rollouts, lambda: False)
    other = replace(run, options=Eagle3Options(64, (0, 2), 2))
    with pytest.raises(InvalidArgument, match="another choice of layers; take another folder"):
        train(other, recipe, rollouts, lambda: False)
    features = followable_cache(target_of())
    Trainer(MedusaHeads(HIDDEN, 2, IDS), target_of(), features, PLAN, tmp_path / "made up").save()
    features.revision = "another"
    with pytest.raises(InvalidArgument, match="another target; take another folder"):
        Trainer(MedusaHeads(HIDDEN, 2, IDS), target_of(), features, PLAN, tmp_path / "made up")


def test_rollouts_of_another_tokenizer_are_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny[0], model)
    values = json.loads((model / "tokenizer.json").read_text())
    values["added_tokens"][0]["content"] = "<|renamed|>"
    (model / "tokenizer.json").write_text(json.dumps(values))
    assert open_model(model).revision() == open_model(tiny[0]).revision()
    digests = [vocabulary_digest(Tokenizer.from_directory(path)) for path in (model, tiny[0])]
    assert digests[0] != digests[1]
    line = training_line((model, tiny[1]), "medusa", tmp_path / "out", tmp_path / "features")
    assert f"rollouts: they were rolled out with another tokenizer than {model} has" in told(line)


def test_rollouts_that_nothing_can_be_judged_on_are_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = read_recipe(tiny[1])
    rollouts = list(RolloutStore(tiny[1], recipe))
    run = HeadRun(Place(tiny[0], tmp_path / "f", 1), tmp_path / "out", MedusaOptions(64, 2), PLAN)
    sampled = [replace(rollout, temperature=0.7) for rollout in rollouts]
    with pytest.raises(InvalidArgument, match="is greedy and long enough for drafts of depth 2"):
        train(run, recipe, sampled, lambda: False)
    for few in (rollouts[:1], [rollout for rollout in rollouts if rollout.number % 16 != 5], []):
        with pytest.raises(InvalidArgument, match="too few to train and to judge on"):
            train(run, recipe, few, lambda: False)
    assert not run.out.exists()


def test_rollouts_without_answers_teach_nothing_and_are_refused(tmp_path: Path) -> None:
    target = target_of()
    found = followable(1, target)
    silent = replace(found, rollout=replace(found.rollout, answer_start=len(found.rollout.token_ids)))
    with pytest.raises(InvalidArgument, match="none of them has an answer"):
        Trainer(MedusaHeads(HIDDEN, 2, IDS), target, CacheInMemory([[silent]]), PLAN, tmp_path)


def test_weights_that_are_no_numbers_are_neither_kept_nor_written(tmp_path: Path) -> None:
    target = target_of()
    plan = replace(PLAN, save_steps=1)
    trainer = Trainer(MedusaHeads(HIDDEN, 2, IDS), target, followable_cache(target), plan, tmp_path)
    trainer.save()
    before = (tmp_path / "checkpoint.safetensors").read_bytes()

    def overflow(*_: object) -> None:
        with torch.no_grad():
            next(trainer.head.parameters()).fill_(torch.inf)

    with pytest.raises(InvalidArgument, match="weights of step 1: no numbers any more"):
        trainer.run(lambda: True, overflow)  # behind its only step, so no loss would tell
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_a_new_shard_overwrites_none_where_one_is_missing(tmp_path: Path) -> None:
    recipe = Recipe("m", "r", "t", 300, 0, 8, 8, ("code",), (0.0,))
    store = RolloutStore(tmp_path, recipe)
    for number in range(3):
        store.add(Rollout(number, "code", 0.0, 1, (number, 1, 2)))
        store.flush()
    (tmp_path / "shard-00000.safetensors").unlink()
    again = RolloutStore(tmp_path, recipe)
    again.add(Rollout(7, "code", 0.0, 1, (7, 1, 2)))
    again.flush()
    assert {rollout.number for rollout in RolloutStore(tmp_path, recipe)} == {1, 2, 7}


def test_a_folder_with_odd_letters_does_not_end_a_stopped_run_with_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from cluster.cli.train_progress import say

    say("out[/red] keeps it")
    assert "out[/red] keeps it" in capsys.readouterr().err


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    import resource

    line = training_line(tiny, "medusa --heads 2 --draft-vocab 64", tmp_path / "out", tmp_path / "features")
    done(line)
    before = (tmp_path / "out" / "checkpoint" / "checkpoint.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        said = told(line, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "files: " in said
    assert (tmp_path / "out" / "checkpoint" / "checkpoint.safetensors").read_bytes() == before
    done(line)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint", "manifest.json", "model.safetensors"]
