"""The figures of a bench run, from its samples. Pure.

A ratio to `none` is paired: the same prompt in the same round. A prompt's ratio is the median over its rounds, an
arm's is the median over prompts, and its lower bound is the 5th percentile of that median over 2,000
bootstrap resamples of the prompts (one-sided 95 %).
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

BASELINE = "none"
POOLED = "pooled"
ALL = "all"
MIN_CLASS_PROMPTS = 30
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the client saw it. `token_gaps_s`: seconds a token, one entry for each token after the first."""

    arm: str
    concurrency: int
    round_number: int
    case_id: str
    class_name: str
    token_ids: tuple[int, ...]
    seconds: float
    first_token_s: float
    token_gaps_s: tuple[float, ...]
    steps: int
    step_tokens: float
    offered: int
    accepted: int
    error: str | None = None

    @property
    def rate(self) -> float:
        """Tokens a second, first token included."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. None: nothing to compute it from."""

    concurrency: int
    class_name: str
    arm: str
    prompts: int
    errors: int
    tokens: int
    tokens_per_s: float | None
    ratio: float | None
    ratio_lower: float | None
    acceptance_rate: float | None
    acceptance_length: float | None
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    token_gap_p50_s: float | None
    token_gap_p99_s: float | None
    equal_texts: int | None
    compared_texts: int


def rows(samples: Sequence[Sample]) -> list[Row]:
    """A row for each concurrency, class (then small classes pooled, then all) and arm."""
    table: list[Row] = []
    for concurrency in sorted({sample.concurrency for sample in samples}):
        chosen = [sample for sample in samples if sample.concurrency == concurrency]
        arms = list(dict.fromkeys(sample.arm for sample in chosen))
        for name, group in _groups(chosen):
            table.extend(_row(concurrency, name, arm, group) for arm in arms)
    return table


def _groups(samples: Sequence[Sample]) -> Iterable[tuple[str, list[Sample]]]:
    names = list(dict.fromkeys(sample.class_name for sample in samples))
    sizes = {name: len({sample.case_id for sample in samples if sample.class_name == name}) for name in names}
    small = {name for name in names if sizes[name] < MIN_CLASS_PROMPTS}
    for name in names:
        yield name, [sample for sample in samples if sample.class_name == name]
    if len(names) > 1:
        if small and len(small) < len(names):
            yield POOLED, [sample for sample in samples if sample.class_name in small]
        yield ALL, list(samples)


def _row(concurrency: int, class_name: str, arm: str, group: Sequence[Sample]) -> Row:
    mine = [sample for sample in group if sample.arm == arm]
    good = [sample for sample in mine if sample.error is None]
    baseline = {
        (sample.case_id, sample.round_number): sample
        for sample in group
        if sample.arm == BASELINE and sample.error is None
    }
    pairs = [
        (sample, baseline[key])
        for sample in good
        if (key := (sample.case_id, sample.round_number)) in baseline
    ]
    ratios = prompt_ratios(pairs)
    seconds = sum(sample.seconds for sample in good)
    tokens = sum(len(sample.token_ids) for sample in good)
    gaps = [gap for sample in good for gap in sample.token_gaps_s]
    firsts = [sample.first_token_s for sample in good]
    return Row(
        concurrency=concurrency,
        class_name=class_name,
        arm=arm,
        prompts=len({sample.case_id for sample in mine}),
        errors=len(mine) - len(good),
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else None,
        ratio=median(ratios) if ratios else None,
        ratio_lower=lower_bound(ratios) if ratios else None,
        acceptance_rate=_divide(sum(s.accepted for s in good), sum(s.offered for s in good)),
        acceptance_length=_divide(sum(s.step_tokens for s in good), sum(s.steps for s in good)),
        first_token_p50_s=percentile(firsts, 50),
        first_token_p99_s=percentile(firsts, 99),
        token_gap_p50_s=percentile(gaps, 50),
        token_gap_p99_s=percentile(gaps, 99),
        equal_texts=sum(mine.token_ids == other.token_ids for mine, other in pairs) if pairs else None,
        compared_texts=len(pairs),
    )


def prompt_ratios(pairs: Iterable[tuple[Sample, Sample]]) -> list[float]:
    """For each prompt the median over rounds of its rate over the baseline's rate."""
    by_prompt: dict[str, list[float]] = {}
    for sample, baseline in pairs:
        if baseline.rate > 0:
            by_prompt.setdefault(sample.case_id, []).append(sample.rate / baseline.rate)
    return [median(ratios) for ratios in by_prompt.values()]


def lower_bound(values: Sequence[float], statistic: Callable[[Sequence[float]], float] = median) -> float:
    """One-sided 95 % bootstrap bound of a statistic. Same values, same bound."""
    chance = random.Random(len(values))
    resampled = [statistic(chance.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(resampled, 5) or 0.0


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None
