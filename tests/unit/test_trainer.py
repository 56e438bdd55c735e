"""A stopped or killed run goes on as if it had not been, and what is measured of a head is what it drafts."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.engine import Engine
from tests.support.made_up_features import HIDDEN, IDS, CacheInMemory, followable, followable_cache, target_of
from tests.support.tiny_model import make_tiny_model
from training.batch import Batch, TargetHead, common_start, draft_vocabulary, make_batch, trained_tokens
from training.eagle3 import Eagle3Head
from training.features import FeatureCache, Features, compute
from training.head import DraftHead
from training.judge import RANKS, judge
from training.medusa import MedusaHeads
from training.recurrent import HeadShape
from training.rollout_store import Rollout
from training.trainer import Trainer, TrainingPlan

PLAN = TrainingPlan(epochs=50, batch=4, warm_up_steps=2, save_steps=4, tokens=480)
"""480 answer tokens are 12 steps of 4 rollouts with 10 each."""
SHAPE = HeadShape(HIDDEN, 4, 2, 8, 48, 3, len(IDS), 1e-5, 10000.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eagle3() -> DraftHead:
    torch.manual_seed(0)
    return Eagle3Head(SHAPE, IDS, 2)


def medusa() -> DraftHead:
    return MedusaHeads(HIDDEN, 3, IDS)


def trainer_in(folder: Path, head: DraftHead, plan: TrainingPlan = PLAN, **others: Any) -> Trainer:
    target = target_of()
    return Trainer(head, target, followable_cache(target), plan, folder, **others)


def never() -> bool:
    return False


def ignore(*_: object) -> None:
    pass


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(make: Callable[[], DraftHead], tmp_path: Path) -> None:
    def train(folder: Path, stops: list[int]) -> DraftHead:
        for stop in stops:
            trainer = trainer_in(folder, make())
            trainer.run(lambda trainer=trainer, stop=stop: trainer.progress.step >= stop, ignore)  # type: ignore[misc]
        assert trainer.progress.step == 12
        assert trainer.done
        return trainer.head

    whole, parts = train(tmp_path / "whole", [12]), train(tmp_path / "parts", [1, 5, 6, 12])
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    curves = [(tmp_path / name / "curve.jsonl").read_text() for name in ("whole", "parts")]
    assert curves[0] == curves[1]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("killed_at", "checkpoint"), [(3, 0), (7, 4)])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    killed_at: int, checkpoint: int, tmp_path: Path
) -> None:
    watched = [followable(20, target_of())]

    def kill_at(step: int) -> Callable[..., None]:
        def report(progress: Any, losses: list[float]) -> None:
            if progress.step == step:
                raise Killed

        return report

    whole = trainer_in(tmp_path / "whole", medusa(), watched=watched)
    whole.run(never, ignore)
    with pytest.raises(Killed):
        trainer_in(tmp_path / "killed", medusa(), watched=watched).run(never, kill_at(killed_at))
    again = trainer_in(tmp_path / "killed", medusa(), watched=watched)
    assert again.progress.step == checkpoint
    again.run(never, ignore)
    for ours, theirs in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    lines = [(tmp_path / name / "curve.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert lines[0] == lines[1]
    assert [json.loads(line)["step"] for line in lines[0]] == [
        0,
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        7,
        8,
        8,
        9,
        10,
        11,
        12,
        12,
    ]


def test_a_checkpoint_of_something_else_is_refused_by_what_differs(tmp_path: Path) -> None:
    trainer_in(tmp_path, medusa()).save()
    with pytest.raises(InvalidArgument, match="another plan"):
        trainer_in(tmp_path, medusa(), dataclasses.replace(PLAN, learning_rate=0.5))
    with pytest.raises(InvalidArgument, match="another head"):
        trainer_in(tmp_path, eagle3())
    target = target_of()
    with pytest.raises(InvalidArgument, match="another set of rollouts"):
        Trainer(medusa(), target, CacheInMemory([[followable(3, target)]]), PLAN, tmp_path)
    for damage in (b"", b"\x80\x04\x95pickle"):
        (tmp_path / "checkpoint.safetensors").write_bytes(damage)
        with pytest.raises(InvalidArgument, match=r"checkpoint\.safetensors is no checkpoint"):
            trainer_in(tmp_path, medusa())
    save_file({"odd": torch.zeros(1)}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(InvalidArgument, match=r"checkpoint\.safetensors is no checkpoint"):
        trainer_in(tmp_path, medusa())


def test_training_ends_after_epochs_or_tokens_whichever_comes_first(tmp_path: Path) -> None:
    for name, plan, steps in (
        ("epochs", dataclasses.replace(PLAN, epochs=2), 4),
        ("tokens", dataclasses.replace(PLAN, epochs=2, tokens=41), 2),
        ("all", dataclasses.replace(PLAN, epochs=1, tokens=None), 2),
    ):
        trainer = trainer_in(tmp_path / name, medusa(), plan)
        trainer.run(never, ignore)
        assert trainer.progress.step == steps


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, epochs=50, tokens=4000, warm_up_steps=5)
    trainer_in(tmp_path, medusa(), plan).run(never, ignore)
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines]
    assert len(rates) == 100
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[0] == pytest.approx(plan.learning_rate / 5, rel=0.01)
    assert rates[-1] == pytest.approx(plan.learning_rate / 10, rel=0.05)


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, medusa(), dataclasses.replace(PLAN, save_steps=1))
    trainer.run(lambda: True, ignore)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with torch.no_grad():
        next(trainer.head.parameters()).fill_(torch.nan)
    with pytest.raises(InvalidArgument, match="no number"):
        trainer.run(never, ignore)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_training_raises_acceptance(make: Callable[[], DraftHead], tmp_path: Path) -> None:
    target = target_of()
    watched = [followable(number, target) for number in (20, 21)]
    plan = TrainingPlan(epochs=80, batch=4, warm_up_steps=5, learning_rate=5e-3, save_steps=40)
    trainer = trainer_in(tmp_path, make(), plan, watched=watched)
    before = judge(trainer.head, target, watched)["all"].acceptance_length
    trainer.run(never, ignore)
    after = judge(trainer.head, target, watched)["all"]
    assert after.acceptance_length > before + 0.5
    assert after.offered[0] == after.chains > 0
    assert after.offered[1] == after.accepted[0]
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    judged = [point for point in points if "rates" in point]
    assert [point["step"] for point in judged] == [0, 40, 80, 120, 160]
    assert judged[0]["acceptance_length"] == pytest.approx(before, abs=1e-3)
    assert judged[-1]["acceptance_length"] == pytest.approx(after.acceptance_length, abs=1e-3)


class Oracle(DraftHead):
    """Drafts the true tokens, but at depth 2 of odd starts only as its second best."""

    kind = "oracle"
    depth = 2

    @property
    def target_ids(self) -> torch.Tensor:
        return torch.tensor(IDS)

    def sizes(self) -> dict[str, float]:
        return {}

    def losses(self, batch: Any, target: TargetHead) -> list[torch.Tensor]:
        return []

    def draft_ids(self, batch: Any, target: TargetHead, starts: Any, ranks: int) -> torch.Tensor:
        rows, tokens = starts
        ids = torch.zeros(len(rows), self.depth, ranks, dtype=torch.int64)
        for depth in range(self.depth):
            ids[:, depth, 0] = batch.token_ids[rows, tokens + 2 + depth]
        odd = tokens % 2 == 1
        ids[odd, 1] = ids[odd, 1].roll(1, -1)
        return ids


def test_acceptance_is_counted_by_depth_rank_and_class() -> None:
    target = target_of()
    found = [followable(number, target, length=15) for number in (1, 2)]
    other = dataclasses.replace(found[1], rollout=dataclasses.replace(found[1].rollout, class_name="qa"))
    sampled = dataclasses.replace(found[0], rollout=dataclasses.replace(found[0].rollout, temperature=0.7))
    judged = judge(Oracle(), target, [found[0], other, sampled])
    # the first root is token 4, the first of the answer; the last start leaves room for depth 2: 3 … 11
    assert judged.keys() == {"all", "code", "qa"}
    assert judged["code"].chains == 9
    assert judged["all"].chains == 18
    assert judged["code"].accepted == [9, 4]
    assert judged["code"].offered == [9, 9]
    assert judged["code"].rates == [1.0, 4 / 9]
    assert judged["code"].acceptance_length == 1 + 13 / 9
    assert judged["code"].ranks == [[9] + [0] * (RANKS - 1), [4, 5] + [0] * (RANKS - 2)]
    assert judged["all"].rank_rates[1][:2] == [4 / 9, 5 / 9]


def test_the_draft_vocabulary_holds_the_commonest_ids() -> None:
    rollouts = [Rollout(0, "code", 0.0, 1, (7, 7, 7, 9, 9, 3))]
    assert draft_vocabulary(rollouts, 2) == [7, 9]
    assert draft_vocabulary(rollouts, 5) == [0, 1, 3, 7, 9]


def test_a_batch_is_padded_and_cut() -> None:
    target = target_of()
    found = [followable(0, target, length=9), followable(1, target, length=5)]
    batch = make_batch(found, 7)
    assert batch.token_ids.shape == (2, 7)
    assert batch.token_ids[1, 5:].tolist() == [0, 0]
    assert batch.counted.sum(1).tolist() == [3, 1]
    assert [trained_tokens(features.rollout, 7) for features in found] == [3, 1]
    assert torch.equal(batch.planes[0, :7], found[0].planes[:7].flatten(1))
    assert torch.equal(batch.best_ids[0, :7], found[0].best_ids[:7])


def test_user_turns_are_learnt_from_behind_the_template_s_head() -> None:
    target = target_of()
    found = [
        dataclasses.replace(features, rollout=dataclasses.replace(features.rollout, token_ids=ids))
        for features in (followable(0, target, length=9), followable(1, target, length=9))
        for ids in [(1, 2, *features.rollout.token_ids[2:])]
    ]
    shared = common_start([features.rollout for features in found])
    assert shared == 2
    batch = make_batch(found, 7, shared)
    assert batch.counted.sum(1).tolist() == [5, 5]
    assert make_batch(found, 7, 100).counted.tolist() == make_batch(found, 7).counted.tolist()


def test_training_counts_user_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, medusa())
    seen: list[Batch] = []

    def step(batch: Batch) -> list[float]:
        seen.append(batch)
        return [0.0]

    monkeypatch.setattr(trainer, "_step", step)
    trainer.run(never, ignore)
    assert seen
    assert all(bool(batch.counted[:, 0].all()) for batch in seen)


def test_a_file_that_is_no_curve_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text("mine\n")
    with pytest.raises(InvalidArgument, match="no curve"):
        trainer_in(tmp_path, medusa())
    assert (tmp_path / "curve.jsonl").read_text() == "mine\n"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(0, 2))
    engine = Engine.load(make_tiny_model(tmp_path / "model"), settings)
    yield engine
    engine.close()


def some_rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    return [
        Rollout(
            number,
            "code",
            temperature,
            3,
            tuple(torch.randint(1, 200, (size,), generator=generator).tolist()),
        )
        for number, (size, temperature) in enumerate(((300, 0.0), (20, 0.7), (5, 0.0)))
    ]


def test_features_are_those_of_one_pass_and_come_back_from_disk(engine: Engine, tmp_path: Path) -> None:
    rollouts = some_rollouts()
    cache = FeatureCache(tmp_path / "features", rollouts, "revision", (0, 2))
    done: list[int] = []
    cache.prepare(engine, done.append)
    assert sum(done) == 325
    found = list(cache.read(0))
    for features, rollout in zip(found, rollouts, strict=True):
        again = compute(engine, rollout)
        assert features.rollout == rollout
        assert features.planes.shape == (len(rollout.token_ids), 2, 64)
        torch.testing.assert_close(features.planes, again.planes.bfloat16())
        torch.testing.assert_close(features.final, again.final.bfloat16())
        assert torch.equal(features.best_ids, again.best_ids)
    assert found[0].best_ids[:-1].tolist() == list(rollouts[0].token_ids[1:])
    best = (compute(engine, rollouts[1]).final @ engine.weights.embedding.T).argmax(-1)
    assert found[1].best_ids.tolist() == best.tolist()
    (path,) = (tmp_path / "features").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidArgument, match=path.name):
        list(cache.read(0))


def test_a_head_that_needs_fewer_layers_reads_the_features_of_another(engine: Engine, tmp_path: Path) -> None:
    rollouts = some_rollouts()
    both = FeatureCache(tmp_path / "features", rollouts, "revision", (0, 2))
    both.prepare(engine, ignore)
    fewer = [FeatureCache(tmp_path / "features", rollouts, "revision", layers) for layers in ((), (2,))]
    for cache in fewer:
        cache.prepare(engine, ignore)
    assert len(list((tmp_path / "features").rglob("*.safetensors"))) == 1
    plain, last = (list(cache.read(0)) for cache in fewer)
    for all_of_it, none, one in zip(both.read(0), plain, last, strict=True):
        assert none.planes.shape == (len(none.rollout.token_ids), 0, 64)
        assert torch.equal(one.planes, all_of_it.planes[:, 1:])
        assert torch.equal(none.final, all_of_it.final)
        _same_batches([none], [one])


def _same_batches(ours: list[Features], theirs: list[Features]) -> None:
    assert torch.equal(make_batch(ours, 100).final, make_batch(theirs, 100).final)
