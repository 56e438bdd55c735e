"""What the engine thread does next: whom it admits, and whose rows fill the next step. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_OVERTAKEN = 16
"""So often may later prompts pass one that is too big for the free blocks; then they wait behind it."""


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A prompt in the queue. `num_blocks`: what it needs at most. `overtaken`: later ones admitted before it."""

    key: int
    num_blocks: int
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """`admitted` and `overtaken` prompts, by key."""

    admitted: tuple[int, ...]
    overtaken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunningView:
    """An admitted prompt: `remaining` tokens are not computed yet."""

    key: int
    remaining: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The next `num_rows` rows of a prompt."""

    key: int
    num_rows: int


def plan_admission(waiting: Sequence[WaitingView], free_blocks: int) -> Admission:
    """Who gets blocks now; `waiting` in order of arrival.

    First come, first served, but a prompt that does not fit lets smaller ones pass, MAX_OVERTAKEN times at
    most: so it is admitted in bounded time, and nobody waits behind it for ever.
    """
    admitted: list[int] = []
    blocked: list[WaitingView] = []
    overtaken: set[int] = set()
    for view in waiting:
        if view.num_blocks > free_blocks:
            blocked.append(view)
            if view.overtaken >= MAX_OVERTAKEN:
                break
            continue
        admitted.append(view.key)
        free_blocks -= view.num_blocks
        overtaken.update(other.key for other in blocked)
    return Admission(tuple(admitted), tuple(view.key for view in blocked if view.key in overtaken))


def plan_chunks(running: Sequence[RunningView], num_rows: int) -> tuple[ChunkPlan, ...]:
    """How `num_rows` rows are shared; `running` in order of arrival.

    The oldest prompt has half of the rows for sure, so every prompt ends in bounded time. The others are
    served by what remains of them, the shortest first, and the oldest takes what they leave. Where it takes at most
    a quarter of a step more, all that remains goes into this one: a step of few rows costs more than they do.
    """
    if sum(view.remaining for view in running) <= num_rows + num_rows // 4:
        return tuple(ChunkPlan(view.key, view.remaining) for view in running)
    oldest, *others = running
    left = num_rows - min(oldest.remaining, -(-num_rows // 2))
    plans: list[ChunkPlan] = []
    for view in sorted(others, key=lambda view: view.remaining):
        taken = min(view.remaining, left)
        if taken:
            plans.append(ChunkPlan(view.key, taken))
            left -= taken
    oldest_rows = min(oldest.remaining, num_rows - sum(plan.num_rows for plan in plans))
    return (ChunkPlan(oldest.key, oldest_rows), *plans)
