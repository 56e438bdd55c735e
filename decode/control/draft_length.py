"""How long each choice drafts in the next step: a pure function of measured rates and times.

With conditional rates a_1, a_2, … the expected tokens of a step are E(K) = 1 + a_1 + a_1·a_2 + … (for i.i.d.
acceptance a that is (1 - a^(K+1)) / (1 - a), Leviathan et al. 2023). Behind its root a draft of depth K > 0 has
R(K) = A + w·K rows, R(0) = 0: w nodes a depth, the tree's width, and A auxiliary rows, paid once it drafts at all. The
K of a batch maximise

    Σ E_i(K_i) / (T_target(Σ (1 + R_i(K_i)) + other rows) + Σ_drafters T_draft(longest K of that drafter))

with measured times. One walk starts at K = 0 for all and adds depths in falling order of what they bring a row; the
best point of the walk is taken. A depth brings a_1···a_k for w rows, which falls with k. Where A > 0 the first
depths bear it: all those up to the K with the largest (E(K) - 1) / R(K) count with that mean and are added one after
another (the steepest segment of the upper hull of E over R; behind it the mean is above the next depth's).

That finds the global maximum for one choice, whatever its rows (the walk passes through every K); for a batch whose
choices have the same w and A = 0 (for any number of rows the best draft takes the largest marginals); and for any
batch where T_target is affine (for the best rate r every choice maximises E - r·slope·R by itself, Dinkelbach 1967, and
those K lie on the hulls). Otherwise it may miss what the last segment would have brought: the tokens of one draft
among those of the batch. Because a drafter that costs time or auxiliary rows may spoil the walk, it is also
tried without each of these. Depths that are reached in less than 1 % of steps are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeAlias

_Depth: TypeAlias = tuple[float, int, float, int]
"""One more depth of one choice: what it brings a row (negative, to sort by), the choice, what it brings, its rows."""

_SMALLEST_CHANCE = 0.01


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """One choice before a step.

    `rates` are conditional rates by depth; their number is the longest draft possible now. `fixed` is the
    request's own length, respected as given. `current` is the K of the last decision, None before the first.
    `dwell_steps` must have passed since the last change (`steps_since_change`). A draft has `width` nodes a depth
    (at most: a tree may be thinner) and `auxiliary_rows` whatever its depth.
    """

    drafter: str
    rates: tuple[float, ...]
    fixed: int | None = None
    current: int | None = None
    steps_since_change: int = 0
    dwell_steps: int = 8
    width: int = 1
    auxiliary_rows: int = 0

    def rows(self, length: int) -> int:
        """Rows behind the root."""
        return length * self.width + self.auxiliary_rows if length > 0 else 0


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """When a change is worth it. Gains are relative, for a batch of one; in a batch a change needs its share."""

    min_gain: float = 0.01
    urgent_gain: float = 0.10
    urgent_dwell_steps: int = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds: of a step by its rows (`target`), of a draft by its depth (`drafters`; missing: free)."""

    target: Sequence[float]
    drafters: Mapping[str, Sequence[float]]
    other_rows: int = 0


def choose_draft_lengths(
    candidates: Sequence[DraftCandidate], costs: StepCosts, policy: ChangePolicy | None = None
) -> list[int]:
    """K for each candidate, in order: what is held, changed only where the gain pays. Reads only its arguments."""
    policy = policy or ChangePolicy()
    held = [_held_length(candidate) for candidate in candidates]
    due = _movable(candidates, held, None)
    urgent = _movable(candidates, held, policy.urgent_dwell_steps)
    if any(due) or any(urgent):
        before = _rate(candidates, [length or 0 for length in held], costs)
        for movable, gain in ((urgent, policy.urgent_gain), (due, policy.min_gain)):
            if not any(movable) or (movable is urgent and urgent == due):
                continue
            lengths, rate = _best(candidates, held, movable, costs)
            if _pays(held, lengths, rate, before, gain):
                return lengths
    return [length or 0 for length in held]


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
    """Whether the predicted gain is worth the changes; first decisions need none."""
    if any(length is None for length in held):
        return True
    changed = sum(old != new for old, new in zip(held, lengths, strict=True))
    return changed > 0 and rate >= before * (1.0 + min_gain * changed / len(held))


def _rate(candidates: Sequence[DraftCandidate], lengths: Sequence[int], costs: StepCosts) -> float:
    """Expected tokens a second of the given lengths."""
    emitted, rows, longest = 0.0, len(lengths) + costs.other_rows, dict[str, int]()
    for candidate, length in zip(candidates, lengths, strict=True):
        emitted += _expected(candidate.rates, length)
        rows += candidate.rows(length)
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
    seconds = _at(costs.target, rows)
    for drafter, length in longest.items():
        seconds += _at(costs.drafters.get(drafter, ()), length)
    return emitted / seconds if seconds > 0.0 else emitted


def _expected(rates: Sequence[float], length: int) -> float:
    """E(length)."""
    chance = expected = 1.0
    for conditional in rates[:length]:
        chance *= conditional
        expected += chance
    return expected


def _at(table: Sequence[float], count: int) -> float:
    if not table or count == 0:
        return 0.0
    return table[min(count, len(table) - 1)]


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
        c.drafter for c in moving if c.auxiliary_rows or _at(costs.drafters.get(c.drafter, ()), 1) > 0.0
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
    emitted, rows = 0.0, len(lengths) + costs.other_rows
    longest: dict[str, int] = {}
    for index, candidate in enumerate(candidates):
        length = lengths[index]
        if movable[index]:
            emitted += 1.0
            depths += _depths(index, candidate)
        else:
            emitted += _expected(candidate.rates, length)
            rows += candidate.rows(length)
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
    depths.sort(key=itemgetter(0))
    draft_seconds = sum(_at(costs.drafters.get(name, ()), length) for name, length in longest.items())
    target, last = costs.target, len(costs.target) - 1
    seconds = (target[min(rows, last)] if target else 0.0) + draft_seconds
    best_rate, best_depths = emitted / seconds if seconds > 0.0 else emitted, 0
    walked = lengths.copy()
    for count, (_, index, gain, own_rows) in enumerate(depths, start=1):
        emitted += gain
        rows += own_rows
        walked[index] += 1
        drafter = candidates[index].drafter
        if walked[index] > longest[drafter]:
            table = costs.drafters.get(drafter, ())
            draft_seconds += _at(table, walked[index]) - _at(table, longest[drafter])
            longest[drafter] = walked[index]
        seconds = (target[min(rows, last)] if target else 0.0) + draft_seconds
        rate = emitted / seconds if seconds > 0.0 else emitted
        if rate > best_rate:
            best_rate, best_depths = rate, count
    for _, index, _, _ in depths[:best_depths]:
        lengths[index] += 1
    return lengths, best_rate


def _depths(index: int, candidate: DraftCandidate) -> list[_Depth]:
    """A choice's depths in order, each with what it brings a row: never more than the one before."""
    depths: list[_Depth] = []
    chance, width = 1.0, candidate.width
    for conditional in candidate.rates:
        chance *= conditional
        if chance < _SMALLEST_CHANCE:
            break
        depths.append((-chance / width, index, chance, width))
    if depths and candidate.auxiliary_rows:
        _bear(depths, candidate.auxiliary_rows)
    return depths


def _bear(depths: list[_Depth], auxiliary_rows: int) -> None:
    """Let the first depths bear the auxiliary rows, as many of them as raise what they bring a row together."""
    _, index, gain, width = depths[0]
    rows = auxiliary_rows + width
    mean = -gain / rows
    size = 1
    while size < len(depths) and depths[size][0] < mean:
        gain += depths[size][2]
        rows += width
        mean = -gain / rows
        size += 1
    for place in range(size):
        depths[place] = (mean, index, depths[place][2], width + (0 if place else auxiliary_rows))
