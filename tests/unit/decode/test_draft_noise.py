"""A drafter that samples: shared noise where the text is invariant, its own where it may be rejected."""

import math

import pytest
import torch

from core.records import SamplingParams, VerificationMode
from decode.draft import VerifyItem
from decode.sampling.draft_noise import DraftDraw, draw_draft
from decode.sampling.history import TokenHistory
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
