"""Batches of features as heads read them, and the target's output matrix cut to what a head may say.

Everything of a batch is by token: row t is about token t of its rollout. A draft *start* s is where a request stands
when its planes are known up to token s and token s + 1 is its root: depth d (from 1) is about token s + 1 + d.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import torch
from torch import Tensor

from training.features import Features
from training.rollout_store import Rollout

_CHUNK_ROWS: Final = 256
_SHORTEST: Final = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rollouts.

    token_ids: Tensor  # [batch, tokens] int64
    planes: Tensor  # [batch, tokens, num_planes · hidden_dim]
    final: Tensor  # [batch, tokens, hidden_dim]: from row t follows how token t + 1 is distributed
    best_ids: Tensor  # [batch, tokens] int64: the target's best token t + 1 (see `Features`)
    counted: Tensor  # [batch, tokens] bool: token t is one to be learnt
    """

    token_ids: Tensor
    planes: Tensor
    final: Tensor
    best_ids: Tensor
    counted: Tensor


def make_batch(found: Sequence[Features], max_tokens: int, first: int | None = None) -> Batch:
    """Pads the features of rollouts to one length; longer ones are cut to `max_tokens`.

    What counts is the answer or, where `first` is given, every token from that one on, as most of a user turn are the
    target's own words as well.
    """
    lengths = [min(len(features.rollout.token_ids), max_tokens) for features in found]
    shape = (len(found), max(lengths))
    hidden_dim = found[0].final.shape[1]
    token_ids, best_ids = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    planes = torch.zeros(*shape, found[0].planes.shape[1] * hidden_dim)
    final = torch.zeros(*shape, hidden_dim)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, (features, length) in enumerate(zip(found, lengths, strict=True)):
        token_ids[row, :length] = torch.tensor(features.rollout.token_ids[:length])
        best_ids[row, :length] = features.best_ids[:length]
        planes[row, :length] = features.planes[:length].flatten(1)
        final[row, :length] = features.final[:length]
        answer_start = features.rollout.answer_start
        counted[row, answer_start if first is None else min(first, answer_start) : length] = True
    return Batch(token_ids, planes, final, best_ids, counted)


def common_start(rollouts: Sequence[Rollout]) -> int:
    """Tokens that all of them begin with: the head of the chat template."""
    columns = zip(*(rollout.token_ids[: rollout.answer_start] for rollout in rollouts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


def trained_tokens(rollout: Rollout, max_tokens: int) -> int:
    """Answer tokens of a rollout that training sees; none of one that is too short to draft in."""
    num_tokens = min(len(rollout.token_ids), max_tokens)
    return max(0, num_tokens - rollout.answer_start) if num_tokens >= _SHORTEST else 0


def draft_vocabulary(rollouts: Sequence[Rollout], size: int) -> list[int]:
    """The `size` ids that occur most in rollouts, ascending; rarer ones fill up in order of id."""
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        counts.update(rollout.token_ids)
    chosen = [token_id for token_id, _ in counts.most_common(size)]
    known = set(chosen)
    filler = (token_id for token_id in range(size + len(known)) if token_id not in known)
    while len(chosen) < size:
        chosen.append(next(filler))
    return sorted(chosen)


class ReducedTarget:
    """The target's head over the ids that a draft may hold.

    target_ids: Tensor  # [draft_vocab] int64; matrix: Tensor  # [draft_vocab, hidden_dim]
    draftable: Tensor  # [vocabulary] bool
    """

    def __init__(self, target_ids: Tensor, output: Tensor) -> None:
        """output: Tensor  # [vocabulary, hidden_dim]"""
        self.target_ids = target_ids
        self.matrix = output[target_ids]
        self.draftable = torch.zeros(len(output), dtype=torch.bool)
        self.draftable[target_ids] = True

    def logits(self, final: Tensor) -> Tensor:
        """[rows, hidden_dim] → [rows, draft_vocab] float32."""
        dtype = computing_dtype()
        return (final.to(dtype) @ self.matrix.to(dtype).T).float()

    def probs(self, final: Tensor) -> Tensor:
        """[rows, hidden_dim] → [rows, draft_vocab] float32: the target's distribution, renormalised over these ids."""
        probs = torch.empty(len(final), len(self.matrix))
        for start in range(0, len(final), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            torch.softmax(self.logits(final[rows]), dim=-1, out=probs[rows])
        return probs


class TargetHead:
    """The target's embedding, output matrix and last norm.

    embedding: Tensor  # [vocabulary, hidden_dim]; output: Tensor  # [vocabulary, hidden_dim]
    final_norm: Tensor  # [hidden_dim]; 1 where none is given
    frequencies: Tensor | None  # [head_dim / 2]: its rotary ones, scaled as it scales them; None: a head's own
    """

    def __init__(
        self,
        embedding: Tensor,
        output: Tensor,
        final_norm: Tensor | None = None,
        frequencies: Tensor | None = None,
    ) -> None:
        self.embedding = embedding
        self.output = output
        self.final_norm = torch.ones(embedding.shape[1]) if final_norm is None else final_norm
        self.frequencies = frequencies
        self._reduced: ReducedTarget | None = None

    def reduced(self, target_ids: Tensor) -> ReducedTarget:
        """For `target_ids`; kept for the next call, as a head asks for the same ids at every batch."""
        if self._reduced is None or not torch.equal(self._reduced.target_ids, target_ids):
            self._reduced = ReducedTarget(target_ids.clone(), self.output)
        return self._reduced


@dataclass(frozen=True, slots=True)
class Wanted:
    """The places of a batch that a loss is about, the same ones at every depth, and what is to be said there.

    rows: Tensor  # [n] int64, in the batch; tokens: Tensor  # [n] int64: token t of that row
    probs: Tensor  # [n, draft_vocab] float32: how the target sees that token
    """

    rows: Tensor
    tokens: Tensor
    probs: Tensor


@torch.no_grad()
def wanted_of(batch: Batch, target: ReducedTarget, depth: int) -> Wanted:
    """Tokens that count, whose best id may be drafted and that drafts of all depths up to `depth` reach.

    Computed once a batch: every depth, and every head of several, is held against the same distribution.
    """
    counted = batch.counted.clone()
    counted[:, : depth + 1] = False
    counted[:, 1:] &= target.draftable[batch.best_ids[:, :-1]]
    rows, tokens = counted.nonzero(as_tuple=True)
    return Wanted(rows, tokens, target.probs(batch.final[rows, tokens - 1]))


def counted_places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows and tokens [n] int64 of all tokens that count and have one before them."""
    counted = batch.counted.clone()
    counted[:, :1] = False
    rows, tokens = counted.nonzero(as_tuple=True)
    return rows, tokens


def computing_dtype() -> torch.dtype:
    """What products are computed in here: autocast's type, or float32 outside of it."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
