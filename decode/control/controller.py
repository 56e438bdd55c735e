"""The K controller of a decode worker: keeps what was measured, and decides by `draft_length` every step.

The decode loop calls, on the engine thread: `add` when a choice joins, `plan` before each step, `observe` for each
choice and `record_step` after it, `record_draft` after each drafter's work, `restart` where the answer turns to
something else, `remove` on every path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decode.control.acceptance import AcceptanceStats
from decode.control.draft_length import (
    ChangePolicy,
    DraftCandidate,
    StepCosts,
    choose_draft_lengths,
)
from decode.control.step_time import StepTimeTable

BASE_DWELL_STEPS = 8
LONGEST_DWELL_STEPS = 256
PROBE_LENGTH = 2
BASE_PROBE_STEPS = 16
HOPEFUL_PROBE_STEPS = 2
LONGEST_PROBE_STEPS = 256
STEPS_BETWEEN_DECISIONS = 4
_SHARED_DECAY = 0.995
_SHARED_PRIOR_TRIALS = 4.0


@dataclass(frozen=True, slots=True)
class ControlledChoice:
    """How a choice may draft. `fixed` is its own length (0 for the drafter `none`); None: the controller moves K.

    `start_length` is the first K; None: chosen from what its (drafter, class) showed before, `default_length`
    where nothing was measured at all. `width`, `auxiliary_rows`: the rows of a draft, as in `DraftCandidate`.
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


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A choice of the coming step: `room` is the longest draft that max_tokens and the budgets leave it."""

    key: int
    room: int


@dataclass(slots=True)
class _ChoiceState:
    choice: ControlledChoice
    stats: AcceptanceStats
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
    _shared: dict[tuple[str, str], AcceptanceStats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.step_time = StepTimeTable(self.max_rows, self.warm_start)

    def add(self, choice: ControlledChoice) -> None:
        """Take a choice on."""
        kind = (choice.drafter, choice.request_class)
        shared = self._shared.get(kind)
        prior = shared.rates if shared else ()
        current = choice.start_length
        if current is None and self.step_time.empty:
            current = choice.default_length
        stats = AcceptanceStats(choice.max_length, prior, prior_trials=_SHARED_PRIOR_TRIALS)
        self._choices[choice.key] = _ChoiceState(choice, stats, current)

    def remove(self, key: int) -> None:
        """Forget a choice; unknown keys are ignored."""
        self._choices.pop(key, None)

    def restart(self, key: int, length: int) -> None:
        """Hold K = `length` from now on, until what is measured moves it. Nothing happens to a fixed K."""
        state = self._choices.get(key)
        if state is not None and state.choice.fixed is None:
            state.current = min(length, state.choice.max_length)
            state.steps_since_change, state.dwell_steps = 0, BASE_DWELL_STEPS

    def plan(self, entries: Sequence[PlanEntry], other_rows: int = 0) -> list[int]:
        """K of each entry, in order. `other_rows`: rows of the step besides roots and drafts.

        The batch is weighed anew when a choice has no K yet, and every few steps; between, each K is held.
        """
        states = [self._choices[entry.key] for entry in entries]
        self._steps_to_decision -= 1
        if self._steps_to_decision <= 0 or any(state.current is None for state in states):
            self._steps_to_decision = STEPS_BETWEEN_DECISIONS
            self._decide(states, entries, other_rows)
        lengths = []
        for state, entry in zip(states, entries, strict=True):
            state.steps_since_change += 1
            length = self._next_length(state, max(0, entry.room))
            state.steps_since_draft = 0 if length else state.steps_since_draft + 1
            lengths.append(length)
        return lengths

    def _decide(self, states: Sequence[_ChoiceState], entries: Sequence[PlanEntry], other_rows: int) -> None:
        candidates = [_candidate(state, entry.room) for state, entry in zip(states, entries, strict=True)]
        draft_seconds = {name: table.seconds for name, table in self.draft_times.items()}
        costs = StepCosts(self.step_time.seconds, draft_seconds, other_rows)
        settled = choose_draft_lengths(candidates, costs, self.policy)
        for state, candidate, length in zip(states, candidates, settled, strict=True):
            _note(state, length, len(candidate.rates))

    @staticmethod
    def _next_length(state: _ChoiceState, room: int) -> int:
        held = state.current if state.choice.fixed is None else state.choice.fixed
        length = min(held or 0, room, state.choice.max_length)
        if length == 0 and state.choice.fixed is None and state.steps_since_draft >= state.probe_steps:
            return min(PROBE_LENGTH, room, state.choice.max_length)
        return length

    def observe(self, key: int, offered_depth: int, accepted: int) -> None:
        """What a step offered and kept for a choice. Nothing offered says nothing."""
        state = self._choices.get(key)
        if state is None or offered_depth <= 0:
            return
        accepted = max(0, min(accepted, offered_depth))
        state.stats.observe(offered_depth, accepted)
        kind = (state.choice.drafter, state.choice.request_class)
        if kind not in self._shared:
            self._shared[kind] = AcceptanceStats(state.choice.max_length, decay=_SHARED_DECAY)
        self._shared[kind].observe(offered_depth, accepted)
        if state.current == 0:
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


def _candidate(state: _ChoiceState, room: int) -> DraftCandidate:
    rates = state.stats.rates
    return DraftCandidate(
        drafter=state.choice.drafter,
        rates=rates if room >= len(rates) else rates[: max(0, room)],
        fixed=state.choice.fixed,
        current=state.current,
        steps_since_change=state.steps_since_change,
        dwell_steps=state.dwell_steps,
        width=state.choice.width,
        auxiliary_rows=state.choice.auxiliary_rows,
    )


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
