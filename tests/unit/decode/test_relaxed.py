"""Draft tokens are kept while the target finds them likely enough; then it draws for itself."""

import math
from dataclasses import replace

import pytest
import torch

from core.records import SamplingParams
from decode.draft import NO_DRAFT, Draft, VerifyItem
from decode.sampling.history import TokenHistory
from decode.verification.relaxed import verify_relaxed
from decode.verification.verify import verify

VOCAB = 50
CHAIN = Draft((3, 4, 5), (0, 1, 2))
HALF, RARE = math.log(0.5), math.log(0.01)


def logits_of(*likely: float) -> torch.Tensor:
    """Row i gives draft token i the log-probability `likely[i]`; the last row is behind the chain. Id 9 is best."""
    rows = torch.full((len(likely) + 1, VOCAB), -20.0)
    rows[:, 9] = 0.0
    for row, logprob in enumerate(likely):
        chance = math.exp(logprob)
        rows[row, 9] = math.log(1 - chance) if chance < 1 else -30.0
        rows[row, CHAIN.token_ids[row]] = logprob
    return rows


def item_of(draft: Draft, threshold: float, **changed: object) -> VerifyItem:
    sampling = SamplingParams(seed=1, **changed)  # type: ignore[arg-type]
    return VerifyItem(sampling, 1, 0, TokenHistory([1, 2]), 2, 0, draft, rollback_threshold=threshold)


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.1, 0), (-HALF + 1e-3, 2), (-RARE + 1e-3, 3), (math.inf, 3)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_is_kept_up_to_the_first_token_beyond_the_threshold(
    threshold: float, kept: int, temperature: float
) -> None:
    item = item_of(CHAIN, threshold, temperature=temperature)
    (walk,) = verify_relaxed([item], logits_of(HALF, HALF, RARE))
    assert walk.accepted_rows == tuple(range(1, kept + 1))
    assert walk.token_ids[:kept] == CHAIN.token_ids[:kept]
    assert len(walk.token_ids) == kept + 1
    assert walk.error is None


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_the_token_behind_is_the_one_of_plain_decoding(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in range(20):
        logits = torch.randn(4, VOCAB, generator=generator)
        item = replace(item_of(CHAIN, 3.0, temperature=temperature), seed=seed)
        (walk,) = verify_relaxed([item], logits)
        kept = len(walk.accepted_rows)
        history = TokenHistory([1, 2], CHAIN.token_ids[:kept])
        plain = replace(
            item,
            history=history,
            position=2 + kept,
            logits_start=kept,
            draft=NO_DRAFT,
            rollback_threshold=None,
        )
        (verdict,) = verify([plain], logits)
        assert walk.token_ids[kept:] == verdict.token_ids


def test_the_threshold_looks_at_the_targets_own_distribution_and_not_at_the_temperature() -> None:
    logits = logits_of(HALF, HALF, HALF)
    for sampling in ({"temperature": 0.0}, {"temperature": 5.0}, {"top_k": 1}, {"presence_penalty": 2.0}):
        (walk,) = verify_relaxed([item_of(CHAIN, -HALF + 1e-3, **sampling)], logits)
        assert len(walk.accepted_rows) == 3


def test_what_is_no_number_ends_the_chain_and_is_that_items_error() -> None:
    logits = torch.cat([logits_of(HALF, HALF, HALF), logits_of(HALF, HALF, HALF)])
    logits[1] = torch.nan
    broken = item_of(CHAIN, math.inf)
    whole = replace(broken, logits_start=4)
    first, second = verify([broken, whole], logits)
    assert (first.accepted_rows, first.token_ids) == ((1,), (3,))
    assert first.error is not None
    assert (len(second.token_ids), second.error) == (4, None)


def test_items_of_all_kinds_go_through_one_call_and_keep_their_order() -> None:
    logits = torch.cat([logits_of(HALF, HALF, HALF)] * 4)
    relaxed = item_of(CHAIN, math.inf)
    exact = replace(relaxed, rollback_threshold=None, logits_start=4)
    rejection = replace(exact, verification="rejection", logits_start=8)
    empty = replace(relaxed, draft=NO_DRAFT, logits_start=12)
    verdicts = verify([relaxed, exact, rejection, empty], logits)
    assert verdicts[0].token_ids == (3, 4, 5, 9)
    assert len(verdicts[1].token_ids) in range(1, 5)
    assert verdicts[3].accepted_rows == ()


def test_trees_are_refused() -> None:
    item = item_of(Draft((3, 4), (0, 0)), 1.0)
    with pytest.raises(ValueError, match="chains only"):
        verify_relaxed([item], logits_of(HALF, HALF))
