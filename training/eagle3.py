"""The EAGLE-3 head (Li et al. 2025) as it is trained: one decoder layer over fused target features.

At position t it reads the target's captured planes of token t, fused to one vector, and the embedding of token t + 1,
and says how token t + 2 is distributed, over a reduced vocabulary. Deeper drafts read the head's own output where the
target's planes are not known yet. Training runs those deeper steps too (training-time test), so that the head learns
from what it will see. Tensor names are those of public checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.drafters.artifact import ArtifactManifest
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, wanted_of
from training.head import DraftHead
from training.loss import soft_cross_entropy


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes of a head for a target."""

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
    def of(cls, config: ModelConfig, num_planes: int, draft_vocab: int) -> "Eagle3Shape":
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


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """`layers` None: early, middle and late. `depth`: drafts of this depth are trained."""

    draft_vocab: int = 8192
    layers: tuple[int, ...] | None = None
    depth: int = 5

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """See `HeadOptions`."""
        last = config.num_layers - 1
        return self.layers or tuple(sorted({min(2, last), config.num_layers // 2, max(0, last - 2)}))

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The same."""
        return self.hidden_layers(config)

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> "Eagle3Head":
        """See `HeadOptions`."""
        shape = Eagle3Shape.of(config, len(self.hidden_layers(config)), len(target_ids))
        return Eagle3Head(shape, target_ids, self.depth)


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
        return (wide * scale).to(values.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        width = 2 * shape.hidden_dim
        self.q_proj = nn.Linear(width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_dim, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_dim, shape.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(shape.hidden_dim, shape.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_dim, shape.hidden_dim, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values)))


class _MidLayer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.input_layernorm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.mlp = _Mlp(shape)


class Eagle3Head(DraftHead):
    """See the module. `d2t` [draft_vocab] int64: target id of a draft id, less the draft id.

    Loss: cross-entropy against the target's whole distribution over the draft vocabulary, where the target's own best
    token is in it and the token belongs to the answer.
    """

    kind: ClassVar[str] = "eagle3"
    d2t: Tensor

    def __init__(self, shape: Eagle3Shape, target_ids: Sequence[int], depth: int) -> None:
        """`target_ids`: the target's ids that may be drafted, ascending; `draft_vocab` of them."""
        super().__init__()
        if len(target_ids) != shape.draft_vocab:
            raise ValueError(f"{len(target_ids)} ids for a draft vocabulary of {shape.draft_vocab}")
        self.shape = shape
        self.depth = depth
        self.fc = nn.Linear(shape.num_planes * shape.hidden_dim, shape.hidden_dim, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.lm_head = nn.Linear(shape.hidden_dim, shape.draft_vocab, bias=False)
        offsets = torch.tensor(target_ids, dtype=torch.int64) - torch.arange(shape.draft_vocab)
        self.register_buffer("d2t", offsets)

    @property
    def target_ids(self) -> Tensor:
        """Tensor  # [draft_vocab] int64: the target's id of each draft id."""
        return self.d2t + torch.arange(self.shape.draft_vocab)

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "Eagle3Head":
        """A head that the artifact's tensors fit. Raises TypeError or ValueError where its sizes are none."""
        shape = Eagle3Shape(**cast("dict[str, int]", dict(manifest.shape)))
        return cls(shape, range(shape.draft_vocab), len(manifest.acceptance["all"]))

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`."""
        return asdict(self.shape)

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """See `DraftHead`. Norm and head run over the rows that count only."""
        wanted = wanted_of(batch, target.reduced(self.target_ids), self.depth)
        places = wanted.rows * (batch.token_ids.shape[1] - 2) + wanted.tokens - 2
        return [
            soft_cross_entropy(
                self.norm(hidden.flatten(0, 1).index_select(0, places)), self.lm_head.weight, wanted.probs
            )
            for hidden in self._unrolled(batch, target)
        ]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        rows, tokens = starts
        best = [
            self.logits(hidden[rows, tokens + step]).topk(ranks, dim=-1).indices
            for step, hidden in enumerate(self._unrolled(batch, target))
        ]
        return self.target_ids[torch.stack(best, dim=1)]

    def _unrolled(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """`unroll` of a batch: the position of token t is about token t + 2."""
        embedded = target.embedding[batch.token_ids[:, 1:-1]].float()
        return self.unroll(batch.planes[:, :-2], embedded, self.depth)

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, hidden_dim] of `unroll` → […, draft_vocab]"""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def unroll(self, planes: Tensor, embedded: Tensor, num_steps: int) -> list[Tensor]:
        """The layer's outputs at every position, for drafts of depth 1 … `num_steps`.

        planes: Tensor  # [batch, positions, num_planes · hidden_dim], of tokens t
        embedded: Tensor  # [batch, positions, hidden_dim], of tokens t + 1
        → num_steps × Tensor  # [batch, positions, hidden_dim], about tokens t + 2

        At depth j + 1 position t knows the target's planes up to t - j and its own outputs behind them; rows
        t < j see their neighbours' rows wrapped out and mean nothing.
        """
        layer = self.midlayer
        words = layer.input_layernorm(embedded)
        hidden = self.fc(planes)
        rotary = _rotary(embedded.shape[1], self.shape.head_dim, self.shape.rope_theta)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(num_steps):
            if step:
                hidden = _shifted(hidden)
            both = torch.cat([words, layer.hidden_norm(hidden)], dim=-1)
            attended = self._attend(both, rotary, keys, values)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
        return outputs

    def _attend(
        self, both: Tensor, rotary: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Step j's queries over the first step's keys up to t - j, and over one key of each later step.

        The key of step i ≤ j for position t is the one that step made at position t - (j - i).
        """
        attention, shape = self.midlayer.self_attn, self.shape
        batch, positions, _ = both.shape
        query = _rotated(_heads(attention.q_proj(both), shape.num_heads), rotary)
        groups = shape.num_heads // shape.num_kv_heads
        key = _rotated(_heads(attention.k_proj(both), shape.num_kv_heads), rotary)
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(_heads(attention.v_proj(both), shape.num_kv_heads).repeat_interleave(groups, dim=1))
        step = len(keys) - 1
        scale = 1 / math.sqrt(shape.head_dim)
        seen = torch.ones(positions, positions, dtype=torch.bool).tril(-step)
        scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
        own = [
            (query * _shifted(keys[index], step - index, 2)).sum(-1, keepdim=True) * scale
            for index in range(1, step + 1)
        ]
        weights = torch.softmax(torch.cat([scores.float(), *own], dim=-1).float(), dim=-1).to(query.dtype)
        mixed = weights[..., :positions] @ values[0]
        for place, index in enumerate(range(1, step + 1)):
            column = weights[..., positions + place : positions + place + 1]
            mixed = mixed + column * _shifted(values[index], step - index, 2)
        return cast(Tensor, attention.o_proj(mixed.transpose(1, 2).reshape(batch, positions, -1)))


def _heads(rows: Tensor, count: int) -> Tensor:
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


def _rotary(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] of positions 0 …, in the halves' order of Llama."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * theta**-exponents
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def _rotated(rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = (part.to(rows.dtype) for part in rotary)
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat([-second, first], dim=-1) * sines
