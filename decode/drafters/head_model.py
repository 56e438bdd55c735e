"""One decoder layer that drafts from the target's hidden states: what EAGLE and MTP heads have in common.

Position t holds the target's state of token t and the embedding of token t + 1, and says how token t + 2 is
distributed. Where the target's state is not known yet the head's own output of the position before takes its place. The
layer has its own paged K and V; it runs through the engine's kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.drafter_settings import DraftQuantisation
from engine.backends import make_backends
from engine.engine import Engine
from engine.kv_cache import KvCache, KvLayout
from engine.linear import PackedProduct, pack
from engine.model_config import ModelConfig
from engine.step_batch import SequenceStep
from engine.step_rows import build_rows


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """A head's layer. `input_dim`: what its attention reads; `draft_vocab`: ids that it can propose."""

    hidden_dim: int
    input_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_dim: int
    draft_vocab: int
    norm_epsilon: float
    rope_theta: float

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the layer by the end of their names."""
        hidden, intermediate = self.hidden_dim, self.intermediate_dim
        return {
            "self_attn.q_proj.weight": (self.query_dim, self.input_dim),
            "self_attn.k_proj.weight": (self.kv_dim, self.input_dim),
            "self_attn.v_proj.weight": (self.kv_dim, self.input_dim),
            "self_attn.o_proj.weight": (hidden, self.query_dim),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What one forward answers for the rows whose logits were wanted.

    logits: Tensor  # [wanted rows, draft_vocab] float32
    outputs: Tensor  # [wanted rows, hidden_dim]: what stands for the target's state one position on
    """

    logits: Tensor
    outputs: Tensor


class HeadModel(ABC):
    """A head beside its target. Engine thread only."""

    def __init__(
        self,
        engine: Engine,
        sizes: HeadSizes,
        layer: Mapping[str, Tensor],
        draft_ids: Tensor,
        quantisation: DraftQuantisation,
    ) -> None:
        """`layer`: tensors by the names of `layer_shapes`; draft_ids: Tensor  # [draft_vocab] int64, target ids."""
        self.sizes = sizes
        self.draft_ids = draft_ids
        dtype = engine.kv.layout.dtype
        config = _layer_config(engine.config, sizes)
        layout = KvLayout(
            1, sizes.num_kv_heads, sizes.head_dim, sizes.hidden_dim, (), engine.kv.layout.block_size, dtype
        )
        self.kv = KvCache(layout, engine.kv.stats().total)
        self._attention, self._pointwise = make_backends(config, engine.settings, self.kv, engine.max_context)
        self._embedding = engine.weights.embedding
        self._dtype = dtype
        self._quantisation = quantisation
        parts = {name: tensor.to(dtype) for name, tensor in layer.items()}
        self._qkv = self._pack(*(parts[f"self_attn.{part}_proj.weight"] for part in ("q", "k", "v")))
        self._output = self._pack(parts["self_attn.o_proj.weight"])
        self._gate_up = self._pack(*(parts[f"mlp.{part}_proj.weight"] for part in ("gate", "up")))
        self._down = self._pack(parts["mlp.down_proj.weight"])
        self._post_norm = parts["post_attention_layernorm.weight"]

    def features(self, planes: Tensor) -> Tensor:
        """The target's states as the head reads them: planes [kept layers, rows, hidden_dim] → [rows, hidden_dim]."""
        with torch.inference_mode():
            return self._features(planes)

    def forward(self, sequences: Sequence[SequenceStep], features: Tensor) -> HeadRows:
        """One pass over the rows of `sequences`, whose token ids are those one position on.

        features: Tensor  # [rows, hidden_dim], overwritten. K and V are written as `Engine.step` writes them.
        """
        rows = build_rows(sequences, self.kv.layout.block_size)
        with torch.inference_mode():
            embedded = self._embedding.index_select(0, torch.from_numpy(rows.token_ids))
            self._attention.begin(rows)
            attention_input, residual = self._enter(embedded, features)
            delta = self._output(self._attention.attend(0, self._qkv(attention_input)))
            normed = self._pointwise.add_norm(residual, delta, self._post_norm)
            delta = self._down(self._pointwise.silu_multiply(self._gate_up(normed)))
            if rows.wanted_rows is not None:
                wanted = torch.tensor(rows.wanted_rows, dtype=torch.int64)
                residual, delta = residual.index_select(0, wanted), delta.index_select(0, wanted)
            if not len(residual):
                return HeadRows(
                    residual.new_empty((0, self.sizes.draft_vocab), dtype=torch.float32), residual
                )
            outputs, logits = self._leave(residual, delta)
        return HeadRows(logits.float(), outputs)

    @abstractmethod
    def _features(self, planes: Tensor) -> Tensor:
        """See `features`."""

    @abstractmethod
    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [rows, input_dim], and the residual [rows, hidden_dim], which may be overwritten."""

    @abstractmethod
    def _leave(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [rows, hidden_dim] and logits [rows, draft_vocab] of a layer that ends with residual + delta."""

    def _pack(self, *weights: Tensor) -> PackedProduct:
        return pack(torch.cat([weight.to(self._dtype) for weight in weights]), self._quantisation)


def _layer_config(target: ModelConfig, sizes: HeadSizes) -> ModelConfig:
    """The layer as attention sees it; its rotary embedding is scaled as the target's."""
    return replace(
        target,
        num_layers=1,
        hidden_dim=sizes.hidden_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_dim=sizes.intermediate_dim,
        norm_epsilon=sizes.norm_epsilon,
        rope_theta=sizes.rope_theta,
    )
