"""Measured seconds as a function of a count: target rows of a step, or depth of a draft. Learned online."""

import math
from collections.abc import Mapping

import numpy as np

_NEW_SAMPLE_SHARE = 0.05
_SAMPLES_BEFORE_CLIPPING = 4
_RECORDS_BETWEEN_REBUILDS = 8
_FORGETTING = 0.998
_PACE_SHARE = 0.4
_LARGEST_CHANGE = 1.5


class StepTimeTable:
    """Decayed mean seconds for each count seen; between them interpolation, made monotone.

    `seconds` is a list indexed by count, 0 to `max_count`. Below the smallest count seen it is flat, above the
    largest it goes on with the mean slope (flat with one count): what was never tried looks cheap, so it is tried.

    A machine that other work slows down does so for every count: that is followed by one pace, in which all seconds
    are measured. Counts seen while it was slow, and not since, would look dear for ever otherwise.
    """

    __slots__ = ("_means", "_pace", "_records", "_weights", "max_count", "seconds")

    def __init__(self, max_count: int, warm_start: Mapping[int, float] | None = None) -> None:
        self.max_count = max_count
        self._means: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._records = 0
        self._pace = 1.0
        self.seconds: list[float] = [0.0] * (max_count + 1)
        for count, seconds in (warm_start or {}).items():
            self.record(count, seconds)
        self._rebuild()

    @property
    def empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._means

    def record(self, count: int, seconds: float) -> None:
        """One measurement. Values that are no durations are ignored; a stall counts as a half more at most, a
        sudden gain as a third less."""
        if not (0 <= count <= self.max_count) or not math.isfinite(seconds) or seconds <= 0.0:
            return
        weight = self._weights.get(count, 0.0)
        mean = self._means.get(count, seconds / self._pace)
        if weight >= _SAMPLES_BEFORE_CLIPPING:
            change = seconds / (self._pace * mean)
            change = min(max(change, 1.0 / _LARGEST_CHANGE), _LARGEST_CHANGE)
            self._pace *= change**_PACE_SHARE
            seconds = change ** (1.0 - _PACE_SHARE) * mean
        else:
            seconds /= self._pace
            if weight and seconds * _LARGEST_CHANGE < mean:
                mean = seconds  # what came first was a stall
            elif weight:
                seconds = min(seconds, _LARGEST_CHANGE * mean)
        self._means[count] = mean + (seconds - mean) * max(_NEW_SAMPLE_SHARE, 1.0 / (weight + 1.0))
        self._weights[count] = weight + 1.0
        self._records += 1
        if weight == 0.0 or self._records >= _RECORDS_BETWEEN_REBUILDS:
            self._rebuild()

    def _rebuild(self) -> None:
        forgetting = _FORGETTING**self._records
        self._records = 0
        if not self._means:
            return
        for count in self._weights:
            self._weights[count] = max(1.0, self._weights[count] * forgetting)
        counts = sorted(self._means)
        means = monotone([self._means[c] for c in counts], [self._weights[c] for c in counts])
        dense = np.interp(np.arange(self.max_count + 1), counts, means)
        if len(counts) > 1:
            slope = (means[-1] - means[0]) / (counts[-1] - counts[0])
            beyond = np.arange(counts[-1], self.max_count + 1)
            dense[beyond] = means[-1] + slope * (beyond - counts[-1])
        self.seconds = (self._pace * dense).tolist()


def monotone(values: list[float], weights: list[float]) -> list[float]:
    """The nearest non-decreasing sequence in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            other_value, other_weight, length = pools.pop()
            total = other_weight + pool[1]
            mean = (other_value * other_weight + pool[0] * pool[1]) / total
            pool = (mean, total, length + pool[2])
        pools.append(pool)
    return [value for value, _, length in pools for _ in range(length)]
