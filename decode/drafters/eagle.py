"""EAGLE-1 (Li et al. 2024): one layer over the target's last hidden state and the next token, read as features.

EAGLE-2 is the same head with a dynamic tree. The head has no output matrix: its outputs are features as the target's
final-normed states are, and rows of the target's own matrix turn them into logits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from core.drafter_settings import DraftQuantisation
from decode.drafters.head_model import HeadModel, HeadSizes
from engine.engine import Engine

_LAYER = "layers.0."


def eagle_shapes(sizes: HeadSizes) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head, by name."""
    layer = {_LAYER + name: shape for name, shape in sizes.layer_shapes().items()}
    return layer | {"fc.weight": (sizes.hidden_dim, 2 * sizes.hidden_dim), "d2t": (sizes.draft_vocab,)}


class EagleModel(HeadModel):
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
        self._fuse = self._pack(tensors["fc.weight"])
        self._head = self._pack(engine.output_rows(draft_ids))

    def _features(self, planes: Tensor) -> Tensor:
        return self._pointwise.add_norm(planes[self._kept_plane].contiguous(), None, self._target_norm)

    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        fused = self._fuse(torch.cat([embedded, features], dim=-1))
        return fused, fused

    def _leave(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        outputs = residual.add_(delta)
        return outputs, self._head(outputs)
