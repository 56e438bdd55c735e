"""Drafting ahead over two stages: the text is that of plain decoding, whatever happens to the requests."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from core.records import SamplingParams
from core.settings import DecodeSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget
from decode.last_word import NativeLastWord, Question
from decode.pass_step import PassStepper
from engine.pipeline import Flight
from engine.pipeline_messages import StepReply
from tests.integration.decode.conftest import prompt_of
from tests.support.loop_stand import LOOP_ENGINE, KnowingDrafter, LoopStand, SplitLoop, split_engine

SAMPLED = SamplingParams(temperature=12.0, top_p=0.95, max_tokens=40, seed=7)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40, seed=7),
    "sampled": SAMPLED,
    "repetition": SamplingParams(max_tokens=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.5),
    "truncated": replace(SAMPLED, top_k=5, min_p=0.01, presence_penalty=2.0),
    "three": replace(SAMPLED, n=3, min_tokens=9, eos_token_ids=tuple(range(0, 256, 9))),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_every_answer_is_the_plain_one_whatever_becomes_of_the_guesses(
    plain_loop: LoopStand, split_loop: SplitLoop, sampling: SamplingParams
) -> None:
    prompts = [prompt_of(20 + 9 * number, number) for number in range(3)]
    known = [plain_loop.answer(prompt, sampling, "none") for prompt in prompts]
    split_loop.learn(*known)
    for wrong_every in (0, 1, 4, 7):
        split_loop.drafter.wrong_every = wrong_every
        for prompt, expected in zip(prompts, known, strict=True):
            assert split_loop.stand.answer(prompt, sampling).token_ids == expected.token_ids
    names = ("pass", "none", "ngram", "pass", "other")
    mixed = [split_loop.stand.ask(prompt, sampling, name) for prompt in prompts for name in names]
    split_loop.stand.run()
    for number, asked in enumerate(mixed):
        assert asked.token_ids == known[number // len(names)].token_ids
    guesses = split_loop.stepper.guesses
    assert guesses.held > 10
    assert guesses.failed > 10


@pytest.mark.parametrize("draft_length", [1, 2, 5, 8, None])
def test_a_right_drafter_is_always_ahead_and_a_wrong_one_never(
    plain_loop: LoopStand, split_loop: SplitLoop, draft_length: int | None
) -> None:
    prompt = prompt_of(30)
    expected = plain_loop.answer(prompt, SAMPLED, "none")
    split_loop.learn(expected)
    answer = split_loop.stand.answer(prompt, SAMPLED, draft_length=draft_length)
    guesses = split_loop.stepper.guesses
    assert answer.ids == expected.ids
    assert guesses.failed == guesses.missed == 0
    assert guesses.held > 0
    assert answer.report is not None
    assert answer.report.accepted_tokens == answer.report.proposed_nodes
    if draft_length is not None:
        bursts = -(-39 // (draft_length + 1))
        assert answer.report.steps == bursts
        assert guesses.held == bursts - 1
    held = guesses.held
    split_loop.drafter.wrong_every = 1
    assert split_loop.stand.answer(prompt, SAMPLED, draft_length=draft_length).ids == expected.ids
    assert guesses.held == held
    assert guesses.failed > 0


def test_a_slow_drafter_drafts_nothing_ahead_once_that_is_known(
    plain_loop: LoopStand, split_loop: SplitLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(30)
    expected = plain_loop.answer(prompt, SAMPLED, "none")
    split_loop.learn(expected)
    quick = split_loop.drafter.propose

    def slow(budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        split_loop.stand.clock.advance(max(budget.draft_length for budget in budgets))
        return quick(budgets)

    monkeypatch.setattr(split_loop.drafter, "propose", slow)
    guesses = split_loop.stepper.guesses
    assert split_loop.stand.answer(prompt, SAMPLED, draft_length=2).ids == expected.ids
    before = replace(guesses)
    answer = split_loop.stand.answer(prompt, SAMPLED, draft_length=2)
    assert answer.ids == expected.ids
    assert answer.report is not None
    assert answer.report.steps == 13
    assert guesses == before


def test_the_last_stage_begins_the_next_burst_before_the_first_one_has_settled_the_last(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer
) -> None:
    prompt = prompt_of(30)
    expected = plain_loop.answer(prompt, SAMPLED, "none")
    begun: dict[int, threading.Event] = {number: threading.Event() for number in range(1, 50)}

    class Noticing(NativeLastWord):
        def is_void(self, verify: Tensor) -> bool:
            begun[Question.from_tensor(verify).number].set()
            return super().is_void(verify)

    with split_engine(tiny_model, LOOP_ENGINE, Noticing()) as (engine, _):
        drafter = KnowingDrafter()
        stand = LoopStand(engine, [drafter], tokenizer)
        stepper = stand.stepper
        assert isinstance(stepper, PassStepper)
        drafter.learn(expected)
        real_answer = engine.answer
        overlapped = 0

        def answer(flight: Flight, void: Sequence[int] = ()) -> StepReply:
            nonlocal overlapped
            reply = real_answer(flight, void)
            if stepper.num_in_flight:
                number = stepper._pipe[0].question.number
                assert begun[number].wait(10), "the next burst waits for the first stage"
                overlapped += 1
            return reply

        engine.answer = answer  # type: ignore[method-assign, assignment]
        assert stand.answer(prompt, SAMPLED).ids == expected.ids
        assert overlapped == stepper.guesses.held == 7


@pytest.mark.parametrize("wrong_every", [0, 7])
@pytest.mark.parametrize("num_blocks", [9, 12])
def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer, num_blocks: int, wrong_every: int
) -> None:
    prompts = [prompt_of(30 + number, number) for number in range(6)]
    sampling = replace(SAMPLED, n=1)
    known = [plain_loop.answer(prompt, sampling, "none") for prompt in prompts]
    settings = LOOP_ENGINE.model_copy(update={"num_blocks": num_blocks})
    with split_engine(tiny_model, settings) as (engine, _):
        drafter = KnowingDrafter()
        drafter.wrong_every = wrong_every
        stand = LoopStand(engine, [drafter], tokenizer)
        for asked in known:
            drafter.learn(asked)
        for names in (("pass",), ("pass", "none")):
            answers = [
                stand.ask(prompt, sampling, names[number % len(names)])
                for number, prompt in enumerate(prompts)
            ]
            stand.run()
            assert [answer.ids for answer in answers] == [asked.ids for asked in known]
        assert stand.metrics.totals()["outrider.preemptions"] > 0


def test_several_choices_share_their_prompt_under_pressure(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer
) -> None:
    prompt, sampling = prompt_of(37), replace(SAMPLED, n=4)
    known = plain_loop.answer(prompt, sampling, "none")
    with split_engine(tiny_model, LOOP_ENGINE.model_copy(update={"num_blocks": 10})) as (engine, _):
        drafter = KnowingDrafter()
        stand = LoopStand(engine, [drafter], tokenizer)
        drafter.learn(known)
        assert stand.answer(prompt, sampling).token_ids == known.token_ids


@pytest.mark.parametrize("wrong_every", [0, 6])
def test_a_request_that_is_dropped_at_any_moment_leaves_nothing_and_hurts_nobody(
    plain_loop: LoopStand, split_loop: SplitLoop, wrong_every: int
) -> None:
    split_loop.drafter.wrong_every = wrong_every
    stays, goes = prompt_of(30, 1), prompt_of(40, 2)
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in (stays, goes)]
    split_loop.learn(*known)
    for moment in range(12):
        staying, going = split_loop.stand.ask(stays, SAMPLED), split_loop.stand.ask(goes, SAMPLED)
        for _ in range(moment):
            split_loop.stand.turn()
        split_loop.stand.loop.drop(going.request)
        split_loop.stand.loop.check()
        split_loop.stand.run()
        assert staying.ids == known[0].ids
        assert going.ids == known[1].ids[: len(going.ids)]
    for moment in range(8):
        alone = split_loop.stand.ask(stays, SAMPLED)
        for _ in range(moment):
            split_loop.stand.turn()
        split_loop.stand.loop.drop(alone.request)
        split_loop.stand.run()


@pytest.mark.parametrize("place", range(3, 14))
def test_an_answer_ends_where_it_ends_inside_a_burst(
    plain_loop: LoopStand, split_loop: SplitLoop, place: int
) -> None:
    prompt = prompt_of(30)
    free = plain_loop.answer(prompt, SAMPLED, "none")
    split_loop.learn(free)
    for sampling in (
        replace(SAMPLED, eos_token_ids=(free.ids[place],)),
        replace(SAMPLED, stop_token_ids=(free.ids[place],), min_tokens=place - 2),
        replace(SAMPLED, max_tokens=place),
        replace(SAMPLED, stop=(chr(free.ids[place] % 128),)),
    ):
        expected = plain_loop.answer(prompt, sampling, "none")
        assert split_loop.stand.answer(prompt, sampling).ids == expected.ids
        together = [split_loop.stand.ask(prompt, one) for one in (sampling, SAMPLED)]
        split_loop.stand.run()
        assert [asked.ids for asked in together] == [expected.ids, free.ids]


def test_requests_that_come_while_others_fly_fly_beside_them(
    plain_loop: LoopStand, split_loop: SplitLoop
) -> None:
    prompts = [prompt_of(20 + 7 * number, number) for number in range(5)]
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    split_loop.learn(*known)
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(split_loop.stand.ask(prompt, SAMPLED, draft_length=2 + number))
        for _ in range(number + 1):
            split_loop.stand.turn()
    split_loop.stand.run()
    assert [answer.ids for answer in answers] == [asked.ids for asked in known]


def test_a_resumed_answer_goes_on_where_it_was(plain_loop: LoopStand, split_loop: SplitLoop) -> None:
    prompt = prompt_of(30)
    known = plain_loop.answer(prompt, SAMPLED, "none")
    split_loop.learn(known)
    for sent in (1, 4, 17):
        resumed = split_loop.stand.answer(prompt, SAMPLED, committed={0: known.ids[:sent]})
        assert resumed.ids == known.ids[sent:]


def test_a_reader_that_is_behind_waits_and_misses_nothing(
    plain_loop: LoopStand, split_loop: SplitLoop
) -> None:
    prompts = [prompt_of(30, 1), prompt_of(40, 2)]
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    split_loop.learn(*known)
    slow, fast = (split_loop.stand.ask(prompt, SAMPLED) for prompt in prompts)
    while len(slow.ids) < 6:
        split_loop.stand.turn()
    slow.reader.blocked = True
    split_loop.stand.turn()
    arrived = len(slow.ids)
    while split_loop.stand.turn():
        pass
    assert fast.ids == known[1].ids
    assert len(slow.ids) <= arrived + 5
    assert split_loop.stepper.num_in_flight == 0
    slow.reader.blocked = False
    split_loop.stand.run()
    assert slow.ids == known[0].ids


@pytest.mark.parametrize(
    "unusual",
    [replace(SAMPLED, logprobs=1), SamplingParams(max_tokens=20, seed=1, beam_width=2)],
    ids=["logprobs", "beam search"],
)
def test_requests_that_the_last_stage_cannot_draw_for_take_the_plain_step_and_all_with_them(
    plain_loop: LoopStand, split_loop: SplitLoop, unusual: SamplingParams
) -> None:
    prompts = [prompt_of(30, 1), prompt_of(40, 2)]
    known = [
        plain_loop.answer(prompt, sampling, "none")
        for prompt, sampling in zip(prompts, (SAMPLED, unusual), strict=True)
    ]
    split_loop.learn(known[0])
    usual = split_loop.stand.ask(prompts[0], SAMPLED)
    for _ in range(4):
        split_loop.stand.turn()
    other = split_loop.stand.ask(prompts[1], unusual, "none")
    split_loop.stand.run()
    assert (usual.ids, other.ids) == (known[0].ids, known[1].ids)


def test_a_long_answer_keeps_no_trace_of_what_has_been_settled(
    plain_loop: LoopStand, split_loop: SplitLoop
) -> None:
    prompt, sampling = prompt_of(30), replace(SAMPLED, max_tokens=200)
    split_loop.learn(plain_loop.answer(prompt, sampling, "none"))
    split_loop.stand.ask(prompt, sampling)
    for _ in range(30):
        split_loop.stand.turn()
    (message,) = split_loop.stepper._pipe
    (item,) = message.flown
    assert item.base is None
    split_loop.stand.run()


def test_rows_of_a_step_stay_within_the_budget(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer
) -> None:
    prompts = [prompt_of(20 + number, number) for number in range(6)]
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    with split_engine(tiny_model, LOOP_ENGINE) as (engine, _):
        drafter = KnowingDrafter()
        stand = LoopStand(engine, [drafter], tokenizer, DecodeSettings(step_tokens=16))
        most = 0
        real_launch = engine.launch

        def launch(*args: object, **others: object) -> Flight:
            nonlocal most
            flight = real_launch(*args, **others)  # type: ignore[arg-type]
            most = max(most, flight.rows.num_rows)
            return flight

        engine.launch = launch  # type: ignore[method-assign]
        for asked in known:
            drafter.learn(asked)
        answers = [stand.ask(prompt, SAMPLED, draft_length=8) for prompt in prompts]
        stand.run()
        assert [answer.ids for answer in answers] == [asked.ids for asked in known]
        assert most == 16
