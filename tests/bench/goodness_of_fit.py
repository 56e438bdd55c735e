"""Chi-square tests of counts against exact distributions, and Holm's correction over many of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

SMALLEST_EXPECTED = 8.0
"""Cells that expect fewer are pooled."""


@dataclass(frozen=True, slots=True)
class FitTest:
    """One claim about a distribution: `p_value` is how likely so large a deviation is if the claim holds."""

    name: str
    num_draws: int
    p_value: float


def fit(name: str, counts: NDArray[np.int64], probs: NDArray[np.float64]) -> FitTest:
    """`counts` [groups, outcomes] against `probs` of the same shape, each row summing to 1.

    The groups' statistics and degrees of freedom add up. A draw that cannot happen gives p = 0.
    """
    statistic, freedom = 0.0, 0
    for observed, prob in zip(counts, probs, strict=True):
        if observed[prob <= 0.0].any():
            return FitTest(name, int(counts.sum()), 0.0)
        expected = prob * observed.sum()
        small = expected < SMALLEST_EXPECTED
        cells = [*zip(observed[~small], expected[~small], strict=True)]
        if expected[small].sum() >= SMALLEST_EXPECTED:
            cells.append((observed[small].sum(), expected[small].sum()))
        elif cells and small.any():
            last_observed, last_expected = cells.pop()
            cells.append((last_observed + observed[small].sum(), last_expected + expected[small].sum()))
        statistic += sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
        freedom += max(0, len(cells) - 1)
    p_value = float(chi2.sf(statistic, freedom)) if freedom else 1.0
    return FitTest(name, int(counts.sum()), p_value)


def holm(tests: Sequence[FitTest]) -> list[FitTest]:
    """The tests with p-values corrected by Holm's step-down method (1979), smallest first."""
    corrected, largest = [], 0.0
    for index, test in enumerate(sorted(tests, key=lambda test: test.p_value)):
        largest = max(largest, min(1.0, (len(tests) - index) * test.p_value))
        corrected.append(FitTest(test.name, test.num_draws, largest))
    return corrected
