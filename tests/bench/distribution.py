"""Does the output follow the target's distribution? One command, with faults planted to prove that it would tell.

    python -m tests.bench.distribution                                  # synthetic target and draft
    python -m tests.bench.distribution --address HOST:PORT --model DIR  # and continuations of a served model

Every claim is a chi-square test; after Holm's correction each must have p ≥ 1e-3. Each planted fault must be
refuted with p < 1e-6. The exit status says whether all of that held.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.bench.goodness_of_fit import FitTest, holm
from tests.bench.served_pairs import ServedPlan, served_tests
from tests.bench.synthetic_blocks import AnswerScenario, judge_answers, judge_blocks, run_answers
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

AnyScenario = Scenario | TreeScenario | AnswerScenario
AnyFault = Fault | TreeFault

SMALLEST_P = 1e-3
FAULT_P = 1e-6
FAULT_SCENARIO_LENGTH = 2


def scenarios(num_draws: int) -> list[AnyScenario]:
    """Each verifier over chains of one to three, sampled and deterministic; rejection over trees; whole answers."""
    chains = [
        Scenario(mode, length, num_draws) for mode in ("invariant", "rejection") for length in (1, 2, 3)
    ]
    one_hot = [Scenario(mode, 2, num_draws, one_hot=True) for mode in ("rejection", "block")]
    return [
        *chains,
        Scenario("block", 3, num_draws),
        *one_hot,
        *tree_scenarios(num_draws),
        AnswerScenario("block", num_draws // 4),
    ]


def examine(scenario: AnyScenario) -> tuple[list[FitTest], str]:
    """Draw and verify; the claims, and what became of the drafts in a few words."""
    match scenario:
        case TreeScenario():
            seen = run_trees(scenario)
            return judge_trees(scenario, seen), f"{(seen.accepted[:, 0] >= 0).mean():.3f} of first nodes left"
        case AnswerScenario():
            return judge_answers(scenario, run_answers(scenario)), "whole answers"
        case Scenario():
            outcome = run(scenario)
            judged = (judge_blocks if scenario.verification == "block" else judge)(scenario, outcome)
            return judged, f"{outcome.accepted.mean() / scenario.draft_length:.3f} of drafts kept"


def synthetic_tests(num_draws: int, pool: Executor, report: Callable[[str], None]) -> list[FitTest]:
    """All claims about all scenarios, which are spread over the pool."""
    tests: list[FitTest] = []
    wanted = scenarios(num_draws)
    for scenario, (judged, kept) in zip(wanted, pool.map(examine, wanted), strict=True):
        num_drawn = max(test.num_draws for test in judged)
        report(
            f"{scenario.name}: {num_drawn} draws, {kept}, {len(judged)} tests, "
            f"smallest p {min(test.p_value for test in judged):.2e}"
        )
        tests += judged
    return tests


def fault_p_values(num_draws: int, pool: Executor) -> dict[AnyFault, float]:
    """Smallest Holm-corrected p of each planted fault."""
    faults: list[AnyFault] = [*FAULTS, *TREE_FAULTS]
    found = pool.map(_fault_p_value, faults, [num_draws] * len(faults))
    return dict(zip(faults, found, strict=True))


def _fault_p_value(fault: AnyFault, num_draws: int) -> float:
    chains = Scenario("rejection", FAULT_SCENARIO_LENGTH, num_draws)
    for chain_fault in FAULTS:
        if fault == chain_fault:
            return holm(judge(chains, run(chains, chain_fault)))[0].p_value
    (tree_fault,) = (one for one in TREE_FAULTS if one == fault)
    trees = fault_scenario(tree_fault, num_draws)
    return holm(judge_trees(trees, run_trees(trees, tree_fault)))[0].p_value


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where everything held."""
    options = _options(arguments)
    started = time.perf_counter()
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        tests = synthetic_tests(options.chains, pool, _say)
        faults = fault_p_values(options.fault_chains, pool)
    print(f"synthetic part: {time.perf_counter() - started:.0f} s")
    if options.address:
        plan = ServedPlan(
            options.address, Path(options.model), options.pairs, options.drafter, options.concurrency
        )
        tests += served_tests(plan, _say)
    corrected = holm(tests)
    print(
        f"{len(tests)} tests, smallest p after Holm's correction {corrected[0].p_value:.2e} ({corrected[0].name})"
    )
    for test in corrected:
        if test.p_value < SMALLEST_P:
            print(f"FAILED {test.name}: p = {test.p_value:.2e} over {test.num_draws} draws")
    for fault, p_value in faults.items():
        print(f"planted {fault}: p = {p_value:.2e} {'refuted' if p_value < FAULT_P else 'NOT REFUTED'}")
    held = corrected[0].p_value >= SMALLEST_P and all(p_value < FAULT_P for p_value in faults.values())
    print("distribution holds" if held else "distribution DOES NOT hold")
    return 0 if held else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.distribution", description=__doc__)
    parser.add_argument(
        "--chains", type=int, default=100_000, help="chains, trees or answers of each scenario"
    )
    parser.add_argument("--fault-chains", type=int, default=40_000, help="as many of each planted fault")
    parser.add_argument("--address", help="HOST:PORT of a running router; adds the served part")
    parser.add_argument("--model", help="directory of the served model; needed with --address")
    parser.add_argument("--pairs", type=int, default=5_000, help="continuations of each served arm")
    parser.add_argument("--drafter", default="ngram", help="drafter of the served part")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    options = parser.parse_args(arguments)
    if options.address and not options.model:
        parser.error("--address needs --model")
    return options


if __name__ == "__main__":
    sys.exit(main())
