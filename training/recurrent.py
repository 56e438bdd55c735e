"""Heads of one decoder layer that draft from their own output (EAGLE-1, -3, MTP), as they are trained.

At position t a head reads the target's state of token t and the embedding of token t + 1, and says how token t + 2 is
distributed, over a reduced vocabulary. Deeper drafts read the head's own output where the target's state is not known
yet; training runs those deeper steps too (training-time test, Li et al. 2025), so that it learns from what it will see.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.drafters.artifact import ArtifactManifest
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, Wanted, computing_dtype, wanted_of
from training.head import DraftHead

_UNSAID_DEPTH: Final = 5


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head for a target. `num_planes`: captured layers that it reads; 0: the final state."""

    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_dim: int
    num_planes: int
    draft_vocab: int
    norm_epsilon: float
    rope_theta: float

    @classmethod
    def of(cls, config: ModelConfig, num_planes: int, draft_vocab: int) -> "HeadShape":
        """The layer is as wide as one of the target's."""
        return cls(
            config.hidden_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_dim,
            num_planes,
            draft_vocab,
            config.norm_epsilon,
            config.rope_theta,
        )


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        """[..., dim] → [..., dim]"""
        wide = values.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return (wide * scale * self.weight).to(values.dtype)


class Attention(nn.Module):
    """Its projections; `RecurrentHead` attends."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_dim, bias=False)


class Mlp(nn.Module):
    """silu(gate) · up, down."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_dim, shape.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(shape.hidden_dim, shape.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_dim, shape.hidden_dim, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """[..., hidden_dim] → [..., hidden_dim]"""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values)))


class Layer(nn.Module):
    """Attention that reads rows of `width`, and an MLP; further norms are given to it by name."""

    self_attn: Attention
    mlp: Mlp
    hidden_norm: RmsNorm
    input_layernorm: RmsNorm

    def __init__(self, shape: HeadShape, width: int, norms: Sequence[str] = ()) -> None:
        super().__init__()
        for name in norms:
            self.add_module(name, RmsNorm(shape.hidden_dim, shape.norm_epsilon))
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.mlp = Mlp(shape)


class RecurrentHead(DraftHead):
    """See the module. `d2t` [draft_vocab] int64: target id of a draft id, less the draft id.

    Loss: cross-entropy against the target's whole distribution over the draft vocabulary, where the target's own best
    token is in it and the token counts.
    """

    d2t: Tensor

    def __init__(self, shape: HeadShape, target_ids: Sequence[int], depth: int) -> None:
        """`target_ids`: the target's ids that may be drafted, ascending; `draft_vocab` of them."""
        super().__init__()
        if len(target_ids) != shape.draft_vocab:
            raise ValueError(f"{len(target_ids)} ids for a draft vocabulary of {shape.draft_vocab}")
        self.shape = shape
        self.depth = depth
        offsets = torch.tensor(target_ids, dtype=torch.int64) - torch.arange(shape.draft_vocab)
        self.register_buffer("d2t", offsets)

    @property
    def target_ids(self) -> Tensor:
        """See `DraftHead`."""
        return self.d2t + torch.arange(self.shape.draft_vocab)

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`."""
        return asdict(self.shape)

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The decoder layer."""

    @abstractmethod
    def features(self, planes: Tensor) -> Tensor:
        """The target's states as the head reads them: [..., num_planes · hidden_dim] → [..., hidden_dim]"""

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual, of next words and states: both [batch, positions, hidden_dim]."""

    @abstractmethod
    def states(self, batch: Batch) -> Tensor:
        """What `features` reads of a batch: [batch, tokens, num_planes · hidden_dim]"""

    @abstractmethod
    def loss(self, hidden: Tensor, wanted: Wanted, batch: Batch, target: TargetHead) -> Tensor:
        """Of outputs [n, hidden_dim] at the places wanted."""

    @abstractmethod
    def logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        """[…, hidden_dim] of `unroll` → […, draft_vocab]"""

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """See `DraftHead`."""
        return self._losses(batch, target, self.depth)

    def shallow_losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """See `DraftHead`."""
        return self._losses(batch, target, 1)

    def _losses(self, batch: Batch, target: TargetHead, depth: int) -> list[Tensor]:
        """What follows the layer runs over the rows that count only."""
        wanted = wanted_of(batch, target.reduced(self.target_ids), depth)
        places = wanted.rows * (batch.token_ids.shape[1] - 2) + wanted.tokens - 2
        return [
            self.loss(hidden.flatten(0, 1).index_select(0, places), wanted, batch, target)
            for hidden in self._unrolled(batch, target, depth)
        ]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        rows, tokens = starts
        best = [
            self.logits(hidden[rows, tokens + step], target).topk(ranks, dim=-1).indices
            for step, hidden in enumerate(self._unrolled(batch, target, self.depth))
        ]
        return self.target_ids[torch.stack(best, dim=1)]

    def _unrolled(self, batch: Batch, target: TargetHead, depth: int) -> list[Tensor]:
        """`unroll` of a batch: the position of token t is about token t + 2."""
        embedded = target.embedding[batch.token_ids[:, 1:-1]].to(computing_dtype())
        return self.unroll(self.states(batch)[:, :-2], embedded, depth, target.frequencies)

    def unroll(
        self, planes: Tensor, embedded: Tensor, num_steps: int, frequencies: Tensor | None = None
    ) -> list[Tensor]:
        """The layer's outputs at every position, for drafts of depth 1 … `num_steps`.

        planes: Tensor  # [batch, positions, num_planes · hidden_dim], of tokens t
        embedded: Tensor  # [batch, positions, hidden_dim], of tokens t + 1
        frequencies: Tensor  # [head_dim / 2], rotary ones; None: those of `rope_theta`, not scaled
        → num_steps × Tensor  # [batch, positions, hidden_dim], about tokens t + 2

        At depth j + 1 position t knows the target's states up to t - j and its own outputs behind them; rows
        t < j see their neighbours' rows wrapped out and mean nothing.
        """
        layer = self.layer
        hidden = self.features(planes)
        if frequencies is None:
            exponents = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
            frequencies = self.shape.rope_theta**-exponents
        rotary = rotary_of(embedded.shape[1], frequencies)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(num_steps):
            if step:
                hidden = _shifted(hidden)
            attention_input, residual = self.enter(embedded, hidden)
            hidden = residual + self._attend(attention_input, rotary, keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
        return outputs

    def _attend(
        self, both: Tensor, rotary: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Step j's queries over the first step's keys up to t - j, and over one key of each later step.

        The key of step i ≤ j for position t is the one that step made at position t - (j - i).
        """
        attention, shape = self.layer.self_attn, self.shape
        batch, positions, _ = both.shape
        query = rotated(split_heads(attention.q_proj(both), shape.num_heads), rotary)
        groups = shape.num_heads // shape.num_kv_heads
        key = rotated(split_heads(attention.k_proj(both), shape.num_kv_heads), rotary)
        value = split_heads(attention.v_proj(both), shape.num_kv_heads)
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if len(keys) == 1:
            mixed = functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        else:
            mixed = _mixed(query / math.sqrt(shape.head_dim), keys, values)
        return cast(Tensor, attention.o_proj(mixed.transpose(1, 2).reshape(batch, positions, -1)))


def _mixed(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of a step behind the first, as `_attend` says; all [batch, heads, positions, head_dim]."""
    positions = query.shape[2]
    step = len(keys) - 1
    later = range(1, step + 1)
    unseen = torch.ones(positions, positions, dtype=torch.bool).triu(1 - step)
    scores = (query @ keys[0].transpose(-1, -2)).masked_fill_(unseen, -torch.inf)
    own = [(query * _shifted(keys[index], step - index, 2)).sum(-1, keepdim=True) for index in later]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1)
    mixed = weights[..., :positions] @ values[0]
    for index in later:
        column = weights[..., positions + index - 1, None]
        mixed = mixed + column * _shifted(values[index], step - index, 2)
    return mixed


def split_heads(rows: Tensor, count: int) -> Tensor:
    """[batch, positions, count · dim] → [batch, count, positions, dim]"""
    return rows.view(*rows.shape[:-1], count, -1).transpose(1, 2)


def _shifted(values: Tensor, by: int = 1, dim: int = 1) -> Tensor:
    """What was at position t - `by` is at t; the first positions repeat the first one."""
    if by == 0:
        return values
    first = values.narrow(dim, 0, 1)
    kept = values.narrow(dim, 0, max(0, values.shape[dim] - by))
    copies = [first] * min(by, values.shape[dim])
    return torch.cat([*copies, kept], dim=dim)


def rotary_of(positions: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] of positions 0 …, in the halves' order of Llama."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotated(rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rows [..., positions, head_dim] turned by the cosines and sines [positions, head_dim] of their positions."""
    cosines, sines = (part.to(rows.dtype) for part in rotary)
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat([-second, first], dim=-1) * sines


def stored_shape(manifest: ArtifactManifest) -> tuple[HeadShape, int]:
    """Sizes and depth of a head that was written. Raises TypeError or ValueError where they are none.

    One that was imported says no depth.
    """
    shape = HeadShape(**cast("dict[str, int]", dict(manifest.shape)))
    return shape, len(manifest.acceptance.get("all", ())) or _UNSAID_DEPTH
