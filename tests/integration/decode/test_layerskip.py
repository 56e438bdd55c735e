"""Early exit changes how fast an answer comes, never which one, though it writes to the target's own KV."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import LayerSkipSettings
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from tests.integration.decode.conftest import prompt_of
from tests.integration.decode.test_exact_text import record, seen
from tests.support.decode_stand import Answer, DecodeStand, decode_stand
from tests.support.exit_artifact import make_exit_artifact

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, seed=7),
    "0.8": SamplingParams(temperature=0.8, max_tokens=40, seed=7),
    "hot": SamplingParams(temperature=12.0, top_p=0.95, max_tokens=40, seed=7),
    "penalised": SamplingParams(
        max_tokens=40, seed=7, repetition_penalty=1.3, min_tokens=20, eos_token_ids=(0,)
    ),
}
SPECULATIONS = tuple(
    SpeculationParams(drafter="layerskip", draft_length=length) for length in (None, 1, 4, 8)
)
LENGTHS = (1, 15, 16, 17, 41)


@pytest.fixture(params=["trained", "untrained"])
def settings(
    request: pytest.FixtureRequest, all_drafters: DecodeSettings, tiny_model: Path, tmp_path: Path
) -> DecodeSettings:
    """Every drafter, layerskip among them, so that a batch mixes them."""
    artifact = None
    if request.param == "trained":
        artifact = str(make_exit_artifact(tiny_model, tmp_path / "exit"))
    layerskip = LayerSkipSettings(artifact=artifact, exit_layer=2)
    drafters = all_drafters.drafters.model_copy(update={"layerskip": layerskip})
    return all_drafters.model_copy(update={"drafters": drafters})


async def answers(
    stand: DecodeStand, sampling: SamplingParams, speculation: SpeculationParams
) -> list[Answer]:
    return await asyncio.gather(*(stand.ask(prompt_of(length), sampling, speculation) for length in LENGTHS))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_text_is_that_of_plain_decoding(
    tiny_model: Path, script: Path, settings: DecodeSettings, sampling: SamplingParams
) -> None:
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        plain = await answers(stand, sampling, SpeculationParams(drafter="none"))
        accepted = 0
        for speculation in SPECULATIONS:
            drafted = await answers(stand, sampling, speculation)
            assert [seen(answer) for answer in drafted] == [seen(answer) for answer in plain]
            for answer in drafted:
                assert answer.report is not None
                assert (answer.report.drafter, answer.report.fallback_reason) == ("layerskip", "")
                accepted += answer.report.accepted_tokens
            await stand.idle()
        assert accepted > 0


async def test_a_batch_of_all_drafters_and_several_choices_gives_the_plain_answers(
    tiny_model: Path, script: Path, settings: DecodeSettings
) -> None:
    sampling = replace(SAMPLINGS["hot"], n=3)
    drafters = ("layerskip", "scripted-hidden", "draft_model", "layerskip", "scripted-tree", "none")
    prompts = [prompt_of(20 + 9 * number, number) for number in range(6)]
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        plain = [await record(stand, prompt, sampling) for prompt in prompts]
        mixed = await asyncio.gather(
            *(
                stand.ask(prompt, sampling, SpeculationParams(drafter=drafter))
                for prompt, drafter in zip(prompts, drafters, strict=True)
            )
        )
        assert [seen(answer) for answer in mixed] == [seen(answer) for answer in plain]
        assert all(answer.report and not answer.report.fallback_reason for answer in mixed)
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [9, 12])
async def test_text_survives_preemption(
    tiny_model: Path, script: Path, settings: DecodeSettings, num_blocks: int
) -> None:
    pool = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=num_blocks)
    prompts = [prompt_of(30 + number, number) for number in range(6)]
    async with decode_stand(tiny_model, script, engine=pool, decode=settings) as stand:
        for sampling in (SAMPLINGS["greedy"], SAMPLINGS["0.8"], SAMPLINGS["hot"]):
            alone = [await stand.ask(prompt, sampling) for prompt in prompts]
            before = stand.worker.metrics.totals().get("outrider.preemptions", 0.0)
            together = await asyncio.gather(
                *(
                    stand.ask(prompt, sampling, SPECULATIONS[number % 4])
                    for number, prompt in enumerate(prompts)
                )
            )
            assert [seen(answer) for answer in together] == [seen(answer) for answer in alone]
            assert stand.worker.metrics.totals().get("outrider.preemptions", 0.0) > before
        await stand.idle()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_a_resumed_answer_goes_on_as_it_would_have(
    tiny_model: Path, script: Path, settings: DecodeSettings, sampling: SamplingParams
) -> None:
    prompt = prompt_of(33)
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        whole = await stand.ask(prompt, sampling)
        for sent in (1, 12, 39):
            rest = await stand.ask(prompt, sampling, SPECULATIONS[2], committed={0: whole.ids[:sent]})
            assert rest.ids == whole.ids[sent:]
        await stand.idle()


async def test_a_cancelled_request_leaves_nothing(
    tiny_model: Path, script: Path, settings: DecodeSettings
) -> None:
    sampling = replace(SAMPLINGS["hot"], max_tokens=200)
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        calls = [
            stand.stub.Generate(stand.request(prompt_of(30 + number, number), sampling, SPECULATIONS[3]))
            for number in range(4)
        ]
        for call in calls:
            await call.read()
            call.cancel()
        await stand.idle()


async def test_rejection_serves_its_chains(tiny_model: Path, script: Path, settings: DecodeSettings) -> None:
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        speculation = replace(SPECULATIONS[2], verification="rejection")
        for answer in await answers(stand, SAMPLINGS["hot"], speculation):
            assert len(answer.ids) == 40
            assert answer.report is not None
            assert answer.report.fallback_reason == ""
        await stand.idle()
