"""The bookkeeping of beam search against its definition, on a tiny vocabulary."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import EarlyStopping, SamplingParams
from decode.beam_group import BeamGroup
from decode.beam_search import BeamSearch, Candidate, Hypothesis
from decode.finisher import Finisher
from decode.sampling.arithmetic import Float32
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import BAD_WORDS, NOT_FINITE
from engine.kv_cache import KvCache, KvLayout
from tests.support.naive_beams import (
    LogitsOf,
    ends_by_id,
    log_probs_after,
    naive_beam_search,
    table_of_logits,
)
from tests.unit.decode.test_finisher import ByteText

PROMPT = (1, 2, 3, 2)
VOCABULARY = 6
EARLY: tuple[EarlyStopping, ...] = (False, True, "never")
LAYOUT = KvLayout(1, 1, 2, 2, (), 4, torch.float32)


class Searched:
    """A group over a KV pool, its target made up; the planes hold nothing that is looked at."""

    def __init__(
        self, logits_of: LogitsOf, sampling: SamplingParams, longest: int, prompt: Sequence[int] = PROMPT
    ) -> None:
        self.kv = KvCache(LAYOUT, 512)
        self.group = BeamGroup(sampling, TokenHistory(prompt), Finisher(sampling, longest, ByteText()))
        self.prompt = prompt
        self.logits_of = logits_of
        self.error: str | None = None

    def open(self) -> None:
        table = self.kv.open()
        self.kv.reserve(table, len(self.prompt))
        self.kv.commit(table, len(self.prompt))
        self.group.start(table)

    def steps(self) -> Iterator[int]:
        """Goes through the search, its number of hypotheses before each step."""
        self.open()
        self._advance()
        while self.error is None and self.group.best is None:
            yield self.group.num_rows
            self.group.reserve(self.kv)
            self._check_rows()
            self.group.commit(self.kv)
            self._advance()
            self.kv.check()

    def run(self) -> tuple[tuple[int, ...], float]:
        for _ in self.steps():
            pass
        assert self.error is None
        assert self.group.best is not None
        answer = self.group.best.hypothesis.token_ids, self.group.best.score
        assert not self.group.holds_blocks
        assert self.kv.stats().used == 0
        return answer

    def _advance(self) -> None:
        rows = [self.logits_of(hypothesis.token_ids) for hypothesis in self.group._search.running]
        self.error = self.group.advance(self.kv, torch.stack([torch.from_numpy(row) for row in rows]))

    def _check_rows(self) -> None:
        """Every row is the last token of its hypothesis, at its place, in a slot of its own."""
        sequences = self.group.sequences()
        slots = []
        for sequence, hypothesis in zip(sequences, self.group._search.running, strict=True):
            assert sequence.token_ids == hypothesis.token_ids[-1:]
            assert sequence.start == len(self.prompt) + len(hypothesis.token_ids) - 1
            slots += self.kv.slots(sequence.table, sequence.start, sequence.start + 1).tolist()
        assert len(set(slots)) == len(slots)


samplings = st.builds(
    SamplingParams,
    beam_width=st.integers(2, 5),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from(EARLY),
    eos_token_ids=st.sampled_from([(), (0,), (0, 4)]),
    stop_token_ids=st.sampled_from([(), (5,)]),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {2: 1.5, 3: -2.0}]),
    bad_word_ids=st.sampled_from([(), ((3,),), ((2, 1), (4, 4))]),
)


@settings(deadline=None, max_examples=150)
@given(samplings, st.integers(0, 10**6), st.integers(1, 7))
def test_group_finds_what_the_definition_finds(sampling: SamplingParams, seed: int, longest: int) -> None:
    logits_of = table_of_logits(VOCABULARY, seed)
    expected = naive_beam_search(logits_of, sampling, PROMPT, longest)
    token_ids, score = Searched(logits_of, sampling, longest).run()
    assert token_ids == expected.token_ids
    assert score == pytest.approx(expected.score, rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from([-0.5, 0.0, 1.0, 2.0]),
    st.sampled_from([(), (0,)]),
    st.sampled_from([1.0, 1.4]),
)
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_answers(
    seed: int, length_penalty: float, eos: tuple[int, ...], repetition: float
) -> None:
    logits_of, longest, vocabulary = table_of_logits(3, seed), 4, 3
    sampling = SamplingParams(
        beam_width=vocabulary**longest,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_ids=eos,
        repetition_penalty=repetition,
    )
    _, score = Searched(logits_of, sampling, longest).run()
    assert score == pytest.approx(best_score(logits_of, sampling, vocabulary, longest))


def best_score(logits_of: LogitsOf, sampling: SamplingParams, vocabulary: int, longest: int) -> float:
    """Over every answer that there is."""
    best = -math.inf
    for length in range(1, longest + 1):
        for ids in itertools.product(range(vocabulary), repeat=length):
            inner = [ends_by_id(sampling, ids[:end]) for end in range(1, length)]
            if any(inner) or (length < longest and not ends_by_id(sampling, ids)):
                continue
            total = sum(
                log_probs_after(logits_of, sampling, PROMPT, ids[:end])[ids[end]] for end in range(length)
            )
            best = max(best, total / length**sampling.length_penalty)
    return best


def plain_search(**changes: object) -> BeamSearch:
    sampling = SamplingParams(**{"beam_width": 2, "eos_token_ids": (0,), **changes})  # type: ignore[arg-type]
    return BeamSearch(sampling, Finisher(sampling, 10, ByteText()))


def advance(search: BeamSearch, *candidates: Candidate) -> None:
    def extend(candidate: Candidate) -> Hypothesis:
        parent = search.running[candidate.beam]
        finisher = parent.finisher.fork()
        ended = finisher.push((candidate.token_id,)).finish is not None
        return Hypothesis(
            (*parent.token_ids, candidate.token_id), candidate.log_prob, candidate.beam, ended, finisher
        )

    search.advance(candidates, extend)


def test_ties_go_to_the_lower_beam_and_then_to_the_lower_token() -> None:
    search = plain_search()
    advance(search, Candidate(0, 7, -1.0), Candidate(0, 5, -1.0), Candidate(0, 6, -1.0))
    assert [hypothesis.token_ids for hypothesis in search.running] == [(5,), (6,)]
    advance(search, Candidate(1, 3, -2.0), Candidate(0, 9, -2.0), Candidate(0, 8, -2.0))
    assert [hypothesis.token_ids for hypothesis in search.running] == [(5, 8), (5, 9)]


def test_an_end_behind_the_first_of_the_ranking_is_not_kept() -> None:
    search = plain_search()
    advance(search, Candidate(0, 5, -1.0), Candidate(0, 6, -1.5), Candidate(0, 0, -2.0))
    assert not search.finished
    advance(
        search, Candidate(0, 0, -1.1), Candidate(0, 5, -1.2), Candidate(1, 5, -1.6), Candidate(1, 0, -1.7)
    )
    assert [entry.hypothesis.token_ids for entry in search.finished] == [(5, 0)]
    assert [hypothesis.token_ids for hypothesis in search.running] == [(5, 5), (6, 5)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "over"),
    [(True, 1.0, True), (False, 1.0, False), (False, 0.0, True), ("never", 1.0, False), ("never", 0.0, True)],
)
def test_a_full_search_is_over_by_the_rule_asked_for(
    early_stopping: EarlyStopping, length_penalty: float, over: bool
) -> None:
    search = plain_search(early_stopping=early_stopping, length_penalty=length_penalty)
    advance(search, Candidate(0, 0, -2.0), Candidate(0, 5, -2.1), Candidate(0, 6, -2.2))
    assert not search.over
    advance(search, Candidate(0, 0, -2.15), Candidate(1, 5, -2.3), Candidate(1, 6, -2.4))
    assert len(search.finished) == 2
    assert search.over is over


def test_false_gives_up_where_never_goes_on_for_the_length_to_come() -> None:
    for early_stopping, over in ((False, True), ("never", False)):
        search = plain_search(early_stopping=early_stopping)
        advance(search, Candidate(0, 0, -1.0), Candidate(0, 5, -1.1), Candidate(0, 6, -4.0))
        advance(search, Candidate(0, 0, -1.3), Candidate(0, 5, -4.0), Candidate(1, 6, -4.4))
        assert search.over is over


def test_a_search_begins_again_after_it_gave_its_blocks_back() -> None:
    sampling = SamplingParams(beam_width=3, eos_token_ids=(0,), early_stopping="never")
    logits_of = table_of_logits(VOCABULARY, 3)
    expected = Searched(logits_of, sampling, 9).run()
    searched = Searched(logits_of, sampling, 9)
    for number, _ in enumerate(searched.steps()):
        if number == 3:
            before = searched.group.num_blocks(LAYOUT)
            searched.group.close(searched.kv)
            assert searched.kv.stats().used == 0
            break
    assert before > len(PROMPT) // LAYOUT.block_size + 3
    assert searched.group.num_blocks(LAYOUT) == before
    assert searched.run() == expected


def test_a_beam_that_has_nothing_left_is_dropped_and_the_last_one_names_its_constraint() -> None:
    row: Float32 = np.array([0.0, -1.0, -2.0], np.float32)

    def logits_of(ids: tuple[int, ...]) -> Float32:
        return row

    bans = tuple((0, token_id) for token_id in range(3))
    sampling = SamplingParams(beam_width=2, bad_word_ids=bans, eos_token_ids=(9,))
    token_ids, _ = Searched(logits_of, sampling, 3).run()
    assert token_ids == (1, 1, 0)
    all_bans = (*bans, *((1, token_id) for token_id in range(3)), (2,))
    stuck = Searched(logits_of, SamplingParams(beam_width=2, bad_word_ids=all_bans), 3)
    list(stuck.steps())
    assert stuck.error == BAD_WORDS


def test_numbers_that_are_none_are_told() -> None:
    def logits_of(ids: tuple[int, ...]) -> Float32:
        return np.array([0.0, math.nan if len(ids) > 1 and ids[-1] == 1 else 0.5], np.float32)

    searched = Searched(logits_of, SamplingParams(beam_width=2), 5)
    list(searched.steps())
    assert searched.error == NOT_FINITE


def test_logprobs_are_those_of_the_tokens_before_any_processing() -> None:
    sampling = SamplingParams(beam_width=3, eos_token_ids=(0,), repetition_penalty=1.5, logprobs=2)
    logits_of = table_of_logits(VOCABULARY, 11)
    searched = Searched(logits_of, sampling, 6)
    token_ids, _ = searched.run()
    best = searched.group.best
    assert best is not None
    plain = SamplingParams()
    for end, entry in enumerate(best.hypothesis.logprobs):
        raw = log_probs_after(logits_of, plain, PROMPT, token_ids[:end])
        assert entry.token_id == token_ids[end]
        assert entry.logprob == pytest.approx(raw[token_ids[end]])
        assert [value for _, value in entry.top] == pytest.approx(sorted(raw, reverse=True)[:2])
    assert len(best.hypothesis.logprobs) == len(token_ids)


def test_stop_strings_end_hypotheses_wherever_their_text_was_forked() -> None:
    vocabulary = {token_id: chr(97 + token_id) for token_id in range(VOCABULARY)}

    class Letters(ByteText):
        def push(self, token_ids: Sequence[int]) -> str:
            return "".join(vocabulary[token_id] for token_id in token_ids)

    for seed in range(20):
        sampling = SamplingParams(beam_width=3, stop=("ab", "bca", "fc"), early_stopping="never")
        searched = Searched(table_of_logits(VOCABULARY, seed), sampling, 8)
        searched.group = BeamGroup(sampling, TokenHistory(PROMPT), Finisher(sampling, 8, Letters()))
        token_ids, _ = searched.run()
        text = "".join(vocabulary[token_id] for token_id in token_ids)
        ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(sampling.stop)]
        assert (ends or [8])[0] == len(text)
