"""Beam search in the decode worker: beside other requests, under pressure, cancelled, and asked for wrongly."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import DeadlineExceeded, InvalidArgument
from core.records import EarlyStopping, SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from decode.sampling.arithmetic import Float32
from engine.doctor import run_chunks
from engine.engine import Engine
from tests.integration.decode.conftest import prompt_of
from tests.integration.decode.test_exact_text import DRAFTERS, SAMPLED, record, seen
from tests.integration.decode.test_kv_use import BLOCK, preemptions, small_pool
from tests.support.decode_stand import DecodeStand, decode_stand
from tests.support.naive_beams import LogitsOf, naive_beam_search

BEAMS = SamplingParams(beam_width=4, max_tokens=12, seed=1, eos_token_ids=(0,))
SEARCHES = {
    "plain": BEAMS,
    "narrow": replace(BEAMS, beam_width=2, max_tokens=20),
    "short answers": replace(BEAMS, length_penalty=-1.0, early_stopping=True),
    "long answers": replace(BEAMS, length_penalty=2.0, early_stopping="never"),
    "penalties": replace(
        BEAMS, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, early_stopping="never"
    ),
    "bans": replace(BEAMS, bad_word_ids=((104,), (7, 9)), logit_bias={33: 4.0, 34: 4.0}, min_tokens=4),
    "logprobs": replace(BEAMS, repetition_penalty=1.4, logprobs=2),
}


@pytest.fixture(scope="module")
def logits_of(tiny_model: Path) -> Callable[[list[int]], LogitsOf]:
    """The target computed afresh, prompt and all, for each hypothesis."""
    engine = Engine.load(tiny_model, EngineSettings(dtype="float32", num_threads=1, num_blocks=64))

    def behind(prompt: list[int]) -> LogitsOf:
        def logits(ids: tuple[int, ...]) -> Float32:
            row: Float32 = run_chunks(engine, [*prompt, *ids], 64).logits[-1].numpy()
            return row

        return logits

    return behind


@pytest.mark.parametrize("name", SEARCHES)
async def test_the_answer_is_the_one_that_the_definition_names(
    stand: DecodeStand, logits_of: Callable[[list[int]], LogitsOf], name: str
) -> None:
    prompt = prompt_of(30)
    free = await stand.ask(prompt, SEARCHES[name])
    for sampling in (SEARCHES[name], replace(SEARCHES[name], eos_token_ids=(free.ids[5],))):
        answer = await stand.ask(prompt, sampling)
        expected = naive_beam_search(logits_of(prompt), sampling, prompt, sampling.max_tokens)
        assert tuple(answer.ids) == expected.token_ids
        assert answer.bursts == [len(answer.ids)]
        assert answer.finished is not None
        assert answer.report is not None
        assert answer.finished.usage.completion_tokens == len(answer.ids)
        assert (answer.report.drafter, answer.report.fallback_reason) == ("none", "")
        assert answer.report.step_tokens == len(answer.ids) - 1 <= answer.report.steps
        assert len(answer.logprobs[0]) == (0 if sampling.logprobs is None else len(answer.ids))


async def test_logprobs_of_the_answer_add_up_to_its_score(
    stand: DecodeStand, logits_of: Callable[[list[int]], LogitsOf]
) -> None:
    prompt, sampling = prompt_of(30), replace(BEAMS, logprobs=0)
    answer = await stand.ask(prompt, sampling)
    expected = naive_beam_search(logits_of(prompt), sampling, prompt, sampling.max_tokens)
    total = sum(entry.chosen.logprob for entry in answer.logprobs[0])
    assert total / len(answer.ids) == pytest.approx(expected.score, rel=1e-5)


@pytest.mark.parametrize("early_stopping", [True, "never"])
async def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(
    stand: DecodeStand, early_stopping: EarlyStopping
) -> None:
    letters = dict.fromkeys(b"ABCD", 100.0)
    sampling = replace(BEAMS, logit_bias=letters, frequency_penalty=2.0, max_tokens=24)
    free = await stand.ask(prompt_of(30), sampling)
    stops = (free.text[0][6:9], "no text of this")
    stopped = await stand.ask(prompt_of(30), replace(sampling, stop=stops, early_stopping=early_stopping))
    whole = bytes(stopped.ids).decode()
    assert stopped.reasons[0] == "FINISH_REASON_STOP"
    assert whole == stopped.text[0] + stopped.stop_strings[0]
    assert stops[0] not in whole[:-1]


async def test_searches_and_requests_with_every_drafter_in_one_batch_equal_themselves_alone(
    stand: DecodeStand,
) -> None:
    prompts = [prompt_of(20 + 9 * number, number) for number in range(2)]
    searched = {name: await stand.ask(prompts[0], sampling) for name, sampling in SEARCHES.items()}
    drafted = [await record(stand, prompt, SAMPLED) for prompt in prompts]
    answers = await asyncio.gather(
        *(stand.ask(prompts[0], sampling) for sampling in SEARCHES.values()),
        *(stand.ask(prompt, SAMPLED, speculation) for speculation in DRAFTERS for prompt in prompts),
    )
    for name, answer in zip(SEARCHES, answers, strict=False):
        assert seen(answer) == seen(searched[name]), name
    for number, answer in enumerate(answers[len(SEARCHES) :]):
        assert seen(answer) == seen(drafted[number % 2]), DRAFTERS[number // 2]


async def test_a_prompt_from_anywhere_gives_one_answer(stand: DecodeStand) -> None:
    for length in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 1):
        prompt = prompt_of(length)
        cold = await stand.ask(prompt, BEAMS)
        warm = await stand.ask(prompt, BEAMS)
        own = await stand.ask(prompt, BEAMS, peers=[], salt=b"own")
        assert cold.ids == warm.ids == own.ids
        assert warm.finished is not None
        assert warm.finished.usage.cached_prompt_tokens == min(length - 1, length // BLOCK * BLOCK)


async def test_a_search_waits_until_all_its_places_are_free(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    settings = all_drafters.model_copy(update={"max_running": 4})
    sampling = replace(BEAMS, max_tokens=40, ignore_eos=True)
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        alone = await stand.ask(prompt_of(20), sampling)
        plain = replace(SAMPLED, max_tokens=30)
        most = 0

        async def watched(number: int) -> None:
            nonlocal most
            async for _ in stand.stub.Generate(stand.request(prompt_of(20, number), plain)):
                most = max(most, stand.worker.gauges().running)

        answers = await asyncio.gather(
            stand.ask(prompt_of(20), sampling),
            stand.ask(prompt_of(20), sampling),
            *(watched(number) for number in range(8)),
        )
        assert answers[0] is not None
        assert [seen(answer) for answer in answers[:2] if answer] == [seen(alone)] * 2
        assert 1 < most <= 4
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [14, 18])
async def test_searches_that_were_preempted_give_the_answers_of_a_roomy_pool(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, num_blocks: int
) -> None:
    searched = replace(BEAMS, max_tokens=30, ignore_eos=True, repetition_penalty=1.4, beam_width=3)
    plain = replace(SAMPLED, max_tokens=60)
    jobs = [(prompt_of(30 + n, n), searched if n % 2 else plain) for n in range(6)]
    async with decode_stand(tiny_model, script, decode=all_drafters) as roomy:
        expected = [await roomy.ask(prompt, sampling) for prompt, sampling in jobs]
    async with decode_stand(tiny_model, script, engine=small_pool(num_blocks), decode=all_drafters) as stand:
        answers = await asyncio.gather(*(stand.ask(prompt, sampling) for prompt, sampling in jobs))
        assert [seen(answer) for answer in answers] == [seen(answer) for answer in expected]
        assert preemptions(stand) > 0
        await stand.idle()


async def test_a_search_that_must_give_way_begins_again(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    searched = replace(BEAMS, max_tokens=60, ignore_eos=True, repetition_penalty=1.4, beam_width=3)
    async with decode_stand(tiny_model, script, engine=small_pool(20), decode=all_drafters) as stand:
        alone = await stand.ask(prompt_of(30, 1), searched)
        assert preemptions(stand) == 0
        answers = await asyncio.gather(
            *(stand.ask(prompt_of(30, 1), searched, salt=bytes([n])) for n in range(3))
        )
        assert [seen(answer) for answer in answers] == [seen(alone)] * 3
        assert preemptions(stand) > 0
        assert max(answer.report.steps for answer in answers if answer.report) > 60
        await stand.idle()


async def test_an_answer_is_cut_where_a_pool_held_alone_is_full(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    searched = replace(BEAMS, max_tokens=200, ignore_eos=True, repetition_penalty=1.4)
    async with decode_stand(tiny_model, script, engine=small_pool(10), decode=all_drafters) as stand:
        answer = await stand.ask(prompt_of(30), searched)
        assert (len(answer.ids), answer.reasons[0]) == (19, "FINISH_REASON_LENGTH")
        exact = await stand.ask(prompt_of(10 * BLOCK), searched)
        assert (len(exact.ids), exact.reasons[0]) == (1, "FINISH_REASON_LENGTH")
        refused = await stand.answer(stand.request(prompt_of(9 * BLOCK + 2), searched))
        assert isinstance(refused.error, InvalidArgument)
        assert refused.error.field == "sampling.beam_width"
        assert preemptions(stand) == 0
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [128, 40])
async def test_a_search_that_is_cancelled_leaves_nothing(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, num_blocks: int
) -> None:
    searched = replace(BEAMS, max_tokens=400, ignore_eos=True, beam_width=3)
    plain = replace(SAMPLED, max_tokens=150)
    async with decode_stand(tiny_model, script, engine=small_pool(num_blocks), decode=all_drafters) as stand:
        expected = await stand.ask(prompt_of(40), plain)
        calls = [stand.stub.Generate(stand.request(prompt_of(30 + n, n), searched)) for n in range(3)]
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        neighbour = stand.stub.Generate(stand.request(prompt_of(40), plain))
        ids: list[int] = []
        async for event in neighbour:
            ids += event.delta.token_ids
            if len(ids) > 10 and stand.worker.gauges().running > 3:
                for call in calls:
                    call.cancel()
        assert all(call.cancelled() for call in calls)
        await asyncio.gather(*reads, return_exceptions=True)
        assert ids == expected.ids
        await stand.idle()


async def test_a_search_ends_with_its_deadline(stand: DecodeStand) -> None:
    searched = replace(BEAMS, max_tokens=1500, ignore_eos=True)
    answer = await stand.answer(stand.request(prompt_of(30), searched), timeout_s=0.3)
    assert isinstance(answer.error, DeadlineExceeded)
    assert answer.ids == []
    await stand.idle()


async def test_constraints_that_leave_nothing_end_the_request_by_name(stand: DecodeStand) -> None:
    nothing = replace(BEAMS, bad_word_ids=tuple((token_id,) for token_id in range(300)))
    answer = await stand.answer(stand.request(prompt_of(20), nothing))
    assert isinstance(answer.error, InvalidArgument)
    assert "bad_words" in answer.error.message
    await stand.idle()


WRONG: list[tuple[str, SamplingParams, SpeculationParams]] = [
    ("sampling.beam_width", replace(BEAMS, beam_width=0), SpeculationParams("none")),
    ("sampling.beam_width", replace(BEAMS, beam_width=33), SpeculationParams("none")),
    ("sampling.temperature", replace(BEAMS, temperature=0.5), SpeculationParams("none")),
    ("sampling.top_k", replace(BEAMS, top_k=3), SpeculationParams("none")),
    ("sampling.top_p", replace(BEAMS, top_p=0.5), SpeculationParams("none")),
    ("sampling.min_p", replace(BEAMS, min_p=0.5), SpeculationParams("none")),
    ("sampling.n", replace(BEAMS, n=2), SpeculationParams("none")),
    ("sampling.length_penalty", replace(BEAMS, length_penalty=float("nan")), SpeculationParams("none")),
    ("speculation.drafter", BEAMS, SpeculationParams("ngram")),
    ("speculation.draft_length", BEAMS, SpeculationParams("none", draft_length=4)),
    ("speculation.draft_width", BEAMS, SpeculationParams("none", draft_width=2)),
    ("speculation.verification", BEAMS, SpeculationParams("none", verification="rejection")),
]


@pytest.mark.parametrize(("field", "sampling", "speculation"), WRONG)
async def test_what_a_search_cannot_honour_is_refused_by_name(
    stand: DecodeStand, field: str, sampling: SamplingParams, speculation: SpeculationParams
) -> None:
    answer = await stand.answer(stand.request(prompt_of(20), sampling, speculation))
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == field


async def test_a_search_is_not_gone_on_with_from_its_middle(stand: DecodeStand) -> None:
    request = stand.request(prompt_of(20), BEAMS, SpeculationParams("auto"), committed={0: [65, 66]})
    answer = await stand.answer(request)
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == "committed"
    assert (await stand.ask(prompt_of(20), BEAMS, SpeculationParams("auto"))).ids
