"""A multi-token-prediction module (DeepSeek-V3, 2024) as it is trained, here beside a frozen target.

One block over (norm of the next token's embedding, norm of the target's final state), with rows of the target's own
output matrix behind a norm of its own; for deeper drafts it reads its own output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from decode.drafters.artifact import ArtifactManifest
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, Wanted
from training.loss import soft_cross_entropy
from training.recurrent import HeadShape, Layer, RecurrentHead, RmsNorm, stored_shape


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """`depth`: drafts of this depth are trained."""

    draft_vocab: int = 8192
    depth: int = 4

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The last layer's plane: the final norm is applied where it is read."""
        return (config.num_layers - 1,)

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None: the final hidden state is all that the module reads."""
        del config
        return ()

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> "MtpHead":
        """See `HeadOptions`."""
        return MtpHead(HeadShape.of(config, 0, len(target_ids)), target_ids, self.depth)


class MtpHead(RecurrentHead):
    """See the module."""

    kind: ClassVar[str] = "mtp"

    def __init__(self, shape: HeadShape, target_ids: Sequence[int], depth: int) -> None:
        super().__init__(shape, target_ids, depth)
        self.enorm, self.hnorm, self.norm = (RmsNorm(shape.hidden_dim, shape.norm_epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * shape.hidden_dim, shape.hidden_dim, bias=False)
        self.block = Layer(shape, shape.hidden_dim, ("input_layernorm",))

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "MtpHead":
        """A module that the artifact's tensors fit. Raises as `stored_shape`."""
        shape, depth = stored_shape(manifest)
        return cls(shape, range(shape.draft_vocab), depth)

    @property
    def layer(self) -> Layer:
        """See `RecurrentHead`."""
        return self.block

    def states(self, batch: Batch) -> Tensor:
        """See `RecurrentHead`."""
        return batch.final

    def features(self, planes: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return planes

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecurrentHead`."""
        residual = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.block.input_layernorm(residual), residual

    def loss(self, hidden: Tensor, wanted: Wanted, batch: Batch, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        return soft_cross_entropy(self.norm(hidden), target.reduced(self.target_ids).matrix, wanted.probs)

    def logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        return target.reduced(self.target_ids).logits(self.norm(hidden))
