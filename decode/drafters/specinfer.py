"""The drafts of several drafters, merged into one tree (SpecInfer: Miao et al. 2023).

The members are the worker's own instances, hosted under their names beside this one. Each is asked for its draft within
a share of the budget, what it leaves of its share going to the next, and is told afterwards what became of its own
draft. A member that raises is left out of that choice from then on; the others go on.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from decode.draft import NO_DRAFT, Draft
from decode.drafters.merging import merge_drafts, own_part
from decode.drafters.protocol import DraftBudget, Drafter, DrafterNeeds, DraftRequest, Observation

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _State:
    """`requests`: the choice as each member sees it, by place; of members left out there is none.

    `drafts`: what the members proposed in this step, by place.
    """

    requests: dict[int, DraftRequest]
    drafts: dict[int, Draft] = field(default_factory=dict)


class SpecInferDrafter:
    """`failures` counts by member the choices that it was left out of, and the drafts that it told faults of."""

    name = "specinfer"

    def __init__(self, members: Sequence[Drafter]) -> None:
        self._members = tuple(members)
        self._states: dict[int, _State] = {}
        self.failures: Counter[str] = Counter()
        self.needs = union_of_needs([member.needs for member in members])

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """What it drafts with."""
        return self._members

    def start(self, request: DraftRequest) -> None:
        """Every member takes the choice on."""
        self._take_on(request, lambda member, own: member.start(own))

    def rebuild(self, request: DraftRequest) -> None:
        """Every member takes the choice on again."""
        self._take_on(request, lambda member, own: member.rebuild(own))

    def prefill(self, max_rows: int) -> int:
        """The members' own prompt work, one after another."""
        rows = 0
        for place, member in enumerate(self._members):
            states = [state for state in self._states.values() if place in state.requests]
            left = max_rows - rows
            if states and left > 0:
                rows += self._guard(place, states, lambda: member.prefill(left)) or 0  # noqa: B023 (called at once)
        return rows

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One merged tree for each budget."""
        states = [self._states[budget.request.key] for budget in budgets]
        for state in states:
            state.drafts = {}
        left = [budget.max_nodes for budget in budgets]
        for place in range(len(self._members)):
            asked = [index for index, state in enumerate(states) if place in state.requests]
            shares = {i: self._share(place, states[i], budgets[i].draft_length, left[i]) for i in asked}
            asked = [index for index in asked if shares[index] > 0]
            self._ask(place, [(states[i], budgets[i], shares[i]) for i in asked])
            for index in asked:
                left[index] -= states[index].drafts.get(place, NO_DRAFT).num_rows
        return [
            merge_drafts(
                [state.drafts.get(place, NO_DRAFT) for place in range(len(self._members))],
                keep_equal=budget.request.is_weighed,
            )
            for state, budget in zip(states, budgets, strict=True)
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Tell every member what became of its own draft."""
        states = [self._states[observation.request.key] for observation in observations]
        told: dict[int, list[tuple[_State, Observation]]] = {}
        for state, observation in zip(states, observations, strict=True):
            for place in state.requests:
                told.setdefault(place, []).append((state, _own_observation(place, state, observation)))
        for place, of_member in sorted(told.items()):
            own = [observation for _, observation in of_member]
            member = self._members[place]
            self._guard(place, [state for state, _ in of_member], lambda: member.observe(own))  # noqa: B023
        for state in states:
            state.drafts = {}

    def finish(self, request: DraftRequest) -> None:
        """Every member forgets the choice, whatever another one raises."""
        state = self._states.pop(request.key, None)
        if state is not None:
            for place in list(state.requests):
                self._let_go(place, state)

    def check(self) -> None:
        """Called when idle: no choice may be left; the members, being hosted too, check themselves."""
        if self._states:
            raise AssertionError(f"specinfer keeps {len(self._states)} finished requests")

    def _take_on(self, request: DraftRequest, call: Callable[[Drafter, DraftRequest], None]) -> None:
        state = _State({})
        self._states[request.key] = state
        for place, member in enumerate(self._members):
            part = request.draft_width * member.needs.default_draft_width // self.needs.default_draft_width
            own = replace(
                request,
                draft_width=max(1, min(member.needs.max_draft_width, part)),
                draft_lane=_lane(request.draft_lane, place, len(self._members)),
            )
            state.requests[place] = own
            self._guard(place, [state], lambda: call(member, own))  # noqa: B023 (called at once)

    def _share(self, place: int, state: _State, depth: int, left: int) -> int:
        """Rows for one member: all that the later ones cannot want, and an equal part of what is left at least."""
        wanted = {
            other: self._members[other].needs.rows(
                min(depth, self._members[other].needs.max_draft_length), own.draft_width
            )
            for other, own in state.requests.items()
            if other >= place
        }
        return max(left - sum(wanted.values()) + wanted[place], left // len(wanted))

    def _ask(self, place: int, asked: Sequence[tuple[_State, DraftBudget, int]]) -> None:
        """One member's drafts within shares of the budgets."""
        member = self._members[place]
        if not asked:
            return
        deepest = member.needs.max_draft_length
        budgets = [
            DraftBudget(state.requests[place], min(budget.draft_length, deepest), share)
            for state, budget, share in asked
        ]
        states = [state for state, _, _ in asked]
        drafts = self._guard(place, states, lambda: member.propose(budgets))
        for state, draft in zip(states, drafts or (), strict=False):
            state.drafts[place] = draft
            if draft.fault:
                self.failures[member.name] += 1

    def _guard(self, place: int, states: Sequence[_State], call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:  # boundary: members are guests; a broken one is left out of its choices
            _LOG.exception("%s failed; specinfer goes on without it", self._members[place].name)
        self.failures[self._members[place].name] += len(states)
        for state in states:
            self._let_go(place, state)
        return None

    def _let_go(self, place: int, state: _State) -> None:
        """A member forgets a choice and is asked no more about it."""
        own = state.requests.pop(place)
        state.drafts.pop(place, None)
        try:
            self._members[place].finish(own)
        except Exception:  # boundary: a broken member cannot be asked for more
            _LOG.exception("%s could not let go of a choice", self._members[place].name)


def union_of_needs(needs: Sequence[DrafterNeeds]) -> DrafterNeeds:
    """What all of them together ask for; the default width leaves each member its share at full length."""
    positions = [need.largest_position for need in needs if need.largest_position is not None]
    return DrafterNeeds(
        max_draft_length=max(need.max_draft_length for need in needs),
        default_draft_length=max(need.default_draft_length for need in needs),
        hidden_layers=tuple(sorted({layer for need in needs for layer in need.hidden_layers})),
        bytes_per_token=sum(need.bytes_per_token for need in needs),
        noise="shared" if any(need.noise == "shared" for need in needs) else "independent",
        largest_position=min(positions) if positions else None,
        max_draft_width=sum(need.max_draft_width for need in needs),
        default_draft_width=sum(need.default_draft_width for need in needs),
        auxiliary_rows=sum(need.auxiliary_rows for need in needs),
        remembers_answers=any(need.remembers_answers for need in needs),
    )


def _lane(lane: int, place: int, num_members: int) -> int:
    """Its own for every member at every depth of nesting; the first member's is the drafter's own."""
    return lane * num_members + place


def _own_observation(place: int, state: _State, observation: Observation) -> Observation:
    """The observation of a merged draft as the one of a member's own."""
    accepted_ids = observation.token_ids[: len(observation.accepted_rows)]
    begin = sum(len(draft.auxiliary_token_ids) for at, draft in state.drafts.items() if at < place)
    wanted = sum(len(draft.auxiliary_token_ids) for draft in state.drafts.values())
    logits = observation.auxiliary_logits
    whole = logits is not None and len(logits) == wanted
    own = state.drafts.get(place, NO_DRAFT)
    draft, rows = own_part(own, observation.draft, accepted_ids, with_auxiliary=whole)
    end = begin + len(draft.auxiliary_token_ids)
    return replace(
        observation,
        request=state.requests[place],
        draft=draft,
        accepted_rows=rows,
        auxiliary_logits=logits[begin:end] if logits is not None and end > begin else None,
    )
