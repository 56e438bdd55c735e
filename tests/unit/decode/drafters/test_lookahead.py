"""Lookahead: its window and pool against the algorithm written down plainly, and what it does where rows run short."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from core.drafter_settings import LookaheadSettings
from core.records import SamplingParams, VerificationMode
from decode.draft import Draft, VerifyItem
from decode.drafters.lookahead import LookaheadDrafter, window_parents
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from engine.block_table import BlockTable

VOCAB = 11
GREEDY = SamplingParams(max_tokens=1000)
Model = Callable[[Sequence[int]], int]


def babbling(context: Sequence[int]) -> int:
    """A target of a few words: its next token hangs on the last three."""
    return hashlib.sha256(repr(list(context[-3:])).encode()).digest()[0] % VOCAB


def repeating(context: Sequence[int]) -> int:
    """Counts from 0 to 4, again and again."""
    return (context[-1] + 1) % 5


def request_of(
    token_ids: Sequence[int],
    width: int = 3,
    sampling: SamplingParams = GREEDY,
    verification: VerificationMode = "invariant",
    key: int = 1,
) -> DraftRequest:
    return DraftRequest(
        key=key,
        history=TokenHistory(token_ids),
        sampling=sampling,
        seed=3,
        choice=0,
        verification=verification,
        hidden=lambda start, end: torch.empty(0),
        draft_width=width,
        table=BlockTable,
    )


def drafter_of(max_context: int = 1000, **settings: int) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadSettings(**settings), max_context)


def rows_of(draft: Draft) -> list[tuple[int, ...]]:
    """The path behind the root of every row, the root's first."""
    found: list[tuple[int, ...]] = [()]
    token_ids = (*draft.token_ids, *draft.auxiliary_token_ids)
    for token_id, parent in zip(token_ids, (*draft.parents, *draft.auxiliary_parents), strict=True):
        found.append((*found[parent], token_id))
    return found


def step(
    drafter: LookaheadDrafter, request: DraftRequest, model: Model, depth: int, max_rows: int = 99
) -> tuple[Draft, int]:
    """Propose, let `model` judge the rows, observe; the draft and how much of it was accepted."""
    (draft,) = drafter.propose([DraftBudget(request, depth, max_rows)])
    text = list(request.history.token_ids)
    paths = rows_of(draft)
    answers = [model([*text, *path]) for path in paths]
    logits = torch.full((len(paths), VOCAB), -1.0)
    logits[torch.arange(len(paths)), torch.tensor(answers)] = 1.0
    accepted: list[int] = []
    emitted = [answers[0]]
    nodes = {path: row for row, path in enumerate(paths[: 1 + len(draft.token_ids)])}
    while tuple(emitted) in nodes:
        accepted.append(nodes[tuple(emitted)])
        emitted.append(answers[accepted[-1]])
    request.history.extend(emitted)
    num_auxiliary = len(draft.auxiliary_token_ids)
    auxiliary = logits[-num_auxiliary:] if num_auxiliary else None
    drafter.observe([Observation(request, draft, tuple(accepted), tuple(emitted), None, auxiliary)])
    return draft, len(accepted)


class PlainLookahead:
    """The algorithm of Fu et al. as it is told: iterations of guesses by place, each one seeing what is named.

    `iterations[-1]` is the latest of N - 1; each maps (column) to its guess. Of the oldest, column c is the guess for
    place c, column 0 being the text's last token. Of one that came i iterations later column c is for place c + i.
    """

    def __init__(self, text: Sequence[int], window: int, ngram: int, guesses: int) -> None:
        self.window, self.ngram, self.guesses = window, ngram, guesses
        tail = list(text)[-(window + ngram - 3) :]
        self.iterations = [
            {column: tail[(column + late - 1) % len(tail)] for column in range(window)}
            for late in range(ngram - 1)
        ]
        self.pool: list[tuple[int, ...]] = []
        """Every n-gram, the latest last."""

    def continuations(self, last: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for gram in reversed(self.pool):
            if gram[0] == last and gram[1:] not in found:
                found.append(gram[1:])
        return found[: self.guesses]

    def contexts(self) -> dict[tuple[int, int], list[int]]:
        """What each guess's row holds behind the text, its own token last, by (iteration, column)."""
        oldest = self.iterations[0]
        seen = {}
        for late in range(self.ngram - 1):
            for column in range(self.window):
                first = [oldest[other] for other in range(1, column + 1)]
                own = [self.iterations[level][column] for level in range(1, late + 1)]
                seen[late, column] = first + own
        return seen

    def iterate(self, text: Sequence[int], model: Model) -> None:
        contexts = self.contexts()
        new = {c: model([*text, *contexts[self.ngram - 2, c]]) for c in range(self.window)}
        grams = []
        for column in range(self.window):
            head = text[-1] if column == 0 else self.iterations[0][column]
            middle = [self.iterations[level][column] for level in range(1, self.ngram - 1)]
            grams.append((head, *middle, new[column]))
        self.pool += reversed(grams)
        self.iterations = [*self.iterations[1:], new]


@pytest.mark.parametrize(
    ("window", "ngram", "guesses"), [(4, 3, 3), (1, 3, 1), (5, 5, 2), (2, 4, 7), (7, 3, 2)]
)
@pytest.mark.parametrize("model", [babbling, repeating])
def test_it_does_what_the_algorithm_says(window: int, ngram: int, guesses: int, model: Model) -> None:
    drafter = drafter_of(window=window, ngram=ngram, guesses=guesses)
    request = request_of([5, 1, 2, 9, 1, 2, 3], width=guesses)
    drafter.start(request)
    plain = PlainLookahead(request.history.token_ids, window, ngram, guesses)
    total = 0
    for _ in range(60):
        text = list(request.history.token_ids)
        draft, accepted = step(drafter, request, model, ngram - 1)
        paths = rows_of(draft)
        nodes, auxiliary = paths[1 : 1 + len(draft.token_ids)], paths[1 + len(draft.token_ids) :]
        expected = [tuple(path) for path in plain.contexts().values()][1:]
        assert auxiliary == expected
        wanted = plain.continuations(text[-1])
        assert {path for path in nodes if len(path) == ngram - 1} == set(wanted)
        assert set(nodes) == {rest[:length] for rest in wanted for length in range(1, ngram)}
        assert len(set(nodes)) == len(nodes), "siblings are distinct"
        plain.iterate(text, model)
        total += accepted
    assert total > 0 or window == 1


def test_a_row_of_the_window_sees_its_column_and_the_oldest_level_before_it() -> None:
    parents = window_parents(4, 4)
    assert len(parents) == 4 * 3 - 1
    seen: list[list[int]] = [[0]]
    for row, parent in enumerate(parents, start=1):
        seen.append([*seen[parent], row])
    for level in range(3):
        for column in range(4):
            above = [4 * other + column for other in range(1, level + 1)]
            assert seen[4 * level + column] == [*range(column + 1), *above]
            assert len(seen[4 * level + column]) == 1 + column + level, "its place is its depth"


def test_a_text_that_repeats_itself_is_soon_drafted_whole() -> None:
    drafter = drafter_of(window=4, ngram=4, guesses=2)
    request = request_of([3, 4, 0, 1, 2, 3, 4])
    drafter.start(request)
    accepted = [step(drafter, request, repeating, 3)[1] for _ in range(20)]
    assert accepted[-5:] == [3] * 5


def test_drafts_keep_to_depth_and_width() -> None:
    drafter = drafter_of(window=4, ngram=4, guesses=4)
    wide, narrow = request_of([1, 2, 3], width=4), request_of([1, 2, 3], width=1, key=2)
    for request in (wide, narrow):
        drafter.start(request)
    widest = 0
    for _ in range(200):
        draft, _ = step(drafter, wide, babbling, 2)
        assert max(draft.depths(), default=0) <= 2
        assert len(draft.token_ids) <= 2 * 4
        widest = max(widest, draft.parents.count(0))
        chain, _ = step(drafter, narrow, babbling, 3)
        assert chain.is_chain
    assert widest > 1


def test_where_rows_run_short_the_window_waits_and_goes_on_afterwards() -> None:
    drafter = drafter_of(window=4, ngram=3, guesses=3)
    request = request_of([0, 1, 2, 3, 4])
    drafter.start(request)
    for _ in range(6):
        step(drafter, request, repeating, 2)
    (whole,) = drafter.propose([DraftBudget(request, 2, 99)])
    assert whole.num_rows == len(whole.token_ids) + 7
    assert whole.token_ids
    (bare,) = drafter.propose([DraftBudget(request, 2, whole.num_rows - 1)])
    assert bare == replace(whole, auxiliary_token_ids=(), auxiliary_parents=())
    (first,) = drafter.propose([DraftBudget(request, 2, 1)])
    assert first.token_ids == whole.token_ids[:1]
    assert drafter.propose([DraftBudget(request, 0, 0)])[0].num_rows == 0
    step(drafter, request, repeating, 2, max_rows=2)
    (after,) = drafter.propose([DraftBudget(request, 2, 99)])
    assert after.auxiliary_token_ids == whole.auxiliary_token_ids


def test_the_window_stays_inside_the_context() -> None:
    request = request_of([1] * 10)
    for max_context, inside in ((14, True), (13, False)):
        drafter = drafter_of(max_context, window=4, ngram=3)
        drafter.start(request)
        (draft,) = drafter.propose([DraftBudget(request, 2, 99)])
        deepest = 9 + max(map(len, rows_of(draft)))
        assert (draft.num_rows > 0) == inside
        assert deepest < max_context


def test_a_row_that_cannot_be_drawn_from_leaves_the_window_as_it_was() -> None:
    drafter = drafter_of()
    request = request_of([1, 2, 3])
    drafter.start(request)
    (draft,) = drafter.propose([DraftBudget(request, 2, 99)])
    request.history.extend([4])
    logits = torch.zeros(7, VOCAB)
    logits[6, 2] = math.nan
    drafter.observe([Observation(request, draft, (), (4,), None, logits)])
    (after,) = drafter.propose([DraftBudget(request, 2, 99)])
    assert after == draft


def test_requests_of_one_step_do_not_mix() -> None:
    together, apart = drafter_of(), drafter_of()
    texts = ([1, 2, 3], [4, 5, 6, 7])
    requests = [request_of(text, key=key) for key, text in enumerate(texts)]
    copies = [request_of(text, key=key) for key, text in enumerate(texts)]
    for request, copy in zip(requests, copies, strict=True):
        together.start(request)
        apart.start(copy)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        drafts = together.propose([DraftBudget(request, 2, 99) for request in requests])
        observations = []
        for request, copy, draft in zip(requests, copies, drafts, strict=True):
            (own,) = apart.propose([DraftBudget(copy, 2, 99)])
            assert own == draft
            logits = torch.randn(7, VOCAB, generator=generator)
            for drafted in (request, copy):
                drafted.history.extend([8])
            observations.append(Observation(request, draft, (), (8,), None, logits))
            apart.observe([Observation(copy, own, (), (8,), None, logits)])
        together.observe(observations)


@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_guesses_are_drawn_with_the_noise_of_their_places_and_are_the_likeliest_under_rejection(
    verification: VerificationMode,
) -> None:
    drafter = drafter_of(window=8)
    sampling = replace(GREEDY, temperature=1.0)
    request = request_of([1, 2, 3], sampling=sampling, verification=verification)
    drafter.start(request)
    (draft,) = drafter.propose([DraftBudget(request, 2, 99)])
    request.history.extend([4])
    logits = torch.zeros(15, VOCAB)
    logits[:, 6] = 0.1
    drafter.observe([Observation(request, draft, (), (4,), None, logits)])
    (after,) = drafter.propose([DraftBudget(request, 2, 99)])
    guesses = after.auxiliary_token_ids[-8:]
    if verification == "rejection":
        assert set(guesses) == {6}
        return
    places = range(len(request.history.token_ids), len(request.history.token_ids) + 8)
    items = [
        VerifyItem(sampling, request.seed, request.choice, request.history, place, logits_start=row)
        for row, place in enumerate(places)
    ]
    assert [verdict.token_ids[0] for verdict in verify(items, logits[-8:])] == list(guesses)
    assert len(set(guesses)) > 1


def test_finishing_forgets_and_check_sees_what_was_forgotten() -> None:
    drafter = drafter_of()
    request = request_of([1])
    drafter.rebuild(request)
    with pytest.raises(AssertionError, match="1 windows"):
        drafter.check()
    drafter.finish(request)
    drafter.finish(request)
    drafter.check()


def test_its_needs_count_the_window_and_settings_are_checked() -> None:
    needs = drafter_of(window=5, ngram=4, guesses=2).needs
    assert (needs.max_draft_length, needs.default_draft_length) == (3, 3)
    assert (needs.max_draft_width, needs.default_draft_width) == (2, 2)
    assert needs.auxiliary_rows == 14
    assert [needs.rows(depth, 2) for depth in range(4)] == [0, 16, 18, 20]
    assert drafter_of(ngram=4, draft_length=2).needs.default_draft_length == 2
    with pytest.raises(ValidationError, match="less than ngram"):
        LookaheadSettings(ngram=3, draft_length=3)
