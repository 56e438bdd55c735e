"""The row plan is found by probing, and a linear follows it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.linear import CANDIDATE_PLANS, Linear, RowPlan, find_row_plan, pack

Rule = Callable[[int], bool]


def moody_product(weight: Tensor, even: Rule) -> Callable[[Tensor], Tensor]:
    """A product whose bits are those of one summation order where `even(rows)` holds, else of another."""

    def multiply(rows: Tensor) -> Tensor:
        if even(rows.shape[0]):
            return (rows[:, None] * weight).sum(-1)
        return (rows[:, None] * weight).flip(-1).cumsum(-1)[..., -1]

    return multiply


@pytest.mark.parametrize(
    ("even", "plan"),
    [
        (lambda rows: True, RowPlan(1, None)),
        (lambda rows: rows % 4 == 0, RowPlan(4, None)),
        (lambda rows: rows <= 32, RowPlan(1, 32)),
        (lambda rows: rows % 4 == 0 and rows <= 32, RowPlan(4, 32)),
        (lambda rows: rows <= 16, RowPlan(1, 16)),
        (lambda rows: rows % 3 == 0, RowPlan(4, 4)),
    ],
)
def test_the_cheapest_plan_that_holds_is_found(even: Rule, plan: RowPlan) -> None:
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    found = find_row_plan([(moody_product(weight, even), 48)], torch.float32, torch.device("cpu"))
    assert found == plan


@pytest.mark.parametrize("plan", CANDIDATE_PLANS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 31, 33, 70])
def test_every_plan_computes_the_product(plan: RowPlan, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, rows = torch.randn(24, 32, generator=generator), torch.randn(num_rows, 32, generator=generator)
    assert torch.allclose(Linear(pack(weight), plan)(rows), rows @ weight.T, atol=1e-5)


def test_a_linear_never_calls_with_more_rows_or_another_multiple_than_planned() -> None:
    seen: list[int] = []

    def record(rows: Tensor) -> Tensor:
        seen.append(rows.shape[0])
        return rows

    for num_rows in range(1, 80):
        result = Linear(record, RowPlan(4, 32))(torch.zeros(num_rows, 3))
        assert result.shape == (num_rows, 3)
    assert max(seen) == 32
    assert all(count % 4 == 0 for count in seen)
