"""`auto` with several candidates: the worker tries them, takes the one that pays, and says which; the text is plain."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.records import SamplingParams, SpeculationParams
from decode.draft_costs import DraftCosts
from decode.drafters.protocol import DraftBudget
from decode.pace import Pace
from outrider.v1 import decode_pb2
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand

pytestmark = pytest.mark.usefixtures("even_times")
SAMPLED = SamplingParams(temperature=12.0, max_tokens=60, seed=7)
RIGHT, WRONG = "scripted-right", "scripted-wrong"


PROMPT = prompt_of(40)
AUTO = SpeculationParams("auto")


@pytest.fixture
def even_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a millisecond and a proposal a twentieth of that, however busy this machine is just now."""
    step, draft, spend = Pace.record_step, Pace.record_draft, DraftCosts.spend
    monkeypatch.setattr(Pace, "record_step", lambda pace, rows, _: step(pace, rows, 1e-3))
    monkeypatch.setattr(Pace, "record_draft", lambda pace, name, depth, _: draft(pace, name, depth, 5e-5))
    monkeypatch.setattr(DraftCosts, "spend", lambda costs, choices, _: spend(costs, choices, 5e-5))


def automatic(
    stand: DecodeStand,
    candidates: Sequence[str],
    speculation: SpeculationParams = AUTO,
    sampling: SamplingParams = SAMPLED,
) -> decode_pb2.DecodeRequest:
    request = stand.request(PROMPT, sampling, speculation)
    request.auto_drafters.extend(candidates)
    return request


async def chosen(stand: DecodeStand, request: decode_pb2.DecodeRequest) -> tuple[str, Answer]:
    """What the first message names, and the whole answer."""
    answer, started = Answer(), ""
    async for event in stand.stub.Generate(request, timeout=60.0):
        if event.HasField("started"):
            started = event.started.drafter
        answer.take(event)
    assert answer.report is not None
    assert answer.report.drafter == started
    return started, answer


async def recorded(stand: DecodeStand) -> Answer:
    plain = await stand.ask(PROMPT, SAMPLED)
    stand.record(PROMPT, SAMPLED, plain)
    return plain


async def test_the_drafter_that_pays_is_found_and_every_text_is_that_of_plain_decoding(
    stand: DecodeStand,
) -> None:
    plain = await recorded(stand)
    names: list[str] = []
    for _ in range(24):
        name, answer = await chosen(stand, automatic(stand, (WRONG, RIGHT)))
        names.append(name)
        assert (answer.ids, answer.text) == (plain.ids, plain.text)
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
        assert answer.report.draft_length_requested is None
    assert names[:2] == [WRONG, RIGHT]
    assert Counter(names[8:])[RIGHT] >= 13


async def test_a_drafter_that_fails_is_tried_no_more_than_now_and_then(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await recorded(stand)
    fired = 0

    def broken(budgets: Sequence[DraftBudget]) -> None:
        nonlocal fired
        fired += 1
        raise RuntimeError("broken")

    monkeypatch.setattr(stand.worker.drafters[WRONG], "propose", broken)
    names: list[str] = []
    for _ in range(20):
        name, answer = await chosen(stand, automatic(stand, (WRONG, RIGHT)))
        names.append(name)
        assert answer.ids == plain.ids
        assert answer.report is not None
        assert answer.report.fallback_reason == ("drafter_error" if name == WRONG else "")
    assert 0 < fired == names.count(WRONG) <= 5


async def test_what_cannot_be_tried_is_not_chosen(stand: DecodeStand) -> None:
    await recorded(stand)
    for candidates in ((), ("oracle",), ("bild",)):
        assert (await chosen(stand, automatic(stand, candidates)))[0] == "ngram"
    too_deep = automatic(stand, ("eagle3", RIGHT), SpeculationParams("auto", draft_length=12))
    assert (await chosen(stand, too_deep))[0] == RIGHT, "the head drafts 8 tokens at most"
    too_wide = automatic(stand, (RIGHT, "eagle3"), SpeculationParams("auto", draft_width=3))
    assert (await chosen(stand, too_wide))[0] == "eagle3"


async def test_short_answers_and_a_fixed_length_take_the_best_without_a_trial(stand: DecodeStand) -> None:
    await recorded(stand)
    short = replace(SAMPLED, max_tokens=4)
    fixed = SpeculationParams("auto", draft_length=3)
    for _ in range(3):
        name, answer = await chosen(stand, automatic(stand, (RIGHT, WRONG), sampling=short))
        assert answer.report is not None
        assert (name, answer.report.fallback_reason) == (RIGHT, "short_answer")
        assert answer.report.proposed_nodes == 0
        assert (await chosen(stand, automatic(stand, (RIGHT, WRONG), fixed)))[0] == RIGHT
    first, _ = await chosen(stand, automatic(stand, (RIGHT, WRONG)))
    second, _ = await chosen(stand, automatic(stand, (RIGHT, WRONG)))
    assert (first, second) == (RIGHT, WRONG), "the trials begin here"


async def test_the_drafter_that_was_chosen_is_counted_by_class(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str, str]] = []
    all_counted = asyncio.Event()

    def count(status: str, request_class: str = "", drafter: str = "") -> None:
        counted.append((status, request_class, drafter))
        if len(counted) == 3:
            all_counted.set()

    monkeypatch.setattr(stand.worker.metrics, "request_finished", count)
    await recorded(stand)
    for _ in range(2):
        await chosen(stand, automatic(stand, (RIGHT, WRONG)))
    async with asyncio.timeout(10):
        await all_counted.wait()
    assert sorted(counted) == [("OK", "chat", "none"), ("OK", "chat", RIGHT), ("OK", "chat", WRONG)]
