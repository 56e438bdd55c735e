"""Drafts with a head on the target's hidden states (EAGLE-1, -2, -3, MTP): chains and trees, all requests together.

The head's cache of a request holds a row for each token whose target state is known, that is all but the last one. What
a step accepted is computed in the next proposal's first forward, whose last row gives the first level of the tree; each
further level is one forward over the nodes that go on. After a prompt, or a long time at K = 0, `prefill` catches up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.draft import NO_DRAFT, Draft
from decode.drafters.head_model import HeadModel, HeadRows
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.tree_growth import TreeGrowth
from decode.sampling.draft_noise import DraftDraw, draw_children
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
    """One draft in the making. `token_ids` and `parents`: rows of the head's tree, row 0 the last known state;
    `rows`: the head's row of each node that was evaluated."""

    index: int
    state: _State
    growth: TreeGrowth
    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [0])
    rows: dict[int, int] = field(default_factory=lambda: {-1: 0})
    num_written: int = 0
    broken: bool = False


class HeadDrafter:
    """See the module. `target_vocab`: width of the target's logits."""

    def __init__(
        self, name: str, model: HeadModel, needs: DrafterNeeds, target_vocab: int, min_probability: float
    ) -> None:
        self.name = name
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
            features.append(self._model.features(state.request.hidden(start, start + rows)))
            tables.append(state.table)
            rows_done += rows
        if sequences:
            self._model.forward(sequences, torch.cat(features))
        for table, sequence in zip(tables, sequences, strict=True):
            self._kv.commit(table, sequence.start + len(sequence.token_ids))
        return rows_done

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """A tree or chain for each budget; none for a request that lags or has no room."""
        drafts: list[Draft] = [NO_DRAFT] * len(budgets)
        proposals = [
            proposal
            for index, budget in enumerate(budgets)
            if (proposal := self._begin(index, budget)) is not None
        ]
        live, answer = proposals, self._first(proposals)
        while live:
            self._draw(live, answer.logits)
            live, parents = _close_level(live)
            if live:
                features = answer.outputs.index_select(0, torch.tensor(parents))
                answer = self._model.forward([_next_level(proposal) for proposal in live], features)
        for proposal in proposals:
            self._kv.commit(proposal.state.table, len(proposal.state.request.history.token_ids) - 1)
            drafts[proposal.index] = (
                proposal.growth.draft() if not proposal.broken else Draft(fault=NOT_FINITE)
            )
        return drafts

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

    def _begin(self, index: int, budget: DraftBudget) -> _Proposal | None:
        request = budget.request
        state = self._states[request.key]
        depth = min(budget.draft_length, budget.max_nodes)
        if depth < 1 or not 1 <= _lag(state) <= CATCH_UP_ROWS:
            return None
        width = min(request.draft_width, budget.max_nodes)
        sampled = request.verification in ("rejection", "block") and not request.sampling.greedy
        growth = TreeGrowth(depth, width, budget.max_nodes, not sampled, self._min_probability)
        known = len(request.history.token_ids) - 1
        if not self._reserved(state, known + (depth - 1) * width):
            return None
        return _Proposal(index, state, growth, request.history.token_ids[-1:])

    def _first(self, proposals: Sequence[_Proposal]) -> HeadRows:
        """The rows of tokens whose target state became known; the last one's answer is the first level."""
        if not proposals:
            return HeadRows(torch.empty(0), torch.empty(0))
        sequences: list[SequenceStep] = []
        features: list[Tensor] = []
        for proposal in proposals:
            state = proposal.state
            start, token_ids = state.table.num_tokens, state.request.history.token_ids
            sequences.append(SequenceStep(state.table, start, token_ids[start + 1 :], logit_rows="last"))
            features.append(state.request.hidden(start, len(token_ids) - 1))
        answer = self._model.forward(sequences, self._model.features(torch.cat(features, dim=1)))
        for proposal in proposals:
            table = proposal.state.table
            last = len(proposal.state.request.history.token_ids) - 2
            self._kv.commit(table, last, keep_reserved=True)
            proposal.num_written = 1
        return answer

    def _draw(self, live: Sequence[_Proposal], logits: Tensor) -> None:
        """Children for every node of every frontier; the rows of `logits` are those nodes in order."""
        plain: list[tuple[_Proposal, int, int]] = []
        drawn: list[tuple[_Proposal, int, int]] = []
        row = 0
        for proposal in live:
            request = proposal.state.request
            chosen = plain if _takes_the_largest(request) else drawn
            for place in range(len(proposal.growth.frontier)):
                chosen.append((proposal, place, row))
                row += 1
        if plain:
            self._take_largest(plain, logits)
        if drawn:
            self._draw_noisy(drawn, logits)

    def _take_largest(self, nodes: Sequence[tuple[_Proposal, int, int]], logits: Tensor) -> None:
        """Greedy without anything that moves logits: the largest of the reduced vocabulary."""
        width = max(proposal.growth.children_wanted for proposal, _, _ in nodes)
        chosen = logits if len(nodes) == len(logits) else logits[[row for _, _, row in nodes]]
        scores, places = torch.log_softmax(chosen, dim=-1).topk(min(width, chosen.shape[1]), dim=-1)
        token_ids = self._model.draft_ids[places].tolist()
        finite = torch.isfinite(scores[:, 0]).tolist()
        for (proposal, place, _), ids, found, good in zip(
            nodes, token_ids, scores.tolist(), finite, strict=True
        ):
            wanted = proposal.growth.children_wanted
            proposal.broken |= not good
            proposal.growth.add(place, ids[:wanted], found[:wanted], None)

    def _draw_noisy(self, nodes: Sequence[tuple[_Proposal, int, int]], logits: Tensor) -> None:
        """Through the request's pipeline, over target ids, with the noise that its verification wants."""
        rows = [row for _, _, row in nodes]
        wide = torch.full((len(rows), self._target_vocab), -torch.inf)
        wide.index_copy_(1, self._model.draft_ids, logits[rows])
        draws = [_draw_of(proposal, place) for proposal, place, _ in nodes]
        widths = [proposal.growth.children_wanted for proposal, _, _ in nodes]
        for (proposal, place, _), children in zip(nodes, draw_children(draws, wide, widths), strict=True):
            if children is None:
                proposal.broken |= not bool(torch.isfinite(logits).all())
                continue
            probs = children.draft_probs
            if probs is not None and float(probs.max()) < self._min_probability:
                continue
            proposal.growth.add(place, children.token_ids, children.scores, probs)

    def _reserved(self, state: _State, num_tokens: int) -> bool:
        try:
            self._kv.reserve(state.table, num_tokens)
        except OutOfBlocks:
            return False
        return True


def _lag(state: _State) -> int:
    """Rows that are missing: the state of every token but the last is known."""
    return len(state.request.history.token_ids) - 1 - state.table.num_tokens


def _takes_the_largest(request: DraftRequest) -> bool:
    """Whether the request's draws are the largest raw logits."""
    sampling = request.sampling
    return (
        sampling.greedy
        and request.grammar is None
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and not sampling.logit_bias
        and not sampling.bad_word_ids
        and sampling.min_tokens <= request.history.num_output
    )


def _close_level(live: Sequence[_Proposal]) -> tuple[list[_Proposal], list[int]]:
    """Who goes on, and for each of their new nodes the row of the last answer that belongs to its parent.

    The answer had a row for every node of the frontiers that it was asked about, in order.
    """
    going_on: list[_Proposal] = []
    parents: list[int] = []
    first_row = 0
    for proposal in live:
        growth = proposal.growth
        asked = growth.frontier
        if not proposal.broken and growth.close_level():
            going_on.append(proposal)
            parents.extend(first_row + asked.index(growth.nodes[node].parent) for node in growth.frontier)
        first_row += len(asked)
    return going_on, parents


def _next_level(proposal: _Proposal) -> SequenceStep:
    """The nodes that go on, as rows behind those of the levels before."""
    growth = proposal.growth
    for node in growth.frontier:
        proposal.rows[node] = len(proposal.token_ids)
        proposal.parents.append(proposal.rows[growth.nodes[node].parent])
        proposal.token_ids.append(growth.nodes[node].token_id)
    table, num_written = proposal.state.table, proposal.num_written
    proposal.num_written = len(proposal.token_ids)
    return SequenceStep(
        table, table.num_tokens, proposal.token_ids, proposal.parents, num_written=num_written
    )


def _draw_of(proposal: _Proposal, place: int) -> DraftDraw:
    request = proposal.state.request
    path = proposal.growth.path(proposal.growth.frontier[place])
    return DraftDraw(
        sampling=request.sampling,
        seed=request.seed,
        choice=request.choice,
        position=len(request.history.token_ids) + len(path),
        verification=request.verification,
        history=request.history,
        path=path,
    )
