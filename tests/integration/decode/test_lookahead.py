"""Lookahead, and rows that are evaluated for a drafter alone, through the whole decode step."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from core.drafter_settings import DraftersSettings, LookaheadSettings
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings
from decode.draft import Draft
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import DraftBudget, DrafterNeeds, Observation
from engine.engine import Engine
from engine.step_batch import SequenceStep, StepResult
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, seed=7)
HOT = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
PENALISED = SamplingParams(temperature=0.8, max_tokens=40, seed=7, repetition_penalty=1.3, top_p=0.9)
LENGTHS = (9, 20, 33, 41)
SPECULATIONS = (
    SpeculationParams(drafter="lookahead"),
    SpeculationParams(drafter="lookahead", draft_length=2),
    SpeculationParams(drafter="lookahead", draft_length=1, draft_width=1),
    SpeculationParams(drafter="lookahead", draft_length=2, draft_width=2),
)
FIXED = SPECULATIONS[1]


def worker_settings(window: int = 4, ngram: int = 3, **decode: int) -> DecodeSettings:
    drafters = DraftersSettings(lookahead=LookaheadSettings(window=window, ngram=ngram))
    return DecodeSettings(drafters=drafters, **decode)


def small_engine(num_blocks: int = 128, max_context: int | None = None) -> EngineSettings:
    return EngineSettings(
        dtype="float32", num_threads=1, block_size=16, num_blocks=num_blocks, max_context=max_context
    )


async def answers(
    stand: DecodeStand, sampling: SamplingParams, speculations: Sequence[SpeculationParams]
) -> list[Answer]:
    """Every prompt with every speculation, all at once."""
    return await asyncio.gather(
        *(
            stand.ask(prompt_of(length), sampling, speculation)
            for speculation in speculations
            for length in LENGTHS
        )
    )


def same(drafted: Sequence[Answer], plain: Sequence[Answer]) -> None:
    for index, answer in enumerate(drafted):
        expected = plain[index % len(plain)]
        assert (answer.ids, answer.text, answer.reasons) == (expected.ids, expected.text, expected.reasons)
        assert answer.report is not None
        assert answer.report.fallback_reason == ""


def accepted(drafted: Sequence[Answer]) -> int:
    return sum(answer.report.accepted_tokens for answer in drafted if answer.report)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, HOT, PENALISED], ids=["greedy", "0.8", "12", "penalised"]
)
async def test_text_is_that_of_plain_decoding(
    tiny_model: Path, script: Path, sampling: SamplingParams
) -> None:
    async with decode_stand(tiny_model, script, decode=worker_settings()) as stand:
        plain = await answers(stand, sampling, [SpeculationParams(drafter="none")])
        alone = [await answers(stand, sampling, [speculation]) for speculation in SPECULATIONS]
        for drafted in alone:
            same(drafted, plain)
        together = await answers(stand, sampling, SPECULATIONS)
        same(together, plain)
        offered = sum(sum(answer.report.position_offered) for answer in together if answer.report)
        assert accepted(together) <= offered
        if sampling in (GREEDY, SAMPLED):
            assert accepted(together) > len(together) * 10, "the tiny model repeats itself"
        await stand.idle()


async def test_neighbours_with_other_drafters_change_nothing(stand: DecodeStand) -> None:
    others = [SpeculationParams(drafter=name) for name in ("none", "ngram", "draft_model", "scripted-wrong")]
    plain = await answers(stand, HOT, others[:1])
    mixed = await answers(stand, HOT, [*SPECULATIONS, *others])
    same(mixed, plain)
    choices = replace(HOT, n=3)
    expected = await stand.ask(prompt_of(37), choices)
    assert (await stand.ask(prompt_of(37), choices, FIXED)).token_ids == expected.token_ids


@pytest.mark.parametrize(("window", "ngram"), [(1, 3), (3, 5), (8, 4)])
async def test_any_window_gives_the_plain_text(
    tiny_model: Path, script: Path, window: int, ngram: int
) -> None:
    async with decode_stand(tiny_model, script, decode=worker_settings(window, ngram)) as stand:
        plain = await answers(stand, SAMPLED, [SpeculationParams(drafter="none")])
        drafted = await answers(
            stand, SAMPLED, [SpeculationParams(drafter="lookahead", draft_length=ngram - 1)]
        )
        same(drafted, plain)
        assert accepted(drafted) > 0
        await stand.idle()


@pytest.mark.parametrize("num_blocks", [9, 12])
async def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, script: Path, num_blocks: int
) -> None:
    prompts = [prompt_of(30 + number, number) for number in range(6)]
    engine = small_engine(num_blocks)
    async with decode_stand(tiny_model, script, engine=engine, decode=worker_settings()) as stand:
        alone = [await stand.ask(prompt, HOT) for prompt in prompts]
        before = stand.worker.metrics.totals().get("outrider.preemptions", 0.0)
        for speculations in ((FIXED,), (*SPECULATIONS, SpeculationParams(drafter="none"))):
            drafted = await asyncio.gather(
                *(
                    stand.ask(prompt, HOT, speculations[number % len(speculations)])
                    for number, prompt in enumerate(prompts)
                )
            )
            same(drafted, alone)
            for answer in drafted:
                assert answer.report is not None
                assert answer.report.step_tokens == 39
        assert stand.worker.metrics.totals()["outrider.preemptions"] > before
        await stand.idle()


@pytest.mark.parametrize("have", [1, 7, 39])
async def test_a_resumed_answer_goes_on_where_it_was_cut(stand: DecodeStand, have: int) -> None:
    whole = await stand.ask(prompt_of(30), SAMPLED)
    resumed = await stand.ask(prompt_of(30), SAMPLED, FIXED, committed={0: whole.ids[:have]})
    assert whole.ids[:have] + resumed.ids == whole.ids
    assert resumed.report is not None
    assert resumed.report.fallback_reason == ""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
async def test_rejection_verification_takes_its_drafts(stand: DecodeStand, sampling: SamplingParams) -> None:
    speculation = SpeculationParams(drafter="lookahead", draft_length=2, verification="rejection")
    drafted = await answers(stand, sampling, [speculation])
    for answer in drafted:
        assert len(answer.ids) == 40
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
    assert accepted(drafted) > 0


async def test_the_window_ends_before_the_context_does(tiny_model: Path, script: Path) -> None:
    async with decode_stand(
        tiny_model, script, engine=small_engine(max_context=48), decode=worker_settings(window=8)
    ) as stand:
        sampling = replace(GREEDY, max_tokens=100)
        plain = await stand.ask(prompt_of(30), sampling)
        assert (len(plain.ids), plain.reasons[0]) == (18, "FINISH_REASON_LENGTH")
        same([await stand.ask(prompt_of(30), sampling, FIXED)], [plain])
        assert stand.worker.faults() == {"failed_steps": 0.0, "failed_checks": 0.0}
        await stand.idle()


@pytest.mark.parametrize("limits", [{"step_tokens": 24}, {"max_tree_nodes": 8}, {"max_tree_nodes": 6}])
async def test_rows_of_the_window_keep_to_the_budget_of_the_step(
    tiny_model: Path, script: Path, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with decode_stand(tiny_model, script, decode=worker_settings(**limits)) as stand:
        plain = await answers(stand, SAMPLED, [SpeculationParams(drafter="none")])
        steps: list[tuple[int, int, int]] = []
        real_step = stand.worker.engine.step

        def step(sequences: Sequence[SequenceStep]) -> StepResult:
            rows = [len(sequence.token_ids) for sequence in sequences if sequence.logit_rows == "all"]
            auxiliary = sum(sequence.num_auxiliary for sequence in sequences)
            steps.append((sum(len(s.token_ids) for s in sequences), max(rows, default=0), auxiliary))
            return real_step(sequences)

        monkeypatch.setattr(stand.worker.engine, "step", step)
        long_prompt = asyncio.create_task(stand.ask(prompt_of(400), SAMPLED, FIXED, peers=[]))
        same(await answers(stand, SAMPLED, [FIXED]), plain)
        assert len((await long_prompt).ids) == 40
        assert max(rows for rows, _, _ in steps) <= limits.get("step_tokens", 256)
        assert max(rows for _, rows, _ in steps) <= 1 + limits.get("max_tree_nodes", 64)
        windows = sum(auxiliary > 0 for _, _, auxiliary in steps)
        assert (windows > 0) == (limits.get("max_tree_nodes", 64) >= 7)
        assert windows < len(steps)
        await stand.idle()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a step told about its auxiliary rows: logits [3, vocabulary], and the tokens up to the root."""

    token_ids: tuple[int, ...]
    draft: Draft
    logits: torch.Tensor


class _Ahead(NoneDrafter):
    """Asks for three auxiliary rows in every step, beside the given nodes, and keeps what it is told of them."""

    name = "ahead"

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.seen: list[_Seen] = []
        self.needs = DrafterNeeds(
            max_draft_length=2, default_draft_length=2, auxiliary_rows=len(draft.auxiliary_token_ids)
        )

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        return [self._draft] * len(budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            if observation.auxiliary_logits is None:
                assert not observation.draft.num_rows
                continue
            token_ids = observation.request.history.token_ids[: -len(observation.token_ids)]
            logits = observation.auxiliary_logits.clone()
            self.seen.append(_Seen(tuple(token_ids), observation.draft, logits))


ALONE = Draft(auxiliary_token_ids=(11, 12, 13), auxiliary_parents=(0, 1, 0))
BESIDE_NODES = Draft((21, 22), (0, 1), None, auxiliary_token_ids=(11, 12, 13), auxiliary_parents=(0, 3, 1))
PATHS = {ALONE: ((11,), (11, 12), (13,)), BESIDE_NODES: ((11,), (11, 12), (21, 13))}


def plain_logits(engine: Engine, token_ids: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The row of the last token of `path` behind `token_ids`, computed as a prompt and a chain."""
    table = engine.kv.open()
    start = len(token_ids) - 1
    engine.kv.reserve(table, len(token_ids) + len(path))
    engine.step([SequenceStep(table, 0, token_ids[:start], logit_rows="none")])
    engine.kv.commit(table, start, keep_reserved=True)
    result = engine.step([SequenceStep(table, start, (token_ids[start], *path))])
    engine.kv.close(table)
    return result.logits[-1]


@pytest.mark.parametrize("draft", [ALONE, BESIDE_NODES], ids=["alone", "beside nodes"])
@pytest.mark.parametrize("length", [None, 2], ids=["controlled", "fixed"])
async def test_auxiliary_rows_are_told_as_evaluated_and_count_nowhere(
    stand: DecodeStand, tiny_model: Path, draft: Draft, length: int | None
) -> None:
    ahead = _Ahead(draft)
    stand.worker.drafters["ahead"] = ahead
    plain = await stand.ask(prompt_of(30), HOT)
    answer, prompt_beside, neighbour = await asyncio.gather(
        stand.ask(prompt_of(30), HOT, SpeculationParams(drafter="ahead", draft_length=length)),
        stand.ask(prompt_of(300), HOT, peers=[]),
        stand.ask(prompt_of(30), HOT, FIXED),
    )
    del stand.worker.drafters["ahead"]
    assert answer.ids == neighbour.ids == plain.ids
    assert len(prompt_beside.ids) == 40
    report = answer.report
    assert report is not None
    assert (report.fallback_reason, report.step_tokens) == ("", 39)
    if draft is ALONE:
        assert (report.position_offered, report.proposed_nodes, report.accepted_tokens) == ((), 0, 0)
        assert report.steps == 39
    else:
        assert max(report.position_offered, default=0) <= report.steps
        assert report.proposed_nodes <= 2 * report.steps
    assert ahead.seen, "no window was ever evaluated"
    whole = [seen for seen in ahead.seen if seen.draft == draft]
    assert whole or length is None
    if length is not None and draft is ALONE:
        assert len(ahead.seen) >= 37, "all steps but the last ones, which have no room"
    engine = Engine.load(tiny_model, small_engine())
    vocab = stand.worker.limits.vocab_size
    for seen in whole[:4]:
        for row, path in enumerate(PATHS[draft]):
            expected = plain_logits(engine, seen.token_ids, path)
            assert torch.equal(seen.logits[row, :vocab], expected[:vocab])
    await stand.idle()
