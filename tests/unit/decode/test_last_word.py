"""What the last stage draws is what the first one would have drawn, and it knows which guesses came true."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.records import SamplingParams
from decode.draft import Draft, Verdict, VerifyItem
from decode.last_word import Link, NativeLastWord, Question
from decode.sampling import native
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import NOT_FINITE
from decode.sampling.step_items import DrawItem, pack
from decode.verification.invariant import invariant_draw
from decode.verification.verify import verify
from engine.pipeline_messages import PipelineBroken
from tests.unit.decode.test_sampling_kernel import sampling_params, tied_logits

VOCAB = 61
GREEDY = SamplingParams()


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if native.kernels() is None:
        pytest.skip("no C++ compiler here: nothing is drawn on the last stage")


class Asking:
    """A first stage's side: counts its questions."""

    def __init__(self) -> None:
        self.last_word = NativeLastWord()
        self._number = 0

    def ask(
        self, draws: Sequence[DrawItem], logits: Tensor, links: Sequence[Link] = (), vocab_size: int = VOCAB
    ) -> list[Verdict | None] | None:
        """As `serve_last_stage` does."""
        self._number += 1
        links = links or [Link(key) for key in range(len(draws))]
        question = Question.of(self._number, vocab_size, pack(draws), links)
        verify_tensor = question.to_tensor()
        if self.last_word.is_void(verify_tensor):
            return question.verdicts(torch.empty(0, dtype=torch.int64))
        with torch.inference_mode():
            computed = logits.clone()
        return question.verdicts(self.last_word.verdicts(verify_tensor, computed))


def item_of(
    sampling: SamplingParams, history: TokenHistory, draft: Draft, logits_start: int, choice: int = 0
) -> VerifyItem:
    return VerifyItem(sampling, 5, choice, history, len(history.token_ids), logits_start, draft)


def chain(*token_ids: int) -> Draft:
    return Draft(token_ids, tuple(range(len(token_ids))))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_a_question_is_answered_as_if_it_were_verified_at_home(data: st.DataObject, seed: int) -> None:
    token_ids = st.integers(0, VOCAB - 1)
    items: list[VerifyItem] = []
    row = 0
    for choice in range(data.draw(st.integers(1, 4))):
        history = TokenHistory(
            data.draw(st.lists(token_ids, min_size=1, max_size=6)), data.draw(st.lists(token_ids, max_size=6))
        )
        nodes = data.draw(st.integers(0, 5))
        parents = tuple(data.draw(st.integers(0, node)) for node in range(nodes))
        guesses = tuple(data.draw(st.lists(token_ids, min_size=nodes, max_size=nodes)))
        items.append(
            item_of(data.draw(sampling_params(VOCAB)), history, Draft(guesses, parents), row, choice)
        )
        row += nodes + 1
    logits = tied_logits(seed, row, VOCAB, data.draw(st.sampled_from([0.01, 1.0, 4.0])))
    assert Asking().ask([invariant_draw(item) for item in items], logits) == verify(items, logits)


def test_rows_ahead_are_drawn_as_if_what_is_before_them_were_committed() -> None:
    sampling = SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5, min_p=0.01,
        bad_word_ids=((3, 4), (5,)), min_tokens=8, eos_token_ids=(7,), logit_bias={9: 2.0},
    )  # fmt: skip
    logits = tied_logits(3, 4, VOCAB, 1.0)
    later = TokenHistory([1, 2, 3], [4, 5, 6, 2, 3])
    expected = verify([item_of(sampling, later, chain(8, 9, 1), 0)], logits)
    now = TokenHistory([1, 2, 3], [4, 5])
    (home,) = [invariant_draw(item_of(sampling, now, chain(8, 9, 1), 0))]
    ahead = DrawItem(
        home.sampling, home.seed, home.choice, home.position + 3, now, 0,
        path=(6, 2, 3), token_ids=home.token_ids, parents=home.parents,
    )  # fmt: skip
    assert Asking().ask([ahead], logits) == expected


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    logits = torch.zeros(2, VOCAB + 8)
    logits[:, VOCAB + 3] = 9.0
    logits[:, 4] = 1.0
    items = [item_of(GREEDY, TokenHistory([1]), chain(4), 0)]
    (verdict,) = Asking().ask([invariant_draw(item) for item in items], logits) or [None]
    assert verdict == Verdict((1,), (4, 4))


def test_numbers_that_are_none_are_the_error_of_their_item_alone() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = torch.nan
    logits[1, 6] = 1.0
    draws = [invariant_draw(item_of(GREEDY, TokenHistory([1]), Draft(), row)) for row in (0, 1)]
    assert Asking().ask(draws, logits) == [Verdict((), (), (), NOT_FINITE), Verdict((), (6,))]


def says(*token_ids: int) -> Tensor:
    """Logits whose rows give these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(token_ids), VOCAB).float()


def draw(logits_row: int, *token_ids: int) -> DrawItem:
    return invariant_draw(item_of(GREEDY, TokenHistory([1]), chain(*token_ids), logits_row))


RIGHT = Link(1, builds_on=0, num_accepted=2, last_token_id=30)


@pytest.mark.parametrize(
    ("answer", "link", "holds"),
    [
        ((10, 20, 30), RIGHT, True),
        ((10, 20, 31), RIGHT, False),
        ((10, 21, 30), RIGHT, False),
        ((10, 20, 30), Link(1, 0, 1, 30), False),
    ],
    ids=["right", "another bonus token", "not accepted whole", "other length"],
)
def test_a_guess_holds_where_the_draft_was_accepted_whole_and_its_bonus_token_is_the_one(
    answer: tuple[int, ...], link: Link, holds: bool
) -> None:
    asking = Asking()
    assert asking.ask([draw(0, 10, 20)], says(*answer)) is not None
    verdicts = asking.ask([draw(0)], says(7), [link])
    assert verdicts == ([Verdict((), (7,))] if holds else None)


def test_void_items_are_skipped_beside_others_and_what_builds_on_them_is_void_too() -> None:
    asking = Asking()
    asking.ask([draw(0, 10), draw(2, 11)], says(10, 20, 12, 12))
    links = [Link(1, 0, 1, 20), Link(2, 1, 1, 21), Link(3)]
    verdicts = asking.ask([draw(0, 5), draw(2, 6), draw(4)], says(5, 6, 6, 7, 9), links)
    assert verdicts == [Verdict((1,), (5, 6)), None, Verdict((), (9,))]
    on_void = Link(2, builds_on=1, num_accepted=1, last_token_id=7)
    assert asking.ask([draw(0)], says(1), [on_void]) is None
    assert asking.ask([draw(0)], says(1), [Link(2, 0, 0, 1)]) is None, "nothing builds on a void question"


def test_an_error_makes_void_what_builds_on_it() -> None:
    asking = Asking()
    asking.ask([draw(0)], torch.full((1, VOCAB), torch.nan))
    assert asking.ask([draw(0)], says(1), [Link(1, 0, 0, 0)]) is None


def test_what_builds_on_an_earlier_question_or_on_none_is_refused() -> None:
    with pytest.raises(PipelineBroken, match="builds on"):
        Asking().ask([draw(0)], says(1), [RIGHT])
    last_word = NativeLastWord()
    for number in (1, 3):
        question = Question.of(number, VOCAB, pack([draw(0)]), [Link(1) if number == 1 else RIGHT])
        if number == 1:
            last_word.verdicts(question.to_tensor(), says(1))
        else:
            with pytest.raises(PipelineBroken, match="question 3 builds on"):
                last_word.is_void(question.to_tensor())


def test_answers_to_something_else_are_refused() -> None:
    last_word = NativeLastWord()
    questions = [Question.of(number, VOCAB, pack([draw(0)]), [Link(number)]) for number in (1, 2)]
    answers = [last_word.verdicts(question.to_tensor(), says(1)) for question in questions]
    with pytest.raises(PipelineBroken, match="question 1 was asked, 2 answered"):
        questions[0].verdicts(answers[1])
    other = Question.of(1, VOCAB, pack([draw(0)]), [Link(9)])
    with pytest.raises(PipelineBroken, match="other requests"):
        other.verdicts(answers[0])


@pytest.mark.parametrize("num_bytes", [0, 5, 40, 8 * 30])
def test_a_question_that_is_cut_short_is_refused(num_bytes: int) -> None:
    question = Question.of(1, VOCAB, pack([draw(0, 1, 2)]), [Link(1)]).to_tensor()
    with pytest.raises(PipelineBroken, match="a question of"):
        Question.from_tensor(question[:num_bytes].clone())
