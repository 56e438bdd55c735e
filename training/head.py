"""What the trainer knows of a head: how wrong it is about a batch, what it would draft, and how it is kept.

A head of its own kind is a module beside `eagle3.py` and `medusa.py`, named in `heads.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from torch import Tensor, nn

from decode.drafters.artifact import ArtifactManifest, read_tensors, write_artifact
from engine.model_config import ModelConfig
from engine.weights import ModelFiles
from training.batch import Batch, TargetHead

DEPTH_DECAY: Final = 0.8


class DraftHead(nn.Module, ABC):
    """Trained by `Trainer`, judged by `judge`, written as an artifact: its state is the artifact's tensors.

    `depth`: drafts of depth 1 … `depth` are trained and judged.
    """

    kind: ClassVar[str]
    depth: int

    @property
    @abstractmethod
    def target_ids(self) -> Tensor:
        """Tensor  # [draft_vocab] int64: the target's id of each draft id."""

    @abstractmethod
    def sizes(self) -> Mapping[str, float]:
        """The manifest's `shape`: enough to make an equal head."""

    @abstractmethod
    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """Mean loss at each depth; the trainer sums them by `loss_weight`."""

    def shallow_losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """As `losses`, of depth 1 only, where that takes a fraction of the time; here: `losses`."""
        return self.losses(batch, target)

    @abstractmethod
    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """What it would propose behind `starts`, every token before being as in the rollout.

        starts: 2 × Tensor  # [n] int64: batch row, and s as in `training/batch.py`; token s + 1 + depth exists
        → Tensor  # [n, depth, ranks] int64: the target's ids, best first; called without gradients
        """

    def loss_weight(self, place: int) -> float:
        """What loss number `place` (from 0) of `losses` counts in the sum."""
        return DEPTH_DECAY**place

    def learning_rates(self) -> list[tuple[float, list[nn.Parameter]]]:
        """All that is trained, in groups, each with its share of the plan's learning rate."""
        return [(1.0, list(self.parameters()))]

    def begin(self, files: ModelFiles, target: TargetHead) -> None:
        """Take from the target what training starts from; called once for a fresh head. Here: nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """The artifact's: bfloat16, ids in full width."""
        return {
            name: tensor.detach().bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in self.state_dict().items()
        }

    def write(self, directory: Path, manifest: ArtifactManifest, target: Path) -> None:
        """Write it as it is served. `target`: the directory of the target."""
        del target
        write_artifact(directory, manifest, self.tensors())

    def read(self, directory: Path) -> None:
        """Take the weights that `write` wrote. Raises InvalidArgument naming file and tensor."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}
        self.load_state_dict(read_tensors(directory, shapes))


class HeadOptions(Protocol):
    """What is chosen of a kind of head before it is trained: a frozen dataclass, kept in the manifest."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def draft_vocab(self) -> int:
        """Ids that may be drafted, at most."""
        ...

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Planes that a served draft reads, ascending."""
        ...

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Planes that training reads beside the final hidden state, ascending."""
        ...

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> DraftHead:
        """A fresh head. `target_ids`: ascending. Draws its weights from torch's global generator."""
        ...
