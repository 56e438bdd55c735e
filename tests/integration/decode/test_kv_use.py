"""Blocks under speculation, pressure and preemption (CASES B15, B16, B20, B21, B28, B45, B52)."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import InvalidArgument
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import DecodeStand, decode_stand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=24, seed=7)
BLOCK = 16
DRAFTERS = ("none", "ngram", "scripted-right", "scripted-wrong", "scripted-tree", "draft_model", "medusa")


def small_pool(num_blocks: int) -> EngineSettings:
    return EngineSettings(dtype="float32", num_threads=1, block_size=BLOCK, num_blocks=num_blocks)


@pytest.mark.parametrize("draft_length", [1, 3, 8])
async def test_block_borders_do_not_show(stand: DecodeStand, draft_length: int) -> None:
    for distance in range(-draft_length - 1, 2):
        prompt = prompt_of(3 * BLOCK + distance, distance)
        plain = await stand.ask(prompt, SAMPLED)
        stand.record(prompt, SAMPLED, plain)
        for drafter in ("scripted-right", "scripted-wrong", "scripted-tree"):
            speculation = SpeculationParams(drafter=drafter, draft_length=draft_length)
            assert (await stand.ask(prompt, SAMPLED, speculation)).ids == plain.ids


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
async def test_the_first_token_comes_once_and_counts_are_exact(stand: DecodeStand, max_tokens: int) -> None:
    prompt = prompt_of(40)
    sampling = replace(SAMPLED, max_tokens=max_tokens, logprobs=0)
    whole = await stand.ask(prompt, replace(SAMPLED, logprobs=0))
    stand.record(prompt, sampling, whole)
    for drafter in DRAFTERS:
        speculation = SpeculationParams(drafter=drafter, draft_length=None if drafter == "none" else 4)
        answer = await stand.ask(prompt, sampling, speculation)
        assert answer.ids == whole.ids[:max_tokens]
        assert len(answer.logprobs[0]) == max_tokens
        assert answer.finished is not None
        assert answer.finished.usage.completion_tokens == max_tokens
        assert answer.reasons[0] == "FINISH_REASON_LENGTH"


async def test_a_thousand_requests_leave_every_block_free(stand: DecodeStand) -> None:
    generator = random.Random(1)
    prompts = [prompt_of(length, length) for length in (1, 2, 15, 16, 17, 33, 48)]
    for prompt in prompts:
        for seed in range(3):
            sampling = replace(SAMPLED, seed=seed, max_tokens=12)
            stand.record(prompt, sampling, await stand.ask(prompt, sampling))
    gate = asyncio.Semaphore(24)

    async def one(number: int) -> None:
        prompt = prompts[number % len(prompts)]
        sampling = replace(SAMPLED, seed=number % 3, max_tokens=1 + number % 12)
        if number % 5 == 1:
            sampling = replace(sampling, stop=(chr(generator.randrange(32, 127)),))
        if number % 7 == 2:
            sampling = replace(sampling, eos_token_ids=tuple(generator.sample(range(256), 40)))
        speculation = SpeculationParams(drafter=DRAFTERS[number % len(DRAFTERS)])
        async with gate:
            call = stand.stub.Generate(stand.request(prompt, sampling, speculation), timeout=60)
            abort_after = generator.randrange(6) if number % 4 == 3 else None
            async for _ in call:
                if abort_after == 0:
                    call.cancel()
                    return
                abort_after = None if abort_after is None else abort_after - 1

    for start in range(0, 1000, 250):
        await asyncio.gather(*(one(number) for number in range(start, start + 250)))
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [9, 12])
async def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, num_blocks: int
) -> None:
    sampling = replace(SAMPLED, max_tokens=40)
    prompts = [prompt_of(30 + number, number) for number in range(6)]
    async with decode_stand(tiny_model, script, engine=small_pool(num_blocks), decode=all_drafters) as stand:
        alone = []
        for prompt in prompts:
            alone.append(await stand.ask(prompt, sampling))
            stand.record(prompt, sampling, alone[-1])
        before = preemptions(stand)
        for drafters in (("none",), DRAFTERS):
            answers = await asyncio.gather(
                *(
                    stand.ask(prompt, sampling, SpeculationParams(drafter=drafters[number % len(drafters)]))
                    for number, prompt in enumerate(prompts)
                )
            )
            for answer, expected in zip(answers, alone, strict=True):
                assert (answer.ids, answer.text) == (expected.ids, expected.text)
                assert answer.report is not None
                assert answer.report.step_tokens == 39
        assert preemptions(stand) > before
        await stand.idle()


async def test_preempted_choices_of_one_request_share_and_finish(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    sampling = replace(SAMPLED, max_tokens=40, n=4)
    prompt = prompt_of(30)
    async with decode_stand(tiny_model, script, decode=all_drafters) as roomy:
        expected = await roomy.ask(prompt, sampling)
    async with decode_stand(tiny_model, script, engine=small_pool(10), decode=all_drafters) as stand:
        answer = await stand.ask(prompt, sampling)
        assert answer.token_ids == expected.token_ids
        assert preemptions(stand) > 0
        await stand.idle()


async def test_a_preempted_request_can_be_cancelled(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    sampling = replace(SAMPLED, max_tokens=60)
    async with decode_stand(tiny_model, script, engine=small_pool(8), decode=all_drafters) as stand:
        expected = await stand.ask(prompt_of(40), sampling)
        calls = [stand.stub.Generate(stand.request(prompt_of(30 + n, n), sampling)) for n in range(4)]
        survivor = asyncio.create_task(stand.ask(prompt_of(40), sampling))
        for call in calls:
            await call.read()
        while preemptions(stand) == 0:
            await calls[0].read()
        for call in calls:
            call.cancel()
        assert (await survivor).ids == expected.ids
        await stand.idle()


@pytest.mark.parametrize("first", ["long prefix hit", "new blocks"])
async def test_prefix_hits_and_new_blocks_in_a_tiny_pool_do_not_mix(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, first: str
) -> None:
    sampling = replace(SAMPLED, max_tokens=10)
    hit, new = prompt_of(70, 1), prompt_of(60, 2)
    async with decode_stand(tiny_model, script, engine=small_pool(8), decode=all_drafters) as stand:
        expected_new = await stand.ask(new, sampling)
        expected_hit = await stand.ask(hit, sampling)
        order = [hit, new] if first == "long prefix hit" else [new, hit]
        answers = await asyncio.gather(*(stand.ask(prompt, sampling) for prompt in order))
        by_prompt = dict(zip((tuple(prompt) for prompt in order), answers, strict=True))
        assert by_prompt[tuple(hit)].ids == expected_hit.ids
        assert by_prompt[tuple(new)].ids == expected_new.ids
        await stand.idle()


async def test_a_prompt_beyond_the_pool_is_refused_with_sizes_and_others_run(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    pool = 8 * BLOCK
    async with decode_stand(tiny_model, script, engine=small_pool(8), decode=all_drafters) as stand:
        sampling = replace(SAMPLED, max_tokens=30)
        small = asyncio.create_task(stand.ask(prompt_of(10), sampling))
        too_big = await stand.answer(stand.request(prompt_of(pool + BLOCK), sampling))
        assert isinstance(too_big.error, InvalidArgument)
        assert str(pool + BLOCK) in too_big.error.message
        assert str(pool) in too_big.error.message
        exact = await stand.ask(prompt_of(pool), sampling)
        assert (len(exact.ids), exact.reasons[0]) == (1, "FINISH_REASON_LENGTH")
        nearly = await stand.ask(
            prompt_of(pool - BLOCK - 4), sampling, SpeculationParams(drafter="ngram", draft_length=4)
        )
        assert (len(nearly.ids), nearly.reasons[0]) == (21, "FINISH_REASON_LENGTH")
        assert len((await small).ids) == 30
        await stand.idle()


async def test_a_small_request_is_not_blocked_for_ever_by_a_big_one_nor_starves_it(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    async with decode_stand(tiny_model, script, engine=small_pool(8), decode=all_drafters) as stand:
        sampling = replace(SAMPLED, max_tokens=20)
        running = stand.stub.Generate(stand.request(prompt_of(40), replace(sampling, max_tokens=80)))
        await running.read()
        big = asyncio.create_task(stand.ask(prompt_of(100), sampling))
        small = [asyncio.create_task(stand.ask(prompt_of(5, n), sampling)) for n in range(40)]
        done, _ = await asyncio.wait({big, *small}, timeout=30)
        assert len(done) == 41
        running.cancel()
        await stand.idle()


def preemptions(stand: DecodeStand) -> float:
    return stand.worker.metrics.totals().get("outrider.preemptions", 0.0)
