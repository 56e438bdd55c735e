"""The K controller of a decode worker: keeps what was measured, and decides by `draft_length` every step.

The decode loop calls, on the engine thread: `add` when a choice joins, `plan` before each step, `observe` for each
choice and `record_step` after it, `record_draft` after each drafter's work, `restart` where the answer turns to
something else, `remove` on every path.

At K = 0 a choice probes now and then, so that its drafter can come back. What the probes of a batch lose together is
kept to `PROBE_SHARE` of its time, for rows are dear where many choices step: a probe is charged what it costs by the
tables and credited the time that plain decoding would have taken for what was accepted of it. Who waited longest comes
first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from decode.control.acceptance import AcceptanceStats, OfferedShare
from decode.control.draft_length import (
    ChangePolicy,
    DraftCandidate,
    StepCosts,
    choose_draft_lengths,
    seconds_at,
)
from decode.control.node_counts import NodeCounts
from decode.control.step_time import StepTimeTable

BASE_DWELL_STEPS = 8
LONGEST_DWELL_STEPS = 256
PROBE_LENGTH = 2
PROBE_SHARE = 0.005
BASE_PROBE_STEPS = 16
HOPEFUL_PROBE_STEPS = 2
LONGEST_PROBE_STEPS = 256
STEPS_BETWEEN_DECISIONS = 4
_SHARED_DECAY = 0.995
_SHARED_PRIOR_TRIALS = 4.0

Kind: TypeAlias = tuple[str, str, int]
"""Drafter, class of requests, width: what drafts are alike."""


@dataclass(frozen=True, slots=True)
class ControlledChoice:
    """How a choice may draft. `fixed` is its own length (0 for the drafter `none`); None: the controller moves K.

    `start_length` is the first K where drafting so deep is not expected to lose; None: chosen from what its kind showed
    before, `default_length` where nothing was measured at all. `width`, `auxiliary_rows`: as in `DraftCandidate`.
    """

    key: int
    drafter: str
    request_class: str
    max_length: int
    default_length: int
    start_length: int | None = None
    fixed: int | None = None
    width: int = 1
    auxiliary_rows: int = 0

    @property
    def kind(self) -> Kind:
        """What it shares its measurements with."""
        return self.drafter, self.request_class, self.width


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A choice of the coming step: `room` is the longest draft that max_tokens and the budgets leave it."""

    key: int
    room: int


@dataclass(slots=True)
class _KindStats:
    """What all choices of one kind showed."""

    acceptance: AcceptanceStats
    offered: OfferedShare
    nodes: NodeCounts


@dataclass(slots=True)
class _ChoiceState:
    choice: ControlledChoice
    acceptance: AcceptanceStats
    offered: OfferedShare
    kind: _KindStats
    current: int | None
    steps_since_change: int = 0
    dwell_steps: int = BASE_DWELL_STEPS
    steps_since_draft: int = 0
    probe_steps: int = BASE_PROBE_STEPS


@dataclass(slots=True)
class DraftLengthController:
    """See the module. `max_rows` is the largest row count of a step; `warm_start` maps row counts to seconds."""

    max_rows: int
    warm_start: Mapping[int, float] | None = None
    policy: ChangePolicy = field(default_factory=ChangePolicy)
    step_time: StepTimeTable = field(init=False)
    draft_times: dict[str, StepTimeTable] = field(init=False, default_factory=dict)
    _choices: dict[int, _ChoiceState] = field(init=False, default_factory=dict)
    _steps_to_decision: int = field(init=False, default=0)
    _probe_credit_s: float = field(init=False, default=0.0)
    _token_s: float = field(init=False, default=0.0)
    _kinds: dict[Kind, _KindStats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.step_time = StepTimeTable(self.max_rows, self.warm_start)

    def add(self, choice: ControlledChoice) -> None:
        """Take a choice on."""
        kind = self._kinds.get(choice.kind)
        prior = kind.acceptance.rates if kind else ()
        if kind is None:
            kind = self._kinds[choice.kind] = _KindStats(
                AcceptanceStats(choice.max_length, decay=_SHARED_DECAY),
                OfferedShare(decay=_SHARED_DECAY),
                NodeCounts(choice.max_length, choice.width),
            )
        current = None
        if choice.start_length is None and self.step_time.empty:
            current = choice.default_length
        acceptance = AcceptanceStats(choice.max_length, prior, prior_trials=_SHARED_PRIOR_TRIALS)
        self._choices[choice.key] = _ChoiceState(
            choice, acceptance, OfferedShare(kind.offered.value), kind, current
        )

    def remove(self, key: int) -> None:
        """Forget a choice; unknown keys are ignored."""
        self._choices.pop(key, None)

    def restart(self, key: int, length: int) -> None:
        """Hold K = `length` from now on, until what is measured moves it. Nothing happens to a fixed K."""
        state = self._choices.get(key)
        if state is not None and state.choice.fixed is None:
            state.current = min(length, state.choice.max_length)
            state.steps_since_change, state.dwell_steps = 0, BASE_DWELL_STEPS

    def plan(self, entries: Sequence[PlanEntry], other_rows: float = 0, other_tokens: float = 0) -> list[int]:
        """K of each entry, in order. `other_rows` of the step are not theirs, and expected to emit `other_tokens`.

        The batch is weighed anew when a choice has no K yet, and every few steps; between, each K is held.
        """
        states = [self._choices[entry.key] for entry in entries]
        self._steps_to_decision -= 1
        if self._steps_to_decision <= 0 or any(state.current is None for state in states):
            self._steps_to_decision = STEPS_BETWEEN_DECISIONS
            draft_seconds = {name: table.seconds for name, table in self.draft_times.items()}
            costs = StepCosts(self.step_time.seconds, draft_seconds, other_rows, other_tokens)
            self._decide(states, entries, costs)
        lengths = [
            _held_length(state, max(0, entry.room)) for state, entry in zip(states, entries, strict=True)
        ]
        self._probe(states, entries, lengths, other_rows)
        for state, length in zip(states, lengths, strict=True):
            state.steps_since_change += 1
            state.steps_since_draft = 0 if length else state.steps_since_draft + 1
        return lengths

    def expected(self, key: int, length: int) -> tuple[float, float]:
        """(tokens, rows) that a step of this choice is expected to emit, and to have, with a draft of `length`."""
        state = self._choices.get(key)
        if state is None or length <= 0:
            return 1.0, 1.0
        return _candidate(state, length).expected(length), 1.0 + _rows(state, length)

    def pays_ahead(self, key: int, known: int, length: int, deeper: int) -> bool:
        """Whether to draft to depth `deeper` while a draft is verified, in the hope that its first `known` tokens hold.

        These are a draft and the token behind it, of whose depth nothing need have been measured: its chance is taken
        for that of the draft's last token. Held, it saves half of a step of a target in two stages and the draft of
        `length` that would come next; the time of the deeper draft is spent in any case. Weighed as if the choice were
        alone: of several that share the time of a draft each asks for all of it.
        """
        state = self._choices[key]
        rates = _candidate(state, known - 1).rates
        chance = math.prod(rates) * rates[-1]
        table = self.draft_times.get(state.choice.drafter)
        seconds = table.seconds if table else ()
        saved_s = seconds_at(self.step_time.seconds, 1 + length) / 2 + seconds_at(seconds, length)
        return chance * saved_s >= seconds_at(seconds, deeper)

    def _decide(self, states: Sequence[_ChoiceState], entries: Sequence[PlanEntry], costs: StepCosts) -> None:
        candidates = [_candidate(state, entry.room) for state, entry in zip(states, entries, strict=True)]
        settled = choose_draft_lengths(candidates, costs, self.policy)
        for state, candidate, length in zip(states, candidates, settled, strict=True):
            _note(state, length, len(candidate.rates))

    def _probe(
        self,
        states: Sequence[_ChoiceState],
        entries: Sequence[PlanEntry],
        lengths: list[int],
        other_rows: float,
    ) -> None:
        """Lengthen in place what is to probe in this step, within the budget; who waited longest comes first."""
        target = self.step_time.seconds
        rows = len(states) + other_rows
        rows += sum(_rows(state, length) for state, length in zip(states, lengths, strict=True))
        share_s = PROBE_SHARE * seconds_at(target, rows)
        roots = len(states) + other_rows
        self._token_s = seconds_at(target, roots) / max(1.0, roots)
        self._probe_credit_s = min(self._probe_credit_s + share_s, LONGEST_PROBE_STEPS * share_s)
        due = [
            index
            for index, (state, length) in enumerate(zip(states, lengths, strict=True))
            if not length and state.choice.fixed is None and state.steps_since_draft >= state.probe_steps
        ]
        for index in sorted(due, key=lambda index: -states[index].steps_since_draft):
            state = states[index]
            length = min(PROBE_LENGTH, max(0, entries[index].room), state.choice.max_length)
            more = _rows(state, length)
            draft_times = self.draft_times.get(state.choice.drafter)
            cost_s = seconds_at(target, rows + more) - seconds_at(target, rows)
            cost_s += seconds_at(draft_times.seconds, length) if draft_times else 0.0
            if cost_s <= self._probe_credit_s:
                self._probe_credit_s -= cost_s
                lengths[index] = length
                rows += more

    def observe(self, key: int, asked_depth: int, accepted: int, nodes: Sequence[int] | None = None) -> None:
        """What became of the draft of a step that was asked for to `asked_depth`; 0: none was.

        `nodes[i]`: its nodes at depth i + 1; None: the choice's width at each, () where there was no draft. Then
        nothing is said of acceptance.
        """
        state = self._choices.get(key)
        if state is None or asked_depth <= 0:
            return
        kind = state.kind
        for share in (state.offered, kind.offered):
            share.observe(offered=nodes is None or len(nodes) > 0)
        if nodes is not None and not nodes:
            return
        offered_depth = asked_depth if nodes is None else min(len(nodes), asked_depth)
        accepted = max(0, min(accepted, offered_depth))
        for stats in (state.acceptance, kind.acceptance):
            stats.observe(asked_depth, accepted)
        kind.nodes.observe(asked_depth, [state.choice.width] * asked_depth if nodes is None else nodes)
        if state.current == 0:
            self._probe_credit_s += accepted * self._token_s
            state.probe_steps = _next_probe_steps(state.probe_steps, hopeful=accepted == offered_depth)

    def record_step(self, rows: int, seconds: float) -> None:
        """One target forward, verification included."""
        self.step_time.record(rows, seconds)

    def record_draft(self, drafter: str, depth: int, seconds: float) -> None:
        """One `propose` of a drafter whose longest budget was `depth`."""
        if drafter not in self.draft_times:
            self.draft_times[drafter] = StepTimeTable(64)
        self.draft_times[drafter].record(depth, seconds)

    def check(self) -> None:
        """Raise AssertionError where a choice was left behind; call it when idle."""
        assert not self._choices, f"choices left in the controller: {sorted(self._choices)}"


def _held_length(state: _ChoiceState, room: int) -> int:
    held = state.current if state.choice.fixed is None else state.choice.fixed
    return min(held or 0, room, state.choice.max_length)


def _candidate(state: _ChoiceState, room: int) -> DraftCandidate:
    rates = state.acceptance.rates
    return DraftCandidate(
        drafter=state.choice.drafter,
        rates=rates if room >= len(rates) else rates[: max(0, room)],
        fixed=state.choice.fixed,
        current=state.current,
        steps_since_change=state.steps_since_change,
        dwell_steps=state.dwell_steps,
        width=state.choice.width,
        auxiliary_rows=state.choice.auxiliary_rows,
        nodes=state.kind.nodes.means,
        offered=state.offered.value,
        start=state.choice.start_length,
    )


def _rows(state: _ChoiceState, length: int) -> float:
    """Rows expected behind the root."""
    if length <= 0:
        return 0.0
    nodes = sum(state.kind.nodes.means[:length])
    return state.offered.value * (nodes + state.choice.auxiliary_rows)


def _next_probe_steps(probe_steps: int, *, hopeful: bool) -> int:
    """Probe again soon after a probe that was accepted whole, and ever more rarely after the others."""
    if hopeful:
        return HOPEFUL_PROBE_STEPS
    return min(max(2 * probe_steps, BASE_PROBE_STEPS), LONGEST_PROBE_STEPS)


def _note(state: _ChoiceState, length: int, room: int) -> None:
    """Remember a decision without its probes. A change doubles the dwell, so hovering dies down; calm halves it."""
    if state.current is not None and length == min(state.current, room):
        if state.dwell_steps > BASE_DWELL_STEPS and state.steps_since_change >= 4 * state.dwell_steps:
            state.dwell_steps //= 2
            state.steps_since_change = state.dwell_steps
        return
    if state.current is not None:
        state.dwell_steps = min(2 * state.dwell_steps, LONGEST_DWELL_STEPS)
    state.current = length
    state.steps_since_change = 0
