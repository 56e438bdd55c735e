"""The EAGLE-1 head (Li et al. 2024) as it is trained; EAGLE-2 serves the same head with dynamic trees.

It reads the target's final-normed state and says the next one, so the target's own output matrix, cut to the ids that
may be drafted, makes tokens of it. The paper trains one step with a regression and a cross-entropy; here the deeper
steps are trained too, and the regression only keeps outputs near the target's states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.drafters.artifact import ArtifactManifest
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, Wanted
from training.loss import soft_cross_entropy
from training.recurrent import HeadShape, Layer, RecurrentHead, stored_shape

REGRESSION_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """`depth`: drafts of this depth are trained."""

    draft_vocab: int = 8192
    depth: int = 4

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The last layer's plane: the final norm is applied where it is read."""
        return (config.num_layers - 1,)

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None: the final hidden state is all that the head reads."""
        del config
        return ()

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> "EagleHead":
        """See `HeadOptions`."""
        return EagleHead(HeadShape.of(config, 0, len(target_ids)), target_ids, self.depth)


class EagleHead(RecurrentHead):
    """See the module."""

    kind: ClassVar[str] = "eagle"

    def __init__(self, shape: HeadShape, target_ids: Sequence[int], depth: int) -> None:
        super().__init__(shape, target_ids, depth)
        self.fc = nn.Linear(2 * shape.hidden_dim, shape.hidden_dim, bias=False)
        self.layers = nn.ModuleList([Layer(shape, shape.hidden_dim)])

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "EagleHead":
        """A head that the artifact's tensors fit. Raises as `stored_shape`."""
        shape, depth = stored_shape(manifest)
        return cls(shape, range(shape.draft_vocab), depth)

    @property
    def layer(self) -> Layer:
        """See `RecurrentHead`."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def states(self, batch: Batch) -> Tensor:
        """See `RecurrentHead`."""
        return batch.final

    def features(self, planes: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return planes

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecurrentHead`."""
        fused = self.fc(torch.cat([embedded, hidden], dim=-1))
        return fused, fused

    def loss(self, hidden: Tensor, wanted: Wanted, batch: Batch, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        if not len(hidden):
            return hidden.sum()
        said = soft_cross_entropy(hidden, target.reduced(self.target_ids).matrix, wanted.probs)
        states = batch.final[wanted.rows, wanted.tokens - 1]
        return said + REGRESSION_WEIGHT * functional.smooth_l1_loss(hidden.float(), states)

    def logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        return target.reduced(self.target_ids).logits(hidden)
