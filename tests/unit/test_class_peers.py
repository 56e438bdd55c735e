"""Which answers the bench of classes takes into account, and what it makes of their rates."""

import json

import pytest

from tests.bench.class_peers import PEER, Ask, Measured, Row, cells, goal_mean, measure, report
from tests.bench.prompts import Prompt
from tests.bench.timed import TokenTimes

LONG = tuple(range(20))


def prompt(prompt_id: str, prompt_class: str = "code") -> Prompt:
    return Prompt(prompt_id, prompt_class, "text", (1, 2, 3), 0)


def row(arm: str, prompt_id: str, prompt_class: str, rate: float) -> Row:
    return Row(arm, prompt_id, prompt_class, tokens=20, first_s=0.1, rate=rate, whole_rate=rate / 2)


def arm(token_ids: tuple[int, ...], asked: list[tuple[str, int, str]], name: str) -> Ask:
    def ask(prompt: Prompt, count: int, salt: str) -> TokenTimes:
        asked.append((name, count, salt))
        return TokenTimes(token_ids[:count], first_tokens=1, first_s=0.1, whole_s=1.1)

    return ask


def test_every_arm_answers_with_as_many_tokens_as_the_target_did_and_under_a_salt_of_its_own() -> None:
    asked: list[tuple[str, int, str]] = []
    arms = {name: arm(LONG, asked, name) for name in ("none", "auto", PEER)}
    found = measure(arms, [prompt("a"), prompt("b")], rounds=2, max_tokens=96)
    counted = [entry for entry in asked if "reference" not in entry[2] and entry[2]]
    assert len(counted) == len(found.rows) == 2 * 2 * 3
    assert {count for _, count, _ in counted} == {len(LONG)}
    assert len({salt for _, _, salt in counted}) == len(counted)
    assert [name for name, _, _ in counted[:6]] == ["none", "auto", PEER, "auto", PEER, "none"]
    assert (found.wrong, found.agreed, found.prompts) == (0, 2, 2)


def test_another_text_than_plain_decoding_is_counted_and_the_peers_is_not() -> None:
    asked: list[tuple[str, int, str]] = []
    other = (LONG[0], *(token_id + 1 for token_id in LONG[1:]))
    arms = {name: arm(ids, asked, name) for name, ids in (("none", LONG), ("auto", other), (PEER, other))}
    assert measure(arms, [prompt("a")], rounds=3, max_tokens=96).wrong == 3


def test_prompts_with_short_answers_are_left_out() -> None:
    asked: list[tuple[str, int, str]] = []
    arms = {name: arm(LONG[:15], asked, name) for name in ("none", "auto", PEER)}
    found = measure(arms, [prompt("a")], rounds=2, max_tokens=96)
    assert (found.rows, found.prompts) == ([], 0)
    assert cells(found.rows) == {}


def test_a_cell_is_the_median_over_prompts_of_medians_over_rounds() -> None:
    rates = {"a": ([30.0, 10.0, 20.0], [10.0, 10.0, 10.0]), "b": ([40.0, 40.0, 40.0], [10.0, 5.0, 10.0])}
    rows = [
        row(name, prompt_id, "code", rate)
        for prompt_id, pair in rates.items()
        for name, of_arm in zip(("auto", PEER), pair, strict=True)
        for rate in of_arm
    ]
    cell = cells(rows)["auto"]["code"]
    assert (cell.decoding.count, cell.decoding.median, cell.decoding.lower_bound) == (2, 3.0, None)
    assert (cell.rate, cell.peer_rate) == (35.0, 10.0)


def test_the_goal_is_the_mean_over_its_classes_and_not_over_their_prompts() -> None:
    ratios = {"code": [1.0, 1.0, 1.0], "structured": [3.0], "chat": [9.0]}
    rows = [
        row(name, f"{prompt_class}-{number}", prompt_class, rate)
        for prompt_class, of_class in ratios.items()
        for number, ratio in enumerate(of_class)
        for name, rate in (("auto", ratio), (PEER, 1.0))
    ]
    table = cells(rows)
    assert list(table["auto"]) == ["code", "structured", "chat", "all"]
    assert goal_mean(table["auto"]) == pytest.approx(2.0)
    assert goal_mean({"chat": table["auto"]["chat"]}) is None
    assert json.loads(json.dumps(report(Measured(rows), table)))["goal_means"] == {"auto": 2.0}
