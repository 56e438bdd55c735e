"""Drafts with a head on the target's hidden states (EAGLE-1, -2, -3, MTP): chains and trees, all requests together.

The head's cache of a request holds a row for each token whose target state is known, that is all but the last one. What
a step accepted is computed in the next proposal's first forward, whose last row gives the first level of the tree; each
further level is one forward over the nodes that go on. After a prompt, or a long time at K = 0, `prefill` catches up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.control.tree_shape import TreeShape
from decode.draft import NO_DRAFT, Draft
from decode.drafters.draft_tree import DraftTree, Growth, Node, ShapeGrowth, confident_growth_for
from decode.drafters.draws import draw_at
from decode.drafters.head_model import HeadModel, HeadRows
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.reduced_head import is_plain_argmax
from decode.sampling.draft_noise import DraftDraw, DrawnChildren, draw_children
from engine.block_table import BlockTable
from engine.kv_cache import OutOfBlocks
from engine.step_batch import SequenceStep

NOT_FINITE = "draft_not_finite"

CATCH_UP_ROWS = 64
"""Rows that a proposal's first forward may compute; a request further behind waits for `prefill`."""


@dataclass(slots=True, eq=False)
class _State:
    request: DraftRequest
    table: BlockTable


@dataclass(slots=True, eq=False)
class _Proposal:
    """One draft in the making: row 0 of its tree is the last token whose target state is known."""

    state: _State
    tree: DraftTree
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Open:
    """A row of a tree whose `width` children are drawn from `row` of the logits."""

    proposal: _Proposal
    node: Node
    width: int
    row: int


class HeadDrafter:
    """See the module. `target_vocab`: width of the target's logits. `promised_rate`: see `decode/self_check.py`."""

    def __init__(
        self,
        name: str,
        model: HeadModel,
        needs: DrafterNeeds,
        target_vocab: int,
        min_probability: float,
        promised_rate: float | None = None,
    ) -> None:
        self.name = name
        self.promised_rate = promised_rate
        self.needs = needs
        self._model = model
        self._kv = model.kv
        self._target_vocab = target_vocab
        self._min_probability = min_probability
        self._states: dict[int, _State] = {}

    def start(self, request: DraftRequest) -> None:
        """Take a choice on; its prompt waits for `prefill`."""
        self._states[request.key] = _State(request, self._kv.open())

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """Catch up where a proposal could not, the oldest requests first; rows done."""
        sequences: list[SequenceStep] = []
        features: list[Tensor] = []
        tables: list[BlockTable] = []
        rows_done = 0
        for state in self._states.values():
            rows = min(_lag(state) - 1, max_rows - rows_done)
            if _lag(state) <= CATCH_UP_ROWS or rows <= 0:
                continue
            start = state.table.num_tokens
            if not self._reserved(state, start + rows):
                continue
            known = state.request.history.token_ids[start + 1 : start + 1 + rows]
            sequences.append(SequenceStep(state.table, start, known, logit_rows="none"))
            features.append(state.request.hidden(start, start + rows))
            tables.append(state.table)
            rows_done += rows
        if sequences:
            self._model.forward(sequences, self._model.features(torch.cat(features, dim=1)))
        for table, sequence in zip(tables, sequences, strict=True):
            self._kv.commit(table, sequence.start + len(sequence.token_ids))
        return rows_done

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """A tree or chain for each budget; none for a request that lags or has no room.

        Best first, unless verification weighs the draft by its probabilities: then of a shape that the budget decides.
        """
        return self._propose(
            budgets, [confident_growth_for(budget, self._min_probability) for budget in budgets]
        )

    def propose_shapes(self, budgets: Sequence[DraftBudget], shapes: Sequence[TreeShape]) -> Sequence[Draft]:
        """As `propose`, in the shape given for each budget, which keeps to that budget."""
        return self._propose(budgets, [ShapeGrowth(shape) for shape in shapes])

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing: what was accepted is computed from its planes in the next proposal."""

    def finish(self, request: DraftRequest) -> None:
        """Free the cache of a choice."""
        state = self._states.pop(request.key, None)
        if state is not None:
            self._kv.close(state.table)

    def check(self) -> None:
        """Called when idle: no block may be used."""
        self._kv.check()
        if self._states or self._kv.stats().used:
            raise AssertionError(f"{self.name} keeps {len(self._states)} caches of finished requests")

    def cached_tokens(self, request: DraftRequest) -> int:
        """Rows of a choice that are valid in the head's cache."""
        return self._states[request.key].table.num_tokens

    def _propose(self, budgets: Sequence[DraftBudget], growths: Sequence[Growth]) -> list[Draft]:
        """Grow the trees in common forwards."""
        proposals = [self._begin(budget, growth) for budget, growth in zip(budgets, growths, strict=True)]
        begun = [proposal for proposal in proposals if proposal is not None]
        live, answer = begun, self._first(begun)
        while live:
            asked = [proposal.tree.open for proposal in live]
            self._take(live, answer.logits)
            parents = _answered_parents(live, asked)
            live = [proposal for proposal in live if proposal.tree.open and not proposal.broken]
            if live:
                features = answer.outputs.index_select(0, torch.tensor(parents))
                answer = self._model.forward([_next_level(proposal) for proposal in live], features)
        for proposal in begun:
            self._kv.commit(proposal.state.table, len(proposal.state.request.history.token_ids) - 1)
        return [_draft_of(proposal) for proposal in proposals]

    def _begin(self, budget: DraftBudget, growth: Growth) -> _Proposal | None:
        token_ids = budget.request.history.token_ids
        state = self._states[budget.request.key]
        if _lag(state) == 0 < state.table.num_tokens:  # asked again before anything was observed
            self._kv.commit(state.table, state.table.num_tokens - 1, keep_reserved=True)
        if min(budget.draft_length, budget.max_nodes) < 1 or not 1 <= _lag(state) <= CATCH_UP_ROWS:
            return None
        tree = DraftTree(token_ids[-1], growth)
        if not any(tree.widths()) or not self._reserved(state, len(token_ids) - 2 + tree.max_rows):
            return None
        return _Proposal(state, tree)

    def _first(self, proposals: Sequence[_Proposal]) -> HeadRows:
        """The rows of tokens whose target state became known; the last one's answer is the first level."""
        if not proposals:
            return HeadRows(torch.empty(0), torch.empty(0))
        sequences: list[SequenceStep] = []
        planes: list[Tensor] = []
        for proposal in proposals:
            state = proposal.state
            start, token_ids = state.table.num_tokens, state.request.history.token_ids
            sequences.append(SequenceStep(state.table, start, token_ids[start + 1 :], logit_rows="last"))
            planes.append(state.request.hidden(start, len(token_ids) - 1))
        answer = self._model.forward(sequences, self._model.features(torch.cat(planes, dim=1)))
        for proposal in proposals:
            last = len(proposal.state.request.history.token_ids) - 2
            self._kv.commit(proposal.state.table, last, keep_reserved=True)
        return answer

    def _take(self, live: Sequence[_Proposal], logits: Tensor) -> None:
        """Draw the children of every open row; the rows of `logits` are those rows in order."""
        rows: list[_Open] = []
        for proposal in live:
            for node, width in zip(proposal.tree.open, proposal.tree.widths(), strict=True):
                rows.append(_Open(proposal, node, width, len(rows)))
        draws = [draw_at(one.proposal.state.request, one.node.path()) for one in rows]
        plain = [one for one, draw in zip(rows, draws, strict=True) if is_plain_argmax(draw)]
        drawn: list[DrawnChildren | None] = [None] * len(rows)
        if plain:
            self._take_largest(plain, logits, drawn)
        if len(plain) < len(rows):
            chosen = {one.row for one in plain}
            self._draw_noisy([one for one in rows if one.row not in chosen], draws, logits, drawn)
        children = iter(drawn)
        for proposal in live:
            proposal.tree.take([next(children) for _ in proposal.tree.open], self._target_vocab)

    def _take_largest(self, rows: Sequence[_Open], logits: Tensor, drawn: list[DrawnChildren | None]) -> None:
        """Greedy without anything that moves logits: the largest of the reduced vocabulary."""
        width = max(one.width for one in rows)
        chosen = logits if len(rows) == len(logits) else logits[[one.row for one in rows]]
        scores, places = torch.log_softmax(chosen, dim=-1).topk(min(width, chosen.shape[1]), dim=-1)
        token_ids = self._model.draft_ids[places].tolist()
        finite = torch.isfinite(scores[:, 0]).tolist()
        for one, ids, found, good in zip(rows, token_ids, scores.tolist(), finite, strict=True):
            one.proposal.broken |= not good
            drawn[one.row] = DrawnChildren(tuple(ids[: one.width]), tuple(found[: one.width]))

    def _draw_noisy(
        self,
        rows: Sequence[_Open],
        draws: Sequence[DraftDraw],
        logits: Tensor,
        drawn: list[DrawnChildren | None],
    ) -> None:
        """Through the requests' pipelines, over target ids, with the noise that their verification wants.

        Where the draft is weighed, a row whose distribution promises too little ends its path: a look at the parent's
        distribution, never at what was drawn from it.
        """
        places = [one.row for one in rows]
        wide = torch.full((len(rows), self._target_vocab), -torch.inf)
        wide.index_copy_(1, self._model.draft_ids, logits[places])
        found = draw_children([draws[place] for place in places], wide, [one.width for one in rows])
        for one, children in zip(rows, found, strict=True):
            if children is None:
                one.proposal.broken |= not bool(torch.isfinite(logits[one.row]).all())
            elif children.draft_probs is None or float(children.draft_probs.max()) >= self._min_probability:
                drawn[one.row] = children

    def _reserved(self, state: _State, num_tokens: int) -> bool:
        try:
            self._kv.reserve(state.table, num_tokens)
        except OutOfBlocks:
            return False
        return True


def _lag(state: _State) -> int:
    """Rows that are missing: the state of every token but the last is known."""
    return len(state.request.history.token_ids) - 1 - state.table.num_tokens


def _answered_parents(live: Sequence[_Proposal], asked: Sequence[Sequence[Node]]) -> list[int]:
    """For each row that is open now, the row of the last answer that belongs to its parent.

    The answer had a row for every row in `asked`, in order.
    """
    parents: list[int] = []
    first_row = 0
    for proposal, nodes in zip(live, asked, strict=True):
        if not proposal.broken:
            rows = {id(node): first_row + place for place, node in enumerate(nodes)}
            parents.extend(rows[id(node.parent)] for node in proposal.tree.open)
        first_row += len(nodes)
    return parents


def _next_level(proposal: _Proposal) -> SequenceStep:
    """The open rows, behind those of the levels before."""
    table, tree = proposal.state.table, proposal.tree
    token_ids = [node.token_id for node in tree.rows]
    return SequenceStep(table, table.num_tokens, token_ids, tree.parents(), num_written=tree.num_written)


def _draft_of(proposal: _Proposal | None) -> Draft:
    if proposal is None:
        return NO_DRAFT
    return Draft(fault=NOT_FINITE) if proposal.broken else proposal.tree.draft()
