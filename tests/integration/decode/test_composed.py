"""Composed drafters and trees of the draft model: the text is plain decoding's, and nothing is left of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import (
    DraftersSettings,
    DraftModelSettings,
    NgramSettings,
    RecursiveSettings,
    SequoiaSettings,
    SpecInferSettings,
)
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from decode.draft import Draft
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import DraftBudget
from decode.drafters.specinfer import SpecInferDrafter
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

SAMPLED = SamplingParams(temperature=0.8, max_tokens=32, seed=7)
HOT = replace(SAMPLED, temperature=12.0)
GREEDY = replace(SAMPLED, temperature=0.0)
SPECULATIONS = (
    SpeculationParams(drafter="draft_model", draft_length=3, draft_width=3),
    SpeculationParams(drafter="sequoia", draft_length=5),
    SpeculationParams(drafter="sequoia", draft_length=4, draft_width=2),
    SpeculationParams(drafter="recursive", draft_length=4),
    SpeculationParams(drafter="specinfer", draft_length=5),
    SpeculationParams(drafter="specinfer", draft_length=4, draft_width=4),
)
PROMPTS = [prompt_of(20 + 9 * number, number) for number in range(3)]


def settings(model: Path, members: tuple[str, ...] = ("ngram", "draft_model")) -> DecodeSettings:
    """The draft model is the target itself, so that much is accepted."""
    return DecodeSettings(
        min_speculation_tokens=0,
        drafters=DraftersSettings(
            ngram=NgramSettings(min_match=1),
            draft_model=DraftModelSettings(model=str(model)),
            sequoia=SequoiaSettings(replan_steps=4),
            recursive=RecursiveSettings(ngram=NgramSettings(min_match=1)),
            specinfer=SpecInferSettings(members=members),
        ),
    )


async def answers(
    stand: DecodeStand, sampling: SamplingParams, speculations: Sequence[SpeculationParams]
) -> list[Answer]:
    """All prompts under all of them, in one batch."""
    return await asyncio.gather(
        *(stand.ask(prompt, sampling, speculation) for prompt in PROMPTS for speculation in speculations)
    )


def draft_models(stand: DecodeStand) -> DraftModelDrafter:
    drafter = stand.worker.drafters["draft_model"]
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT], ids=["greedy", "0.8", "hot"])
async def test_text_is_that_of_plain_decoding(
    tiny_model: Path, script: Path, sampling: SamplingParams
) -> None:
    async with decode_stand(tiny_model, script, decode=settings(tiny_model)) as stand:
        plain = [await stand.ask(prompt, sampling) for prompt in PROMPTS]
        mixed = await answers(stand, sampling, SPECULATIONS)
        for number, answer in enumerate(mixed):
            expected, speculation = (
                plain[number // len(SPECULATIONS)],
                SPECULATIONS[number % len(SPECULATIONS)],
            )
            assert (answer.ids, answer.text) == (expected.ids, expected.text), speculation
            assert answer.report is not None
            assert (answer.report.drafter, answer.report.fallback_reason) == (speculation.drafter, "")
        for number in range(len(SPECULATIONS)):
            reports = [answer.report for answer in mixed[number :: len(SPECULATIONS)] if answer.report]
            assert sum(report.accepted_tokens for report in reports) > 0, SPECULATIONS[number]
        await stand.idle()


async def test_trees_are_proposed_and_more_is_accepted_than_of_chains(
    tiny_model: Path, draft_model: Path, script: Path
) -> None:
    decode = settings(draft_model)
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        accepted = {}
        for width in (1, 4):
            speculation = SpeculationParams(drafter="draft_model", draft_length=3, draft_width=width)
            reports = [
                (await stand.ask(prompt, replace(HOT, max_tokens=60), speculation)).report
                for prompt in PROMPTS
            ]
            accepted[width] = sum(report.accepted_tokens for report in reports if report)
        assert accepted[4] > accepted[1]
        await stand.idle()


async def test_with_its_own_target_as_draft_model_every_proposal_is_right(
    tiny_model: Path, script: Path
) -> None:
    async with decode_stand(tiny_model, script, decode=settings(tiny_model)) as stand:
        for drafter, width in (("draft_model", 3), ("recursive", None), ("sequoia", 3)):
            speculation = SpeculationParams(drafter=drafter, draft_length=3, draft_width=width)
            answer = await stand.ask(PROMPTS[0], HOT, speculation)
            assert answer.report is not None
            offered, accepted = answer.report.position_offered, answer.report.position_accepted
            assert accepted[0] == offered[0], drafter
            if drafter == "recursive":
                assert accepted == offered
        await stand.idle()


async def test_rejection_serves_trees(tiny_model: Path, script: Path) -> None:
    async with decode_stand(tiny_model, script, decode=settings(tiny_model)) as stand:
        speculations = [
            replace(speculation, verification=verification)
            for speculation in SPECULATIONS
            for verification in ("rejection", "block")
            if verification == "rejection" or speculation.draft_width is None
        ]
        for answer in await answers(stand, HOT, speculations):
            assert len(answer.ids) == HOT.max_tokens
            assert answer.report is not None
            assert answer.report.fallback_reason == ""
            assert answer.report.accepted_tokens > 0
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [10, 13])
async def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, script: Path, num_blocks: int
) -> None:
    engine = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=num_blocks)
    sampling = replace(HOT, max_tokens=40)
    async with decode_stand(tiny_model, script, engine=engine, decode=settings(tiny_model)) as stand:
        alone = [await stand.ask(prompt, sampling) for prompt in PROMPTS]
        together = await answers(stand, sampling, SPECULATIONS)
        for number, answer in enumerate(together):
            assert answer.ids == alone[number // len(SPECULATIONS)].ids, SPECULATIONS[
                number % len(SPECULATIONS)
            ]
            assert answer.report is not None
            assert answer.report.fallback_reason == ""
        assert stand.worker.metrics.totals().get("outrider.preemptions", 0.0) > 0
        await stand.idle()
        draft_models(stand).check()


@pytest.mark.parametrize("where", ["start", "prefill", "propose", "observe", "finish"])
async def test_a_member_that_fails_costs_its_drafts_only(
    tiny_model: Path, script: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with decode_stand(tiny_model, script, decode=settings(tiny_model)) as stand:
        plain = await stand.ask(PROMPTS[0], SAMPLED)
        model = draft_models(stand)
        real = getattr(model, where)
        fired = 0

        def broken(*arguments: object) -> object:
            nonlocal fired
            fired += 1
            if where == "finish":
                real(*arguments)
            raise RuntimeError(f"broken in {where}")

        monkeypatch.setattr(model, where, broken)
        answer = await stand.ask(PROMPTS[0], SAMPLED, SpeculationParams(drafter="specinfer", draft_length=4))
        assert fired == 1, "the fault never fired, or the member was asked again"
        assert answer.ids == plain.ids
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
        assert answer.report.accepted_tokens > 0, "the other member went on"
        specinfer = stand.worker.drafters["specinfer"]
        assert isinstance(specinfer, SpecInferDrafter)
        assert specinfer.failures == ({} if where == "finish" else {"draft_model": 1})
        monkeypatch.setattr(model, where, real)
        await stand.idle()


async def test_a_base_that_fails_takes_its_drafter_off_the_request(
    tiny_model: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with decode_stand(tiny_model, script, decode=settings(tiny_model)) as stand:
        plain = await stand.ask(PROMPTS[0], HOT)

        def broken(budgets: Sequence[DraftBudget], *_: object) -> Sequence[Draft]:
            raise RuntimeError("broken")

        for drafter, call in (("sequoia", "propose_shapes"), ("recursive", "propose_guessed")):
            with monkeypatch.context() as patch:
                patch.setattr(draft_models(stand), call, broken)
                answer = await stand.ask(PROMPTS[0], HOT, SpeculationParams(drafter=drafter, draft_length=3))
            assert answer.ids == plain.ids
            assert answer.report is not None
            assert answer.report.fallback_reason == "drafter_error"
        await stand.idle()


async def test_composites_can_be_members(tiny_model: Path, script: Path) -> None:
    decode = settings(tiny_model, ("sequoia", "ngram"))
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        speculation = SpeculationParams(drafter="specinfer", draft_length=4, draft_width=4)
        for sampling in (GREEDY, HOT):
            plain = await stand.ask(PROMPTS[0], sampling)
            assert (await stand.ask(PROMPTS[0], sampling, speculation)).ids == plain.ids
        await stand.idle()
