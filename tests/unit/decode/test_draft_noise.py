"""A drafter that samples: shared noise where the text is invariant, its own where it may be rejected."""

import math

import numpy as np
import pytest
import torch

from core.records import SamplingParams, VerificationMode
from decode.draft import VerifyItem
from decode.sampling.draft_noise import DraftDraw, DrawnChildren, draw_children, draw_draft
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream, draft_stream, gumbel
from decode.verification.verify import verify

SAMPLED = SamplingParams(temperature=1.0)
HISTORY = TokenHistory([0])


def draft_tokens(
    logits: torch.Tensor, seeds: range, verification: VerificationMode = "invariant"
) -> list[int]:
    draws = [DraftDraw(SAMPLED, seed, 0, 1, verification, HISTORY) for seed in seeds]
    drawn = draw_draft(draws, logits.expand(len(seeds), -1))
    return [token.token_id for token in drawn if token is not None]


def target_tokens(logits: torch.Tensor, seeds: range) -> list[int]:
    items = [VerifyItem(SAMPLED, seed, 0, HISTORY, 1, 0) for seed in seeds]
    return [verdict.token_ids[0] for verdict in verify(items, logits)]


@pytest.mark.parametrize("disagreement", [0.0, 0.3, 1.0, 3.0])
def test_shared_noise_matches_at_least_as_often_as_the_bound_says(disagreement: float) -> None:
    generator = torch.Generator().manual_seed(int(disagreement * 10))
    target = torch.randn(1, 50, generator=generator)
    draft = target + disagreement * torch.randn(1, 50, generator=generator)
    distance = 0.5 * float((target.softmax(1) - draft.softmax(1)).abs().sum())
    seeds = range(4000)
    pairs = zip(draft_tokens(draft, seeds), target_tokens(target, seeds), strict=True)
    rate = sum(drafted == drawn for drafted, drawn in pairs) / len(seeds)
    margin = 4 * math.sqrt(0.25 / len(seeds))
    assert rate >= (1 - distance) / (1 + distance) - (margin if disagreement else 0.0)
    assert rate <= 1 - distance + margin, "no coupling matches more often than 1 - TV"


def test_rejection_drafts_do_not_share_the_noise_of_the_target() -> None:
    logits = torch.zeros(1, 50)
    seeds = range(2000)
    drafted = draft_tokens(logits, seeds, "rejection")
    matches = sum(a == b for a, b in zip(drafted, target_tokens(logits, seeds), strict=True))
    assert matches / len(seeds) < 0.05, "1 in 50 by chance"


def test_draft_probs_are_the_truncated_distribution_that_was_drawn_from() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=3, frequency_penalty=1.0)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5, 0.0]])
    draw = DraftDraw(sampling, 5, 0, 3, "rejection", TokenHistory([4], [0]), path=(0,))
    (drawn,) = draw_draft([draw], logits)
    expected = torch.tensor([3.0 - 2.0, 2.0, 1.0, -math.inf, -math.inf]).div(0.7).softmax(0)
    assert drawn is not None
    assert drawn.draft_probs is not None
    assert torch.allclose(drawn.draft_probs, expected)
    assert drawn.draft_probs[drawn.token_id] > 0


def test_greedy_and_invariant_draws_carry_no_draft_probs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    draws = [
        DraftDraw(SamplingParams(), 1, 0, 1, "rejection", HISTORY),
        DraftDraw(SamplingParams(), 1, 0, 1, "invariant", HISTORY),
        DraftDraw(SAMPLED, 1, 0, 1, "invariant", HISTORY),
    ]
    drawn = draw_draft(draws, logits)
    assert [token.draft_probs for token in drawn if token] == [None, None, None]
    assert [token.token_id for token in drawn[:2] if token] == [1, 1]


def test_a_broken_row_ends_its_own_draft_only() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, 2.0], [math.nan, 1.0]])
    draws = [
        DraftDraw(SAMPLED, 1, 0, 1, "invariant", HISTORY),
        DraftDraw(SamplingParams(), 1, 0, 1, "invariant", HISTORY),
        DraftDraw(SAMPLED, 1, 0, 1, "rejection", HISTORY),
    ]
    broken, whole, also_broken = draw_draft(draws, logits)
    assert broken is None
    assert also_broken is None
    assert whole is not None
    assert whole.token_id == 1


def children_of(draw: DraftDraw, logits: torch.Tensor, width: int) -> DrawnChildren:
    (children,) = draw_children([draw], logits, [width])
    assert children is not None
    return children


def test_greedy_children_are_the_largest_logits_with_ties_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -math.inf]])
    modes: tuple[VerificationMode, ...] = ("invariant", "rejection", "block", "typical")
    for mode in modes:
        children = children_of(DraftDraw(SamplingParams(), 1, 0, 1, mode, HISTORY), logits, 9)
        assert children.token_ids == (1, 3, 2, 0)
        expected = logits[0].double().log_softmax(0)[list(children.token_ids)]
        assert children.scores == pytest.approx(expected.tolist(), abs=1e-12)
        assert children.draft_probs is None


def test_invariant_children_are_the_largest_of_log_d_plus_the_shared_noise() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=6, repetition_penalty=1.5)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 12, generator=generator)
    for seed in range(50):
        children = children_of(DraftDraw(sampling, seed, 2, 1, "invariant", HISTORY), logits, 3)
        penalised = logits[0].double().numpy().copy()
        penalised[0] = penalised[0] / 1.5 if penalised[0] > 0 else penalised[0] * 1.5
        kept = np.argsort(-penalised)[:6]
        noisy = np.full(12, -np.inf)
        noisy[kept] = penalised[kept] / 0.7 + gumbel(seed, 2, 1, kept)
        assert list(children.token_ids) == np.argsort(-noisy)[:3].tolist()
        log_d = torch.from_numpy(penalised[kept] / 0.7).log_softmax(0).numpy()
        noisy[kept] = log_d + gumbel(seed, 2, 1, kept)
        expected = torch.from_numpy(noisy).log_softmax(0)[list(children.token_ids)]
        assert children.scores == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("mode", ["invariant", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_first_child_is_the_token_of_a_single_draw(mode: VerificationMode, temperature: float) -> None:
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams(temperature=temperature, top_p=0.9)
    draws = [DraftDraw(sampling, seed, 0, 2, mode, HISTORY, (seed,)) for seed in range(40)]
    singles = draw_draft(draws, logits)
    several = draw_children(draws, logits, [1 + seed % 4 for seed in range(40)])
    for single, children in zip(singles, several, strict=True):
        assert single is not None
        assert children is not None
        assert children.token_ids[0] == single.token_id
        assert len(set(children.token_ids)) == len(children.token_ids)


def test_rejection_children_are_drawn_without_replacement_and_carry_d_of_the_first() -> None:
    """Ordered pairs (a, b) have the probability d(a) · d(b) / (1 - d(a))."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.7]])
    d = logits[0].double().softmax(0).numpy()
    counts = np.zeros((4, 4))
    num_draws = 20_000
    draws = [DraftDraw(SAMPLED, seed, 0, 1, "rejection", HISTORY) for seed in range(num_draws)]
    for children in draw_children(draws, logits.expand(num_draws, -1), [2] * num_draws):
        assert children is not None
        assert children.draft_probs is not None
        assert np.allclose(children.draft_probs.numpy(), d)
        assert children.scores == pytest.approx(np.log(d[list(children.token_ids)]).tolist(), abs=1e-5)
        counts[children.token_ids] += 1
    expected = num_draws * np.outer(d, d) / (1 - d)[:, None]
    np.fill_diagonal(expected, 0.0)
    apart = ~np.eye(4, dtype=bool)
    assert counts[~apart].sum() == 0
    assert ((counts - expected)[apart] ** 2 / expected[apart]).sum() < 32.9, (
        "chi-square, 11 degrees: p = 0.0005"
    )


def test_fewer_children_than_asked_for_where_truncation_leaves_fewer() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2)
    sampling = SamplingParams(temperature=1.0, top_k=2)
    draws = [DraftDraw(sampling, 1, 0, 1, mode, HISTORY) for mode in ("invariant", "rejection")]
    for children in draw_children(draws, logits, [4, 3]):
        assert children is not None
        assert sorted(children.token_ids) == [0, 1]


def test_nodes_and_lanes_have_draft_noise_of_their_own_and_lane_zero_at_the_root_is_draft() -> None:
    streams = {draft_stream(lane, path) for lane in range(4) for path in ((), (1,), (2,), (1, 2), (2, 1))}
    assert len(streams) == 20
    assert draft_stream(0, ()) == Stream.DRAFT
    assert not streams & {Stream.SHARED, Stream.ACCEPT, Stream.RESIDUAL, Stream.BONUS}
    logits = torch.zeros(1, 1000)
    seeds = range(300)
    drawn = [
        [
            children_of(DraftDraw(SAMPLED, seed, 0, 2, "rejection", HISTORY, path, lane), logits, 1).token_ids
            for seed in seeds
        ]
        for path, lane in (((1,), 0), ((2,), 0), ((1,), 1))
    ]
    for other in drawn[1:]:
        assert sum(a == b for a, b in zip(drawn[0], other, strict=True)) < 10


def test_a_broken_row_has_no_children() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, 2.0], [math.nan, 1.0], [math.nan, 0.0]])
    draws = [
        DraftDraw(SAMPLED, 1, 0, 1, "invariant", HISTORY),
        DraftDraw(SamplingParams(), 1, 0, 1, "invariant", HISTORY),
        DraftDraw(SAMPLED, 1, 0, 1, "rejection", HISTORY),
        DraftDraw(SamplingParams(), 1, 0, 1, "block", HISTORY),
    ]
    drawn = draw_children(draws, logits, [2, 2, 2, 2])
    assert [children is None for children in drawn] == [True, False, True, True]
