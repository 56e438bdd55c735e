"""A shallow share: at first drafts of depth 1 only, and a run that was stopped in it ends as one that was not."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from core.errors import InvalidArgument
from tests.support.made_up_features import HIDDEN, IDS, followable_cache, made_up, target_of
from tests.support.tiny_rollouts import command, done, make_tiny_target
from training.batch import make_batch
from training.eagle import EagleHead
from training.eagle3 import Eagle3Head
from training.head import DraftHead
from training.medusa import MedusaHeads
from training.mtp import MtpHead
from training.recurrent import HeadShape, RecurrentHead
from training.trainer import Trainer, TrainingPlan

SHAPE = HeadShape(HIDDEN, 4, 2, 8, 48, 0, len(IDS), 1e-5, 10000.0)
PLAN = TrainingPlan(epochs=50, batch=4, warm_up_steps=2, save_steps=4, tokens=480, shallow_share=0.5)
"""12 steps of 4 rollouts with 10 answer tokens each."""

Make = Callable[[int], RecurrentHead]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eagle3(depth: int) -> RecurrentHead:
    torch.manual_seed(0)
    return Eagle3Head(dataclasses.replace(SHAPE, num_planes=3), IDS, depth)


def eagle(depth: int) -> RecurrentHead:
    torch.manual_seed(0)
    return EagleHead(SHAPE, IDS, depth)


def mtp(depth: int) -> RecurrentHead:
    torch.manual_seed(0)
    return MtpHead(SHAPE, IDS, depth)


@torch.no_grad()
@pytest.mark.parametrize("make", [eagle3, eagle, mtp])
def test_the_shallow_loss_is_that_of_depth_one(make: Make) -> None:
    target = target_of()
    batch = make_batch([made_up(number, 30, target) for number in range(3)], 100)
    (shallow,) = make(3).shallow_losses(batch, target)
    assert torch.isfinite(shallow)
    assert torch.equal(shallow, make(3).losses(batch, target)[0])  # answers begin at 4: depth 3 leaves all
    assert torch.equal(shallow, make(1).losses(batch, target)[0])
    deep = make(6)
    assert torch.equal(shallow, deep.shallow_losses(batch, target)[0])
    assert not torch.equal(shallow, deep.losses(batch, target)[0])  # depth 6 leaves tokens from 7 on


def trained(folder: Path, plan: TrainingPlan, make: Callable[[], DraftHead], stops: list[int]) -> DraftHead:
    target = target_of()
    for stop in [*stops, 1000]:
        trainer = Trainer(make(), target, followable_cache(target), plan, folder)
        trainer.run(lambda trainer=trainer, stop=stop: trainer.progress.step >= stop, lambda *_: None)  # type: ignore[misc]
    assert trainer.done
    return trainer.head


def losses_of(folder: Path) -> list[int]:
    """How many losses each step had."""
    points = map(json.loads, (folder / "curve.jsonl").read_text().splitlines())
    return [len(point["losses"]) for point in points if "losses" in point]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, [3] * 12), (0.25, [1] * 3 + [3] * 9), (0.5, [1] * 6 + [3] * 6), (1.0, [1] * 12)],
)
def test_the_first_share_of_the_tokens_learns_one_depth(
    share: float, expected: list[int], tmp_path: Path
) -> None:
    trained(tmp_path, dataclasses.replace(PLAN, shallow_share=share), lambda: eagle3(3), [])
    assert losses_of(tmp_path) == expected


def test_a_head_that_learns_all_depths_at_once_is_not_changed_by_it(tmp_path: Path) -> None:
    def heads() -> DraftHead:
        return MedusaHeads(HIDDEN, 3, IDS)

    ours = trained(tmp_path / "ours", PLAN, heads, [])
    plain = trained(tmp_path / "plain", dataclasses.replace(PLAN, shallow_share=0.0), heads, [])
    assert losses_of(tmp_path / "ours") == [3] * 12
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", [eagle3, eagle, mtp])
def test_a_run_stopped_in_the_share_and_behind_it_ends_as_one_that_was_not(
    make: Make, tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", PLAN, lambda: make(2), [])
    parts = trained(tmp_path / "parts", PLAN, lambda: make(2), [1, 5, 6, 7, 9])
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    curves = [(tmp_path / name / "curve.jsonl").read_bytes() for name in ("whole", "parts")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidArgument, match="shallow_share: must be 0 to 1"):
        TrainingPlan(shallow_share=share)


def test_the_commands_of_recurrent_heads_take_it_and_no_other(tmp_path: Path) -> None:
    model, rollouts = make_tiny_target(tmp_path, tokens=700)
    common = f"--model {model} --rollouts {rollouts} --threads 1 --features {tmp_path}/features --epochs 1"
    for kind in ("eagle", "eagle3", "mtp"):
        out = tmp_path / kind
        done(f"train {kind} {common} --out {out} --draft-vocab 64 --depth 2 --shallow-share 0.5")
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["recipe"]["plan"]["shallow_share"] == 0.5
        counts = losses_of(out / "checkpoint")
        assert counts == sorted(counts)
        assert {*counts} == {1, 2}
    refused = command(f"train eagle {common} --out {tmp_path}/odd --shallow-share 1.5")
    assert refused.exit_code == 2
    assert "--shallow-share" in refused.stderr
    assert "No such option" in command(f"train medusa {common} --out {tmp_path}/odd --shallow-share 1").stderr
