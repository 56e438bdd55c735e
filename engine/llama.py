"""A Llama-family decoder over paged KV: one forward over the rows of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.drafter_settings import Quantisation
from engine.attention import Attention
from engine.linear import CANDIDATE_PLANS, Linear, PackedProduct, RowPlan, find_row_plan, pack
from engine.model_config import ModelConfig
from engine.pointwise import Pointwise
from engine.weights import ModelFiles, layer_shapes


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights; Q, K and V are one product, gate and up another."""

    input_norm: Tensor  # [hidden_dim]
    qkv: Linear
    output: Linear
    post_norm: Tensor  # [hidden_dim]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights, packed. `embedding` [vocab, hidden_dim] is read by row; a tied head is packed beside it."""

    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor  # [hidden_dim]
    head: Linear
    row_plan: RowPlan


@dataclass(frozen=True, slots=True)
class _LayerProducts:
    input_norm: Tensor
    qkv: PackedProduct
    output: PackedProduct
    post_norm: Tensor
    gate_up: PackedProduct
    down: PackedProduct


def load_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    quantisation: Quantisation = "none",
    row_plans: Sequence[RowPlan] = CANDIDATE_PLANS,
    layers: range | None = None,
) -> LlamaWeights:
    """Read, cast and pack every tensor, each freed once packed; find the row plan on the first layer and the head.

    `quantisation` is that of all products; embedding and norms stay in `dtype`. `layers`: those that a pipeline stage
    runs, None for all; the others are not read.
    """
    config = files.config
    read = _Reader(files, dtype, device)
    embedding = read("model.embed_tokens.weight", (config.vocab_size, config.hidden_dim))
    if config.tied_embeddings:
        head = pack(embedding, quantisation)
    else:
        head = pack(read("lm_head.weight", (config.vocab_size, config.hidden_dim)), quantisation)
    final_norm = read("model.norm.weight", (config.hidden_dim,))
    wanted = range(config.num_layers) if layers is None else layers
    found = [_read_layer(read, config, layer, quantisation) for layer in wanted]
    if layers is None:
        files.finish()
    first = found[0]
    probed = [
        (first.qkv, config.hidden_dim),
        (first.output, config.query_dim),
        (first.gate_up, config.hidden_dim),
        (first.down, config.intermediate_dim),
        (head, config.hidden_dim),
    ]
    plan = find_row_plan(probed, dtype, device, row_plans)
    return LlamaWeights(
        embedding, tuple(_planned(layer, plan) for layer in found), final_norm, Linear(head, plan), plan
    )


class _Reader:
    """Takes tensors in the engine's dtype on its device."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._files.take(name, shape).to(self._device, self._dtype).contiguous()


def _read_layer(read: _Reader, config: ModelConfig, layer: int, quantisation: Quantisation) -> _LayerProducts:
    shapes = layer_shapes(config)

    def tensor(name: str) -> Tensor:
        return read(f"model.layers.{layer}.{name}.weight", shapes[name])

    return _LayerProducts(
        input_norm=tensor("input_layernorm"),
        qkv=pack(torch.cat([tensor(f"self_attn.{part}_proj") for part in ("q", "k", "v")]), quantisation),
        output=pack(tensor("self_attn.o_proj"), quantisation),
        post_norm=tensor("post_attention_layernorm"),
        gate_up=pack(torch.cat([tensor(f"mlp.{part}_proj") for part in ("gate", "up")]), quantisation),
        down=pack(tensor("mlp.down_proj"), quantisation),
    )


def _planned(layer: _LayerProducts, plan: RowPlan) -> LlamaLayer:
    return LlamaLayer(
        input_norm=layer.input_norm,
        qkv=Linear(layer.qkv, plan),
        output=Linear(layer.output, plan),
        post_norm=layer.post_norm,
        gate_up=Linear(layer.gate_up, plan),
        down=Linear(layer.down, plan),
    )


class Llama:
    """The forward. Holds no state of a step."""

    def __init__(self, weights: LlamaWeights, attention: Attention, pointwise: Pointwise) -> None:
        self._weights = weights
        self._attention = attention
        self._pointwise = pointwise

    def forward(
        self, token_ids: Tensor, num_layers: int, capture: Sequence[int], keep: Callable[[int, Tensor], None]
    ) -> Tensor:
        """Final-normed output of the first `num_layers` layers: token_ids [rows] → [rows, hidden_dim].

        The attention's `begin` has been called. For each layer in `capture` below num_layers,
        `keep(layer, hidden [rows, hidden_dim])` is called with that layer's output; it may not keep the tensor.
        """
        residual, delta = self._run(self.embed(token_ids), num_layers, capture, keep)
        normed = self._pointwise.add_norm(residual, delta, self._weights.final_norm)
        if num_layers - 1 in capture:
            keep(num_layers - 1, residual)
        return normed

    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] → [rows, hidden_dim]"""
        return self._weights.embedding.index_select(0, token_ids)

    def through(
        self, residual: Tensor, capture: Sequence[int], keep: Callable[[int, Tensor], None]
    ) -> Tensor:
        """The output of all layers held here: residual [rows, hidden_dim], overwritten. For a pipeline stage.

        Its bits are those that `forward` goes on with, as both add the last product before they norm. `capture`
        counts layers from the first one held.
        """
        num_layers = len(self._weights.layers)
        residual, delta = self._run(residual, num_layers, capture, keep)
        residual.add_(delta)
        if num_layers - 1 in capture:
            keep(num_layers - 1, residual)
        return residual

    def normed(self, residual: Tensor) -> Tensor:
        """The final norm of [rows, hidden_dim]."""
        return self._pointwise.add_norm(residual, None, self._weights.final_norm)

    def _run(
        self, residual: Tensor, num_layers: int, capture: Sequence[int], keep: Callable[[int, Tensor], None]
    ) -> tuple[Tensor, Tensor]:
        """The first `num_layers` layers held: the residual, and the last product, not yet added to it."""
        weights, pointwise = self._weights, self._pointwise
        delta: Tensor | None = None
        for index in range(num_layers):
            layer = weights.layers[index]
            normed = pointwise.add_norm(residual, delta, layer.input_norm)
            if index - 1 in capture:
                keep(index - 1, residual)
            delta = layer.output(self._attention.attend(index, layer.qkv(normed)))
            normed = pointwise.add_norm(residual, delta, layer.post_norm)
            delta = layer.down(pointwise.silu_multiply(layer.gate_up(normed)))
        assert delta is not None, "no layers"
        return residual, delta

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, hidden_dim] → [rows, vocab] float32."""
        return self._weights.head(normed).float()
