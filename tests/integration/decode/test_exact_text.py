"""The answer is that of plain decoding, whatever was proposed (CASES B04, B05, B07, B09, B10, S10)."""

import asyncio
from dataclasses import replace

import pytest

from core.records import SamplingParams, SpeculationParams, VerificationMode
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand

# The tiny model all but repeats its last token: at this temperature it does so in two of five steps.
TEMPERATURE = 12.0
DRAFTERS = (
    SpeculationParams(drafter="ngram"),
    SpeculationParams(drafter="ngram", draft_length=5, draft_width=3),
    SpeculationParams(drafter="draft_model", draft_length=3),
    SpeculationParams(drafter="eagle", draft_length=3),
    SpeculationParams(drafter="eagle2", draft_length=4, draft_width=3),
    SpeculationParams(drafter="eagle3", draft_length=4, draft_width=4),
    SpeculationParams(drafter="eagle3", draft_length=3, draft_width=1),
    SpeculationParams(drafter="mtp", draft_length=4, draft_width=2),
    SpeculationParams(drafter="medusa", draft_length=4, draft_width=1),
    SpeculationParams(drafter="medusa", draft_length=4, draft_width=3),
    SpeculationParams(drafter="scripted-right", draft_length=6),
    SpeculationParams(drafter="scripted-wrong", draft_length=4),
    SpeculationParams(drafter="scripted-tree", draft_length=5),
    SpeculationParams(drafter="scripted-hidden", draft_length=4),
)
SAMPLED = SamplingParams(temperature=TEMPERATURE, top_p=0.95, max_tokens=32, seed=7, eos_token_ids=(0,))
GREEDY_PENALISED = SamplingParams(max_tokens=32, seed=7, repetition_penalty=1.3, eos_token_ids=(0,))
HARD = {
    "sampled": SAMPLED,
    "greedy": SamplingParams(max_tokens=32, seed=7),
    "repetition": GREEDY_PENALISED,
    "frequency": SamplingParams(max_tokens=32, seed=1, frequency_penalty=2.0),
    "negative frequency": SamplingParams(
        max_tokens=32, seed=1, frequency_penalty=-2.0, temperature=TEMPERATURE
    ),
    "presence": SamplingParams(max_tokens=32, seed=1, presence_penalty=2.0),
    "truncated": SamplingParams(
        max_tokens=32, seed=3, temperature=TEMPERATURE, top_p=0.8, top_k=5, min_p=0.01
    ),
    "hot": SamplingParams(max_tokens=32, seed=3, temperature=100.0),
    "nearly greedy": SamplingParams(max_tokens=32, seed=3, temperature=1e-3),
    "logprobs": replace(SAMPLED, logprobs=2),
}


def seen(answer: Answer) -> tuple[object, ...]:
    """Everything that speculation may not change."""
    logprobs = {index: [entry.SerializeToString() for entry in row] for index, row in answer.logprobs.items()}
    return answer.token_ids, answer.text, answer.reasons, answer.stop_strings, logprobs


async def record(stand: DecodeStand, prompt: list[int], sampling: SamplingParams) -> Answer:
    answer = await stand.ask(prompt, sampling)
    stand.record(prompt, sampling, answer)
    return answer


@pytest.mark.parametrize("sampling", HARD.values(), ids=HARD.keys())
async def test_every_drafter_gives_the_plain_answer_alone_and_in_a_mixed_batch(
    stand: DecodeStand, sampling: SamplingParams
) -> None:
    prompts = [prompt_of(20 + 9 * number, number) for number in range(4)]
    plain = [await record(stand, prompt, sampling) for prompt in prompts]
    for speculation in DRAFTERS:
        alone = await stand.ask(prompts[0], sampling, speculation)
        assert seen(alone) == seen(plain[0]), speculation
        assert alone.report is not None
        assert alone.report.fallback_reason == "", speculation
    mixed = await asyncio.gather(
        *(stand.ask(prompt, sampling, speculation) for prompt in prompts for speculation in DRAFTERS)
    )
    for number, answer in enumerate(mixed):
        assert seen(answer) == seen(plain[number // len(DRAFTERS)]), DRAFTERS[number % len(DRAFTERS)]
    accepted = sum(answer.report.accepted_tokens for answer in mixed if answer.report)
    offered = sum(sum(answer.report.position_offered) for answer in mixed if answer.report)
    assert 0 < accepted < offered


async def test_requests_of_unlike_parameters_in_one_batch_equal_themselves_alone(stand: DecodeStand) -> None:
    prompt = prompt_of(30)
    alone = {name: await record(stand, prompt, sampling) for name, sampling in HARD.items()}
    together = await asyncio.gather(
        *(
            stand.ask(prompt, sampling, DRAFTERS[number % len(DRAFTERS)])
            for number, sampling in enumerate(HARD.values())
        )
    )
    for name, answer in zip(HARD, together, strict=True):
        assert seen(answer) == seen(alone[name]), name


async def test_seeds_decide_the_answer_and_nothing_else_does(stand: DecodeStand) -> None:
    prompt = prompt_of(30)
    alone = [await stand.ask(prompt, replace(SAMPLED, seed=seed)) for seed in (1, 2, 3)]
    assert len({tuple(answer.ids) for answer in alone}) == 3
    for order in ((1, 2, 3), (3, 1, 2)):
        batch = await asyncio.gather(*(stand.ask(prompt, replace(SAMPLED, seed=seed)) for seed in order))
        for seed, answer in zip(order, batch, strict=True):
            assert answer.ids == alone[seed - 1].ids


@pytest.mark.parametrize("drafter", ["scripted-right", "ngram", "draft_model", "scripted-tree"])
async def test_banned_tokens_are_never_emitted_though_the_drafter_proposes_them(
    stand: DecodeStand, drafter: str
) -> None:
    prompt = prompt_of(30)
    free = SamplingParams(max_tokens=24, seed=2, temperature=TEMPERATURE)
    wanted = (await record(stand, prompt, free)).ids
    favourite = max(set(wanted), key=wanted.count)
    for banned in (
        replace(free, logit_bias={favourite: -100.0}),
        replace(free, bad_word_ids=((favourite,),)),
        replace(free, bad_word_ids=((wanted[3], wanted[4]),)),
    ):
        plain = await stand.ask(prompt, banned)
        stand.record(prompt, banned, await stand.ask(prompt, free))
        answer = await stand.ask(prompt, banned, SpeculationParams(drafter=drafter, draft_length=4))
        assert seen(answer) == seen(plain)
        if len(banned.bad_word_ids) == 0 or len(banned.bad_word_ids[0]) == 1:
            assert favourite not in answer.ids
        else:
            assert (wanted[3], wanted[4]) not in zip(answer.ids, answer.ids[1:], strict=False)


@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6, 20])
async def test_the_end_is_impossible_before_min_tokens_and_allowed_after(
    stand: DecodeStand, min_tokens: int
) -> None:
    prompt = prompt_of(30)
    free = SamplingParams(max_tokens=24, seed=2, temperature=TEMPERATURE)
    wanted = (await stand.ask(prompt, free)).ids
    ended = replace(free, eos_token_ids=(wanted[5],), min_tokens=min_tokens)
    plain = await record(stand, prompt, ended)
    assert plain.ids[-1] == wanted[5] or len(plain.ids) == 24
    assert len(plain.ids) > min_tokens
    for drafter in ("scripted-right", "ngram", "scripted-tree"):
        answer = await stand.ask(prompt, ended, SpeculationParams(drafter=drafter, draft_length=8))
        assert seen(answer) == seen(plain)


MODES: tuple[VerificationMode, ...] = ("rejection", "block", "typical")


@pytest.mark.parametrize("mode", MODES)
async def test_every_other_mode_serves_and_counts_chains_and_trees(
    stand: DecodeStand, mode: VerificationMode
) -> None:
    prompt = prompt_of(30)
    await record(stand, prompt, SAMPLED)
    nodes = depths = accepted = 0
    for drafter in ("draft_model", "ngram", "medusa", "eagle3", "scripted-tree", "scripted-right"):
        speculation = SpeculationParams(
            drafter=drafter, draft_length=4, verification=mode, allow_approximate=True
        )
        answer = await stand.ask(prompt, replace(SAMPLED, ignore_eos=True), speculation)
        assert len(answer.ids) == 32
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
        nodes += answer.report.proposed_nodes
        depths += answer.report.draft_length_sum
        accepted += answer.report.accepted_tokens
    assert accepted > 0
    assert (nodes > depths) == (mode != "block"), "block verification drafts chains, the others trees"


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_gives_the_greedy_answer_at_temperature_zero(
    stand: DecodeStand, mode: VerificationMode
) -> None:
    prompt = prompt_of(30)
    plain = await record(stand, prompt, HARD["greedy"])
    for drafter in ("draft_model", "ngram", "scripted-tree", "scripted-wrong"):
        speculation = SpeculationParams(
            drafter=drafter, draft_length=4, verification=mode, allow_approximate=True
        )
        assert seen(await stand.ask(prompt, HARD["greedy"], speculation)) == seen(plain)


async def test_several_choices_equal_themselves_under_every_drafter(stand: DecodeStand) -> None:
    prompt = prompt_of(37)
    sampling = replace(SAMPLED, n=3)
    plain = await record(stand, prompt, sampling)
    assert sorted(plain.token_ids) == [0, 1, 2]
    assert plain.token_ids[0] == (await stand.ask(prompt, SAMPLED)).ids
    assert plain.finished is not None
    assert plain.finished.usage.completion_tokens == sum(len(ids) for ids in plain.token_ids.values())
    for speculation in DRAFTERS:
        assert seen(await stand.ask(prompt, sampling, speculation)) == seen(plain)
