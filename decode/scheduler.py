"""What the next step holds, and who may join: pure functions of snapshots.

`plan_step` shares out a step's rows. Every choice that steps costs 1 row for its root (a beam search one for each
hypothesis) and 1 for each node or auxiliary node; own prefill and drafters' prefill cost a row a token. `admit` says
which waiting requests may join, `choose_victim` who gives its blocks back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_PREFILL_SHARE = 4
"""While prompts wait, at least one row in so many is theirs: running answers slow down, prompts never stop."""

MAX_OVERTAKEN = 16
"""So often may a waiting request that does not fit be passed by smaller ones; then nobody passes it."""


@dataclass(frozen=True, slots=True)
class ChoiceView:
    """A running choice. `draft_length` 0: it steps with its root alone. `max_nodes` bounds its draft's rows."""

    key: int
    draft_length: int
    max_nodes: int
    num_roots: int = 1


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prompt (or committed answer) of which `rows` tokens are still to be computed here."""

    key: int
    rows: int


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """A choice that steps, and what it may draft: `max_nodes` rows at most, auxiliary ones included."""

    key: int
    draft_length: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one step. `drafter_rows`: what drafters may spend on prompts of their own."""

    choices: tuple[PlannedChoice, ...]
    prefills: tuple[PrefillView, ...]
    drafter_rows: int


def plan_step(
    choices: Sequence[ChoiceView], prefills: Sequence[PrefillView], step_tokens: int, drafter_pending: bool
) -> StepPlan:
    """Share out `step_tokens` rows: roots first, then a share for prompts, then drafts, then more prompts.

    `choices` and `prefills` come in order of turn; where roots alone exceed the budget the first ones step.
    """
    reserved = step_tokens // _PREFILL_SHARE if prefills or drafter_pending else 0
    stepping = _roots_within(choices, step_tokens - reserved)
    rows_left = step_tokens - reserved - sum(choice.num_roots for choice in stepping)
    planned = _share_nodes(stepping, rows_left)
    rows_left += reserved - sum(choice.max_nodes for choice in planned)
    drafter_rows = rows_left // 2 if drafter_pending and prefills else rows_left if drafter_pending else 0
    rows_left -= drafter_rows
    granted: list[PrefillView] = []
    for prefill in prefills:
        rows = min(prefill.rows, rows_left)
        if rows > 0:
            granted.append(PrefillView(prefill.key, rows))
            rows_left -= rows
    return StepPlan(planned, tuple(granted), drafter_rows)


def _roots_within(choices: Sequence[ChoiceView], rows: int) -> Sequence[ChoiceView]:
    """The first choices, as many as have room for their roots; one in any case."""
    for index, choice in enumerate(choices):
        rows -= choice.num_roots
        if rows < 0 and index > 0:
            return choices[:index]
    return choices


def _share_nodes(choices: Sequence[ChoiceView], rows: int) -> tuple[PlannedChoice, ...]:
    """Rows of each choice's draft: all that it asks for if the budget allows, else an equal share."""
    wanted = [choice.max_nodes if choice.draft_length > 0 else 0 for choice in choices]
    if sum(wanted) > rows:
        wanted = _level(wanted, rows)
    return tuple(
        PlannedChoice(choice.key, min(choice.draft_length, nodes), nodes)
        for choice, nodes in zip(choices, wanted, strict=True)
    )


def _level(wanted: Sequence[int], rows: int) -> list[int]:
    """The largest equal cap under which the sum fits into `rows`; what is over goes to the first ones."""
    granted = [0] * len(wanted)
    rows = max(0, rows)
    open_indexes = [index for index, want in enumerate(wanted) if want > 0]
    while open_indexes and rows > 0:
        share = max(1, rows // len(open_indexes))
        for index in open_indexes:
            extra = min(share, wanted[index] - granted[index], rows)
            granted[index] += extra
            rows -= extra
        open_indexes = [index for index in open_indexes if granted[index] < wanted[index]]
    return granted


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A waiting request: the blocks and choice places that it needs, and how often others passed it."""

    key: int
    blocks: int
    choices: int
    overtaken: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Who joins now, and whom they passed."""

    admitted: tuple[int, ...]
    overtaken: tuple[int, ...]


def admit(waiting: Sequence[WaitingView], free_blocks: int, free_choices: int) -> Admission:
    """Who joins, in order of turn. One that does not fit is passed by smaller ones, but not for ever."""
    admitted: list[int] = []
    passed: list[int] = []
    for view in waiting:
        if view.blocks <= free_blocks and view.choices <= free_choices:
            free_blocks -= view.blocks
            free_choices -= view.choices
            admitted.append(view.key)
            continue
        if view.overtaken >= MAX_OVERTAKEN or view.choices > free_choices:
            break
        passed.append(view.key)
    last = max((index for index, view in enumerate(waiting) if view.key in admitted), default=-1)
    overtaken = [view.key for view in waiting[: last + 1] if view.key in passed]
    return Admission(tuple(admitted), tuple(overtaken))


@dataclass(frozen=True, slots=True)
class VictimView:
    """A choice that holds blocks."""

    key: int
    emitted_tokens: int
    joined: int


def choose_victim(holders: Sequence[VictimView]) -> int | None:
    """The one with the fewest emitted tokens gives its blocks back; among equals the latest to join."""
    if not holders:
        return None
    return min(holders, key=lambda view: (view.emitted_tokens, -view.joined)).key
