"""The EAGLE-3 head (Li et al. 2025) as it is trained: one decoder layer over fused target features.

It reads three captured planes of the target, fused to one vector, and has an output matrix of its own. Tensor names are
those of public checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from core.errors import InvalidArgument
from decode.drafters.artifact import ArtifactManifest
from engine.model_config import ModelConfig
from engine.weights import ModelFiles
from training.batch import Batch, TargetHead, Wanted
from training.loss import soft_cross_entropy
from training.recurrent import HeadShape, Layer, RecurrentHead, RmsNorm, stored_shape


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """`layers` None: early, middle and late. `depth`: drafts of this depth are trained."""

    draft_vocab: int = 8192
    layers: tuple[int, ...] | None = None
    depth: int = 5

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """See `HeadOptions`. Raises InvalidArgument where the target has no such layer."""
        last = config.num_layers - 1
        if self.layers and not 0 <= min(self.layers) <= max(self.layers) <= last:
            raise InvalidArgument("layers", f"must be 0 to {last}, got {', '.join(map(str, self.layers))}")
        return self.layers or tuple(sorted({min(2, last), config.num_layers // 2, max(0, last - 2)}))

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The same."""
        return self.hidden_layers(config)

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> "Eagle3Head":
        """See `HeadOptions`."""
        shape = HeadShape.of(config, len(self.hidden_layers(config)), len(target_ids))
        return Eagle3Head(shape, target_ids, self.depth)


class Eagle3Head(RecurrentHead):
    """See the module."""

    kind: ClassVar[str] = "eagle3"

    def __init__(self, shape: HeadShape, target_ids: Sequence[int], depth: int) -> None:
        super().__init__(shape, target_ids, depth)
        self.fc = nn.Linear(shape.num_planes * shape.hidden_dim, shape.hidden_dim, bias=False)
        self.midlayer = Layer(shape, 2 * shape.hidden_dim, ("hidden_norm", "input_layernorm"))
        self.norm = RmsNorm(shape.hidden_dim, shape.norm_epsilon)
        self.lm_head = nn.Linear(shape.hidden_dim, shape.draft_vocab, bias=False)

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "Eagle3Head":
        """A head that the artifact's tensors fit. Raises as `stored_shape`."""
        shape, depth = stored_shape(manifest)
        return cls(shape, range(shape.draft_vocab), depth)

    def begin(self, files: ModelFiles, target: TargetHead) -> None:
        """Output matrix and norm start as the target's."""
        del files
        self.norm.load_state_dict({"weight": target.final_norm})
        self.lm_head.load_state_dict({"weight": target.output[self.target_ids]})

    @property
    def layer(self) -> Layer:
        """See `RecurrentHead`."""
        return self.midlayer

    def states(self, batch: Batch) -> Tensor:
        """See `RecurrentHead`."""
        return batch.planes

    def features(self, planes: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return cast(Tensor, self.fc(planes))

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecurrentHead`."""
        words, states = self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)
        return torch.cat([words, states], dim=-1), hidden

    def loss(self, hidden: Tensor, wanted: Wanted, batch: Batch, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        return soft_cross_entropy(self.norm(hidden), self.lm_head.weight, wanted.probs)

    def logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        """See `RecurrentHead`."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))
