"""A request and its choices, as the engine thread holds them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from core.errors import ServiceError
from core.records import ChoiceFinish, SpeculationReport, TokenLogprobs
from decode.beam_group import BeamGroup
from decode.drafters.protocol import Drafter, DraftRequest
from decode.finisher import Finisher
from decode.job import DecodeJob
from decode.report import Tally
from decode.sampling.history import TokenHistory
from decode.thinking import ThinkingSpan
from engine.block_table import BlockTable


class Listener(Protocol):
    """The event loop's side of a request."""

    @property
    def blocked(self) -> bool:
        """Whether its reader is so far behind that it is not to be scheduled. Read by the engine thread."""
        ...

    def take(self, event: "Event") -> None:
        """News of the request; event loop only, in order."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One attempt. `on_admitted` is called (engine thread) when its table is open and its prompt is to be brought.

    `open_choices` counts choices that have not ended; `placed`: they hold places in the
    batch (a parked one, preempted, does not); `dropped`: nobody waits for it any more.
    """

    key: int
    job: DecodeJob
    listener: Listener
    tally: Tally
    on_admitted: Callable[["Request"], None]
    choices: list["Choice"] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    prompt_table: BlockTable | None = None
    cached_tokens: int = 0
    open_choices: int = 0
    placed: bool = False
    dropped: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.job.prompt_ids)

    @property
    def open_places(self) -> int:
        """Places in the batch of the choices that have not ended."""
        return sum(choice.places for choice in self.choices if not choice.ended)


@dataclass(slots=True, eq=False)
class Choice:
    """One answer of a request. `table` None: not begun, preempted or ended.

    With a table, K and V of all tokens but the last are in it whenever the choice is among the running ones.
    A choice with `beams` is searched for: while it runs they hold the tables, and it has tokens only when it ends.
    `taken_off`: its drafter raised or stalled, and is asked no more.
    """

    key: int
    index: int
    request: Request
    history: TokenHistory
    finisher: Finisher
    drafter: Drafter
    draft_length_fixed: int | None
    draft_length_start: int | None
    draft_request: DraftRequest
    thinking: ThinkingSpan | None = None
    table: BlockTable | None = None
    beams: BeamGroup | None = None
    ended: bool = False
    finish: ChoiceFinish | None = None
    parked: bool = False
    drafting: bool = False
    taken_off: bool = False
    joined: int = 0
    last_step: int = 0

    @property
    def emitted_tokens(self) -> int:
        """Tokens of the answer so far; while it is searched for, of each hypothesis."""
        return self.history.num_output + (0 if self.beams is None else self.beams.length)

    @property
    def places(self) -> int:
        """Places in the batch that it takes."""
        return 1 if self.beams is None else self.beams.width

    @property
    def num_roots(self) -> int:
        """Rows of the next step without a draft's."""
        return 1 if self.beams is None else self.beams.num_rows

    @property
    def holds_blocks(self) -> bool:
        """Whether preempting it gives anything back."""
        return self.table is not None or (self.beams is not None and self.beams.holds_blocks)


@dataclass(slots=True, eq=False)
class Prefilling:
    """Tokens that this worker computes itself, in chunks: a prompt (`choice` None) or a choice's past."""

    key: int
    request: Request
    choice: Choice | None
    table: BlockTable
    token_ids: Sequence[int]
    end: int

    @property
    def rows_left(self) -> int:
        """Tokens still to be computed."""
        return self.end - self.table.num_tokens


@dataclass(frozen=True, slots=True)
class Burst:
    """What one step yields for one choice, for the event loop. `text` None: made there, from the first
    `num_text_tokens` tokens."""

    choice: Choice
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str | None
    num_text_tokens: int
    report: SpeculationReport
    finish: ChoiceFinish | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended: all its choices did, or `error` stopped it."""

    request: Request
    error: ServiceError | None = None


Event: TypeAlias = Burst | Ended
