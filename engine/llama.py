"""A Llama-family decoder over paged KV: one forward over the rows of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.settings import Quantisation
from engine.attention import Attention
from engine.linear import Linear, PackedProduct, RowPlan, find_row_plan, pack
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
    files: ModelFiles, dtype: torch.dtype, device: torch.device, quantisation: Quantisation = "none"
) -> LlamaWeights:
    """Read, cast and pack every tensor, each freed once packed; find the row plan on layer 0 and the head.

    `quantisation` is that of all products; embedding and norms stay in `dtype`.
    """
    config = files.config
    read = _Reader(files, dtype, device)
    embedding = read("model.embed_tokens.weight", (config.vocab_size, config.hidden_dim))
    if config.tied_embeddings:
        head = pack(embedding, quantisation)
    else:
        head = pack(read("lm_head.weight", (config.vocab_size, config.hidden_dim)), quantisation)
    final_norm = read("model.norm.weight", (config.hidden_dim,))
    layers = [_read_layer(read, config, layer, quantisation) for layer in range(config.num_layers)]
    files.finish()
    first = layers[0]
    probed = [
        (first.qkv, config.hidden_dim),
        (first.output, config.query_dim),
        (first.gate_up, config.hidden_dim),
        (first.down, config.intermediate_dim),
        (head, config.hidden_dim),
    ]
    plan = find_row_plan(probed, dtype, device)
    return LlamaWeights(
        embedding, tuple(_planned(layer, plan) for layer in layers), final_norm, Linear(head, plan), plan
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
        weights, pointwise = self._weights, self._pointwise
        residual = weights.embedding.index_select(0, token_ids)
        delta: Tensor | None = None
        for index in range(num_layers):
            layer = weights.layers[index]
            normed = pointwise.add_norm(residual, delta, layer.input_norm)
            if index - 1 in capture:
                keep(index - 1, residual)
            delta = layer.output(self._attention.attend(index, layer.qkv(normed)))
            normed = pointwise.add_norm(residual, delta, layer.post_norm)
            delta = layer.down(pointwise.silu_multiply(layer.gate_up(normed)))
        normed = pointwise.add_norm(residual, delta, weights.final_norm)
        if num_layers - 1 in capture:
            keep(num_layers - 1, residual)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, hidden_dim] → [rows, vocab] float32."""
        return self._weights.head(normed).float()
