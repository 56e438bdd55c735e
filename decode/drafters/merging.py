"""Several drafts of one choice as one tree, and what became of the tree as what became of each draft.

Where children are deterministic, or drawn with the noise of the target, equal tokens under one parent are one node.
Under rejection they stay siblings, each tried with the d that it was drawn from (Miao et al. 2023); what was drafted
behind any of them is placed behind the first, which is tried first. That they are equal is known before anything
behind them is drawn, so the verification stays exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.draft import NO_DRAFT, Draft


def merge_drafts(drafts: Sequence[Draft], *, keep_equal: bool) -> Draft:
    """One tree of all drafts, in their order; `keep_equal`: equal siblings of different drafts stay apart.

    Each of the sources of each draft is a source of its own in the tree. Auxiliary rows of the drafts follow one
    another. One draft alone is returned as it is; where there is none, the first fault is.
    """
    proposing = [draft for draft in drafts if draft.num_rows]
    if not proposing:
        return next((draft for draft in drafts if draft.fault), NO_DRAFT)
    if len(proposing) == 1:
        return proposing[0]
    tree = _Merged(keep_equal)
    rows = [tree.add(source, draft) for source, draft in enumerate(drafts)]
    for draft, own_rows in zip(drafts, rows, strict=True):
        tree.add_auxiliary(draft, own_rows)
    return Draft(
        token_ids=tuple(tree.token_ids),
        parents=tuple(tree.parents),
        draft_probs=_merged_probs(tree.probs, tree.token_ids),
        auxiliary_token_ids=tuple(tree.auxiliary_ids),
        auxiliary_parents=tuple(tree.auxiliary_parents),
        without_replacement=any(draft.without_replacement for draft in proposing),
        sources=tuple(tree.sources) if keep_equal else (),
    )


def own_part(
    draft: Draft, verified: Draft, accepted_ids: Sequence[int], *, with_auxiliary: bool
) -> tuple[Draft, tuple[int, ...]]:
    """A draft as far as it is in the tree that was verified, and the rows of it that were accepted.

    `accepted_ids`: tokens of the accepted path. Nodes of `draft` that `verified` lacks, having been cut, are left out,
    and so are its auxiliary rows unless `with_auxiliary`, that is where those of all drafts were evaluated. Rows are
    those of the draft returned.
    """
    known = _children(verified)
    rows, kept = {0: 0}, {0: 0}
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        row = known.get((rows[parent], token_id)) if parent in rows else None
        if row is not None:
            rows[node + 1] = row
            kept[node + 1] = len(kept)
    if not with_auxiliary and draft.auxiliary_token_ids:
        draft = replace(draft, auxiliary_token_ids=(), auxiliary_parents=())
    if len(kept) <= len(draft.token_ids):
        draft = _only(draft, kept)
    children = _children(draft)
    accepted: list[int] = []
    for token_id in accepted_ids:
        child = children.get((accepted[-1] if accepted else 0, token_id))
        if child is None:
            break
        accepted.append(child)
    return draft, tuple(accepted)


class _Merged:
    """The tree so far. `first` maps (parent, token) to the first row that holds it there."""

    def __init__(self, keep_equal: bool) -> None:
        self._keep_equal = keep_equal
        self._first: dict[tuple[int, int], int] = {}
        self._source_ids: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.sources: list[int] = []
        self.probs: list[Tensor | None] = []
        self.auxiliary_ids: list[int] = []
        self.auxiliary_parents: list[int] = []

    def add(self, source: int, draft: Draft) -> list[int]:
        """The merged row behind which each row of the draft has its children."""
        rows = [0]
        for node, (token_id, own_parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            parent = rows[own_parent]
            first = self._first.get((parent, token_id))
            if first is None or self._keep_equal:
                self.token_ids.append(token_id)
                self.parents.append(parent)
                own_source = draft.sources[node] if draft.sources else 0
                self.sources.append(self._source_ids.setdefault((source, own_source), len(self._source_ids)))
                self.probs.append(None if draft.draft_probs is None else draft.draft_probs[node])
                first = self._first.setdefault((parent, token_id), len(self.token_ids))
            rows.append(first)
        return rows

    def add_auxiliary(self, draft: Draft, rows: Sequence[int]) -> None:
        """Called when all nodes of all drafts are in."""
        own_nodes = len(draft.token_ids)
        offset = len(self.token_ids) + len(self.auxiliary_ids) - own_nodes
        self.auxiliary_ids += draft.auxiliary_token_ids
        self.auxiliary_parents += [
            rows[parent] if parent <= own_nodes else parent + offset for parent in draft.auxiliary_parents
        ]


def _merged_probs(probs: Sequence[Tensor | None], token_ids: Sequence[int]) -> Tensor | None:
    """[nodes, vocabulary]; rows of deterministic nodes are one-hot. None where all are deterministic."""
    widths = [row.shape[0] for row in probs if row is not None]
    if not widths:
        return None
    merged = torch.zeros(len(probs), widths[0])
    for node, (row, token_id) in enumerate(zip(probs, token_ids, strict=True)):
        if row is None:
            merged[node, token_id] = 1.0
        else:
            merged[node] = row
    return merged


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """The row of each token under each parent's row; of equal siblings the first."""
    children: dict[tuple[int, int], int] = {}
    for row, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True), start=1):
        children.setdefault((parent, token_id), row)
    return children


def _only(draft: Draft, kept: Mapping[int, int]) -> Draft:
    """Rows that are keys of `kept`, renumbered as it says, and the auxiliary rows, none of whose parents is lost."""
    nodes = [row - 1 for row in kept if row]
    num_lost = len(draft.token_ids) - len(nodes)
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node] for node in nodes),
        parents=tuple(kept[draft.parents[node]] for node in nodes),
        draft_probs=None if draft.draft_probs is None or not nodes else draft.draft_probs[nodes],
        auxiliary_parents=tuple(
            kept[parent] if parent <= len(draft.token_ids) else parent - num_lost
            for parent in draft.auxiliary_parents
        ),
        sources=tuple(draft.sources[node] for node in nodes) if draft.sources else (),
    )
