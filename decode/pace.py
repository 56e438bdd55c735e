"""How deep each choice drafts in a step: a fixed K as given, else what the K controller says, both cut by room."""

from collections import Counter
from collections.abc import Sequence

from decode.choice import Choice
from decode.control.controller import ControlledChoice, DraftLengthController, PlanEntry


class Pace:
    """One a worker. Engine thread only. `max_rows`: rows of the largest step."""

    def __init__(self, max_rows: int) -> None:
        self._controller = DraftLengthController(max_rows)

    def join(self, choice: Choice) -> None:
        """A choice begins to draft."""
        needs = choice.drafter.needs
        self._controller.add(
            ControlledChoice(
                key=choice.key,
                drafter=choice.drafter.name,
                request_class=choice.request.job.request_class,
                max_length=needs.max_draft_length,
                default_length=needs.default_draft_length,
                start_length=choice.draft_length_start,
                fixed=choice.draft_length_fixed,
                width=choice.draft_request.draft_width,
                auxiliary_rows=needs.auxiliary_rows,
            )
        )

    def leave(self, choice: Choice) -> None:
        """It drafts no more. Idempotent."""
        self._controller.remove(choice.key)

    def lengths(
        self, choices: Sequence[Choice], rooms: Sequence[tuple[int, int]], other_rows: int
    ) -> list[tuple[int, int]]:
        """(depth, rows) for each choice; `rooms` are the largest possible ones."""
        for choice in choices:
            self._follow_thinking(choice)
        lengths = [(0, 0)] * len(choices)
        moved: list[int] = []
        for index, (choice, room) in enumerate(zip(choices, rooms, strict=True)):
            if choice.draft_length_fixed is not None:
                lengths[index] = _within(choice, choice.draft_length_fixed, room)
            elif choice.drafting:
                moved.append(index)
        if moved:
            tokens, rows = self._of_others(choices, lengths, moved)
            entries = [PlanEntry(choices[index].key, rooms[index][0]) for index in moved]
            planned = self._controller.plan(entries, rows + other_rows, tokens)
            for index, depth in zip(moved, planned, strict=True):
                lengths[index] = _within(choices[index], depth, rooms[index])
        return lengths

    def _follow_thinking(self, choice: Choice) -> None:
        """Another K to go on from where the answer begins or ends to think aloud; a fixed K stays."""
        if choice.thinking is None or not choice.drafting:
            return
        length = choice.thinking.turn(choice.history.token_ids)
        if length is not None:
            self._controller.restart(choice.key, length)

    def _of_others(
        self, choices: Sequence[Choice], lengths: Sequence[tuple[int, int]], moved: Sequence[int]
    ) -> tuple[float, float]:
        """(tokens, rows) expected of those whose K is not the controller's."""
        tokens = rows = 0.0
        moving = frozenset(moved)
        for index, (choice, (depth, _)) in enumerate(zip(choices, lengths, strict=True)):
            if index not in moving:
                own_tokens, own_rows = self._controller.expected(choice.key, depth)
                tokens += own_tokens
                rows += own_rows
        return tokens, rows

    def learn(
        self,
        choice: Choice,
        asked_depth: int,
        depths: Sequence[int],
        num_accepted: int,
        num_auxiliary: int = 0,
    ) -> None:
        """Acceptance of one choice's draft in one step that was asked for to `asked_depth` (0: none was).

        Auxiliary rows without a node were paid for and brought nothing. The report counts no offer then; the
        controller, which pays those rows for every K > 0, takes it for a draft that was refused at its first depth.
        """
        if num_auxiliary and not depths:
            self._controller.observe(choice.key, 1, 0, (0,))
        elif depths or asked_depth:
            counts = Counter(depths)
            nodes = [counts[depth] for depth in range(1, len(counts) + 1)]
            self._controller.observe(choice.key, max(asked_depth, len(nodes)), num_accepted, nodes)

    def pays_ahead(self, choice: Choice, known: int, length: int, deeper: int) -> bool:
        """See the controller's."""
        return self._controller.pays_ahead(choice.key, known, length, deeper)

    def record_step(self, rows: int, seconds: float) -> None:
        """What a target forward of `rows` rows cost."""
        self._controller.record_step(rows, seconds)

    def step_seconds(self, rows: int) -> float:
        """What a target forward of `rows` rows costs by what was measured; 0.0 before anything was."""
        table = self._controller.step_time
        return table.seconds[min(rows, table.max_count)]

    def record_draft(self, drafter: str, depth: int, seconds: float) -> None:
        """What one proposal cost whose longest draft was `depth`."""
        self._controller.record_draft(drafter, depth, seconds)

    def check(self) -> None:
        """Called when idle: no choice may be left."""
        self._controller.check()


def _within(choice: Choice, depth: int, room: tuple[int, int]) -> tuple[int, int]:
    """(depth, rows) of a draft of `depth`, cut by what the choice has room for."""
    depth = min(depth, room[0])
    return depth, min(room[1], choice.drafter.needs.rows(depth, choice.draft_request.draft_width))
