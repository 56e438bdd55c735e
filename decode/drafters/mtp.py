"""A multi-token-prediction module (DeepSeek-V3, 2024): one block over (norm of the hidden state, norm of the next
token's embedding), run again on its own output for deeper drafts.

It reads the target's final-normed state, and speaks through rows of the target's own output matrix.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from core.drafter_settings import DraftQuantisation
from decode.drafters.head_model import HeadModel, HeadSizes
from engine.engine import Engine

_LAYER = "block."
_NORMS = ("enorm.weight", "hnorm.weight", _LAYER + "input_layernorm.weight", "norm.weight")


def mtp_shapes(sizes: HeadSizes) -> dict[str, tuple[int, ...]]:
    """Every tensor of a module, by name."""
    hidden = sizes.hidden_dim
    layer = {_LAYER + name: shape for name, shape in sizes.layer_shapes().items()}
    norms = dict.fromkeys(_NORMS, (hidden,))
    return layer | norms | {"eh_proj.weight": (hidden, 2 * hidden), "d2t": (sizes.draft_vocab,)}


class MtpModel(HeadModel):
    """See the module. `kept_plane`: place of the target's last layer among those that the engine keeps."""

    def __init__(
        self,
        engine: Engine,
        sizes: HeadSizes,
        kept_plane: int,
        tensors: Mapping[str, Tensor],
        draft_ids: Tensor,
        quantisation: DraftQuantisation = "none",
    ) -> None:
        layer = {name: tensors[_LAYER + name] for name in sizes.layer_shapes()}
        super().__init__(engine, sizes, layer, draft_ids, quantisation)
        self._kept_plane = kept_plane
        self._target_norm = engine.weights.final_norm
        self._fuse = self._pack(tensors["eh_proj.weight"])
        self._head = self._pack(engine.output_rows(draft_ids))
        self._word_norm, self._hidden_norm, self._input_norm, self._norm = (
            tensors[name].to(self._dtype) for name in _NORMS
        )

    def _features(self, planes: Tensor) -> Tensor:
        return self._pointwise.add_norm(planes[self._kept_plane].contiguous(), None, self._target_norm)

    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        words = self._pointwise.add_norm(embedded, None, self._word_norm)
        hidden = self._pointwise.add_norm(features, None, self._hidden_norm)
        residual = self._fuse(torch.cat([words, hidden], dim=-1))
        return self._pointwise.add_norm(residual, None, self._input_norm), residual

    def _leave(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._pointwise.add_norm(residual, delta, self._norm)
        return residual, self._head(normed)
