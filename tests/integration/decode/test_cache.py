"""Earlier answers change how fast an answer comes, never which one, and serve nobody but their owner."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import CacheSettings, DraftersSettings
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from decode.drafters.cache import CacheDrafter
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

LENGTHS = (9, 20, 33, 41)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
CACHE = SpeculationParams(drafter="cache", draft_length=4)
PLAIN = SpeculationParams(drafter="none")


@pytest.fixture
async def stand(tiny_model: Path, script: Path) -> AsyncIterator[DecodeStand]:
    """A worker with the cache alone; nothing may be left at the end."""
    decode = DecodeSettings(drafters=DraftersSettings(cache=CacheSettings(min_match=2)))
    async with decode_stand(tiny_model, script, decode=decode) as running:
        yield running
        await running.idle()


def cache_of(stand: DecodeStand) -> CacheDrafter:
    cache = stand.worker.drafters["cache"]
    assert isinstance(cache, CacheDrafter)
    return cache


def accepted(answer: Answer) -> tuple[int, int]:
    """(accepted, proposed) of an answer that was drafted for by the cache to its end."""
    assert answer.report is not None
    assert (answer.report.drafter, answer.report.fallback_reason) == ("cache", "")
    return answer.report.accepted_tokens, answer.report.proposed_nodes


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_second_of_two_equal_requests_is_drafted_from_its_first_token(
    stand: DecodeStand, sampling: SamplingParams
) -> None:
    for length in LENGTHS:
        plain = await stand.ask(prompt_of(length), sampling, PLAIN)
        first = await stand.ask(prompt_of(length), sampling, CACHE)
        second = await stand.ask(prompt_of(length), sampling, CACHE)
        assert first.ids == second.ids == plain.ids
        assert first.text == second.text == plain.text
        num_accepted, num_proposed = accepted(second)
        assert num_accepted == num_proposed
        assert second.report is not None
        # The first token is drawn from the prompt's row, the others five a step.
        assert second.report.steps == -(-(len(plain.ids) - 1) // 5)


async def test_another_salt_has_a_cache_of_its_own(stand: DecodeStand) -> None:
    for _ in range(2):
        mine = await stand.ask(prompt_of(20), SAMPLED, CACHE, salt=b"mine")
    assert accepted(mine)[0] > 20
    hits = cache_of(stand).events()["hit"]
    theirs = await stand.ask(prompt_of(20), SAMPLED, CACHE, salt=b"theirs")
    assert theirs.ids == mine.ids
    assert accepted(theirs) == (0, 0)
    assert cache_of(stand).events()["hit"] == hits > 0


async def test_text_is_that_of_plain_decoding_for_all_shapes_at_once(stand: DecodeStand) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    shapes = (CACHE, SpeculationParams(drafter="cache"), replace(CACHE, draft_width=3))
    seeds = [replace(SAMPLED, seed=seed) for seed in (7, 8)]
    plain = [await stand.ask(prompt, sampling, PLAIN) for prompt in prompts for sampling in seeds]
    total_accepted = total_proposed = 0
    for shape in shapes:
        drafted = await asyncio.gather(
            *(stand.ask(prompt, sampling, shape) for prompt in prompts for sampling in seeds)
        )
        assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
        for answer in drafted:
            num_accepted, num_proposed = accepted(answer)
            total_accepted += num_accepted
            total_proposed += num_proposed
    assert 0 < total_accepted < total_proposed


async def test_rejection_takes_chains(stand: DecodeStand) -> None:
    """Of what the same request said before, with other noise: the less there is to choose from, the more fits."""
    sampling = replace(SAMPLED, logit_bias={7: 900.0, 9: 900.0})
    for _ in range(2):
        speculation = replace(CACHE, draft_width=3, verification="rejection")
        answer = await stand.ask(prompt_of(20), sampling, speculation)
        assert len(answer.ids) == SAMPLED.max_tokens
    assert accepted(answer)[1] > 0


async def test_a_cancelled_answer_serves_the_next_request(stand: DecodeStand) -> None:
    call = stand.stub.Generate(stand.request(prompt_of(30), replace(SAMPLED, max_tokens=400), CACHE))
    seen: list[int] = []
    async for event in call:
        if event.HasField("delta"):
            seen += event.delta.token_ids
        if len(seen) >= 16:
            break
    call.cancel()
    await stand.idle()
    assert cache_of(stand).held()["answers"] == 1
    again = await stand.ask(prompt_of(30), replace(SAMPLED, max_tokens=16), CACHE)
    assert again.ids == seen[:16]
    assert accepted(again)[0] == 12


async def test_preempted_answers_are_kept_once(tiny_model: Path, script: Path) -> None:
    engine = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=8)
    sampling = replace(SAMPLED, max_tokens=60)
    async with decode_stand(tiny_model, script, engine=engine) as stand:
        prompts = [prompt_of(30 + number, number) for number in range(4)]
        plain = [await stand.ask(prompt, sampling, PLAIN) for prompt in prompts]
        drafted = await asyncio.gather(*(stand.ask(prompt, sampling, CACHE) for prompt in prompts))
        assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
        assert stand.worker.metrics.totals()["outrider.preemptions"] > 0
        await stand.idle()
        assert cache_of(stand).held() == {"answers": 4, "tokens": 4 * (24 + 60)}
