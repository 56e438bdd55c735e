"""Medusa-2 (Cai et al. 2024, §2.2): heads and the last layers of the target trained together, in float32.

The loss is L_LM + λ0 · Σ_k 0.8^k · L_k. L_LM is self-distillation (§2.3): the cross-entropy of the trained model at
every answer token against the whole distribution of the original, frozen target; L_k is that of head k, as in Medusa-1,
over the ids that may be drafted. Heads read what the trained layers say. The backbone learns at a smaller rate than the
heads, and only after these were warmed up on the original (`run_medusa2.py`).

The result is another model with a text of its own. Embedding and output matrix stay those of the original: heads
speak through them, and words that no rollout holds keep their meaning. The layers below the trained ones are not run:
their output is a plane of the features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor, nn

from core.errors import InvalidArgument
from engine.model_config import ModelConfig
from engine.weights import ModelFiles
from training.batch import Batch, TargetHead, counted_places, wanted_of
from training.head import DEPTH_DECAY, DraftHead
from training.llama_stack import LlamaStack
from training.loss import distilled_cross_entropy
from training.medusa import MedusaHeads
from training.ranking import best_ids

HEADS_WEIGHT: Final = 0.2
"""λ0."""


class Medusa2(DraftHead):
    """See the module. `heads` begin as the target's own, `stack` as the target's last layers."""

    kind: ClassVar[str] = "medusa2"

    def __init__(self, config: ModelConfig, options: "Medusa2Options", target_ids: Sequence[int]) -> None:
        super().__init__()
        first = options.first_layer(config)
        self.heads = MedusaHeads(config.hidden_dim, options.num_heads, target_ids)
        self.stack = LlamaStack(config, range(first, config.num_layers))
        self.depth = options.num_heads
        self._backbone_share = options.backbone_share
        self._reads_words = first == 0

    @property
    def target_ids(self) -> Tensor:
        """See `DraftHead`."""
        return self.heads.target_ids

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`."""
        backbone = {"backbone_layers": len(self.stack.model.layers), "backbone_share": self._backbone_share}
        return {**self.heads.sizes(), **backbone}

    def begin(self, files: ModelFiles, target: TargetHead) -> None:
        """The target's last layers and last norm."""
        del target
        self.stack.read(files)

    def loss_weight(self, place: int) -> float:
        """1 for the backbone's, λ0 · 0.8^k for head k, from 1."""
        return 1.0 if place == 0 else HEADS_WEIGHT * DEPTH_DECAY**place

    def learning_rates(self) -> list[tuple[float, list[nn.Parameter]]]:
        """The backbone's is smaller."""
        backbone = list(self.stack.parameters())
        return [(1.0, list(self.heads.parameters())), (self._backbone_share, backbone)]

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """The backbone's, then those of the heads."""
        final = self.states(batch, target)
        rows, tokens = counted_places(batch)
        places = rows, tokens - 1
        own = distilled_cross_entropy(final[places], batch.final[places], target.output)
        wanted = wanted_of(batch, target.reduced(self.target_ids), self.depth)
        return [own, *self.heads.losses_over(final, wanted, target)]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        return self.heads.ids_behind(self.states(batch, target)[starts], target, ranks)

    def states(self, batch: Batch, target: TargetHead) -> Tensor:
        """Final-normed states of the trained model: [batch, tokens, hidden_dim]."""
        words = self._reads_words
        states: Tensor = self.stack(target.embedding[batch.token_ids].float() if words else batch.planes)
        return states

    def agreement(self, batch: Batch, target: TargetHead) -> tuple[int, int]:
        """Answer tokens at which the trained model's best token is the original's, and all of them."""
        rows, tokens = counted_places(batch)
        ours = best_ids(self.states(batch, target)[rows, tokens - 1], target.output, 1)[:, 0]
        return int((ours == batch.best_ids[rows, tokens - 1]).sum()), len(rows)


@dataclass(frozen=True, slots=True)
class Medusa2Options:
    """`num_heads`: the deepest draft. `backbone_layers`: last layers that are trained; None: all.

    `backbone_share`: of the heads' learning rate; the paper trains heads at four times the backbone's.
    """

    draft_vocab: int = 8192
    num_heads: int = 4
    backbone_layers: int | None = None
    backbone_share: float = 0.05

    def first_layer(self, config: ModelConfig) -> int:
        """The first layer that is trained. Raises InvalidArgument where the target has fewer layers."""
        layers = config.num_layers if self.backbone_layers is None else self.backbone_layers
        if not 1 <= layers <= config.num_layers:
            raise InvalidArgument("backbone_layers", f"must be 1 to {config.num_layers}, got {layers}")
        return config.num_layers - layers

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The last layer's plane: the final norm is applied where it is read."""
        return (config.num_layers - 1,)

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The plane that enters the first trained layer; none where that is the embedding."""
        first = self.first_layer(config)
        return (first - 1,) if first else ()

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> Medusa2:
        """See `HeadOptions`; `begin` gives the backbone its weights."""
        return Medusa2(config, self, target_ids)
