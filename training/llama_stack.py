"""Layers of a Llama-family model in torch, as they are trained: what the engine computes, with gradients."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model_config import ModelConfig
from engine.weights import ModelFiles
from training.recurrent import HeadShape, Layer, RmsNorm, rotary_of, rotated, split_heads


class LlamaStack(nn.Module):
    """Some successive layers of a model and its last norm; its state has the names of Hugging Face checkpoints.

    Embedding and output matrix are none of it: they stay the target's.
    """

    def __init__(self, config: ModelConfig, layers: range) -> None:
        """`layers`: which of the model's they are, by name and by the weights that `read` takes."""
        super().__init__()
        self._shape = HeadShape.of(config, 0, config.vocab_size)
        self._frequencies = torch.from_numpy(config.inverse_frequencies())
        self.model = _Model(self._shape, layers)

    def read(self, files: ModelFiles) -> None:
        """Take the weights of these layers. Raises InvalidArgument naming file and tensor."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        self.load_state_dict({name: files.take(name, shape).float() for name, shape in shapes.items()})

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored: bfloat16."""
        return {name: tensor.detach().bfloat16() for name, tensor in self.state_dict().items()}

    def forward(self, hidden: Tensor) -> Tensor:
        """What enters the first of the layers → the last one's output, final-normed: [batch, tokens, hidden_dim] each.

        Token t is at position t and sees no later one, so padding behind a row changes nothing before it.
        """
        rotary = rotary_of(hidden.shape[1], self._frequencies)
        for module in self.model.layers.values():
            layer = cast(Layer, module)
            hidden = hidden + self._attend(layer, layer.input_layernorm(hidden), rotary)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return cast(Tensor, self.model.norm(hidden))

    def _attend(self, layer: Layer, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        attention, shape = layer.self_attn, self._shape
        groups = shape.num_heads // shape.num_kv_heads
        query = rotated(split_heads(attention.q_proj(rows), shape.num_heads), rotary)
        key = rotated(split_heads(attention.k_proj(rows), shape.num_kv_heads), rotary)
        value = split_heads(attention.v_proj(rows), shape.num_kv_heads)
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            is_causal=True,
        )
        return cast(Tensor, attention.o_proj(mixed.transpose(1, 2).flatten(2)))


class _Model(nn.Module):
    def __init__(self, shape: HeadShape, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(layer): Layer(shape, shape.hidden_dim, ("input_layernorm",)) for layer in layers}
        )
        self.norm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
