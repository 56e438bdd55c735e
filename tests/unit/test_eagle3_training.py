"""The head as it is trained: its deeper steps are those of drafting, and a killed run goes on as if it had not been."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model
from training.eagle3 import Eagle3Head, Eagle3Shape
from training.features import FeatureCache, Features, compute
from training.judge import judge
from training.rollout_store import Rollout
from training.trainer import TargetHead, Trainer, TrainingPlan, draft_vocabulary, losses_of, make_batch

SHAPE = Eagle3Shape(
    hidden_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_dim=48,
    num_planes=3,
    draft_vocab=40,
    norm_epsilon=1e-5,
    rope_theta=10000.0,
)
IDS = tuple(range(5, 85, 2))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_head(seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(SHAPE, IDS)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    return head


def drafted(head: Eagle3Head, planes: Tensor, embedded: Tensor, known: int, depth: int) -> list[Tensor]:
    """Draft logits behind `known` positions, one position at a time, with keys and values kept: as it is served."""
    layer, shape = head.midlayer, SHAPE
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def position(hidden: Tensor, words: Tensor, at: int) -> Tensor:
        both = torch.cat([layer.input_layernorm(words), layer.hidden_norm(hidden)])
        attention = layer.self_attn
        query = _rotated(attention.q_proj(both).view(shape.num_heads, shape.head_dim), at)
        keys.append(_rotated(attention.k_proj(both).view(shape.num_kv_heads, shape.head_dim), at))
        values.append(attention.v_proj(both).view(shape.num_kv_heads, shape.head_dim))
        groups = shape.num_heads // shape.num_kv_heads
        all_keys = torch.stack(keys).repeat_interleave(groups, dim=1)
        all_values = torch.stack(values).repeat_interleave(groups, dim=1)
        scores = torch.einsum("hd,phd->hp", query, all_keys) / math.sqrt(shape.head_dim)
        mixed = torch.einsum("hp,phd->hd", torch.softmax(scores, -1), all_values)
        hidden = hidden + attention.o_proj(mixed.flatten())
        return cast(Tensor, hidden + layer.mlp(layer.post_attention_layernorm(hidden)))

    hidden = torch.zeros(0)
    for at in range(known):
        hidden = position(head.fc(planes[at]), embedded[at], at)
    logits = [head.lm_head(head.norm(hidden))]
    for step in range(1, depth):
        at = known - 1 + step
        hidden = position(hidden, embedded[at], at)
        logits.append(head.lm_head(head.norm(hidden)))
    return logits


def _rotated(rows: Tensor, at: int) -> Tensor:
    angles = at * SHAPE.rope_theta ** -(torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
    cosines, sines = angles.cos().repeat(2), angles.sin().repeat(2)
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat([-second, first], -1) * sines


@torch.no_grad()
def test_the_unrolled_steps_are_those_of_drafting_one_position_at_a_time() -> None:
    head = make_head()
    planes, embedded = torch.randn(12, 96), torch.randn(12, 32)
    unrolled = head.unroll(planes[None], embedded[None], 4)
    for known in (1, 2, 5, 9):
        for step, logits in enumerate(drafted(head, planes, embedded, known, 4)):
            torch.testing.assert_close(unrolled[step][0, known - 1 + step], logits, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_row_of_a_batch_does_not_depend_on_padding_or_neighbours() -> None:
    head = make_head()
    planes, embedded = torch.randn(2, 10, 96), torch.randn(2, 10, 32)
    alone = head.unroll(planes[:1, :6], embedded[:1, :6], 3)
    together = head.unroll(planes, embedded, 3)
    for one, many in zip(alone, together, strict=True):
        torch.testing.assert_close(many[:1, :6], one, atol=1e-5, rtol=1e-4)


def made_up(number: int, length: int, generator: torch.Generator, temperature: float = 0.0) -> Features:
    ids = tuple(IDS[int(torch.randint(len(IDS), (1,), generator=generator))] for _ in range(length))
    rollout = Rollout(number, "code", temperature, 4, ids)
    planes = torch.randn(length, 3, 32, generator=generator)
    return Features(rollout, planes, torch.randn(length, 32, generator=generator))


def target_of(seed: int = 1) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(torch.randn(90, 32, generator=generator), torch.randn(90, 32, generator=generator))


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_what_counts() -> None:
    head, target = make_head(), target_of()
    found = [
        made_up(number, length, torch.Generator().manual_seed(number)) for number, length in ((0, 9), (1, 7))
    ]
    batch = make_batch(found, target, 100)
    losses = losses_of(head, batch, target.output, 2)
    logits = head.unroll(batch.planes, batch.embedded, 2)
    for step in range(2):
        terms = []
        for row, features in enumerate(found):
            length = len(features.rollout.token_ids)
            for position in range(max(2, step), length - 2):
                scores = features.final[position + 1] @ target.output.T
                if int(scores.argmax()) in IDS:
                    wanted = torch.softmax(scores[list(IDS)], -1)
                    terms.append(-(wanted * functional.log_softmax(logits[step][row, position], -1)).sum())
        assert terms
        torch.testing.assert_close(losses[step], torch.stack(terms).mean(), atol=1e-4, rtol=1e-4)


def test_the_draft_vocabulary_holds_the_commonest_ids() -> None:
    rollouts = [Rollout(0, "code", 0.0, 1, (7, 7, 7, 9, 9, 3))]
    assert draft_vocabulary(rollouts, 2) == [7, 9]
    assert draft_vocabulary(rollouts, 5) == [0, 1, 3, 7, 9]


class _Cache(FeatureCache):
    """Features in memory."""

    def __init__(self, found: list[list[Features]]) -> None:
        self._found = found

    @property
    def num_parts(self) -> int:
        return len(self._found)

    def read(self, number: int):  # type: ignore[no-untyped-def]
        return iter(self._found[number])


def cache_of(target: TargetHead) -> _Cache:
    """Rollouts whose next tokens follow from the planes: something to learn."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(8):
        features = made_up(number, 14, generator)
        ids = torch.tensor(features.rollout.token_ids)
        final = torch.roll(target.output[ids], -1, 0)
        planes = torch.stack([final, target.output[ids], torch.roll(final, -1, 0)], 1)
        found.append(Features(features.rollout, planes, final))
    return _Cache([found[:4], found[4:]])


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    target = target_of()
    plan = TrainingPlan(epochs=50, batch=4, depth=2, warm_up_steps=2)

    def train(folder: Path, stops: list[int]) -> Eagle3Head:
        for stop in stops:
            trainer = Trainer(make_head(), target, cache_of(target), plan, folder)
            trainer.run(12, lambda trainer=trainer, stop=stop: trainer.progress.step >= stop, lambda *_: None)  # type: ignore[misc]
        assert trainer.progress.step == 12
        return trainer.head

    whole, parts = train(tmp_path / "whole", [12]), train(tmp_path / "parts", [5, 6, 12])
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(InvalidArgument, match="another plan"):
        Trainer(make_head(), target, cache_of(target), dataclasses.replace(plan, depth=3), tmp_path / "whole")


def test_training_raises_acceptance(tmp_path: Path) -> None:
    target = target_of()
    cache = cache_of(target)
    plan = TrainingPlan(epochs=60, batch=4, depth=2, warm_up_steps=5, learning_rate=5e-3)
    trainer = Trainer(make_head(), target, cache, plan, tmp_path)
    found = [features for part in range(2) for features in cache.read(part)]
    before = judge(trainer.head, target, found, 2)["all"].acceptance_length
    trainer.run(120, lambda: False, lambda *_: None)
    after = judge(trainer.head, target, found, 2)["all"]
    assert after.acceptance_length > before + 0.5
    assert after.offered[0] == after.chains > 0
    assert after.offered[1] == after.accepted[0]


def test_features_are_those_of_one_pass_and_come_back_from_disk(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine = Engine.load(
        model, EngineSettings(dtype="float32", num_threads=1, num_blocks=64, hidden_layers=(0, 2))
    )
    generator = torch.Generator().manual_seed(0)
    rollouts = [
        Rollout(number, "code", 0.0, 3, tuple(torch.randint(1, 200, (length,), generator=generator).tolist()))
        for number, length in enumerate((300, 20, 5))
    ]
    cache = FeatureCache(tmp_path / "features", rollouts, "key")
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
    engine.close()
    (path,) = (tmp_path / "features" / "key").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidArgument, match=path.name):
        list(cache.read(0))
