"""How long each choice drafts in the next step: a pure function of measured rates and times.

A draft of depth K, chain or tree, is known by three measures of drafts of its kind that were asked for to depth K or
deeper, whatever shape they had then:

    a_i     at depth i: accepted / asked for, among the steps that accepted i - 1. A depth that a draft did not reach,
            having ended sooner, was asked for and not accepted
    n_i     mean nodes at depth i: 1 for a chain, at most its width for a tree, less where drafts end sooner
    o       share of the drafts asked for that had any node: an n-gram drafter often has none

So a step is expected to emit E(K) = 1 + o · (a_1 + a_1·a_2 + …) tokens (for i.i.d. acceptance a and o = 1 that is
(1 - a^(K+1)) / (1 - a), Leviathan et al. 2023), and has R(K) = o · (A + n_1 + … + n_K) rows behind its root, R(0) = 0:
its nodes and A auxiliary rows, paid once it drafts at all. The K of a batch maximise

    (Σ E_i(K_i) + E') / (T_target(Σ (1 + R_i(K_i)) + R') + Σ_drafters T_draft(longest K of that drafter))

with E' tokens and R' rows of whatever else is in the step (choices without drafts or with a K of their own, prompts)
and measured times, interpolated between row counts. One walk starts at K = 0 for all and adds depths in falling order
of what they bring a row; the best point of the walk is taken. Where a depth brings more a row than those before it
(the first ones bear A; a tree may thin out faster than its chances fall) they count with their common mean and are
added one after another: the segments of the upper hull of E over R.

That finds the global maximum for one choice, whatever its rows (the walk passes through every K); for a batch whose
choices have one n and A = 0 (for any number of rows the best draft takes the largest marginals); and for any
batch where T_target is affine (for the best rate r every choice maximises E - r·slope·R by itself, Dinkelbach 1967, and
those K lie on the hulls). Otherwise it may miss what the last segment would have brought: the tokens of one draft
among those of the batch. Because a drafter that costs time or auxiliary rows may spoil the walk, it is also
tried without each of these. Depths that are reached in less than 1 % of drafts are left out.

*The load gate.* Rows of a full batch cost time, and T_target knows it. Where the K held are expected to emit less a
second than no drafts at all, by more than `largest_loss`, all are chosen anew at once, whatever their dwell. A first K
that the operator gave is taken only where it is not expected to lose against no draft.

Cost: a few operations for each depth of each choice, every few steps; never one for each node or token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeAlias

_Depth: TypeAlias = tuple[float, int, float, float]
"""One more depth of one choice: what it brings a row (negative, to sort by), the choice, what it brings, its rows."""

_SMALLEST_CHANCE = 0.01
_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """One choice before a step.

    `rates` are the a_i of the module's docstring; their number is the longest draft possible now. `nodes` are the n_i,
    as many at least; without them `width` at every depth. `offered`: o. `fixed` is the request's own length, respected
    as given. `current` is the K of the last decision, None before the first; `start`: the K that the first is to be.
    `dwell_steps` must have passed since the last change (`steps_since_change`).
    """

    drafter: str
    rates: tuple[float, ...]
    fixed: int | None = None
    current: int | None = None
    steps_since_change: int = 0
    dwell_steps: int = 8
    width: int = 1
    auxiliary_rows: int = 0
    nodes: tuple[float, ...] = ()
    offered: float = 1.0
    start: int | None = None

    def rows(self, length: int) -> float:
        """R(length): rows expected behind the root."""
        if length <= 0:
            return 0.0
        nodes = sum(self.nodes[:length]) if self.nodes else length * self.width
        return self.offered * (nodes + self.auxiliary_rows)

    def expected(self, length: int) -> float:
        """E(length): tokens that a step is expected to emit."""
        chance, more = 1.0, 0.0
        for conditional in self.rates[:length]:
            chance *= conditional
            more += chance
        return 1.0 + self.offered * more


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """When a change is worth it. Gains are relative, for a batch of one; in a batch a change needs its share.

    `largest_loss`: what the lengths held may be expected to lose against no drafts at all.
    """

    min_gain: float = 0.01
    largest_loss: float = 0.01
    urgent_gain: float = 0.10
    urgent_dwell_steps: int = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds: of a step by its rows (`target`), of a draft by its depth (`drafters`; missing: free).

    `other_rows` of the step belong to nobody who is decided on; `other_tokens` are what they are expected to emit.
    """

    target: Sequence[float]
    drafters: Mapping[str, Sequence[float]]
    other_rows: float = 0
    other_tokens: float = 0


def choose_draft_lengths(
    candidates: Sequence[DraftCandidate], costs: StepCosts, policy: ChangePolicy | None = None
) -> list[int]:
    """K for each candidate, in order: what is held, changed only where the gain pays. Reads only its arguments."""
    policy = policy or ChangePolicy()
    held = _held_lengths(candidates, costs)
    lengths = [length or 0 for length in held]
    before = _rate(candidates, lengths, costs)
    if before < (1.0 - policy.largest_loss) * _rate(candidates, _plain(candidates), costs):
        return _best(candidates, held, [candidate.fixed is None for candidate in candidates], costs)[0]
    due = _movable(candidates, held, None)
    urgent = _movable(candidates, held, policy.urgent_dwell_steps)
    for movable, gain in ((urgent, policy.urgent_gain), (due, policy.min_gain)):
        if not any(movable) or (movable is urgent and urgent == due):
            continue
        best, rate = _best(candidates, held, movable, costs)
        if _pays(held, best, rate, before, gain / (len(held) + costs.other_tokens)):
            return best
    return lengths


def _plain(candidates: Sequence[DraftCandidate]) -> list[int]:
    """The lengths of a batch that drafts no more than it must."""
    return [min(candidate.fixed or 0, len(candidate.rates)) for candidate in candidates]


def _held_lengths(candidates: Sequence[DraftCandidate], costs: StepCosts) -> list[int | None]:
    """The lengths without any change; None: no decision yet. Given first lengths are taken where they do not lose."""
    held = [_held_length(candidate) for candidate in candidates]
    started = [
        min(candidate.start, len(candidate.rates))
        if length is None and candidate.start is not None
        else length
        for candidate, length in zip(candidates, held, strict=True)
    ]
    if started == held:
        return held
    rate = _rate(candidates, [length or 0 for length in started], costs)
    return started if rate >= _rate(candidates, [length or 0 for length in held], costs) else held


def _held_length(candidate: DraftCandidate) -> int | None:
    """The length without any change; None: no decision yet."""
    room = len(candidate.rates)
    if candidate.fixed is not None:
        return min(candidate.fixed, room)
    return None if candidate.current is None else min(candidate.current, room)


def _movable(
    candidates: Sequence[DraftCandidate], held: Sequence[int | None], dwell_steps: int | None
) -> list[bool]:
    """Which lengths may change now; `dwell_steps` None: each after its own dwell."""
    return [
        candidate.fixed is None
        and (
            length is None
            or candidate.steps_since_change
            >= (candidate.dwell_steps if dwell_steps is None else min(dwell_steps, candidate.dwell_steps))
        )
        for candidate, length in zip(candidates, held, strict=True)
    ]


def _pays(
    held: Sequence[int | None], lengths: Sequence[int], rate: float, before: float, min_gain: float
) -> bool:
    """Whether the predicted gain is worth the changes, `min_gain` for each; first decisions need none."""
    if any(length is None for length in held):
        return True
    changed = sum(old != new for old, new in zip(held, lengths, strict=True))
    return changed > 0 and rate >= before * (1.0 + min_gain * changed)


def _rate(candidates: Sequence[DraftCandidate], lengths: Sequence[int], costs: StepCosts) -> float:
    """Expected tokens a second of the given lengths."""
    emitted, rows = costs.other_tokens, len(lengths) + costs.other_rows
    longest: dict[str, int] = {}
    for candidate, length in zip(candidates, lengths, strict=True):
        emitted += candidate.expected(length)
        rows += candidate.rows(length)
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
    seconds = seconds_at(costs.target, rows)
    for drafter, length in longest.items():
        seconds += seconds_at(costs.drafters.get(drafter, ()), length)
    return emitted / seconds if seconds > 0.0 else emitted


def seconds_at(table: Sequence[float], count: float) -> float:
    """The table's seconds, interpolated between whole counts; 0 of nothing, beyond its end it goes on as it ended.

    Rows beyond those of the largest step push others, of prompts or drafts, into a later one: they are not free.
    """
    if not table or count <= 0:
        return 0.0
    low = min(int(count), len(table) - 2)
    if low < 0:
        return table[0]
    return table[low] + (count - low) * (table[low + 1] - table[low])


def _best(
    candidates: Sequence[DraftCandidate],
    held: Sequence[int | None],
    movable: Sequence[bool],
    costs: StepCosts,
) -> tuple[list[int], float]:
    """The best lengths of the movable ones, the others held, and their rate."""
    lengths, rate = _walk(candidates, held, movable, costs)
    moving = [candidate for candidate, moves in zip(candidates, movable, strict=True) if moves]
    if len({candidate.drafter for candidate in moving}) < 2:
        return lengths, rate
    costly = {
        c.drafter
        for c in moving
        if c.auxiliary_rows or seconds_at(costs.drafters.get(c.drafter, ()), 1) > 0.0
    }
    for name in sorted(costly):
        without = [
            replace(c, rates=()) if m and c.drafter == name else c
            for c, m in zip(candidates, movable, strict=True)
        ]
        other_lengths, other_rate = _walk(without, held, movable, costs)
        if other_rate > rate:
            lengths, rate = other_lengths, other_rate
    return lengths, rate


def _walk(
    candidates: Sequence[DraftCandidate],
    held: Sequence[int | None],
    movable: Sequence[bool],
    costs: StepCosts,
) -> tuple[list[int], float]:
    """Add depths by falling gain a row; the best point of the walk."""
    lengths = [0 if moves else (length or 0) for length, moves in zip(held, movable, strict=True)]
    depths: list[_Depth] = []
    emitted, rows = costs.other_tokens, len(lengths) + costs.other_rows
    longest: dict[str, int] = {}
    for index, candidate in enumerate(candidates):
        length = lengths[index]
        emitted += candidate.expected(length)
        rows += candidate.rows(length)
        if movable[index]:
            depths += _depths(index, candidate)
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
    depths.sort(key=itemgetter(0))
    draft_seconds = sum(seconds_at(costs.drafters.get(name, ()), length) for name, length in longest.items())
    target = costs.target
    seconds = seconds_at(target, rows) + draft_seconds
    best_rate, best_depths = emitted / seconds if seconds > 0.0 else emitted, 0
    walked = lengths.copy()
    for count, (_, index, gain, own_rows) in enumerate(depths, start=1):
        emitted += gain
        rows += own_rows
        walked[index] += 1
        drafter = candidates[index].drafter
        if walked[index] > longest[drafter]:
            table = costs.drafters.get(drafter, ())
            draft_seconds += seconds_at(table, walked[index]) - seconds_at(table, longest[drafter])
            longest[drafter] = walked[index]
        seconds = seconds_at(target, rows) + draft_seconds
        rate = emitted / seconds if seconds > 0.0 else emitted
        if rate > best_rate:
            best_rate, best_depths = rate, count
    for _, index, _, _ in depths[:best_depths]:
        lengths[index] += 1
    return lengths, best_rate


def _depths(index: int, candidate: DraftCandidate) -> list[_Depth]:
    """A choice's depths in order, each with what it brings a row: never more than the one before."""
    segments: list[tuple[float, float, list[tuple[float, float]]]] = []
    chance, offered = 1.0, max(_SMALLEST_SHARE, candidate.offered)
    for depth, conditional in enumerate(candidate.rates):
        chance *= conditional
        if chance < _SMALLEST_CHANCE:
            break
        nodes = candidate.nodes[depth] if candidate.nodes else float(candidate.width)
        rows = offered * (nodes + (0 if depth else candidate.auxiliary_rows))
        gain, parts = offered * chance, [(offered * chance, rows)]
        while segments and gain * segments[-1][1] > segments[-1][0] * rows:
            earlier_gain, earlier_rows, earlier = segments.pop()
            gain, rows, parts = earlier_gain + gain, earlier_rows + rows, earlier + parts
        segments.append((gain, rows, parts))
    return [
        (-gain / rows, index, own_gain, own_rows)
        for gain, rows, parts in segments
        for own_gain, own_rows in parts
    ]
