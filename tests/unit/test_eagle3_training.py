"""The head as it is trained: its deeper steps are those of drafting, its loss and drafts what they should be."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.weights import open_model
from tests.support.made_up_features import IDS, VOCAB, made_up, target_of
from tests.support.tiny_model import make_tiny_model
from training.batch import TargetHead, make_batch
from training.eagle3 import Eagle3Head
from training.recurrent import HeadShape

SHAPE = HeadShape(
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_head(seed: int = 0, depth: int = 2) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(SHAPE, IDS, depth)
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


def unrolled_logits(head: Eagle3Head, planes: Tensor, embedded: Tensor, depth: int) -> list[Tensor]:
    return [head.logits(hidden, target_of()) for hidden in head.unroll(planes, embedded, depth)]


@torch.no_grad()
def test_the_unrolled_steps_are_those_of_drafting_one_position_at_a_time() -> None:
    head = make_head()
    planes, embedded = torch.randn(12, 96), torch.randn(12, 32)
    unrolled = unrolled_logits(head, planes[None], embedded[None], 4)
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


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_what_counts() -> None:
    head, target = make_head(), target_of()
    found = [made_up(number, length, target) for number, length in ((0, 9), (1, 7))]
    batch = make_batch(found, 100)
    losses = head.losses(batch, target)
    embedded = target.embedding[batch.token_ids[:, 1:-1]]
    logits = unrolled_logits(head, batch.planes[:, :-2], embedded, 2)
    for step in range(2):
        terms = []
        for row, features in enumerate(found):
            for token in range(4, len(features.rollout.token_ids)):
                scores = features.final[token - 1] @ target.output.T
                if int(scores.argmax()) in IDS:
                    wanted = torch.softmax(scores[list(IDS)], -1)
                    terms.append(-(wanted * functional.log_softmax(logits[step][row, token - 2], -1)).sum())
        assert terms
        torch.testing.assert_close(losses[step], torch.stack(terms).mean(), atol=1e-4, rtol=1e-4)


def test_the_gradient_is_that_of_the_plain_cross_entropy() -> None:
    target = target_of()
    batch = make_batch([made_up(number, 12, target) for number in range(3)], 100)
    ours, plain = make_head(), make_head()
    torch.stack(ours.losses(batch, target)).sum().backward()  # type: ignore[no-untyped-call]
    reduced = torch.tensor(IDS)
    counted = batch.counted.clone()
    counted[:, 1:] &= torch.isin(batch.best_ids[:, :-1], reduced)
    rows, tokens = counted.nonzero(as_tuple=True)
    wanted = torch.softmax(batch.final[rows, tokens - 1] @ target.output[reduced].T, -1)
    embedded = target.embedding[batch.token_ids[:, 1:-1]]
    for logits in unrolled_logits(plain, batch.planes[:, :-2], embedded, 2):
        loss = functional.cross_entropy(logits[rows, tokens - 2], wanted)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for (name, parameter), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5, rtol=1e-3, msg=name)


@torch.no_grad()
def test_drafts_behind_a_start_are_those_of_one_position_at_a_time() -> None:
    head, target = make_head(depth=3), target_of()
    features = made_up(0, 14, target)
    batch = make_batch([features], 100)
    starts = torch.tensor([3, 5, 9])
    ids = head.draft_ids(batch, target, (torch.zeros_like(starts), starts), 4)
    assert ids.shape == (3, 3, 4)
    embedded = target.embedding[batch.token_ids[0, 1:]]
    for place, start in enumerate(starts.tolist()):
        for depth, logits in enumerate(drafted(head, batch.planes[0], embedded, start + 1, 3)):
            assert ids[place, depth].tolist() == [IDS[int(best)] for best in logits.topk(4).indices]


def test_it_begins_with_the_targets_output_matrix_and_norm(tmp_path: Path) -> None:
    head, made = make_head(), target_of()
    target = TargetHead(made.embedding, made.output, torch.rand(SHAPE.hidden_dim))
    head.begin(open_model(make_tiny_model(tmp_path)), target)
    assert torch.equal(head.lm_head.weight, target.output[list(IDS)])
    assert torch.equal(head.norm.weight, target.final_norm)


def test_other_ids_than_the_shape_has_are_refused() -> None:
    with pytest.raises(ValueError, match="a draft vocabulary of 40"):
        Eagle3Head(SHAPE, range(VOCAB), 3)
