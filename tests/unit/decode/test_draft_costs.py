"""What a step costs each choice, in steps of plain decoding."""

from dataclasses import dataclass
from typing import cast

import pytest

from decode.choice import Choice
from decode.draft_costs import DraftCosts
from decode.report import Tally


@dataclass(slots=True)
class Asked:
    tally: Tally


@dataclass(slots=True)
class Stepping:
    """The part of a choice that is counted with."""

    key: int
    request: Asked

    @property
    def plain_steps(self) -> float:
        return self.request.tally.plain_steps


def choices(count: int) -> list[Stepping]:
    return [Stepping(key, Asked(Tally("ngram", "chat", None))) for key in range(count)]


def charge(costs: DraftCosts, stepped: list[tuple[Stepping, int]], rows: int, prefill_rows: int = 0) -> None:
    costs.charge([(cast(Choice, choice), own) for choice, own in stepped], rows, prefill_rows)


def spend(costs: DraftCosts, stepping: list[Stepping], seconds: float) -> None:
    costs.spend([cast(Choice, choice) for choice in stepping], seconds)


def test_alone_a_step_costs_its_time_over_that_of_a_plain_one() -> None:
    (choice,) = choices(1)
    costs = DraftCosts(lambda rows: 0.020 + 0.002 * rows)
    spend(costs, [choice], 0.011)
    charge(costs, [(choice, 4)], 5)
    assert choice.plain_steps == pytest.approx((0.030 + 0.011) / 0.022)
    charge(costs, [(choice, 0)], 1)
    assert choice.plain_steps == pytest.approx((0.030 + 0.011) / 0.022 + 1.0), "what was spent counts once"


def test_in_a_batch_extra_time_is_borne_by_whose_rows_and_whose_drafter_took_it() -> None:
    first, second, plain = choices(3)
    costs = DraftCosts(lambda rows: 0.010 * rows)
    spend(costs, [first, second], 0.02)
    charge(costs, [(first, 6), (second, 0), (plain, 0)], 9)
    assert first.plain_steps == pytest.approx(1.0 + (0.06 + 0.01) / 0.01)
    assert second.plain_steps == pytest.approx(1.0 + 0.01 / 0.01)
    assert plain.plain_steps == 1.0
    assert sum(choice.plain_steps for choice in (first, second, plain)) * 0.01 == pytest.approx(0.09 + 0.02)


def test_beside_prompts_a_plain_step_is_longer_and_drafts_cost_less_of_it() -> None:
    alone, beside = choices(2)
    costs = DraftCosts(lambda rows: 0.001 * rows)
    charge(costs, [(alone, 4)], 5)
    charge(costs, [(beside, 4)], 105, prefill_rows=100)
    assert alone.plain_steps == pytest.approx(5.0)
    assert beside.plain_steps == pytest.approx(1.0 + 4 / 101)


def test_without_measured_times_every_step_counts_as_one() -> None:
    (choice,) = choices(1)
    costs = DraftCosts(lambda rows: 0.0)
    spend(costs, [choice], 1.0)
    charge(costs, [(choice, 3)], 4)
    assert choice.plain_steps == 1.0


def test_what_is_kept_of_a_finished_choice_is_found() -> None:
    (choice,) = choices(1)
    costs = DraftCosts(lambda rows: 0.01)
    spend(costs, [choice], 1.0)
    with pytest.raises(AssertionError, match="finished"):
        costs.check()
    costs.forget(cast(Choice, choice))
    costs.forget(cast(Choice, choice))
    costs.check()
    spend(costs, [], 1.0)
    costs.check()
