"""Ratios of paired measurements, and how sure one may be of their median."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class MedianRatio:
    """The median of `count` ratios and its one-sided lower 95 % bound (None: too few to have one)."""

    count: int
    median: float
    lower_bound: float | None


def median_ratio(ratios: Sequence[float]) -> MedianRatio:
    """The median and its bound; raises ValueError for no ratios at all."""
    return MedianRatio(len(ratios), statistics.median(ratios), lower_bound_of_median(ratios))


def ratios_by_prompt(
    these: Mapping[tuple[str, int], float], those: Mapping[tuple[str, int], float]
) -> list[float]:
    """These over those, each by (prompt, round): one ratio a prompt, the median over the rounds that both have."""
    found: dict[str, list[float]] = {}
    for key in these:
        if key in those:
            found.setdefault(key[0], []).append(these[key] / those[key])
    return [statistics.median(ratios) for ratios in found.values()]


def lower_bound_of_median(values: Sequence[float]) -> float | None:
    """The largest order statistic that lies above the true median with a chance of at most 5 %.

    Distribution-free (the sign test turned round): the k-th smallest value exceeds the median only if fewer
    than k values lie below it, which has the probability P(Binomial(n, 1/2) < k). None for n < 5.
    """
    count = len(values)
    tail, rank = 0.0, 0
    for below in range(count):
        tail += comb(count, below) / 2**count
        if tail > 1 - CONFIDENCE:
            break
        rank = below + 1
    return sorted(values)[rank - 1] if rank else None
