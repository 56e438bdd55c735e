"""The approximate drafters: refused unless allowed; they say the words of the draft, the target's, or some of both."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import BildSettings, CascadeSettings, DraftersSettings, DraftModelSettings
from core.errors import InvalidArgument
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from tests.integration.decode.conftest import VOCAB, prompt_of
from tests.support.decode_stand import DecodeStand, decode_stand
from tests.support.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=7)
HOT = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
BILD = SpeculationParams(drafter="bild", draft_length=5, allow_approximate=True)
CASCADE = SpeculationParams(drafter="cascade", draft_length=8, allow_approximate=True)
PROMPTS = [prompt_of(length) for length in (9, 20, 33, 41)]


def settings_of(model: Path, rollback: float, confidence: float) -> DecodeSettings:
    drafters = DraftersSettings(
        draft_model=DraftModelSettings(model=str(model)),
        bild=BildSettings(fallback_threshold=0.0, rollback_threshold=rollback),
        cascade=CascadeSettings(confidence_threshold=confidence, first_tokens=4),
    )
    return DecodeSettings(drafters=drafters)


@pytest.fixture
async def loose(tiny_model: Path, draft_model: Path, script: Path) -> AsyncIterator[DecodeStand]:
    """Keeps all that another model drafts."""
    async with decode_stand(tiny_model, script, decode=settings_of(draft_model, 1e9, 0.0)) as stand:
        yield stand
        await stand.idle()


@pytest.mark.parametrize("speculation", [BILD, CASCADE], ids=["bild", "cascade"])
async def test_without_leave_or_with_another_rule_they_are_refused(
    loose: DecodeStand, speculation: SpeculationParams
) -> None:
    for changed, told in (
        (replace(speculation, allow_approximate=False), "allow_approximate"),
        (replace(speculation, verification="rejection"), "a rule of its own"),
    ):
        answer = await loose.answer(loose.request(PROMPTS[0], GREEDY, changed))
        assert isinstance(answer.error, InvalidArgument)
        assert told in answer.error.message


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("speculation", [BILD, CASCADE], ids=["bild", "cascade"])
async def test_what_is_within_the_threshold_is_said(
    loose: DecodeStand, speculation: SpeculationParams, sampling: SamplingParams
) -> None:
    answers = await asyncio.gather(*(loose.ask(prompt, sampling, speculation) for prompt in PROMPTS))
    for answer in answers:
        assert len(answer.ids) == 40
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
        assert answer.report.position_accepted == answer.report.position_offered
        assert answer.report.accepted_tokens > 20


@pytest.mark.parametrize("drafter", ["target", "other"])
async def test_bild_without_slack_gives_the_plain_answer(
    tiny_model: Path, draft_model: Path, script: Path, drafter: str
) -> None:
    model = tiny_model if drafter == "target" else draft_model
    async with decode_stand(tiny_model, script, decode=settings_of(model, 0.0, 0.0)) as stand:
        for prompt in PROMPTS:
            plain = await stand.ask(prompt, GREEDY)
            assert (await stand.ask(prompt, GREEDY, BILD)).ids == plain.ids
        await stand.idle()


async def test_a_hard_answer_is_the_targets_but_for_its_first_tokens(
    tiny_model: Path, script: Path, tmp_path: Path
) -> None:
    unsure = make_tiny_model(tmp_path / "unsure", layers=1, vocab=VOCAB, seed=5, logit_scale=0.1)
    async with decode_stand(tiny_model, script, decode=settings_of(unsure, 1e9, 1.0)) as stand:
        answers = await asyncio.gather(*(stand.ask(prompt, HOT, CASCADE) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert len(answer.ids) == 40
            assert answer.report is not None
            assert answer.report.proposed_nodes < 8
            begun = answer.ids[:8]
            rest = await stand.ask(prompt, HOT, committed={0: begun})
            assert rest.ids == answer.ids[8:]
        await stand.idle()


async def test_a_batch_mixes_them_with_exact_requests(loose: DecodeStand) -> None:
    plain = [await loose.ask(prompt, HOT) for prompt in PROMPTS]
    exact = SpeculationParams(drafter="draft_model", draft_length=4)
    together = await asyncio.gather(
        *(loose.ask(prompt, HOT, speculation) for prompt in PROMPTS for speculation in (exact, BILD, CASCADE))
    )
    for number, answer in enumerate(together[::3]):
        assert answer.ids == plain[number].ids
