"""Medusa-1 (Cai et al. 2024): heads beside the target's own, each of which says one of the next tokens at once.

All heads of all requests are one product over the target's last hidden state and one over its output matrix, cut to the
ids that may be drafted: a draft of any depth costs the same, and there is nothing to keep of a request but one hidden
state. Heads that others trained have an output matrix each, and a draft reads one for every depth. What a head says
does not depend on the tokens drafted before, so a draft is a tree over the product of the heads' distributions
(`product_tree.py`), and penalties see no draft path.

Proposals are deterministic. Where the answer is sampled with shared noise, the tokens of a depth are ranked by
log d + gumbel of that position, which is the same noise for every parent; under rejection by d alone: one-hot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from core.drafter_settings import MedusaSettings
from core.records import SamplingParams
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.head_drafter import NOT_FINITE
from decode.drafters.medusa_artifact import KIND, MAX_WIDTH, MedusaWeights, read_weights
from decode.drafters.product_tree import Level, TreeShape, best_shape
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.reduced_head import takes_the_largest
from decode.sampling.draft_noise import DraftDraw, draw_children
from engine.engine import Engine
from engine.linear import Linear, pack
from engine.pointwise import TorchPointwise


@dataclass(slots=True)
class _Wanted:
    """One draft in the making. `depth`: levels of it; `width`: children of a node at most."""

    index: int
    request: DraftRequest
    depth: int
    width: int
    max_nodes: int
    levels: list[Level]
    measured: bool = False
    broken: bool = False


class MedusaDrafter:
    """See the module. Keeps of each request the target's hidden state of its last computed token."""

    name = KIND

    def __init__(self, engine: Engine, weights: MedusaWeights, settings: MedusaSettings) -> None:
        self._num_heads, self._hidden_dim = weights.bias.shape
        dtype, plan = engine.kv.layout.dtype, engine.weights.row_plan
        with torch.inference_mode():
            blocks = weights.weight.reshape(-1, self._hidden_dim).to(dtype)
            self._blocks = Linear(pack(blocks, settings.quantisation), plan)
            self._bias = weights.bias.to(dtype)
            own = weights.matrices
            matrices = [engine.output_rows(weights.draft_ids)] if own is None else list(own.to(dtype))
            self._outputs = [Linear(pack(matrix, settings.quantisation), plan) for matrix in matrices]
            self._shared_output = own is None
        self._norm = TorchPointwise(engine.config.norm_epsilon)
        self._norm_weight = engine.weights.final_norm
        self._draft_ids = weights.draft_ids
        self._target_vocab = engine.config.vocab_size
        self.promised_rate = weights.promised_rate
        self._place = weights.place
        self._least = math.log(settings.min_probability) if settings.min_probability else -math.inf
        self._rank_scores = _rank_scores(weights.rank_rates, settings.tree)
        self._shapes: dict[tuple[tuple[int, ...], int], TreeShape] = {}
        self._states: dict[int, Tensor] = {}
        longest = min(settings.max_draft_length, self._num_heads)
        self.needs = DrafterNeeds(
            max_draft_length=longest,
            default_draft_length=min(settings.draft_length, longest),
            hidden_layers=(engine.config.num_layers - 1,),
            largest_position=engine.max_context - 1,
            max_draft_width=MAX_WIDTH,
            default_draft_width=min(settings.draft_width, MAX_WIDTH),
        )

    @classmethod
    def load(cls, settings: MedusaSettings, engine: Engine, tokenizer: Tokenizer) -> "MedusaDrafter":
        """Raises InvalidArgument naming file and field, FailedPrecondition for heads of another target."""
        return cls(engine, read_weights(settings, engine, tokenizer), settings)

    def start(self, request: DraftRequest) -> None:
        """Take a choice on: one row is read."""
        computed = len(request.history.token_ids) - 1
        self._states[request.key] = request.hidden(computed - 1, computed)[self._place, -1].clone()

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """A tree or chain for each budget, of all its requests in one forward."""
        drafts: list[Draft] = [NO_DRAFT] * len(budgets)
        wanted = [
            _Wanted(
                index, budget.request, depth, min(budget.request.draft_width, MAX_WIDTH), budget.max_nodes, []
            )
            for index, budget in enumerate(budgets)
            if (depth := min(budget.draft_length, budget.max_nodes, self._num_heads)) > 0
        ]
        if wanted:
            logits = self.logits([one.request for one in wanted], max(one.depth for one in wanted))
            self._find_levels(wanted, logits)
        for one in wanted:
            drafts[one.index] = Draft(fault=NOT_FINITE) if one.broken else self._tree(one)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the state of the last token that was computed."""
        for observation in observations:
            if observation.hidden_rows is not None:
                self._states[observation.request.key] = observation.hidden_rows[self._place, -1].clone()

    def finish(self, request: DraftRequest) -> None:
        """Drop the state."""
        self._states.pop(request.key, None)

    def check(self) -> None:
        """Called when idle: no state may be left."""
        if self._states:
            raise AssertionError(f"{self.name} keeps {len(self._states)} states of finished requests")

    def logits(self, requests: Sequence[DraftRequest], depth: int) -> Tensor:
        """What the first `depth` heads say: [requests, depth, draft_vocab] float32."""
        with torch.inference_mode():
            states = torch.stack([self._states[request.key] for request in requests])
            normed = self._norm.add_norm(states, None, self._norm_weight)
            blocks = self._blocks(normed).view(-1, self._num_heads, self._hidden_dim) + self._bias
            heads = normed[:, None] + functional.silu(blocks[:, :depth])
            if self._shared_output:
                rows = heads.reshape(-1, self._hidden_dim)
                return self._outputs[0](rows).float().view(len(requests), depth, -1)
            said = [self._outputs[head](heads[:, head].contiguous()) for head in range(depth)]
            return torch.stack(said, dim=1).float()

    def _find_levels(self, wanted: Sequence[_Wanted], logits: Tensor) -> None:
        plain: list[tuple[_Wanted, int]] = []
        drawn: list[tuple[_Wanted, int]] = []
        for row, one in enumerate(wanted):
            one.measured = one.request.sampling.greedy
            unmoved = takes_the_largest(_ranking(one.request), one.request.history.num_output)
            (plain if unmoved else drawn).append((one, row))
        if plain:
            self._take_largest(plain, logits)
        if drawn:
            self._draw(drawn, logits)

    def _take_largest(self, wanted: Sequence[tuple[_Wanted, int]], logits: Tensor) -> None:
        """Nothing moves the logits: their largest, ties to the lower id, without the rest of the vocabulary."""
        chosen = logits if len(wanted) == len(logits) else logits[[row for _, row in wanted]]
        count = min(max(one.width for one, _ in wanted) + 1, chosen.shape[-1])
        scores, places = torch.log_softmax(chosen, dim=-1).topk(count, dim=-1)
        places, order = places.sort(dim=-1)
        scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        token_ids = self._draft_ids[places.gather(-1, order)].tolist()
        finite = torch.isfinite(scores[..., 0]).all(dim=-1).tolist()
        for (one, _), ids, found, good in zip(wanted, token_ids, scores.tolist(), finite, strict=True):
            one.broken = not good
            one.levels = [
                Level(ids[depth][: one.width], found[depth][: one.width]) for depth in range(one.depth)
            ]

    def _draw(self, wanted: Sequence[tuple[_Wanted, int]], logits: Tensor) -> None:
        """Through the requests' pipelines over target ids, each depth with the noise of its position."""
        rows = [(one, row, depth) for one, row in wanted for depth in range(one.depth)]
        chosen = torch.stack([logits[row, depth] for _, row, depth in rows])
        wide = torch.full((len(rows), self._target_vocab), -torch.inf)
        wide.index_copy_(1, self._draft_ids, chosen)
        draws = [_draw_of(one.request, depth) for one, _, depth in rows]
        finite = torch.isfinite(chosen.sum(dim=-1)).tolist()
        ended: set[int] = set()
        for (one, _, _), children, good in zip(
            rows, draw_children(draws, wide, [one.width for one, _, _ in rows]), finite, strict=True
        ):
            one.broken |= not good
            if children is None or one.index in ended:
                ended.add(one.index)
            else:
                one.levels.append(Level(children.token_ids, children.scores))

    def _tree(self, wanted: _Wanted) -> Draft:
        if self._rank_scores is None or not wanted.measured:
            scores = [level.scores for level in wanted.levels]
            return best_shape(scores, wanted.max_nodes, self._least).filled(wanted.levels)
        sizes = tuple(len(level.token_ids) for level in wanted.levels)
        key = (sizes, wanted.max_nodes)
        shape = self._shapes.get(key)
        if shape is None:
            scores = [row[:size] for row, size in zip(self._rank_scores, sizes, strict=False)]
            shape = self._shapes[key] = best_shape(scores, wanted.max_nodes, self._least)
        return shape.filled(wanted.levels)


def _rank_scores(
    rates: Sequence[Sequence[float]] | None, tree: Literal["measured", "confident"]
) -> list[list[float]] | None:
    """Logarithms of measured rates, no rank above the one before it; None where trees follow the probabilities."""
    if rates is None or tree != "measured":
        return None
    scores: list[list[float]] = []
    for row in rates:
        falling: list[float] = []
        for rate in row:
            falling.append(min([*falling[-1:], math.log(max(rate, 1e-6))]))
        scores.append(falling)
    return scores


def _ranking(request: DraftRequest) -> SamplingParams:
    """By what the tokens of a depth are ranked: under rejection without noise, so that a draft is deterministic."""
    if request.verification in ("rejection", "block"):
        return replace(request.sampling, temperature=0.0)
    return request.sampling


def _draw_of(request: DraftRequest, depth: int) -> DraftDraw:
    """The draw `depth` tokens (from 0) behind the root; the tokens between are not known."""
    return DraftDraw(
        sampling=_ranking(request),
        seed=request.seed,
        choice=request.choice,
        position=len(request.history.token_ids) + depth,
        verification=request.verification,
        history=request.history,
    )
