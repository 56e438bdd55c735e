"""A small draft model as it is trained: the target's own first layers, taught to say what the whole target says.

Sequence-level knowledge distillation on the target's own rollouts (Kim and Rush 2016) with its whole distribution at
every place (Hinton et al. 2015), as DistillSpec (Zhou et al. 2024) has it for draft models. Embedding and output matrix
stay the target's, so that words that no rollout holds keep their meaning; layers and last norm are trained. The
loss is over the whole vocabulary: whatever it left out a draft would say too often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from core.errors import InvalidArgument
from decode.drafters.artifact import DRAFT_MODEL, ArtifactManifest, write_manifest
from engine.model_config import ModelConfig
from engine.truncate import first_layers, write_layers
from engine.weights import ModelFiles, open_model
from training.batch import Batch, TargetHead, counted_places
from training.head import DraftHead
from training.llama_stack import LlamaStack
from training.loss import distilled_cross_entropy
from training.ranking import best_ids

_ALL_IDS: Final = 2**31


class DraftModel(DraftHead):
    """See the module."""

    kind: ClassVar[str] = DRAFT_MODEL

    def __init__(self, config: ModelConfig, depth: int, num_layers: int | None = None) -> None:
        """`config`: of the draft or, with `num_layers`, of the target. `depth`: of the drafts it is judged by."""
        super().__init__()
        self.depth = depth
        self._num_layers = config.num_layers if num_layers is None else num_layers
        self._vocab_size = config.vocab_size
        self._hidden_dim = config.hidden_dim
        self.stack = LlamaStack(config, range(self._num_layers))

    @property
    def target_ids(self) -> Tensor:
        """All of the target's."""
        return torch.arange(self._vocab_size)

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`; the model's config.json says the rest."""
        return {
            "num_layers": self._num_layers,
            "hidden_dim": self._hidden_dim,
            "vocab_size": self._vocab_size,
        }

    def begin(self, files: ModelFiles, target: TargetHead) -> None:
        """The target's first layers and last norm."""
        del target
        self.stack.read(files)

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """See `DraftHead`; one, which holds for every depth: accepted tokens are the rollout's."""
        rows, tokens = counted_places(batch)
        hidden = self._states(batch, target)[rows, tokens - 1]
        return [distilled_cross_entropy(hidden, batch.final[rows, tokens - 1], target.output)]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        rows, tokens = starts
        states = self._states(batch, target)
        best = best_ids(states.flatten(0, 1), target.output, ranks).view(*states.shape[:2], ranks)
        return best[rows[:, None], tokens[:, None] + torch.arange(1, self.depth + 1)]

    def write(self, directory: Path, manifest: ArtifactManifest, target: Path) -> None:
        """A model directory, with the target's embedding, output matrix and tokenizer.

        An earlier config.json goes first and the new one comes last, so half of it is no model.
        """
        directory.mkdir(parents=True, exist_ok=True)
        tensors = first_layers(open_model(target), self._num_layers) | self.stack.tensors()
        (directory / "config.json").unlink(missing_ok=True)
        write_manifest(directory, manifest)
        write_layers(target, self._num_layers, tensors, directory)

    def read(self, directory: Path) -> None:
        """See `DraftHead`."""
        self.stack.read(open_model(directory))

    def _states(self, batch: Batch, target: TargetHead) -> Tensor:
        """[batch, tokens, hidden_dim]: from row t follows what it says of token t + 1."""
        states: Tensor = self.stack(target.embedding[batch.token_ids].float())
        return states


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """`num_layers`: first layers of the target that it begins as. `depth`: of the drafts that it is judged by."""

    num_layers: int = 4
    depth: int = 5

    @property
    def draft_vocab(self) -> int:
        """All ids."""
        return _ALL_IDS

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None. Raises InvalidArgument where the target has fewer layers."""
        if not 1 <= self.num_layers <= config.num_layers:
            raise InvalidArgument("layers", f"must be 1 to {config.num_layers}, got {self.num_layers}")
        return ()

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> DraftModel:
        """See `HeadOptions`; `begin` gives it its weights."""
        return DraftModel(config, self.depth, self.num_layers)
