"""The drafters of a worker in one step: who drafts how much, who falls back to `none`, and why.

Whatever a drafter raises costs its choices their drafter, never their answer or the step.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from core.clock import Clock
from core.metrics import Metrics
from core.settings import DecodeSettings
from decode.choice import Choice
from decode.draft import NO_DRAFT, Draft
from decode.draft_costs import DraftCosts
from decode.drafters.protocol import DraftBudget, Drafter, DraftRequest, Observation
from decode.pace import Pace
from decode.sampling.masking import allowed_part
from decode.scheduler import PlannedChoice

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)

FALLBACK_ERROR = "drafter_error"
FALLBACK_POSITION = "position_limit"
FALLBACK_SHORT = "short_answer"
FALLBACK_STALL = "drafter_stall"


class Drafting:
    """Calls the drafters as their Protocol says. Engine thread only."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        pace: Pace,
        metrics: Metrics,
        clock: Clock,
        settings: DecodeSettings,
        vocab_size: int,
    ) -> None:
        """`vocab_size`: ids that a draft may hold."""
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._pace = pace
        self._metrics = metrics
        self._clock = clock
        self._max_nodes = settings.max_tree_nodes
        self._stall_s = settings.drafter_stall_s
        self._costs = DraftCosts(pace.step_seconds)
        self._choices: dict[int, Choice] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self.pending = False
        """Whether a drafter may have prompt work of its own left."""

    def start(self, choice: Choice, again: bool) -> None:
        """A choice joins the batch; `again` after resume or preemption."""
        if choice.drafter.name == "none" or choice.taken_off:
            return
        limit = choice.drafter.needs.largest_position
        if limit is not None and len(choice.history.token_ids) > limit:
            self._note(choice, FALLBACK_POSITION)
            return
        call = choice.drafter.rebuild if again else choice.drafter.start
        choice.drafting = True
        self.pending = True
        self._choices[choice.key] = choice
        self._pace.join(choice)
        self._timed([choice], lambda: call(choice.draft_request))

    def finish(self, choice: Choice) -> None:
        """A choice leaves the batch, in any way."""
        if choice.drafting:
            self._forget(choice)
            self._guard([choice], lambda: choice.drafter.finish(choice.draft_request))

    def room_for(self, choice: Choice) -> tuple[int, int]:
        """(depth, rows) that a choice may draft at most now, whatever the controller says."""
        if not choice.drafting:
            return 0, 0
        depth = min(choice.drafter.needs.max_draft_length, choice.finisher.tokens_left - 1)
        limit = choice.drafter.needs.largest_position
        if limit is not None:
            reach = limit - (len(choice.history.token_ids) - 1)
            if reach < 1:
                self._note(choice, FALLBACK_POSITION)
                self.finish(choice)
            depth = min(depth, reach)
        depth = max(0, depth)
        return depth, min(self._max_nodes, choice.drafter.needs.rows(depth, choice.draft_request.draft_width))

    def prefill(self, max_rows: int) -> int:
        """Drafters' own prompt work; the rows that it took."""
        rows = 0
        for drafter in {id(choice.drafter): choice.drafter for choice in self._choices.values()}.values():
            choices = [choice for choice in self._choices.values() if choice.drafter is drafter]
            left = max_rows - rows
            rows += self._timed(choices, lambda: drafter.prefill(left))[0] or 0  # noqa: B023 (called at once)
        self.pending = rows > 0
        return rows

    def lengths(self, choices: Sequence[Choice], other_rows: int) -> list[tuple[int, int]]:
        """(depth, rows) that each choice is to draft in a step with `other_rows` rows of prompts."""
        return self._pace.lengths(choices, [self.room_for(choice) for choice in choices], other_rows)

    def pays_ahead(self, choice: Choice, known: int, length: int, deeper: int) -> bool:
        """See `DraftLengthController.pays_ahead`; of a choice that drafts."""
        return self._pace.pays_ahead(choice, known, length, deeper)

    def learn(self, choice: Choice, depths: Sequence[int], num_accepted: int, num_auxiliary: int = 0) -> None:
        """Acceptance of one choice's draft, of nodes at `depths` and of auxiliary rows, in one step."""
        asked, num_nodes = self._asked.pop(choice.key, (0, 0))
        if len(depths) != num_nodes:
            asked = max(depths, default=0)  # cut for want of blocks: nobody asked for the rest
        self._pace.learn(choice, asked, depths, num_accepted, num_auxiliary)
        if not depths and not num_auxiliary and choice.drafting:
            self.pending = True

    def record_step(self, rows: int, seconds: float) -> None:
        """What a target forward of `rows` rows cost, verification included."""
        self._pace.record_step(rows, seconds)

    def charge(self, stepped: Sequence[tuple[Choice, int]], rows: int, prefill_rows: int) -> None:
        """What a step of `rows` rows cost each of these, the rows of its draft among them; see `DraftCosts`."""
        self._costs.charge(stepped, rows, prefill_rows)

    def propose(self, planned: Sequence[tuple[Choice, PlannedChoice]]) -> dict[int, Draft]:
        """Drafts by choice key; choices without one are missing."""
        drafts: dict[int, Draft] = {}
        for choice, _ in planned:
            self._asked.pop(choice.key, None)
        for drafter, group in _by_drafter(planned):
            budgets = [
                DraftBudget(choice.draft_request, plan.draft_length, plan.max_nodes) for choice, plan in group
            ]
            choices = [choice for choice, _ in group]
            answers, took_s = self._timed(choices, lambda: drafter.propose(budgets))  # noqa: B023 (called at once)
            deepest = max(budget.draft_length for budget in budgets)
            if answers is not None:
                self._pace.record_draft(drafter.name, deepest, took_s)
            self._metrics.draft(drafter.name, took_s)
            for budget, choice, draft in zip(budgets, choices, answers or (), strict=False):
                if draft.fault:
                    self._note(choice, draft.fault)
                fitted = self._guard([choice], lambda: self._fitted(draft, budget))  # noqa: B023
                if fitted is None:
                    continue
                if choice.drafting:
                    self._asked[choice.key] = budget.draft_length, len(fitted.token_ids)
                if fitted.num_rows:
                    drafts[choice.key] = fitted
        return drafts

    def _fitted(self, draft: Draft, budget: DraftBudget) -> Draft:
        """As much of the draft as the request may try. Raises ValueError for what is no draft."""
        draft.check(self._vocab_size)
        request = budget.request
        draft = _fitting(draft, request)
        if request.verification == "block":
            draft = leading_chain(draft)
        return cut_draft(draft, budget.draft_length, budget.max_nodes)

    def observe(self, observations: Sequence[tuple[Choice, Observation]]) -> None:
        """Tell the drafters what became of the step, but for choices that ended in it with another one's failure."""
        groups: dict[int, list[tuple[Choice, Observation]]] = {}
        for choice, observation in observations:
            if choice.drafting:
                groups.setdefault(id(choice.drafter), []).append((choice, observation))
        for group in groups.values():
            drafter = group[0][0].drafter
            told = [observation for _, observation in group]
            self._timed([choice for choice, _ in group], lambda: drafter.observe(told))  # noqa: B023

    def check(self) -> None:
        """Called when idle: no drafter holds anything."""
        for drafter in self._drafters.values():
            drafter.check()
        assert not self._asked, f"drafts are waited for of finished choices: {sorted(self._asked)}"
        self._pace.check()
        self._costs.check()

    def _timed(self, choices: Sequence[Choice], call: Callable[[], Result]) -> tuple[Result | None, float]:
        """`_guard`, and the seconds that it took, borne by these choices; they go on without a drafter that stalls."""
        started_s = self._clock.now_s()
        result = self._guard(choices, call)
        took_s = self._clock.now_s() - started_s
        if took_s > self._stall_s:
            self._take_off(choices, FALLBACK_STALL)
        self._costs.spend([choice for choice in choices if choice.drafting], took_s)
        return result, took_s

    def _guard(self, choices: Sequence[Choice], call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:  # boundary: drafters are guests; a broken one is taken off the choice
            _LOG.exception("drafter %s failed; its requests go on without", choices[0].drafter.name)
        self._take_off(choices, FALLBACK_ERROR)
        return None

    def _take_off(self, choices: Sequence[Choice], reason: str) -> None:
        """These go on without their drafter."""
        for choice in choices:
            self._note(choice, reason)
            choice.taken_off = True
            if choice.drafting:
                self._forget(choice)
                _finish_quietly(choice)

    def _forget(self, choice: Choice) -> None:
        choice.drafting = False
        self._choices.pop(choice.key, None)
        self._asked.pop(choice.key, None)
        self._costs.forget(choice)
        self._pace.leave(choice)

    def _note(self, choice: Choice, reason: str) -> None:
        if choice.request.tally.fall_back(reason):
            self._metrics.fallback(choice.drafter.name, reason)


def cut_draft(draft: Draft, depth: int, max_rows: int) -> Draft:
    """The draft without nodes deeper than `depth` and within `max_rows` rows, auxiliary ones included.

    Where rows run short all auxiliary rows go first (half a window tells its drafter nothing), then the last nodes.
    What goes is decided by place alone, never by a token, so a sampled draft stays unbiased.
    """
    depths = draft.depths()
    if draft.num_rows <= max_rows and max(depths, default=0) <= depth:
        return draft
    kept = [node for node, node_depth in enumerate(depths) if node_depth <= depth]
    cut = _keep_nodes(draft, kept)
    if cut.num_rows <= max_rows:
        return cut
    bare = replace(cut, auxiliary_token_ids=(), auxiliary_parents=())
    return _keep_nodes(bare, range(max(0, min(len(kept), max_rows))))


def leading_chain(draft: Draft) -> Draft:
    """The first child of the root, its first child, and so on: block verification takes chains only.

    Auxiliary rows are kept but for those under a node that goes.
    """
    if draft.is_chain:
        return draft
    first_children: dict[int, int] = {}
    for node, parent in enumerate(draft.parents):
        first_children.setdefault(parent, node)
    kept: list[int] = []
    row = 0
    while row in first_children:
        kept.append(first_children[row])
        row = kept[-1] + 1
    return _keep_nodes(draft, kept)


def _keep_nodes(draft: Draft, kept: Sequence[int]) -> Draft:
    """The draft with the nodes `kept` only, ascending, no node without its parent; rows are numbered anew.

    An auxiliary row goes where its parent goes.
    """
    rows = {0: 0} | {node + 1: row for row, node in enumerate(kept, start=1)}
    first_auxiliary = 1 + len(draft.token_ids)
    auxiliary_token_ids: list[int] = []
    auxiliary_parents: list[int] = []
    auxiliary = zip(draft.auxiliary_token_ids, draft.auxiliary_parents, strict=True)
    for row, (token_id, parent) in enumerate(auxiliary, start=first_auxiliary):
        if parent in rows:
            auxiliary_token_ids.append(token_id)
            auxiliary_parents.append(rows[parent])
            rows[row] = len(kept) + len(auxiliary_token_ids)
    if not kept and not auxiliary_token_ids:
        return NO_DRAFT
    probs = draft.draft_probs
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node] for node in kept),
        parents=tuple(rows[draft.parents[node]] for node in kept),
        draft_probs=None if probs is None or not kept else probs[list(kept)],
        sources=tuple(draft.sources[node] for node in kept) if draft.sources else (),
        auxiliary_token_ids=tuple(auxiliary_token_ids),
        auxiliary_parents=tuple(auxiliary_parents),
    )


def _fitting(draft: Draft, request: DraftRequest) -> Draft:
    """The draft as far as the request's grammar allows it.

    Sampled nodes stay where their tokens may not be looked at: those that came from `draw_draft` fit anyhow, and
    others are never accepted.
    """
    weighed = draft.draft_probs is not None and request.is_weighed
    return draft if request.grammar is None or weighed else allowed_part(draft, request.grammar)


def _by_drafter(
    planned: Sequence[tuple[Choice, PlannedChoice]],
) -> list[tuple[Drafter, list[tuple[Choice, PlannedChoice]]]]:
    groups: dict[int, tuple[Drafter, list[tuple[Choice, PlannedChoice]]]] = {}
    for choice, plan in planned:
        if choice.drafting and plan.draft_length > 0:
            groups.setdefault(id(choice.drafter), (choice.drafter, []))[1].append((choice, plan))
    return list(groups.values())


def _finish_quietly(choice: Choice) -> None:
    try:
        choice.drafter.finish(choice.draft_request)
    except Exception:  # boundary: a broken drafter cannot be asked for more
        _LOG.exception("drafter %s could not let go of a choice", choice.drafter.name)
