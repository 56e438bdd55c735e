"""What is on its way through a pipelined target: messages, and each choice's rows in them."""

from dataclasses import dataclass, replace

from core.records import PASS_DRAFTER
from decode.choice import Choice
from decode.draft import Draft, Verdict
from decode.last_word import Link, Question
from decode.sampling.step_items import DrawItem
from decode.step import Stepping, drafted_item, sequence_of
from decode.verification.invariant import invariant_draw
from engine.block_table import BlockTable
from engine.pipeline import Flight
from engine.step_batch import SequenceStep


@dataclass(slots=True, eq=False)
class Flown:
    """One choice's rows in a message: a root and its draft.

    `table` is the choice's when they were sent. Rows sent *ahead* build on those of the message before, `base`: on the
    guess that all of its draft is accepted and `guess_id` is its bonus token, the root of these. Until that has come
    true they are not `held`. `place` is theirs among the rows of the message; `ahead` are those that build on them.
    """

    choice: Choice
    draft: Draft
    table: BlockTable
    base: "Flown | None" = None
    guess_id: int = 0
    held: bool = True
    place: int = 0
    ahead: "Flown | None" = None

    @property
    def is_wanted(self) -> bool:
        """Whether the choice is still where these rows began, or their guess has brought it there."""
        return self.held and self.choice.table is self.table

    @property
    def is_pass(self) -> bool:
        """Whether its choice is one that is drafted for ahead."""
        return self.choice.drafter.name == PASS_DRAFTER

    @property
    def may_be_followed(self) -> bool:
        """Whether rows that build on these may be sent."""
        fitting = bool(self.draft.token_ids) and self.draft.is_chain
        return fitting and self.is_pass and self.is_wanted and self.choice.drafting

    @property
    def path(self) -> tuple[int, ...]:
        """Tokens between the committed ones and the draft: of the base its draft and its bonus token."""
        return () if self.base is None else (*self.base.draft.token_ids, self.guess_id)

    def sequence(self) -> SequenceStep:
        """The rows for the engine; those of the base have been written."""
        path = self.path
        if not path:
            return sequence_of(Stepping(self.choice, self.draft))
        root_id = self.choice.history.token_ids[-1]
        token_ids = (root_id, *path, *self.draft.token_ids)
        return SequenceStep(self.table, self.table.num_tokens, token_ids, num_written=len(path))

    def draw(self, logits_row: int) -> DrawItem:
        """The walk that verifies them, the root's logits in `logits_row`."""
        item = drafted_item(Stepping(self.choice, self.draft), logits_row)
        path = self.path
        return replace(invariant_draw(item), position=item.position + len(path), path=path)

    def link(self) -> Link:
        """What the last stage must know of the base."""
        if self.base is None:
            return Link(self.choice.key)
        return Link(self.choice.key, self.base.place, len(self.base.draft.token_ids), self.guess_id)

    def comes_true(self, verdict: Verdict) -> bool:
        """Whether `verdict`, of the base, is what these rows were guessed on."""
        assert self.base is not None
        whole = len(verdict.accepted_rows) == len(self.base.draft.token_ids)
        return whole and verdict.error is None and verdict.token_ids[-1] == self.guess_id


@dataclass(frozen=True, slots=True)
class Message:
    """One step on its way, and what the last stage was asked of it."""

    flight: Flight
    question: Question
    flown: tuple[Flown, ...]
