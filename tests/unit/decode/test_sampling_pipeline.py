"""What each sampling parameter does to the distribution (CASES B04, B05, B07, B14)."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft, VerifyItem
from decode.sampling import sampler
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import BAD_WORDS, MIN_TOKENS, NOT_FINITE
from decode.sampling.step_items import DrawItem
from decode.verification.verify import verify

LOGITS = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0, -3.0]])


def probs_of(
    sampling: SamplingParams,
    history: TokenHistory | None = None,
    path: tuple[int, ...] = (),
    logits: torch.Tensor = LOGITS,
) -> np.ndarray:
    history = history or TokenHistory([5])
    answer = sampler.probs(DrawItem(sampling, 1, 0, 1, history, 0, path=path), logits)
    assert not isinstance(answer, str), answer
    return answer


def softmax(values: list[float]) -> list[float]:
    return torch.softmax(torch.tensor(values, dtype=torch.float64), dim=0).tolist()


def test_temperature_alone_is_the_softmax_of_scaled_logits() -> None:
    assert probs_of(SamplingParams(temperature=0.5)).tolist() == pytest.approx(softmax([4, 2, 2, 0, -2, -6]))


def test_top_k_cuts_ties_by_the_lowest_id() -> None:
    assert np.flatnonzero(probs_of(SamplingParams(temperature=1.0, top_k=2))).tolist() == [0, 1]


def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass() -> None:
    full = softmax(LOGITS[0].tolist())
    assert np.flatnonzero(probs_of(SamplingParams(temperature=1.0, top_p=full[0] - 1e-9))).tolist() == [0]
    assert np.flatnonzero(probs_of(SamplingParams(temperature=1.0, top_p=full[0] + 1e-9))).tolist() == [0, 1]


def test_top_p_counts_the_mass_of_what_top_k_left() -> None:
    kept = probs_of(SamplingParams(temperature=1.0, top_k=2, top_p=0.73))
    assert np.flatnonzero(kept).tolist() == [0], "e / (e + 1) = 0.731 of the two that top-k left"


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    assert np.flatnonzero(
        probs_of(SamplingParams(temperature=1.0, min_p=math.exp(-1.0) - 1e-6))
    ).tolist() == [0, 1, 2]
    assert np.flatnonzero(
        probs_of(SamplingParams(temperature=1.0, min_p=math.exp(-1.0) + 1e-6))
    ).tolist() == [0]


def test_repetition_penalty_looks_at_prompt_output_and_draft_path() -> None:
    history = TokenHistory([0], [3])
    sampling = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    assert probs_of(sampling, history, (4,)).tolist() == pytest.approx(softmax([1.0, 1, 1, 0, -2, -3]))


def test_presence_and_frequency_look_at_output_and_draft_path_but_not_at_the_prompt() -> None:
    history = TokenHistory([0, 0], [1, 1])
    sampling = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = softmax([2.0, 1 - 0.5 - 0.75, 1 - 0.5 - 0.25, 0, -1, -3])
    assert probs_of(sampling, history, (1, 2)).tolist() == pytest.approx(expected)


def test_rejected_drafts_leave_no_trace_in_the_counts() -> None:
    history = TokenHistory([0], [1])
    sampling = SamplingParams(temperature=1.0, frequency_penalty=2.0)
    before = probs_of(sampling, history)
    probs_of(sampling, history, (2, 2, 2))
    assert np.array_equal(probs_of(sampling, history), before)
    assert history.output_counts == {1: 1}


def test_logit_bias_is_added_and_ids_beyond_the_vocabulary_are_ignored() -> None:
    sampling = SamplingParams(temperature=1.0, logit_bias={3: 5.0, 99: 1.0})
    assert probs_of(sampling).tolist() == pytest.approx(softmax([2.0, 1, 1, 5, -1, -3]))


def test_bad_words_ban_the_last_id_only_after_the_others() -> None:
    sampling = SamplingParams(temperature=1.0, bad_word_ids=((3, 1, 0), (2,)))
    assert probs_of(sampling, TokenHistory([5, 3, 1]))[[0, 2]].tolist() == [0.0, 0.0]
    assert probs_of(sampling, TokenHistory([5, 3]))[0] > 0.0
    assert probs_of(sampling, TokenHistory([5, 3]), (1,))[0] == 0.0, "the draft path counts"
    assert probs_of(sampling, TokenHistory([1]))[0] > 0.0, "a history shorter than the word"


@pytest.mark.parametrize(("emitted", "banned"), [(0, True), (2, True), (3, False)])
def test_min_tokens_bans_the_end_until_that_many_tokens_are_out(emitted: int, banned: bool) -> None:
    sampling = SamplingParams(temperature=1.0, min_tokens=3, eos_token_ids=(0,), stop_token_ids=(4,))
    in_history = probs_of(sampling, TokenHistory([5], [1] * emitted))
    in_path = probs_of(sampling, TokenHistory([5]), (1,) * emitted)
    assert (in_history[[0, 4]] == 0.0).tolist() == [banned, banned] == (in_path[[0, 4]] == 0.0).tolist()


def test_an_end_drafted_too_early_inside_a_burst_is_refused() -> None:
    logits = torch.full((4, 6), -9.0)
    logits[:, 0] = 5.0
    logits[:, 2] = 4.0
    sampling = SamplingParams(min_tokens=2, eos_token_ids=(0,))
    item = VerifyItem(sampling, 0, 0, TokenHistory([5]), 1, 0, Draft((2, 0, 0), (0, 1, 2)))
    (verdict,) = verify([item], logits)
    assert verdict.token_ids == (2, 2), "the end drafted as second token is not emitted"
    allowed = replace(item, draft=Draft((2, 2, 0), (0, 1, 2)))
    assert verify([allowed], logits)[0].token_ids == (2, 2, 0, 0)


def test_a_banned_favourite_is_never_emitted_though_every_draft_holds_it() -> None:
    logits = torch.zeros(9, 6)
    logits[:, 3] = 9.0
    draft = Draft((3,) * 8, tuple(range(8)))
    for sampling in (SamplingParams(logit_bias={3: -100.0}), SamplingParams(bad_word_ids=((3,),))):
        (verdict,) = verify([VerifyItem(sampling, 0, 0, TokenHistory([5]), 1, 0, draft)], logits)
        assert verdict.token_ids == (0,)
        assert verdict.accepted_rows == ()


@pytest.mark.parametrize("penalty", [2.0, -2.0])
@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
def test_penalties_inside_a_burst_equal_those_without_speculation(penalty: float, field: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(40, 12, generator=generator) * 2).bfloat16().float()
    sampling = SamplingParams(repetition_penalty=1.3, min_tokens=20, eos_token_ids=(1,))
    sampling = replace(sampling, **{field: penalty})  # type: ignore[arg-type]  # one field by its name
    plain = answer(rows, sampling, lambda history: ())
    right = answer(rows, sampling, lambda history: tuple(plain[len(history.output_ids) :][:5]))
    wrong = answer(rows, sampling, lambda history: (0, 1, 2))
    assert plain == right == wrong
    assert len(plain) == 24


def answer(
    rows: torch.Tensor, sampling: SamplingParams, propose: Callable[[TokenHistory], tuple[int, ...]]
) -> list[int]:
    """24 tokens of a toy target whose logits depend on the last token."""
    history = TokenHistory([5])
    while history.num_output < 24:
        drafted = propose(history)
        chain = [history.token_ids[-1], *drafted]
        logits = rows[[token_id % 40 for token_id in chain]]
        draft = Draft(drafted, tuple(range(len(drafted))))
        (verdict,) = verify([VerifyItem(sampling, 9, 0, history, len(history.token_ids), 0, draft)], logits)
        history.extend(verdict.token_ids)
    return list(history.output_ids)[:24]


def test_all_temperatures_share_a_call_without_nan_and_tiny_ones_are_greedy() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 3000, generator=generator) * 10
    temperatures = [0.0, 1e-6, 1e-3, 2.0, 100.0]
    items = [
        VerifyItem(SamplingParams(temperature=t, logprobs=1), 4, 0, TokenHistory([1]), 1, row)
        for row, t in enumerate(temperatures)
    ]
    verdicts = verify(items, logits)
    assert [v.token_ids[0] for v in verdicts[:3]] == logits[:3].argmax(dim=1).tolist()
    assert all(v.error is None and math.isfinite(v.logprobs[0].logprob) for v in verdicts)
    for item in items:
        probs = sampler.probs(DrawItem(item.sampling, 4, 0, 1, item.history, item.logits_start), logits)
        assert not isinstance(probs, str)
        assert np.isfinite(probs).all()
        assert abs(probs.sum() - 1) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad_value", [math.nan, math.inf])
@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_broken_logits_end_their_own_request_only(
    temperature: float, bad_value: float, verification: VerificationMode
) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    logits[1, 650] = bad_value
    sampling = SamplingParams(temperature=temperature)
    items = [
        VerifyItem(sampling, 4, 0, TokenHistory([1]), 1, row, verification=verification) for row in range(3)
    ]
    verdicts = verify(items, logits)
    assert [v.error for v in verdicts] == [None, NOT_FINITE, None]
    assert verdicts[1].token_ids == ()
    assert len(verdicts[0].token_ids) == 1


@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_constraints_that_leave_nothing_are_named_and_earlier_tokens_are_kept(
    verification: VerificationMode,
) -> None:
    logits = torch.zeros(2, 2)
    logits[:, 1] = 4.0
    words = SamplingParams(bad_word_ids=((1, 0), (1, 1)))
    ending = SamplingParams(min_tokens=5, eos_token_ids=(0,), stop_token_ids=(1,))
    items = [
        VerifyItem(words, 0, 0, TokenHistory([0]), 1, 0, Draft((1,), (0,)), verification),
        VerifyItem(ending, 0, 0, TokenHistory([0]), 1, 0, verification=verification),
    ]
    first, second = verify(items, logits)
    assert (first.token_ids, first.accepted_rows, first.error) == ((1,), (1,), BAD_WORDS)
    assert (second.token_ids, second.error) == ((), MIN_TOKENS)
