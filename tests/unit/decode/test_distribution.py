"""A small run of `tests.bench.distribution`: both verifiers follow the target, and planted faults are seen."""

import numpy as np
import pytest

from tests.bench.distribution import FAULT_P, SMALLEST_P, examine
from tests.bench.goodness_of_fit import FitTest, fit, holm
from tests.bench.synthetic_blocks import AnswerScenario
from tests.bench.synthetic_chains import FAULTS, Fault, Scenario, judge, run
from tests.bench.synthetic_trees import (
    TREE_FAULTS,
    TreeFault,
    TreeScenario,
    fault_scenario,
    judge_trees,
    run_trees,
    tree_scenarios,
)

SCENARIOS: list[Scenario | TreeScenario | AnswerScenario] = [
    Scenario("invariant", 3, 6000),
    Scenario("rejection", 3, 6000),
    Scenario("rejection", 2, 6000, one_hot=True),
    Scenario("block", 3, 6000),
    Scenario("block", 2, 6000, one_hot=True),
    *tree_scenarios(3000),
    AnswerScenario("block", 6000),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_position_follows_the_target_by_accepted_residual_and_bonus(
    scenario: Scenario | TreeScenario | AnswerScenario,
) -> None:
    tests, _ = examine(scenario)
    smallest = holm(tests)[0]
    assert smallest.p_value >= SMALLEST_P, smallest


def test_the_scenarios_accept_and_reject() -> None:
    outcome = run(Scenario("block", 3, 2000))
    assert 0 < outcome.accepted.sum() < outcome.accepted.size * 3
    for scenario in tree_scenarios(500):
        seen = run_trees(scenario)
        assert {*range(scenario.width), -1} <= set(seen.accepted[:, 0].tolist())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refuted(fault: Fault) -> None:
    scenario = Scenario("rejection", 2, 12_000)
    smallest = holm(judge(scenario, run(scenario, fault)))[0]
    assert smallest.p_value < (FAULT_P if fault != "untruncated_draft_probs" else 1e-4), smallest


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_a_drafter_that_looks_at_its_tokens_is_refuted(fault: TreeFault) -> None:
    scenario = fault_scenario(fault, 8000)
    smallest = holm(judge_trees(scenario, run_trees(scenario, fault)))[0]
    assert smallest.p_value < FAULT_P, smallest


def test_the_fit_accepts_the_truth_and_refutes_a_shift_and_the_impossible() -> None:
    generator = np.random.default_rng(0)
    probs = np.array([[0.5, 0.3, 0.2, 0.0]])
    truth = generator.multinomial(20_000, probs[0])[None]
    assert fit("truth", truth, probs).p_value > 1e-3
    assert fit("shift", truth, np.array([[0.47, 0.33, 0.2, 0.0]])).p_value < 1e-6
    assert fit("impossible", np.array([[5, 3, 2, 1]]), probs).p_value == 0.0
    assert fit("empty", np.zeros((1, 4), np.int64), probs).p_value == 1.0


def test_holm_multiplies_by_the_number_of_tests_left_and_never_falls() -> None:
    tests = [FitTest(name, 1, p) for name, p in (("a", 0.04), ("b", 0.01), ("c", 0.03))]
    assert [(test.name, round(test.p_value, 6)) for test in holm(tests)] == [
        ("b", 0.03),
        ("c", 0.06),
        ("a", 0.06),
    ]
