"""The text does not depend on what was proposed; rejection keeps its promises (CASES B07, B09, B10, B14, S03, S10)."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft, Verdict, VerifyItem
from decode.sampling import native
from decode.sampling.draft_noise import DraftDraw, draw_draft
from decode.sampling.history import TokenHistory
from decode.verification.rejection import residual_probs
from decode.verification.verify import verify

VOCABULARY = 40
TABLE = (
    torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(2).bfloat16().float()
)
"""A toy target: the logits of a row depend on its last token."""

Propose = Callable[[TokenHistory, list[int]], Draft]


def target_rows(history: TokenHistory, draft: Draft) -> torch.Tensor:
    return TABLE[[history.token_ids[-1], *draft.token_ids]]


def answer(
    sampling: SamplingParams, propose: Propose, seed: int = 3, choice: int = 0
) -> tuple[list[int], list[Verdict]]:
    """24 tokens; `propose` sees the plain continuation."""
    plain = plain_answer(sampling, seed, choice)
    history = TokenHistory([1, 2])
    verdicts = []
    while history.num_output < 24:
        draft = propose(history, plain[history.num_output :])
        item = VerifyItem(sampling, seed, choice, history, len(history.token_ids), 0, draft)
        (verdict,) = verify([item], target_rows(history, draft))
        assert verdict.error is None
        history.extend(verdict.token_ids)
        verdicts.append(verdict)
    return list(history.output_ids)[:24], verdicts


def plain_answer(sampling: SamplingParams, seed: int, choice: int = 0) -> list[int]:
    history = TokenHistory([1, 2])
    for _ in range(30):
        item = VerifyItem(sampling, seed, choice, history, len(history.token_ids), 0)
        history.extend(verify([item], target_rows(history, Draft()))[0].token_ids)
    return list(history.output_ids)


def right_chain(history: TokenHistory, rest: list[int]) -> Draft:
    return Draft(tuple(rest[:5]), (0, 1, 2, 3, 4))


def wrong_chain(history: TokenHistory, rest: list[int]) -> Draft:
    return Draft(tuple((token + 1) % VOCABULARY for token in rest[:5]), (0, 1, 2, 3, 4))


def half_right_tree(history: TokenHistory, rest: list[int]) -> Draft:
    """Two branches at the root, the right one second, with duplicates and wrong leaves."""
    wrong = (rest[0] + 7) % VOCABULARY
    return Draft((wrong, rest[0], wrong, rest[1], rest[0], rest[2]), (0, 0, 1, 2, 0, 4))


PROPOSALS = [right_chain, wrong_chain, half_right_tree]
PARAMETERS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3),
]


@pytest.mark.parametrize("sampling", PARAMETERS)
@pytest.mark.parametrize("propose", PROPOSALS)
def test_the_answer_is_that_of_plain_decoding_whatever_is_proposed(
    sampling: SamplingParams, propose: Propose
) -> None:
    tokens, verdicts = answer(sampling, propose)
    assert tokens == plain_answer(sampling, 3)[:24]
    accepted = sum(len(verdict.accepted_rows) for verdict in verdicts)
    assert (accepted == 0) == (propose is wrong_chain), "the proposals did what their names say"


@pytest.mark.parametrize("propose", PROPOSALS)
def test_accepted_rows_are_a_path_whose_tokens_were_emitted(propose: Propose) -> None:
    history = TokenHistory([1, 2])
    draft = propose(history, plain_answer(PARAMETERS[1], 3))
    item = VerifyItem(PARAMETERS[1], 3, 0, history, 2, 0, draft)
    (verdict,) = verify([item], target_rows(history, draft))
    assert len(verdict.token_ids) == len(verdict.accepted_rows) + 1
    parent = 0
    for row, token_id in zip(verdict.accepted_rows, verdict.token_ids, strict=False):
        assert (draft.parents[row - 1], draft.token_ids[row - 1]) == (parent, token_id)
        parent = row


@settings(max_examples=100, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.0, 0.9]), seed=st.integers(0, 2**53 - 1))
def test_any_tree_yields_a_prefix_of_the_plain_answer(
    data: st.DataObject, temperature: float, seed: int
) -> None:
    num_nodes = data.draw(st.integers(0, 8))
    likely = st.sampled_from([*torch.topk(TABLE[2], 4).indices.tolist(), 0, 39])
    draft = Draft(
        tuple(data.draw(likely) for _ in range(num_nodes)),
        tuple(data.draw(st.integers(0, node)) for node in range(num_nodes)),
    )
    sampling = SamplingParams(temperature=temperature)
    history = TokenHistory([1, 2])
    (verdict,) = verify([VerifyItem(sampling, seed, 0, history, 2, 0, draft)], target_rows(history, draft))
    assert list(verdict.token_ids) == plain_answer(sampling, seed)[: len(verdict.token_ids)]


def test_neighbours_order_and_logits_offset_do_not_change_a_verdict() -> None:
    history = TokenHistory([1, 2])
    items: list[VerifyItem] = []
    rows: list[torch.Tensor] = []
    for index in range(8):
        sampling = PARAMETERS[index % 4]
        draft = [right_chain, wrong_chain, half_right_tree][index % 3](history, plain_answer(sampling, index))
        modes: tuple[VerificationMode, ...] = ("rejection", "invariant", "block", "typical")
        mode = modes[index % 4] if draft.is_chain else "rejection"
        start = sum(len(part) for part in rows)
        items.append(VerifyItem(sampling, index, 0, history, 2, start, draft, mode))
        rows.append(target_rows(history, draft))
    logits = torch.cat(rows)
    together = verify(items, logits)
    alone = [verify([item], logits)[0] for item in items]
    assert together == alone == verify(items[::-1], logits)[::-1]


def test_choices_and_seeds_draw_differently_and_a_choice_repeats_itself() -> None:
    sampling = SamplingParams(temperature=1.0)
    answers = [tuple(plain_answer(sampling, seed, choice)) for seed in (1, 2) for choice in (0, 1)]
    assert len(set(answers)) == 4
    assert answers[1] == tuple(plain_answer(sampling, 1, 1))


def test_an_answer_resumed_in_the_middle_goes_on_as_before() -> None:
    sampling = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    whole = plain_answer(sampling, 8)
    history = TokenHistory([1, 2], whole[:11])
    while history.num_output < 24:
        item = VerifyItem(sampling, 8, 0, history, len(history.token_ids), 0)
        history.extend(verify([item], target_rows(history, Draft()))[0].token_ids)
    assert list(history.output_ids) == whole[:24]


def test_a_step_without_a_draft_draws_one_token() -> None:
    modes: tuple[VerificationMode, ...] = ("invariant", "rejection", "block", "typical")
    for mode in modes:
        item = VerifyItem(PARAMETERS[1], 3, 0, TokenHistory([1, 2]), 2, 0, verification=mode)
        (verdict,) = verify([item], TABLE[[2]])
        assert len(verdict.token_ids) == 1
        assert verdict.accepted_rows == ()


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_logprobs_are_the_raw_targets_and_equal_bit_for_bit_with_speculation(
    sampling: SamplingParams,
) -> None:
    asked = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=2,
    )
    _, plain = answer(asked, lambda history, rest: Draft())
    reference = [entry for verdict in plain for entry in verdict.logprobs][:24]
    for propose in PROPOSALS:
        tokens, verdicts = answer(asked, propose)
        entries = [entry for verdict in verdicts for entry in verdict.logprobs][:24]
        assert entries == reference
        assert [entry.token_id for entry in entries] == tokens
    raw = torch.log_softmax(TABLE[2].double(), dim=0)
    best = torch.topk(raw, 2)
    assert reference[0].logprob == pytest.approx(float(raw[reference[0].token_id]), abs=1e-12)
    assert [value for _, value in reference[0].top] == pytest.approx(best.values.tolist(), abs=1e-12)
    assert all(verdict.logprobs == () for verdict in answer(sampling, right_chain)[1])


def test_nothing_outside_the_truncated_set_is_emitted_in_either_mode() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.5, top_k=2, min_p=0.2)
    plain = SamplingParams(temperature=1.0)
    history = TokenHistory([1, 2])
    allowed = set(torch.topk(TABLE[2], 2).indices.tolist())
    seen: dict[str, set[int]] = {"invariant": set(), "rejection": set(), "other": set()}
    for seed in range(300):
        items = [
            VerifyItem(sampling, seed, 0, history, 2, 0, Draft((seed % 40,), (0,)), "invariant"),
            VerifyItem(sampling, seed, 0, history, 2, 0, Draft((seed % 40,), (0,)), "rejection"),
            VerifyItem(plain, seed, 0, history, 2, 0, Draft((seed % 40,), (0,)), "rejection"),
        ]
        logits = TABLE[[2, seed % 40]]
        for name, verdict in zip(seen, verify(items, logits), strict=True):
            seen[name].add(verdict.token_ids[0])
    assert seen["invariant"] <= allowed
    assert seen["rejection"] <= allowed
    assert len(seen["other"]) > 5, "a neighbour keeps its own parameters"


@pytest.mark.parametrize("mode", ["rejection", "block", "typical"])
def test_every_mode_emits_the_greedy_answer(mode: VerificationMode) -> None:
    history = TokenHistory([1, 2])
    rest = plain_answer(SamplingParams(), 3)
    for chain in (tuple(rest[:3]), (rest[0], (rest[1] + 1) % VOCABULARY, rest[2])):
        draft = Draft(chain, (0, 1, 2))
        item = VerifyItem(SamplingParams(), 3, 0, history, 2, 0, draft, mode)
        (verdict,) = verify([item], target_rows(history, draft))
        accepted = 3 if chain[1] == rest[1] else 1
        assert verdict.accepted_rows == tuple(range(1, accepted + 1))
        assert list(verdict.token_ids) == rest[: accepted + 1]


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    target_probs = np.array([0.25, 0.75])
    assert residual_probs(target_probs, target_probs, 0) is target_probs
    assert residual_probs(np.array([1.0, 0.0]), None, 0).tolist() == [1.0, 0.0]
    assert residual_probs(target_probs, np.array([0.5, 0.5]), 0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_draft_probs_that_are_no_distribution_cut_the_chain_before_them(
    bad: float, mode: VerificationMode
) -> None:
    history = TokenHistory([1, 2])
    draft_probs = torch.full((2, VOCABULARY), 1.0 / VOCABULARY)
    draft_probs[1] = 0.0
    draft_probs[1, 3] = bad
    draft = Draft((plain_answer(SamplingParams(), 1)[0], 3), (0, 1), draft_probs)
    item = VerifyItem(SamplingParams(), 1, 0, history, 2, 0, draft, mode)
    (verdict,) = verify([item], target_rows(history, draft))
    assert verdict.error is None
    assert verdict.accepted_rows == (1,)
    assert len(verdict.token_ids) == 2


def test_without_a_compiler_the_verdicts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts() -> list[list[Verdict]]:
        return [answer(sampling, half_right_tree)[1] for sampling in PARAMETERS] + [rejected_verdicts()]

    expected = verdicts()
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert verdicts() == expected


def rejected_verdicts() -> list[Verdict]:
    """Rejection with a sampling drafter, and logprobs."""
    sampling = SamplingParams(temperature=0.9, top_p=0.9, logprobs=2)
    history = TokenHistory([1, 2])
    verdicts = []
    for seed in range(20):
        draw = DraftDraw(sampling, seed, 0, 2, "rejection", history)
        (drawn,) = draw_draft([draw], TABLE[[2]] * 0.5)
        assert drawn is not None
        assert drawn.draft_probs is not None
        draft = Draft((drawn.token_id,), (0,), drawn.draft_probs[None])
        modes: tuple[VerificationMode, ...] = ("rejection", "block", "typical")
        items = [VerifyItem(sampling, seed, 0, history, 2, 0, draft, mode) for mode in modes]
        verdicts += verify(items, target_rows(history, draft))
    return verdicts
