"""What drafters propose and verification decides. Row numbering is that of `engine/step_batch.py`."""

from dataclasses import dataclass

from torch import Tensor

from core.records import SamplingParams, TokenLogprobs, VerificationMode
from decode.sampling.history import TokenHistory


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of proposed tokens behind one committed token (the root, row 0).

    Node j is row j + 1. `parents[j]` is the *row* of its parent: 0 for the root, else ≤ j.
    `draft_probs` [nodes, vocabulary] float32 is the distribution that node j was really drawn from; None:
    deterministic proposals, one-hot. In a tree with both, the row of a deterministic node is one-hot at its token.
    `sources`: which drafter (or which of several draws with replacement) node j is of; empty: one for all.
    `without_replacement`: siblings of one source are distinct and were drawn without replacement; each of their rows
    is d before the first of them was drawn. Else equal siblings keep their multiplicity, each with its own row.
    Siblings stand in the order drawn. Under rejection nobody may prune or re-rank *sampled* nodes by their tokens or
    scores: which siblings are kept, and in what order, depends only on what was known before they were drawn. In
    invariant mode siblings are distinct.
    `auxiliary_token_ids`, `auxiliary_parents`: rows evaluated for the drafter only, after all nodes. Their
    parents are rows too: the root, a node or an earlier auxiliary row. They may be deeper than the nodes, but must
    end inside the target's context.
    `fault`: why there is no draft though there should be one; counted, and told to the caller.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    auxiliary_token_ids: tuple[int, ...] = ()
    auxiliary_parents: tuple[int, ...] = ()
    without_replacement: bool = False
    sources: tuple[int, ...] = ()
    fault: str = ""

    def depths(self) -> tuple[int, ...]:
        """Depth of each node, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == 0 else depths[parent - 1] + 1)
        return tuple(depths)

    def check(self, vocab_size: int) -> None:
        """Raises ValueError for what is no tree of ids below `vocab_size`: no step could take it."""
        token_ids = (*self.token_ids, *self.auxiliary_token_ids)
        parents = (*self.parents, *self.auxiliary_parents)
        if len(self.token_ids) != len(self.parents) or len(token_ids) != len(parents):
            raise ValueError(f"{len(token_ids)} draft tokens have {len(parents)} parents")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise ValueError(f"a draft token is none of {vocab_size} ids")
        if not all(0 <= parent <= row for row, parent in enumerate(parents)):
            raise ValueError("a draft token stands before its parent")
        if self.draft_probs is not None and self.draft_probs.shape[0] != len(self.token_ids):
            raise ValueError(
                f"{len(self.token_ids)} nodes have {self.draft_probs.shape[0]} rows of draft_probs"
            )
        if self.sources and len(self.sources) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} nodes have {len(self.sources)} sources")

    @property
    def num_rows(self) -> int:
        """Rows behind the root: nodes and auxiliary rows."""
        return len(self.token_ids) + len(self.auxiliary_token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the row before it."""
        return all(parent == row for row, parent in enumerate(self.parents))


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One choice in a step. `position` is the absolute position of the token drawn at the root.

    `logits_start` is the logits row of the root; node j's row is logits_start + 1 + j.
    `seed` and `choice` key the noise; `history` holds prompt and output up to the root, root included.
    `rollback_threshold`: -log t(x) up to which a drafted x is kept, whatever `verification` says (approximate; None:
    exact); see `verification/relaxed.py`.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    history: TokenHistory
    position: int
    logits_start: int
    draft: Draft = NO_DRAFT
    verification: VerificationMode = "invariant"
    rollback_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step yields for one choice.

    `accepted_rows`: rows of the accepted path, root excluded, by depth. `token_ids`: the accepted
    tokens and one more. `logprobs`: as many, when asked for. `error`: the constraint that left
    nothing to draw; then `token_ids` ends before it.
    """

    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
