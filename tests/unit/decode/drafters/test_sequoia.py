"""Trees are planned from what was measured, and stay within the budget."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from core.clock import Clock, FakeClock, SystemClock
from core.drafter_settings import SequoiaSettings
from core.errors import InvalidArgument
from decode.control.tree_measurements import read_measurements
from decode.control.tree_plan import TreePlan
from decode.draft import Draft
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import DraftBudget
from decode.drafters.sequoia import SequoiaDrafter
from tests.support.draft_model_stand import HOT, begin, draft_request, load_draft_model, rows_to, settle
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


def over(
    base: DraftModelDrafter,
    settings: SequoiaSettings | None = None,
    step_seconds: Callable[[int], float] = lambda rows: 0.02,
    clock: Clock | None = None,
) -> SequoiaDrafter:
    return SequoiaDrafter(base, settings or SequoiaSettings(), clock or SystemClock(), step_seconds)


def plan_file(path: Path, **values: object) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def test_it_drafts_the_planned_shape_for_every_budget(model: Path, tmp_path: Path) -> None:
    rates = [[0.6, 0.5, 0.1], [0.9]]
    plan = plan_file(tmp_path / "plan.json", rank_rates=rates)
    base, _ = load_draft_model(model)
    sequoia = over(base, SequoiaSettings(plan=plan))
    budgets = [
        DraftBudget(begin(sequoia, draft_request(range(1, 20), HOT, width=3)), depth, nodes)
        for depth, nodes in ((1, 3), (3, 6), (8, 12), (4, 1))
    ]
    best = TreePlan(rates, 64, 8)
    for budget, draft in zip(budgets, sequoia.propose(budgets), strict=True):
        assert draft.parents == best.shape(budget.max_nodes, budget.draft_length).parents()
    for budget in budgets:
        sequoia.finish(budget.request)
    sequoia.check()
    base.check()


def test_the_width_of_a_request_bounds_the_children_of_a_node(model: Path) -> None:
    base, _ = load_draft_model(model)
    sequoia = over(base)
    for width in (1, 2, 3):
        request = begin(sequoia, draft_request(range(1, 20), HOT, width=width))
        (draft,) = sequoia.propose([DraftBudget(request, 4, 4 * width)])
        most = max(draft.parents.count(row) for row in {*draft.parents})
        assert most <= width
        assert draft.is_chain == (width == 1)


def test_it_learns_which_ranks_are_right_and_plans_anew(model: Path) -> None:
    base, _ = load_draft_model(model)
    sequoia = over(base, SequoiaSettings(replan_steps=5, decay=0.8))
    request = begin(sequoia, draft_request(range(1, 20), HOT, width=3))

    def root_children(draft: Draft) -> list[int]:
        return [row for row, parent in enumerate(draft.parents, start=1) if parent == 0]

    (first,) = sequoia.propose([DraftBudget(request, 4, 8)])
    assert len(root_children(first)) > 1
    settle(sequoia, request, first)
    for _ in range(60):
        (draft,) = sequoia.propose([DraftBudget(request, 4, 8)])
        rows: tuple[int, ...] = ()
        for row, parent in enumerate(draft.parents, start=1):
            if parent == (rows[-1] if rows else 0):
                rows = (*rows, row)
        settle(sequoia, request, draft, rows)
    (chain,) = sequoia.propose([DraftBudget(request, 4, 4)])
    assert chain.is_chain, "the first child was always right"
    for _ in range(60):
        (draft,) = sequoia.propose([DraftBudget(request, 4, 4)])
        settle(sequoia, request, draft, rows_to(draft, root_children(draft)[-1])[1:])
    (wide,) = sequoia.propose([DraftBudget(request, 4, 4)])
    assert not wide.is_chain, "the first child was never right"


def test_steps_that_grow_dear_with_their_rows_get_small_trees(model: Path) -> None:
    base, _ = load_draft_model(model)
    request = draft_request(range(1, 20), HOT, width=4)
    sizes = []
    for seconds_a_row in (0.0, 0.002, 1.0):
        sequoia = over(base, step_seconds=lambda rows, each=seconds_a_row: 0.02 + each * rows)  # type: ignore[misc]
        begin(sequoia, request)
        (draft,) = sequoia.propose([DraftBudget(request, 6, 24)])
        sizes.append(len(draft.token_ids))
        sequoia.finish(request)
    assert sizes[0] == 24
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] == 1, "whether to draft at all is for the K controller"


def test_levels_that_take_long_to_draft_are_left_out(model: Path) -> None:
    base, counted = load_draft_model(model)
    clock = FakeClock()
    counted.on_step = lambda: clock.advance(1.0)
    sequoia = over(base, SequoiaSettings(replan_steps=1), clock=clock)
    request = begin(sequoia, draft_request(range(1, 20), HOT, width=4))
    depths = []
    for budget in (DraftBudget(request, 6, 24), DraftBudget(request, 1, 4), DraftBudget(request, 6, 24)):
        (draft,) = sequoia.propose([budget])
        depths.append(max(draft.depths()))
        settle(sequoia, request, draft)
    assert depths[0] > 2, "no cost was known"
    assert depths[2] == 1
    assert sequoia.measurements().draft_level_seconds == pytest.approx(1.0, rel=0.2)


def test_what_it_learnt_can_be_kept_and_planned_from(model: Path, tmp_path: Path) -> None:
    base, _ = load_draft_model(model)
    sequoia = over(base, step_seconds=lambda rows: 0.01 + 0.001 * rows)
    request = begin(sequoia, draft_request(range(1, 20), HOT, width=3))
    for _ in range(5):
        settle(sequoia, request, sequoia.propose([DraftBudget(request, 4, 8)])[0])
    path = tmp_path / "learnt.json"
    path.write_text(sequoia.measurements().model_dump_json())
    again = over(base, SequoiaSettings(plan=str(path)))
    assert again.measurements() == read_measurements(path, "plan") == sequoia.measurements()
    assert again.measurements().rank_rates[0][0] < 0.6, "the first child was never right"


def test_a_file_that_is_no_plan_is_refused_naming_the_setting(model: Path, tmp_path: Path) -> None:
    base, _ = load_draft_model(model)
    plan = plan_file(tmp_path / "plan.json", rank_rates=[2.0])
    with pytest.raises(InvalidArgument, match=r"drafters\.sequoia\.plan"):
        over(base, SequoiaSettings(plan=plan))


def test_no_room_is_no_draft(model: Path) -> None:
    base, _ = load_draft_model(model)
    sequoia = over(base)
    request = begin(sequoia, draft_request(range(1, 20), HOT, width=3))
    assert sequoia.propose([DraftBudget(request, 4, 0)])[0] == Draft()
