"""Verifying and drafting under a grammar: the text of plain decoding, raw log-probabilities, drafts that fit."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.clock import SystemClock
from core.records import Grammar, SamplingParams, TokenLogprobs, VerificationMode
from decode.draft import Draft, Verdict, VerifyItem
from decode.grammar_state import GrammarState
from decode.sampling.draft_noise import DraftDraw, draw_children, draw_draft
from decode.sampling.history import TokenConstraint, TokenHistory
from decode.sampling.masking import allowed_part, paths_of
from decode.verification.verify import verify
from tests.support.byte_grammar import END, compiled

VOCABULARY = 256
CLOCK = SystemClock()
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(2)
"""A toy target: the logits of a row depend on its last token."""

GRAMMAR = Grammar("regex", "([a-f]{2,4}-|[0-3]{1,3},){4,7}(x|xy)")
GREEDY = SamplingParams(eos_token_ids=(END,), grammar=GRAMMAR)
SAMPLED = replace(GREEDY, temperature=1.5, top_p=0.9, repetition_penalty=1.1)
PARAMETERS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "min_tokens": replace(SAMPLED, min_tokens=25),
    "bad words": replace(SAMPLED, bad_word_ids=((ord("-"), ord("0")), (ord("b"),))),
    "bias": replace(GREEDY, logit_bias={ord("a"): 9.0, ord("3"): -9.0}),
}


def history_of(sampling: SamplingParams, answer: bytes = b"") -> TokenHistory:
    history = TokenHistory([1, 2], answer)
    grammar = sampling.grammar
    if grammar is not None:
        history.grammar = GrammarState(
            compiled(grammar.kind, grammar.text), history, sampling, VOCABULARY, CLOCK
        )
    return history


def step(history: TokenHistory, sampling: SamplingParams, draft: Draft, mode: VerificationMode) -> Verdict:
    item = VerifyItem(sampling, 3, 0, history, len(history.token_ids), 0, draft, mode)
    rows = TABLE[[history.token_ids[-1], *draft.token_ids]]
    before = rows.clone()
    (verdict,) = verify([item], rows)
    assert torch.equal(rows, before), "raw rows stay as they are"
    return verdict


def plain(sampling: SamplingParams, limit: int = 60) -> list[int]:
    history = history_of(sampling)
    while history.num_output < limit and END not in history.output_ids:
        verdict = step(history, sampling, Draft(), "invariant")
        assert verdict.error is None
        history.extend(verdict.token_ids)
    return list(history.output_ids)


def random_tree(generator: random.Random, right: list[int]) -> Draft:
    """Right and wrong tokens, some that no grammar allows; distinct siblings."""
    token_ids: list[int] = []
    parents: list[int] = []
    right_row, taken = 0, set[tuple[int, int]]()
    for _ in range(generator.randrange(1, 10)):
        parent = generator.choice([right_row, generator.randrange(len(token_ids) + 1)])
        token_id = generator.choice([*b"abcdef0123-,xy", END, 7])
        depth = len(paths_of(Draft(tuple(token_ids), tuple(parents)))[right_row])
        if parent == right_row and depth < len(right) and generator.random() < 0.7:
            token_id = right[depth]
        if (parent, token_id) in taken:
            continue
        taken.add((parent, token_id))
        token_ids.append(token_id)
        parents.append(parent)
        if parent == right_row and depth < len(right) and token_id == right[depth]:
            right_row = len(token_ids)
    return Draft(tuple(token_ids), tuple(parents))


@pytest.mark.parametrize("prune", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("sampling", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_the_text_is_that_of_plain_decoding_whatever_was_drafted(
    sampling: SamplingParams, prune: bool
) -> None:
    expected = plain(sampling)
    assert expected[-1] == END
    generator = random.Random(1)
    num_accepted = 0
    for _ in range(6):
        history = history_of(sampling)
        while END not in history.output_ids:
            draft = random_tree(generator, expected[history.num_output :])
            if prune:
                assert history.grammar is not None
                draft = allowed_part(draft, history.grammar)
            verdict = step(history, sampling, draft, "invariant")
            num_accepted += len(verdict.accepted_rows)
            history.extend(verdict.token_ids)
        output = list(history.output_ids)
        assert output[: output.index(END) + 1] == expected
    assert num_accepted > 0


class _ShortSighted:
    """A grammar that cannot be looked at behind more than `reach` draft tokens."""

    fault = "none"

    def __init__(self, grammar: TokenConstraint, reach: int) -> None:
        self._grammar = grammar
        self._reach = reach

    def mask(self, path: Sequence[int]) -> torch.Tensor | None:
        return self._grammar.mask(path) if len(path) <= self._reach else None


@pytest.mark.parametrize("mode", ["invariant", "rejection", "block", "typical"])
@pytest.mark.parametrize("reach", [0, 1, 2])
def test_where_nothing_is_known_behind_an_accepted_token_the_next_step_goes_on_from_it(
    mode: VerificationMode, reach: int
) -> None:
    expected = plain(GREEDY)
    history = history_of(GREEDY)
    assert history.grammar is not None
    history.grammar = _ShortSighted(history.grammar, reach)
    num_accepted = 0
    while END not in history.output_ids:
        right = tuple(expected[history.num_output : history.num_output + 4])
        verdict = step(history, GREEDY, Draft(right, tuple(range(len(right)))), mode)
        assert verdict.error is None
        assert len(verdict.token_ids) == min(reach, len(right)) + 1
        num_accepted += len(verdict.accepted_rows)
        history.extend(verdict.token_ids)
    assert list(history.output_ids)[: len(expected)] == expected
    assert (num_accepted > 0) == (reach > 0)


def test_items_with_and_without_a_grammar_share_a_call() -> None:
    free = replace(SAMPLED, grammar=None)
    histories = [
        history_of(free, b"ab"),
        history_of(SAMPLED, b"ab"),
        history_of(free, b"0"),
        history_of(GREEDY),
    ]
    params = [free, SAMPLED, free, GREEDY]
    drafts = [Draft((97, 98), (0, 1)), Draft((ord("-"), ord("c")), (0, 0)), Draft(), Draft((97,), (0,))]
    rows: list[int] = []
    items: list[VerifyItem] = []
    for history, sampling, draft in zip(histories, params, drafts, strict=True):
        position = len(history.token_ids)
        items.append(VerifyItem(sampling, 3, 0, history, position, len(rows), draft))
        rows.extend([history.token_ids[-1], *draft.token_ids])
    together = verify(items, TABLE[rows])
    for verdict, history, sampling, draft in zip(together, histories, params, drafts, strict=True):
        assert verdict == step(history, sampling, draft, "invariant")


def test_log_probabilities_are_those_of_the_target_without_the_grammar() -> None:
    sampling = replace(GREEDY, logprobs=3)
    verdict = step(history_of(sampling), sampling, Draft((97,), (0,)), "invariant")
    raw = TABLE[2].double().log_softmax(0)
    entry: TokenLogprobs = verdict.logprobs[0]
    assert entry.logprob == pytest.approx(float(raw[entry.token_id]), abs=1e-6)
    assert [token_id for token_id, _ in entry.top] == raw.topk(3).indices.tolist()
    assert chr(verdict.token_ids[0]) in "abcdef0123"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"grammar": Grammar("regex", "ab|b")}, None),
        ({"bad_word_ids": ((97,), (98,))}, "bad_words"),
        ({"grammar": Grammar("ebnf", 'root ::= "\x7f"'), "bad_word_ids": ((127,),)}, "bad_words"),
    ],
)
def test_what_leaves_nothing_is_named(change: dict[str, object], told: str | None) -> None:
    sampling = replace(SAMPLED, **{"grammar": Grammar("regex", "ab|b"), **change})  # type: ignore[arg-type]
    verdict = step(history_of(sampling), sampling, Draft(), "invariant")
    assert (verdict.error is None) if told is None else told in (verdict.error or "")


def test_logits_that_are_no_numbers_are_not_laid_at_the_grammars_door() -> None:
    history = history_of(GREEDY)
    rows = torch.full((1, VOCABULARY), torch.nan)
    (verdict,) = verify([VerifyItem(GREEDY, 0, 0, history, 2, 0)], rows)
    assert verdict.error == "logits are not finite"


@pytest.mark.parametrize("mode", ["invariant", "rejection"])
def test_drafts_are_drawn_from_what_the_grammar_leaves(mode: VerificationMode) -> None:
    history = history_of(SAMPLED)
    path: tuple[int, ...] = ()
    for _ in range(12):
        draw = DraftDraw(SAMPLED, 5, 0, 2 + len(path), mode, history, path)
        last = path[-1] if path else 2
        (drawn,) = draw_draft([draw], TABLE[[last]] * 0.5)
        assert drawn is not None
        assert history.grammar is not None
        mask = history.grammar.mask(path)
        assert mask is not None
        assert mask[drawn.token_id]
        if drawn.draft_probs is not None:
            assert float(drawn.draft_probs[~mask].sum()) == 0.0
            assert float(drawn.draft_probs.sum()) == pytest.approx(1.0)
        (children,) = draw_children([draw], TABLE[[last]] * 0.5, [4])
        assert children is not None
        assert all(mask[token_id] for token_id in children.token_ids)
        if drawn.token_id == END:
            break
        path = (*path, drawn.token_id)


def test_a_draw_behind_a_path_that_does_not_fit_draws_nothing() -> None:
    draw = DraftDraw(SAMPLED, 5, 0, 3, "invariant", history_of(SAMPLED), (ord("z"),))
    assert draw_draft([draw], TABLE[[0]]) == [None]
    assert draw_children([draw], TABLE[[0]], [3]) == [None]


def test_draws_without_a_grammar_beside_one_with_are_as_alone() -> None:
    free = replace(SAMPLED, grammar=None)
    alone = DraftDraw(free, 5, 0, 2, "invariant", history_of(free))
    bound = DraftDraw(SAMPLED, 5, 0, 2, "invariant", history_of(SAMPLED))
    together = draw_draft([alone, bound], TABLE[[2, 2]])
    assert together[0] == draw_draft([alone], TABLE[[2]])[0]


def test_an_allowed_part_keeps_every_path_that_fits_and_nothing_else() -> None:
    generator = random.Random(4)
    for _ in range(200):
        history = history_of(GREEDY, generator.choice([b"", b"a", b"ab", b"0,ab-"]))
        grammar = history.grammar
        assert grammar is not None
        draft = random_tree(generator, list(b"cd-01"))
        size = len(draft.token_ids)
        probs = torch.arange(float(size))[:, None]
        draft = replace(
            draft,
            draft_probs=probs,
            auxiliary_token_ids=(9, 9, 9),
            auxiliary_parents=(0, size + 1, generator.randrange(size + 1)),
        )
        fitting = [path for path in paths_of(draft)[1:] if grammar.mask(path) is not None]
        kept = allowed_part(draft, grammar)
        assert paths_of(kept)[1:] == fitting
        assert kept.draft_probs is not None
        originals = np.array(draft.token_ids)[kept.draft_probs[:, 0].long().numpy()].tolist()
        assert originals == list(kept.token_ids)
        hung = draft.auxiliary_parents[2]
        if hung == 0 or grammar.mask(paths_of(draft)[hung]) is not None:
            assert kept.auxiliary_token_ids == (9, 9, 9)
            assert kept.auxiliary_parents[:2] == (0, len(kept.token_ids) + 1)
            assert paths_of(kept)[kept.auxiliary_parents[2]] == paths_of(draft)[hung]
        else:
            assert kept.auxiliary_token_ids == ()


def test_rejection_under_a_grammar_has_the_distribution_of_plain_draws() -> None:
    sampling = replace(SAMPLED, top_p=1.0, repetition_penalty=1.0, temperature=2.0)
    counts = np.zeros((2, VOCABULARY))
    target, drafter = TABLE[[2, 97]], TABLE[[40]]
    for seed in range(3000):
        history = history_of(sampling)
        plain_item = VerifyItem(sampling, seed, 0, history, 2, 0)
        counts[0, verify([plain_item], target)[0].token_ids[0]] += 1
        (drawn,) = draw_draft([DraftDraw(sampling, seed, 0, 2, "rejection", history)], drafter)
        assert drawn is not None
        assert drawn.draft_probs is not None
        draft = Draft((drawn.token_id,), (0,), drawn.draft_probs[None])
        item = replace(plain_item, draft=draft, verification="rejection")
        counts[1, verify([item], target)[0].token_ids[0]] += 1
    distance = np.abs(counts[0] - counts[1]).sum() / 2 / 3000
    assert distance < 0.06
