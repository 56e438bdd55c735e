"""Medusa heads change how fast an answer comes, never which one (CASES B04, B20)."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import DraftersSettings, MedusaSettings
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

LENGTHS = (9, 20, 33, 41)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.8, seed=7),
    "hot": replace(GREEDY, temperature=12.0, seed=7),
    "penalised": replace(GREEDY, repetition_penalty=1.3, temperature=0.8, seed=3),
}
SPECULATIONS = (
    SpeculationParams(drafter="medusa"),
    SpeculationParams(drafter="medusa", draft_length=4, draft_width=1),
    SpeculationParams(drafter="medusa", draft_length=3, draft_width=4),
)


async def answers(
    stand: DecodeStand, sampling: SamplingParams, *speculations: SpeculationParams
) -> list[Answer]:
    return await asyncio.gather(
        *(
            stand.ask(prompt_of(length), sampling, speculations[number % len(speculations)])
            for number, length in enumerate(LENGTHS)
        )
    )


@pytest.mark.parametrize("tree", ["measured", "confident"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_text_is_that_of_plain_decoding(
    tiny_model: Path, script: Path, medusa: MedusaSettings, sampling: SamplingParams, tree: str
) -> None:
    drafters = DraftersSettings(medusa=medusa.model_copy(update={"tree": tree}))
    async with decode_stand(tiny_model, script, decode=DecodeSettings(drafters=drafters)) as stand:
        plain = await answers(stand, sampling, SpeculationParams(drafter="none"))
        accepted = offered = 0
        for speculations in (*((one,) for one in SPECULATIONS), SPECULATIONS):
            drafted = await answers(stand, sampling, *speculations)
            assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
            assert [answer.text for answer in drafted] == [answer.text for answer in plain]
            for answer in drafted:
                assert answer.report is not None
                assert (answer.report.drafter, answer.report.fallback_reason) == ("medusa", "")
                accepted += answer.report.accepted_tokens
                offered += answer.report.proposed_nodes
        assert 0 < accepted < offered
        await stand.idle()


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["hot"]], ids=["greedy", "hot"])
async def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, script: Path, medusa: MedusaSettings, sampling: SamplingParams
) -> None:
    decode = DecodeSettings(drafters=DraftersSettings(medusa=medusa))
    engine = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=9)
    async with decode_stand(tiny_model, script, engine=engine, decode=decode) as stand:
        alone = [await stand.ask(prompt_of(length), sampling) for length in LENGTHS]
        drafted = await answers(stand, sampling, *SPECULATIONS)
        assert [answer.ids for answer in drafted] == [answer.ids for answer in alone]
        assert stand.worker.metrics.totals().get("outrider.preemptions", 0.0) > 0
        await stand.idle()


async def test_rejection_serves_whole_answers(tiny_model: Path, script: Path, medusa: MedusaSettings) -> None:
    decode = DecodeSettings(drafters=DraftersSettings(medusa=medusa))
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        for speculation in SPECULATIONS:
            rejecting = replace(speculation, verification="rejection")
            for answer in await answers(stand, SAMPLINGS["hot"], rejecting):
                assert len(answer.ids) == GREEDY.max_tokens
                assert answer.report is not None
                assert answer.report.fallback_reason == ""
        await stand.idle()
