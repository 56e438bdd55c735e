"""Broken drafters, broken steps, bad numbers and slow readers cost one request at most."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import torch

from core.errors import Internal, Overloaded
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from decode import lifecycle
from decode.draft import Draft, Verdict
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.outbox import Delta
from engine.kv_layout import InvariantBroken
from engine.step_batch import SequenceStep, StepResult
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import DecodeStand, decode_stand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=24, seed=7)


class _Broken(NoneDrafter):
    """Raises in one of its calls."""

    name = "broken"
    needs = DrafterNeeds(max_draft_length=4, default_draft_length=4)

    def __init__(self, where: str) -> None:
        self._where = where
        self.raised = 0

    def _maybe(self, where: str) -> None:
        if where == self._where:
            self.raised += 1
            raise RuntimeError(f"broken in {where}")

    def start(self, request: DraftRequest) -> None:
        self._maybe("start")

    def prefill(self, max_rows: int) -> int:
        self._maybe("prefill")
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        self._maybe("propose")
        return [Draft((1, 2), (0, 1)) for _ in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._maybe("observe")

    def finish(self, request: DraftRequest) -> None:
        self._maybe("finish")


@pytest.mark.parametrize("where", ["start", "prefill", "propose", "observe", "finish"])
async def test_a_drafter_that_raises_is_taken_off_its_requests_only(stand: DecodeStand, where: str) -> None:
    broken = _Broken(where)
    stand.worker.drafters["broken"] = broken
    plain = await stand.ask(prompt_of(30), SAMPLED)
    answer, neighbour = await asyncio.gather(
        stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="broken")),
        stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="ngram", draft_length=4)),
    )
    assert broken.raised == 1, "the fault never fired"
    assert answer.ids == neighbour.ids == plain.ids
    assert answer.report is not None
    assert neighbour.report is not None
    if where != "finish":
        assert answer.report.fallback_reason == "drafter_error"
        assert stand.worker.metrics.totals()["outrider.speculation.fallbacks"] == 1
    assert neighbour.report.fallback_reason == ""
    del stand.worker.drafters["broken"]


class _Slow(_Broken):
    """Takes its time in one of its calls."""

    def _maybe(self, where: str) -> None:
        if where == self._where:
            self.raised += 1
            time.sleep(0.05)


class _Lying(_Broken):
    """What it proposes is no draft."""

    def __init__(self, draft: Draft) -> None:
        super().__init__("")
        self._draft = draft

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        self.raised += 1
        return [self._draft for _ in budgets]


@pytest.mark.parametrize(
    "draft",
    [
        Draft((1, 2), (0, 2)),
        Draft((1, 2), (0, -1)),
        Draft((1, 2), (0,)),
        Draft((1, 10**6), (0, 1)),
        Draft((1, -1), (0, 1)),
        Draft((1,), (0,), auxiliary_token_ids=(3,), auxiliary_parents=(2,)),
        Draft((1, 2), (0, 1), draft_probs=torch.ones(1, 8)),
        Draft((1, 2), (0, 1), sources=(0,)),
    ],
)
async def test_what_is_no_draft_costs_its_request_the_drafter_and_nobody_else_anything(
    stand: DecodeStand, draft: Draft
) -> None:
    lying = _Lying(draft)
    stand.worker.drafters["broken"] = lying
    plain = await stand.ask(prompt_of(30), SAMPLED)
    answer, neighbour = await asyncio.gather(
        stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="broken", draft_length=4)),
        stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="ngram", draft_length=4)),
    )
    assert lying.raised == 1
    assert answer.ids == neighbour.ids == plain.ids
    assert answer.report is not None
    assert answer.report.fallback_reason == "drafter_error"
    assert neighbour.report is not None
    assert neighbour.report.fallback_reason == ""
    del stand.worker.drafters["broken"]


class _Lost(_Broken):
    """Its numbers are none."""

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        self.raised += 1
        return [Draft(fault="draft_not_finite") for _ in budgets]


@pytest.mark.parametrize("where", ["start", "prefill", "propose", "observe"])
async def test_a_drafter_that_stalls_is_taken_off_its_requests(
    tiny_model: Path, script: Path, where: str
) -> None:
    settings = DecodeSettings(drafter_stall_s=0.02)
    async with decode_stand(tiny_model, script, decode=settings) as stand:
        slow = _Slow(where)
        stand.worker.drafters["broken"] = slow
        plain = await stand.ask(prompt_of(30), SAMPLED)
        answer = await stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="broken"))
        assert slow.raised == 1
        assert answer.ids == plain.ids
        assert answer.report is not None
        assert answer.report.fallback_reason == "drafter_stall"


async def test_a_drafter_whose_numbers_are_none_is_reported_and_plain_steps_follow(
    stand: DecodeStand,
) -> None:
    lost = _Lost("")
    stand.worker.drafters["broken"] = lost
    plain = await stand.ask(prompt_of(30), SAMPLED)
    answer = await stand.ask(prompt_of(30), SAMPLED, SpeculationParams(drafter="broken", draft_length=4))
    assert lost.raised > 1
    assert answer.ids == plain.ids
    assert answer.report is not None
    assert answer.report.fallback_reason == "draft_not_finite"
    assert answer.report.proposed_nodes == 0
    assert stand.worker.metrics.totals()["outrider.speculation.fallbacks"] == 1
    del stand.worker.drafters["broken"]


async def test_bad_logits_end_their_own_request_only(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stand.worker.engine
    real_step = engine.step
    poisoned = 99

    def step(sequences: Sequence[SequenceStep]) -> StepResult:
        result = real_step(sequences)
        for sequence, start in zip(sequences, result.logits_start, strict=True):
            if poisoned in list(sequence.token_ids) and sequence.logit_rows == "all":
                with torch.inference_mode():
                    result.logits[start : start + len(sequence.token_ids)] = torch.nan
        return result

    healthy = replace(SAMPLED, logit_bias={poisoned: -1000.0})
    doomed = replace(SAMPLED, logit_bias={poisoned: 1000.0})
    expected = await stand.ask(prompt_of(20, 3), healthy)
    monkeypatch.setattr(engine, "step", step)
    bad, good = await asyncio.gather(
        stand.answer(stand.request(prompt_of(20, 3), doomed)), stand.ask(prompt_of(20, 3), healthy)
    )
    assert isinstance(bad.error, Internal)
    assert "finite" in bad.error.message
    assert good.ids == expected.ids


async def test_a_step_that_fails_ends_its_requests_and_the_worker_lives_on(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await stand.ask(prompt_of(20), SAMPLED)
    real_step = stand.worker.engine.step
    failures = iter([True])

    def step(sequences: Sequence[SequenceStep]) -> StepResult:
        if next(failures, False):
            raise RuntimeError("the engine broke")
        return real_step(sequences)

    monkeypatch.setattr(stand.worker.engine, "step", step)
    assert isinstance((await stand.answer(stand.request(prompt_of(20), SAMPLED))).error, Internal)
    await stand.idle()
    assert (await stand.ask(prompt_of(20), SAMPLED)).ids == expected.ids
    assert stand.worker.faults() == {"failed_steps": 1.0, "failed_checks": 0.0}


async def test_a_first_token_that_cannot_be_drawn_for_a_fault_of_ours_ends_its_request(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[bool] = []

    def broken(*_: object) -> list[Verdict]:
        raised.append(True)
        raise RuntimeError("drawing broke")

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "verify", broken)
        own = await stand.answer(stand.request(prompt_of(40), SAMPLED, peers=[]), timeout_s=10)
        handed_over = await stand.answer(stand.request(prompt_of(40, 1), SAMPLED), timeout_s=10)
    assert len(raised) == 2
    assert isinstance(own.error, Internal)
    assert isinstance(handed_over.error, Internal)
    await stand.idle()
    assert len((await stand.ask(prompt_of(40), SAMPLED, peers=[])).ids) == 24


async def test_a_broken_invariant_is_counted_when_the_batch_runs_empty_and_serving_goes_on(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await stand.ask(prompt_of(20), SAMPLED)
    real_check = stand.worker.engine.kv.check
    failures = iter([True])

    def check() -> None:
        if next(failures, False):
            raise InvariantBroken("a block is lost")
        real_check()

    await stand.idle()
    monkeypatch.setattr(stand.worker.engine.kv, "check", check)
    assert (await stand.ask(prompt_of(20), SAMPLED)).ids == expected.ids
    assert (await stand.ask(prompt_of(20), SAMPLED)).ids == expected.ids
    assert stand.worker.faults()["failed_checks"] == 1


async def test_a_slow_reader_is_not_scheduled_then_ended_and_the_batch_never_waits(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    decode = all_drafters.model_copy(update={"outbox_deltas": 4, "slow_reader_timeout_s": 0.4})
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        live = stand.worker.accept(stand.request(prompt_of(20), replace(SAMPLED, max_tokens=1900)))
        taken: list[Delta] = []

        async def started(_: object) -> None:
            return None

        async def never_returns(delta: Delta) -> None:
            taken.append(delta)
            await asyncio.Event().wait()

        slow = asyncio.create_task(stand.worker.serve(live, None, started, never_returns))
        fast = await stand.ask(prompt_of(20), SAMPLED)
        assert len(fast.ids) == 24
        with pytest.raises(Overloaded):
            await slow
        assert len(taken) == 1
        assert live.emitted_tokens < 100, "a blocked request was scheduled on"
        await stand.idle()


async def test_a_reader_that_pauses_loses_nothing(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    decode = all_drafters.model_copy(update={"outbox_deltas": 4, "slow_reader_timeout_s": 20.0})
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        sampling = replace(SAMPLED, max_tokens=120)
        expected = await stand.ask(prompt_of(20), sampling)
        live = stand.worker.accept(stand.request(prompt_of(20), sampling))
        ids: list[int] = []

        async def started(_: object) -> None:
            return None

        async def pauses(delta: Delta) -> None:
            while not ids and not live.blocked:  # noqa: ASYNC110  # set by the engine's events
                await asyncio.sleep(0)
            ids.extend(delta.token_ids)

        await stand.worker.serve(live, None, started, pauses)
        assert ids == expected.ids
        await stand.idle()


async def test_a_client_that_vanishes_frees_everything(stand: DecodeStand) -> None:
    calls = [
        stand.stub.Generate(stand.request(prompt_of(20, n), replace(SAMPLED, max_tokens=900)))
        for n in range(6)
    ]
    for call in calls:
        assert await call.read() is not grpc.aio.EOF
    for call in calls:
        call.cancel()
    await stand.idle()
