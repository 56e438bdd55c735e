"""Typical acceptance: which tokens are taken, which path, and what is drawn behind it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import SamplingParams
from decode.draft import Draft, Verdict, VerifyItem
from decode.sampling.history import TokenHistory
from decode.verification.typical import DELTA, EPSILON, threshold
from decode.verification.verify import verify

SAMPLING = SamplingParams(temperature=1.0)
HISTORY = TokenHistory([0])


def verdict_of(
    draft: Draft, logits: torch.Tensor, sampling: SamplingParams = SAMPLING, seed: int = 1
) -> Verdict:
    return verify([VerifyItem(sampling, seed, 0, HISTORY, 1, 0, draft, "typical")], logits)[0]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


@pytest.mark.parametrize("probs", [[1.0], [0.5, 0.5], [0.97, 0.02, 0.01], [0.25] * 4, [0.001] * 1000])
def test_the_threshold_is_the_smaller_of_epsilon_and_a_share_of_the_typical_probability(
    probs: list[float],
) -> None:
    entropy = -sum(p * math.log(p) for p in probs)
    expected = min(EPSILON, DELTA * math.exp(-entropy))
    assert threshold(np.array([*probs, 0.0])) == pytest.approx(expected)


def test_a_token_above_the_threshold_is_taken_and_one_below_is_not() -> None:
    row = [0.8, 0.1, 0.08, 0.02]
    bar = threshold(np.array(row))
    assert 0.08 < bar <= 0.1
    for token_id, taken in ((0, True), (1, True), (2, False), (3, False)):
        verdict = verdict_of(Draft((token_id,), (0,)), logits_of(row, row))
        assert bool(verdict.accepted_rows) == taken
        assert len(verdict.token_ids) == 1 + taken


def test_the_longest_accepted_path_is_taken_and_the_first_of_several() -> None:
    flat = [0.25] * 4
    draft = Draft((0, 1, 2, 3, 1, 2), (0, 0, 2, 2, 3, 4))
    verdict = verdict_of(draft, logits_of(*[flat] * 7))
    assert verdict.accepted_rows == (2, 3, 5)
    assert verdict.token_ids[:3] == (1, 2, 1)


def test_nothing_banned_or_truncated_is_taken() -> None:
    sampling = SamplingParams(temperature=1.0, top_k=2, bad_word_ids=((1,),))
    row = [0.3, 0.3, 0.3, 0.1]
    draft = Draft((1, 3), (0, 0))
    for seed in range(50):
        verdict = verdict_of(draft, logits_of(row, row, row), sampling, seed)
        assert verdict.accepted_rows == ()
        assert verdict.token_ids[0] in (0, 2)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.0, 0.7, 1.5]), seed=st.integers(0, 2**53 - 1))
def test_the_token_behind_the_path_is_the_one_that_plain_decoding_would_draw_there(
    data: st.DataObject, temperature: float, seed: int
) -> None:
    size = data.draw(st.integers(0, 7))
    draft = Draft(
        tuple(data.draw(st.integers(0, 5)) for _ in range(size)),
        tuple(data.draw(st.integers(0, node)) for node in range(size)),
    )
    sampling = SamplingParams(temperature=temperature, frequency_penalty=0.5)
    logits = torch.randn(size + 1, 6, generator=torch.Generator().manual_seed(seed % 1000))
    verdict = verdict_of(draft, logits, sampling, seed)
    path = [draft.token_ids[row - 1] for row in verdict.accepted_rows]
    assert list(verdict.token_ids[:-1]) == path
    assert [draft.parents[row - 1] for row in verdict.accepted_rows] == [0, *verdict.accepted_rows][
        : len(path)
    ]
    last = verdict.accepted_rows[-1] if path else 0
    there = TokenHistory([0], path)
    plain = VerifyItem(sampling, seed, 0, there, 1 + len(path), last)
    assert verify([plain], logits)[0].token_ids == verdict.token_ids[-1:]


def test_a_row_that_leaves_nothing_to_draw_ends_the_path_before_its_children() -> None:
    logits = logits_of([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    logits[1] = math.nan
    verdict = verdict_of(Draft((1, 0), (0, 1)), logits)
    assert (verdict.accepted_rows, verdict.token_ids) == ((1,), (1,))
    assert verdict.error == "logits are not finite"
