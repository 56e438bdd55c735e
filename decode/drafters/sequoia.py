"""Draft trees of the shape that pays best (Sequoia: Chen et al. 2024), whatever drafter draws their tokens.

How often the k-th child of a node is the target's token is learnt from every verified draft, or read from a file.
With it and the measured times of target steps and of own drafts, `TreePlan` says which tree within a budget emits
most tokens a second. Whether to draft at all is the K controller's question: a tree has one node at least.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.clock import Clock
from core.drafter_settings import SequoiaSettings
from decode.control.rank_acceptance import RankAcceptance
from decode.control.step_time import StepTimeTable
from decode.control.tree_measurements import TreeMeasurements, read_measurements
from decode.control.tree_plan import TreeCosts, TreePlan
from decode.control.tree_shape import TreeShape
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget, Drafter, DraftRequest, Observation
from decode.drafters.tree_drafting import TreeDrafting

MOST_NODES = 64
"""Larger trees are not planned."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What decides a shape besides what was measured."""

    nodes: int
    depth: int
    width: int
    batch: int


class SequoiaDrafter:
    """`step_seconds(rows)` is the measured time of a target step; the base's drafts are timed by `clock`."""

    name = "sequoia"

    def __init__(
        self,
        base: TreeDrafting,
        settings: SequoiaSettings,
        clock: Clock,
        step_seconds: Callable[[int], float],
    ) -> None:
        """Raises InvalidArgument where the file of measurements will not do."""
        self._base = base
        self._settings = settings
        self._clock = clock
        self._step_seconds = step_seconds
        most = min(settings.max_draft_length, base.needs.max_draft_length)
        self.needs = replace(
            base.needs,
            max_draft_length=most,
            default_draft_length=min(settings.draft_length, most),
            default_draft_width=min(settings.draft_width, base.needs.max_draft_width),
        )
        self._measured: TreeMeasurements | None = None
        if settings.plan is not None:
            self._measured = read_measurements(
                Path(settings.plan).expanduser(), "decode_worker.drafters.sequoia.plan"
            )
        self._acceptance = RankAcceptance(base.needs.max_draft_width, decay=settings.decay)
        self._draft_times = StepTimeTable(most)
        self._plans: dict[int, TreePlan] = {}
        self._shapes: dict[_Wanted, TreeShape] = {}
        self._steps_to_plan = settings.replan_steps

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """What it drafts with."""
        return (self._base,)

    def start(self, request: DraftRequest) -> None:
        """The base takes the choice on."""
        self._base.start(request)

    def rebuild(self, request: DraftRequest) -> None:
        """The base takes the choice on again."""
        self._base.rebuild(request)

    def prefill(self, max_rows: int) -> int:
        """The base's own prompt work."""
        return self._base.prefill(max_rows)

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """The base's drafts in the shapes planned."""
        shapes = [self._shape(budget, len(budgets)) for budget in budgets]
        started_s = self._clock.now_s()
        drafts = self._base.propose_shapes(budgets, shapes)
        if any(draft.token_ids for draft in drafts):
            deepest = max(shape.depth for shape in shapes)
            self._draft_times.record(deepest, self._clock.now_s() - started_s)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn how often each rank was right, and plan anew when it is time."""
        for observation in observations:
            self._acceptance.observe(observation.draft.parents, observation.accepted_rows)
        self._base.observe(observations)
        self._steps_to_plan -= 1
        if self._steps_to_plan <= 0:
            self._steps_to_plan = self._settings.replan_steps
            self._shapes.clear()
            if self._measured is None:
                self._plans.clear()

    def finish(self, request: DraftRequest) -> None:
        """The base forgets the choice."""
        self._base.finish(request)

    def check(self) -> None:
        """No state of requests here; the base, being hosted too, checks its own."""

    def measurements(self) -> TreeMeasurements:
        """What a plan would be made from now: to be kept in a file for `outrider plan-tree` and `plan`."""
        if self._measured is not None:
            return self._measured
        rows = (1, 2, 4, 8, 16, 32, 1 + MOST_NODES)
        deepest = self._draft_times.max_count
        return TreeMeasurements(
            rank_rates=(self._acceptance.rates,),
            step_seconds={count: seconds for count in rows if (seconds := self._step_seconds(count)) > 0.0},
            draft_level_seconds=self._draft_times.seconds[deepest] / deepest,
        )

    def _shape(self, budget: DraftBudget, batch: int) -> TreeShape:
        depth = min(budget.draft_length, self.needs.max_draft_length)
        nodes = min(budget.max_nodes, MOST_NODES)
        wanted = _Wanted(nodes, depth, budget.request.draft_width, batch)
        shape = self._shapes.get(wanted)
        if shape is None:
            costs = self._costs(batch)
            shape = self._plan(wanted.width).best(nodes, depth, costs, fewest=1).shape
            self._shapes[wanted] = shape
        return shape

    def _plan(self, width: int) -> TreePlan:
        """The best trees of at most `width` children a node."""
        plan = self._plans.get(width)
        if plan is None:
            measured = self._measured
            by_depth = (self._acceptance.rates,) if measured is None else measured.rank_rates
            rates = [row[:width] for row in by_depth]
            plan = self._plans[width] = TreePlan(rates, MOST_NODES, self.needs.max_draft_length)
        return plan

    def _costs(self, batch: int) -> TreeCosts:
        if self._measured is not None and self._measured.step_seconds:
            return self._measured.costs(batch * (1 + MOST_NODES), batch)
        draft_seconds = self._draft_times.seconds
        return TreeCosts(self._step_seconds, lambda depth: draft_seconds[depth], batch)
