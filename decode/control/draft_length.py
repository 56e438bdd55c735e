"""How long each choice drafts in the next step: a pure function of measured rates and times.

With conditional rates a_1, a_2, … the expected tokens of a step are E(K) = 1 + a_1 + a_1·a_2 + … (for i.i.d.
acceptance a that is (1 - a^(K+1)) / (1 - a), Leviathan et al. 2023). The K of a batch maximise

    Σ E_i(K_i) / (T_target(Σ (K_i + 1) + other rows) + Σ_drafters T_draft(longest K of that drafter))

with measured times. Marginal gains fall with depth, so for any number of rows the best draft takes the largest
marginals; one walk over them in falling order passes through every candidate, K = 0 for all included, and the
best point of the walk is taken. Because a costly drafter may spoil the walk, it is also tried without each one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """One choice before a step.

    `rates` are conditional rates by depth; their number is the longest draft possible now. `fixed` is the
    request's own length, respected as given. `current` is the K of the last decision, None before the first.
    `dwell_steps` must have passed since the last change (`steps_since_change`).
    """

    drafter: str
    rates: tuple[float, ...]
    fixed: int | None = None
    current: int | None = None
    steps_since_change: int = 0
    dwell_steps: int = 8


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
    emitted, longest = 0.0, dict[str, int]()
    for candidate, length in zip(candidates, lengths, strict=True):
        chance = 1.0
        emitted += 1.0
        for depth in range(length):
            chance *= candidate.rates[depth]
            emitted += chance
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
    seconds = _at(costs.target, sum(lengths) + len(lengths) + costs.other_rows)
    for drafter, length in longest.items():
        seconds += _at(costs.drafters.get(drafter, ()), length)
    return emitted / seconds if seconds > 0.0 else emitted


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
    drafters = {c.drafter for c, moves in zip(candidates, movable, strict=True) if moves}
    costly = [name for name in drafters if _at(costs.drafters.get(name, ()), 1) > 0.0]
    if len(drafters) < 2:
        return lengths, rate
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
    """Add nodes by falling marginal gain; the best point of the walk."""
    lengths = [0 if moves else (length or 0) for length, moves in zip(held, movable, strict=True)]
    marginals: list[tuple[float, int]] = []
    emitted, rows = float(len(lengths)), len(lengths) + sum(lengths) + costs.other_rows
    longest: dict[str, int] = {}
    for index, candidate in enumerate(candidates):
        chance = 1.0
        for depth, conditional in enumerate(candidate.rates):
            chance *= conditional
            if movable[index]:
                if chance < 0.01:
                    break
                marginals.append((-chance, index))
            elif depth < lengths[index]:
                emitted += chance
        longest[candidate.drafter] = max(lengths[index], longest.get(candidate.drafter, 0))
    marginals.sort()
    draft_seconds = sum(_at(costs.drafters.get(name, ()), length) for name, length in longest.items())
    target, last = costs.target, len(costs.target) - 1
    seconds = (target[min(rows, last)] if target else 0.0) + draft_seconds
    best_rate, best_nodes = emitted / seconds if seconds > 0.0 else emitted, 0
    walked = lengths.copy()
    for nodes, (negative_chance, index) in enumerate(marginals, start=1):
        emitted -= negative_chance
        rows += 1
        walked[index] += 1
        drafter = candidates[index].drafter
        if walked[index] > longest[drafter]:
            table = costs.drafters.get(drafter, ())
            draft_seconds += _at(table, walked[index]) - _at(table, longest[drafter])
            longest[drafter] = walked[index]
        seconds = (target[min(rows, last)] if target else 0.0) + draft_seconds
        rate = emitted / seconds if seconds > 0.0 else emitted
        if rate > best_rate:
            best_rate, best_nodes = rate, nodes
    for _, index in marginals[:best_nodes]:
        lengths[index] += 1
    return lengths, best_rate
