"""`auto` over whole answers, with made-up times and drafters: finds the best, follows changes, is never below plain."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest

from decode.choice import Choice
from decode.control.controller import ControlledChoice, DraftLengthController, PlanEntry
from decode.control.drafter_choice import PLAIN, DrafterChoice
from decode.draft_costs import DraftCosts
from decode.report import Tally

ROWS_WARMED_UP = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ANSWER_TOKENS = 96
LONGEST = 8


def step_seconds(rows: int) -> float:
    """Rows are nearly free up to 12, and dear behind."""
    return 0.024 * max(1.0, rows / 12) + 0.0002 * rows


@dataclass(slots=True)
class MadeUpDrafter:
    """Right with `rate` at each depth; a level takes `level_s`."""

    rate: float
    level_s: float = 0.0


@dataclass(slots=True)
class Asked:
    """The part of a request that is counted with."""

    tally: Tally


@dataclass(slots=True)
class Answer:
    """The part of a choice that is counted with."""

    key: int
    drafter: str
    request: Asked
    left: int = ANSWER_TOKENS


@dataclass
class MadeUpWorker:
    """Keeps `batch` answers running, one class of requests; the real controller, costs and choice decide."""

    drafters: dict[str, MadeUpDrafter]
    batch: int
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    live: list[Answer] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.choice = DrafterChoice()
        warm = {rows: step_seconds(rows) for rows in ROWS_WARMED_UP}
        self.controller = DraftLengthController(256, warm)
        table = self.controller.step_time
        self.costs = DraftCosts(lambda rows: table.seconds[min(rows, table.max_count)])

    def serve(self, count: int) -> list[str]:
        """The drafters of `count` further answers, in the order that they began."""
        before = len(self.started)
        while len(self.started) < before + count:
            while len(self.live) < self.batch:
                self._begin()
            self._step()
        return self.started[before : before + count]

    def speed(self) -> float:
        """Tokens a second over those of plain decoding."""
        return self.tokens / self.seconds / (self.batch / step_seconds(self.batch))

    def _begin(self) -> None:
        company = Counter(answer.drafter for answer in self.live)
        name = self.choice.choose("chat", tuple(self.drafters), company)
        answer = Answer(len(self.started), name, Asked(Tally(name, "chat", None)))
        self.started.append(name)
        self.live.append(answer)
        if name != PLAIN:
            self.controller.add(ControlledChoice(answer.key, name, "chat", LONGEST, 4, start_length=4))

    def _step(self) -> None:
        drafting = [answer for answer in self.live if answer.drafter != PLAIN]
        entries = [PlanEntry(answer.key, min(LONGEST, answer.left - 1)) for answer in drafting]
        others = len(self.live) - len(drafting)
        planned = self.controller.plan(entries, others, others) if drafting else []
        lengths = {answer.key: length for answer, length in zip(drafting, planned, strict=True)}
        self._draft(drafting, lengths)
        rows = len(self.live) + sum(planned)
        took_s = step_seconds(rows) * self.random.uniform(0.97, 1.03)
        self.seconds += took_s
        self.controller.record_step(rows, took_s)
        stepped = [(cast(Choice, answer), lengths.get(answer.key, 0)) for answer in self.live]
        self.costs.charge(stepped, rows, 0)
        for answer in list(self.live):
            self._settle(answer, lengths.get(answer.key, 0))

    def _draft(self, drafting: list[Answer], lengths: dict[int, int]) -> None:
        for name, drafter in self.drafters.items():
            group = [answer for answer in drafting if answer.drafter == name and lengths[answer.key]]
            if group:
                deepest = max(lengths[answer.key] for answer in group)
                took_s = drafter.level_s * deepest * self.random.uniform(0.97, 1.03)
                self.seconds += took_s
                self.controller.record_draft(name, deepest, took_s)
                self.costs.spend([cast(Choice, answer) for answer in group], took_s)

    def _settle(self, answer: Answer, length: int) -> None:
        accepted = 0
        while accepted < length and self.random.random() < self.drafters[answer.drafter].rate:
            accepted += 1
        self.controller.observe(answer.key, length, accepted)
        emitted = min(accepted + 1, answer.left)
        answer.left -= emitted
        self.tokens += emitted
        tally = answer.request.tally
        tally.add_step(tuple(range(1, length + 1)), accepted, emitted, answer.left == 0)
        if answer.left == 0:
            self.live.remove(answer)
            self.controller.remove(answer.key)
            self.costs.forget(cast(Choice, answer))
            report = tally.snapshot()
            self.choice.learn("chat", report.drafter, report.step_tokens, tally.plain_steps)


def three(first: float, second: float, third: float) -> dict[str, MadeUpDrafter]:
    """The second takes time to draft, the third a little."""
    return {
        "first": MadeUpDrafter(first),
        "second": MadeUpDrafter(second, level_s=0.002),
        "third": MadeUpDrafter(third, level_s=0.0005),
    }


@pytest.mark.parametrize(
    ("rates", "best"),
    [((0.3, 0.5, 0.9), "third"), ((0.8, 0.4, 0.5), "first"), ((0.1, 0.95, 0.4), "second")],
)
def test_the_best_of_three_is_found_within_twenty_answers(
    rates: tuple[float, float, float], best: str
) -> None:
    worker = MadeUpWorker(three(*rates), batch=1)
    worker.serve(20)
    assert Counter(worker.serve(80))[best] >= 70
    worker.costs.check()


def test_a_change_is_followed_within_120_answers() -> None:
    worker = MadeUpWorker(three(0.8, 0.4, 0.5), batch=1)
    worker.serve(150)
    worker.drafters["first"].rate, worker.drafters["third"].rate = 0.2, 0.9
    worker.serve(120)
    assert Counter(worker.serve(80))["third"] >= 65


def test_useless_drafters_give_way_to_plain_decoding_and_one_that_gets_good_comes_back() -> None:
    worker = MadeUpWorker(three(0.01, 0.02, 0.01), batch=1)
    worker.serve(60)
    assert Counter(worker.serve(160))[PLAIN] >= 140
    worker.drafters["second"].rate = 0.9
    worker.serve(250)
    assert Counter(worker.serve(80))["second"] >= 65


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("rates", [(0.1, 0.1, 0.1), (0.5, 0.4, 0.3), (0.3, 0.8, 0.05), (0.9, 0.9, 0.9)])
def test_auto_is_never_below_plain_decoding_under_load(batch: int, rates: tuple[float, float, float]) -> None:
    worker = MadeUpWorker(three(*rates), batch)
    worker.serve(10 * batch)
    assert worker.speed() >= 0.98


def test_under_load_the_drafter_is_taken_that_pays_there() -> None:
    """Its time to draft is spent once for all that use it, but a step of eight has no more free rows for them."""
    worker = MadeUpWorker(three(0.7, 0.7, 0.7), batch=8)
    worker.serve(80)
    counts = Counter(worker.serve(80))
    assert counts["first"] > counts["second"]
    assert worker.speed() > 1.02
