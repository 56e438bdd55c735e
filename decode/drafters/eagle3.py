"""EAGLE-3 (Li et al. 2025): a head over low, middle and high layers of the target, with a vocabulary of its own.

Tensor names are those of public checkpoints; the same math as `training/eagle3.py` trains.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.drafter_settings import DraftQuantisation
from decode.drafters.head_model import HeadModel, HeadSizes
from engine.engine import Engine

_LAYER = "midlayer."


def eagle3_shapes(sizes: HeadSizes, num_planes: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head, by name; `d2t` is the target's id of a draft id, less the draft id."""
    hidden = sizes.hidden_dim
    layer = {_LAYER + name: shape for name, shape in sizes.layer_shapes().items()}
    return layer | {
        _LAYER + "hidden_norm.weight": (hidden,),
        _LAYER + "input_layernorm.weight": (hidden,),
        "fc.weight": (hidden, num_planes * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (sizes.draft_vocab, hidden),
        "d2t": (sizes.draft_vocab,),
    }


class Eagle3Model(HeadModel):
    """See the module. `kept_planes`: places of the head's layers among those that the engine keeps."""

    def __init__(
        self,
        engine: Engine,
        sizes: HeadSizes,
        kept_planes: Sequence[int],
        tensors: Mapping[str, Tensor],
        draft_ids: Tensor,
        quantisation: DraftQuantisation = "none",
    ) -> None:
        layer = {name: tensors[_LAYER + name] for name in sizes.layer_shapes()}
        super().__init__(engine, sizes, layer, draft_ids, quantisation)
        self._kept_planes = torch.tensor(kept_planes)
        self._fuse = self._pack(tensors["fc.weight"])
        self._head = self._pack(tensors["lm_head.weight"])
        self._input_norm, self._hidden_norm, self._norm = (
            tensors[name].to(self._dtype)
            for name in (_LAYER + "input_layernorm.weight", _LAYER + "hidden_norm.weight", "norm.weight")
        )

    def _features(self, planes: Tensor) -> Tensor:
        chosen = planes.index_select(0, self._kept_planes)
        return self._fuse(chosen.transpose(0, 1).flatten(1))

    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        words = self._pointwise.add_norm(embedded, None, self._input_norm)
        hidden = self._pointwise.add_norm(features, None, self._hidden_norm)
        return torch.cat([words, hidden], dim=-1), features

    def _leave(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._pointwise.add_norm(residual, delta, self._norm)
        return residual, self._head(normed)
