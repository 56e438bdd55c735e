"""The figures of a bench run are those that a reader would work out by hand."""

import pytest

from cluster.cli.bench_stats import ALL, POOLED, Sample, lower_bound, percentile, prompt_ratios, rows


def _sample(arm: str, case_id: str, seconds: float, **fields: object) -> Sample:
    values: dict[str, object] = {
        "arm": arm,
        "concurrency": 1,
        "round_number": 0,
        "case_id": case_id,
        "class_name": "chat",
        "token_ids": (1, 2, 3, 4),
        "seconds": seconds,
        "first_token_s": 0.1,
        "token_gaps_s": (0.1, 0.2, 0.3),
        "steps": 2,
        "step_tokens": 3.0,
        "offered": 4,
        "accepted": 1,
    }
    return Sample(**{**values, **fields})  # type: ignore[arg-type]  # a test's shorthand


def test_a_row_sums_tokens_time_and_acceptance() -> None:
    (row,) = rows([_sample("none", "a", 1.0), _sample("none", "b", 3.0, offered=0, accepted=0)])
    assert row.tokens_per_s == pytest.approx(8 / 4.0)
    assert row.acceptance_rate == pytest.approx(1 / 4)
    assert row.acceptance_length == pytest.approx(6 / 4)
    assert row.token_gap_p50_s == pytest.approx(0.2)
    assert (row.prompts, row.tokens, row.ratio) == (2, 8, 1.0)


def test_nothing_offered_is_no_rate() -> None:
    (row,) = rows([_sample("none", "a", 1.0, steps=0, step_tokens=0.0, offered=0, accepted=0)])
    assert (row.acceptance_rate, row.acceptance_length) == (None, None)


def test_ratio_pairs_the_same_prompt_in_the_same_round() -> None:
    samples = [
        _sample("none", "a", 2.0),
        _sample("ngram", "a", 1.0),
        _sample("none", "a", 30.0, round_number=1),
        _sample("ngram", "a", 10.0, round_number=1),
        _sample("none", "b", 1.0),
        _sample("ngram", "b", 1.0),
    ]
    ngram = next(row for row in rows(samples) if row.arm == "ngram")
    assert ngram.ratio == pytest.approx((2.5 + 1.0) / 2)
    assert (ngram.equal_texts, ngram.compared_texts) == (3, 3)


def test_a_prompts_ratio_is_the_median_over_its_rounds() -> None:
    pairs = [
        (_sample("ngram", "a", seconds, round_number=number), _sample("none", "a", 2.0, round_number=number))
        for number, seconds in enumerate([1.0, 2.0, 100.0])
    ]
    assert prompt_ratios(pairs) == [pytest.approx(1.0)]


def test_other_texts_are_counted() -> None:
    samples = [_sample("none", "a", 1.0), _sample("ngram", "a", 1.0, token_ids=(1, 2, 3, 5))]
    ngram = next(row for row in rows(samples) if row.arm == "ngram")
    assert (ngram.equal_texts, ngram.compared_texts) == (0, 1)


def test_failed_requests_are_counted_and_measured_by_nothing() -> None:
    samples = [_sample("none", "a", 1.0), _sample("none", "b", 0.0, token_ids=(), error="UNAVAILABLE: gone")]
    (row,) = rows(samples)
    assert (row.errors, row.prompts, row.tokens_per_s) == (1, 2, 4.0)


def test_small_classes_are_pooled_beside_large_ones() -> None:
    large = [_sample("none", f"large{number}", 1.0) for number in range(30)]
    small = [
        _sample("none", f"small{number}", 1.0, class_name=name)
        for number, name in enumerate(["code", "creative"])
    ]
    by_class = {row.class_name: row.prompts for row in rows([*large, *small])}
    assert by_class == {"chat": 30, "code": 1, "creative": 1, POOLED: 2, ALL: 32}


def test_without_a_baseline_there_is_no_ratio() -> None:
    (row,) = rows([_sample("ngram", "a", 1.0)])
    assert (row.ratio, row.ratio_lower, row.equal_texts) == (None, None, None)


def test_lower_bound_lies_below_the_median_of_a_spread_and_at_it_without_one() -> None:
    spread = [0.5 + number / 50 for number in range(50)]
    assert 0.8 < lower_bound(spread) < 0.99
    assert lower_bound([2.0] * 10) == 2.0
    assert lower_bound(spread) == lower_bound(spread)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 1.0], 99) == pytest.approx(0.99)
