"""Medusa-1 (Cai et al. 2024) as it is trained: heads beside the target's own that each say a later token.

All read the target's final-normed hidden state x of token t. The target's own head says token t + 1; head i says
token t + 1 + i, as W(x + silu(W_i x + b_i)) with W the target's output matrix, cut to the ids that may be drafted. The
target is frozen, and so is W: an artifact holds the blocks and the ids only. Heads begin as the target's own
(W_i = b_i = 0). No head sees what another one said: a draft is a product of K independent distributions. Heads that
others trained may have an output matrix each instead of W.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.drafters.artifact import ArtifactManifest
from decode.drafters.medusa_artifact import KIND
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, Wanted, wanted_of
from training.head import DraftHead
from training.loss import soft_cross_entropy
from training.ranking import best_ids


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """`num_heads`: the deepest draft."""

    draft_vocab: int = 8192
    num_heads: int = 4

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The last layer's plane: the final norm is applied where it is read."""
        return (config.num_layers - 1,)

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None: the final hidden state is all that the heads read."""
        del config
        return ()

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> "MedusaHeads":
        """See `HeadOptions`."""
        return MedusaHeads(config.hidden_dim, self.num_heads, target_ids)


class MedusaHeads(DraftHead):
    """See the module.

    weight: Tensor  # [num_heads, hidden_dim, hidden_dim]; bias: Tensor  # [num_heads, hidden_dim]
    d2t: Tensor  # [draft_vocab] int64: target id of a draft id, less the draft id
    matrices: Tensor  # [num_heads, draft_vocab, hidden_dim], output matrices of their own, constant; None: the target's
    """

    kind: ClassVar[str] = KIND
    d2t: Tensor
    matrices: Tensor | None

    def __init__(
        self, hidden_dim: int, num_heads: int, target_ids: Sequence[int], own_matrices: bool = False
    ) -> None:
        super().__init__()
        self.depth = num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_dim, hidden_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_dim))
        ids = torch.tensor(target_ids, dtype=torch.int64)
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        shape = (num_heads, len(ids), hidden_dim)
        self.register_buffer("matrices", torch.zeros(shape) if own_matrices else None)

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "MedusaHeads":
        """Heads that the artifact's tensors fit. Raises TypeError, KeyError or ValueError where its sizes are none."""
        hidden_dim, num_heads, draft_vocab = (
            int(manifest.shape[name]) for name in ("hidden_dim", "num_heads", "draft_vocab")
        )
        return cls(hidden_dim, num_heads, range(draft_vocab), bool(manifest.shape.get("own_matrices")))

    @property
    def target_ids(self) -> Tensor:
        """See `DraftHead`."""
        return self.d2t + torch.arange(len(self.d2t))

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`."""
        num_heads, hidden_dim = self.bias.shape
        sizes = {"hidden_dim": hidden_dim, "num_heads": num_heads, "draft_vocab": len(self.d2t)}
        return sizes if self.matrices is None else {**sizes, "own_matrices": 1}

    def states(self, final: Tensor, head: int) -> Tensor:
        """What head number `head` (from 0) gives to the output matrix: [rows, hidden_dim] → [rows, hidden_dim]."""
        return final + functional.silu(functional.linear(final, self.weight[head], self.bias[head]))

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """Cross-entropy of head i at token t - 1 - i against the target's distribution of token t.

        Counted where the target's own best token may be drafted and token t counts. The paper takes the true
        token instead of the distribution, which says less about each place.
        """
        wanted = wanted_of(batch, target.reduced(self.target_ids), self.depth)
        return self.losses_over(batch.final, wanted, target)

    def losses_over(self, final: Tensor, wanted: Wanted, target: TargetHead) -> list[Tensor]:
        """As `losses`, where the heads read `final` [batch, tokens, hidden_dim]."""
        return [
            soft_cross_entropy(
                self.states(final[wanted.rows, wanted.tokens - 2 - head], head),
                self._matrix(head, target),
                wanted.probs,
            )
            for head in range(self.depth)
        ]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        return self.ids_behind(batch.final[starts], target, ranks)

    def ids_behind(self, final: Tensor, target: TargetHead, ranks: int) -> Tensor:
        """The best ids of every head: final [rows, hidden_dim] → [rows, depth, ranks]"""
        best = [
            best_ids(self.states(final, head), self._matrix(head, target), ranks)
            for head in range(self.depth)
        ]
        return self.target_ids[torch.stack(best, dim=1)]

    def _matrix(self, head: int, target: TargetHead) -> Tensor:
        """[draft_vocab, hidden_dim]"""
        return target.reduced(self.target_ids).matrix if self.matrices is None else self.matrices[head]
