"""The contract of every drafter. A drafter decides what is tried, never what is emitted.

The decode loop calls, on the engine thread only:

    start      once, when a choice joins the batch with its prompt's K, V and planes in place
    prefill    once a step, for a drafter with pending prompt work of its own
    propose    once a step, with all its choices that may draft; where a burst is drafted for ahead of time
               (`decode/pass_step.py`), again before anything of the last proposal was observed
    observe    once a step, after verification and commit, with all its choices that stepped
    rebuild    instead of start, after resume or preemption
    finish     once, on every path

A drafter that raises is taken off the choice (fallback to `none`, counted); the step goes on.

Under rejection and block verification a drafter that samples has a duty besides: which of the *sampled* nodes
are handed over, in what order and how often, may depend only on what was known before each was drawn. Stop or
prune by the parent's distribution, never by the token; siblings stay in the order drawn, equal ones are not merged,
and scores may only choose below which node to draft on. Deterministic nodes may be pruned and ordered at will, by
what does not depend on sampled ones. `Draft` says how both are told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft
from decode.sampling.history import TokenConstraint, TokenHistory
from engine.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter asks of its worker; fixed at load.

    `hidden_layers`: layers whose planes must be kept with the KV. `bytes_per_token`: its own state.
    `noise`: invariant verification shares its noise with a drafter that samples; rejection never does.
    `largest_position`: past it the drafter is not asked (None: no limit). `auxiliary_rows`: rows of the target
    that a draft may want beside its nodes, evaluated for the drafter alone. They come whole or not at all: where
    rows run short they go before any node. `rollback_threshold`: of a drafter named in `APPROXIMATE_DRAFTERS`, -log
    of the target's probability up to which its chains' tokens are kept. `remembers_answers`: its drafts may be of an
    earlier answer to the same request.
    """

    max_draft_length: int
    default_draft_length: int
    hidden_layers: tuple[int, ...] = ()
    bytes_per_token: int = 0
    noise: Literal["shared", "independent"] = "shared"
    largest_position: int | None = None
    max_draft_width: int = 1
    default_draft_width: int = 1
    auxiliary_rows: int = 0
    rollback_threshold: float | None = None
    remembers_answers: bool = False

    def rows(self, depth: int, width: int) -> int:
        """Rows behind the root that a draft may take: its nodes and, where it drafts at all, the auxiliary rows."""
        return depth * width + self.auxiliary_rows if depth > 0 else 0


@dataclass(slots=True, eq=False)
class DraftRequest:
    """One choice as a drafter sees it. `key` is unique in the worker's life; `history` is live.

    `hidden(start, end)` reads the captured planes of committed positions:
    Tensor [num hidden layers, end - start, hidden_dim]. `table()` is the choice's own table in the target's KV:
    a drafter may reserve and write slots behind its committed tokens, never commit. `isolation`: what the request
    may share with others (tenant and salt); nothing learnt of one value may be seen under another. `draft_lane`: the
    lane of this drafter's draws (`DraftDraw.lane`), its own among drafters whose proposals meet in one tree.
    """

    key: int
    history: TokenHistory
    sampling: SamplingParams
    seed: int
    choice: int
    verification: VerificationMode
    hidden: Callable[[int, int], Tensor]
    draft_width: int
    table: Callable[[], BlockTable]
    request_class: str = "chat"
    isolation: str = ""
    draft_lane: int = 0

    @property
    def is_weighed(self) -> bool:
        """Whether verification weighs sampled nodes by what they were drawn from (see the module's docstring)."""
        return self.verification in ("rejection", "block") and not self.sampling.greedy

    @property
    def grammar(self) -> TokenConstraint | None:
        """What the answer must follow. `draw_draft` and `draw_children` heed it; who takes tokens otherwise need not
        (what does not fit is dropped from the draft), but wastes nodes."""
        return self.history.grammar


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What one choice may draft in this step: depth ≤ `draft_length`, nodes and auxiliary rows ≤ `max_nodes`."""

    request: DraftRequest
    draft_length: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What became of a step. `history` of the request already holds `token_ids`.

    `hidden_rows` [num hidden layers, 1 + accepted, hidden_dim]: planes of the root and the accepted path.
    `auxiliary_logits` [auxiliary rows of `draft`, vocabulary], read during the call only; None where it has none.
    """

    request: DraftRequest
    draft: Draft
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    hidden_rows: Tensor | None = None
    auxiliary_logits: Tensor | None = None


class Drafter(Protocol):
    """See the module's docstring for who calls what, when."""

    @property
    def name(self) -> str:
        """The name in requests and reports."""
        ...

    @property
    def needs(self) -> DrafterNeeds:
        """What it asks of its worker."""
        ...

    def start(self, request: DraftRequest) -> None:
        """Take a choice on. Cheap: own prompt work waits for `prefill`."""
        ...

    def rebuild(self, request: DraftRequest) -> None:
        """Take a choice on again: `history` holds prompt and answer so far."""
        ...

    def prefill(self, max_rows: int) -> int:
        """Do own prompt work of at most `max_rows` rows; the rows done, which count in the step's budget."""
        ...

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget, in order; `NO_DRAFT` where it has none."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn what was accepted, and roll own state back to it."""
        ...

    def finish(self, request: DraftRequest) -> None:
        """Forget a choice and free its state."""
        ...

    def check(self) -> None:
        """Raise on a broken invariant, such as state left of a finished choice."""
        ...
