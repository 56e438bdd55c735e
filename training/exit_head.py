"""The exit of layerskip as it is trained: an adapter behind the target's first layers, which stay as they are.

At token t it reads the output of layer E - 1, final-normed as the target's own head would read it, and says how token
t + 1 is distributed, over a reduced vocabulary: h + down(silu(gate(h)) · up(h)) through rows of the target's output
matrix. Deeper drafts are the same function behind the same layers, which read the drafted tokens; while those are
accepted they are the rollout's, so one loss trains every depth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import InvalidArgument
from decode.drafters.artifact import ArtifactManifest
from decode.drafters.exit_adapter import KIND, ExitShape, exit_shape
from engine.model_config import ModelConfig
from training.batch import Batch, TargetHead, wanted_of
from training.head import DraftHead
from training.loss import soft_cross_entropy


class ExitHead(DraftHead):
    """See the module. Begins as the target's untrained exit: `down` is zero."""

    kind: ClassVar[str] = KIND
    token_ids: Tensor

    def __init__(self, shape: ExitShape, token_ids: Sequence[int], depth: int) -> None:
        """`token_ids`: the target's ids that may be drafted, ascending. `depth`: of the drafts it is judged by."""
        super().__init__()
        if len(token_ids) != shape.draft_vocab:
            raise ValueError(f"{len(token_ids)} ids for a draft vocabulary of {shape.draft_vocab}")
        self.shape = shape
        self.depth = depth
        self.gate = nn.Linear(shape.hidden_dim, shape.width, bias=False)
        self.up = nn.Linear(shape.hidden_dim, shape.width, bias=False)
        self.down = nn.Linear(shape.width, shape.hidden_dim, bias=False)
        nn.init.zeros_(self.down.weight)
        self.register_buffer("token_ids", torch.tensor(token_ids, dtype=torch.int64))

    @classmethod
    def of(cls, manifest: ArtifactManifest) -> "ExitHead":
        """A head that the artifact's tensors fit. Raises InvalidArgument or KeyError where its sizes are none."""
        shape = exit_shape(manifest, "the manifest")
        return cls(shape, range(shape.draft_vocab), len(manifest.acceptance["all"]))

    @property
    def target_ids(self) -> Tensor:
        """See `DraftHead`."""
        return self.token_ids

    def sizes(self) -> Mapping[str, float]:
        """See `DraftHead`."""
        return asdict(self.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_dim], final-normed → [rows, hidden_dim], as the output matrix reads it."""
        return hidden + cast(Tensor, self.down(functional.silu(self.gate(hidden)) * self.up(hidden)))

    def losses(self, batch: Batch, target: TargetHead) -> list[Tensor]:
        """See `DraftHead`; one, which holds for every depth."""
        reduced = target.reduced(self.token_ids)
        wanted = wanted_of(batch, reduced, 0)
        hidden = self._normed(batch.planes[wanted.rows, wanted.tokens - 1], target)
        return [soft_cross_entropy(self(hidden), reduced.matrix, wanted.probs)]

    def draft_ids(
        self, batch: Batch, target: TargetHead, starts: tuple[Tensor, Tensor], ranks: int
    ) -> Tensor:
        """See `DraftHead`."""
        rows, tokens = starts
        depths = torch.arange(1, self.depth + 1)
        hidden = self._normed(batch.planes[rows[:, None], tokens[:, None] + depths], target)
        logits = target.reduced(self.token_ids).logits(self(hidden))
        return self.token_ids[logits.topk(ranks, dim=-1).indices]

    def _normed(self, planes: Tensor, target: TargetHead) -> Tensor:
        """The target's last norm, in float32: [..., hidden_dim] → [..., hidden_dim]."""
        wide = planes.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_epsilon)
        return wide * scale * target.final_norm.float()


@dataclass(frozen=True, slots=True)
class ExitOptions:
    """`exit_layer`: layers of the target before the exit. `width`: of the adapter's gated product. `depth`: of the
    drafts that it is judged by."""

    exit_layer: int
    draft_vocab: int = 8192
    width: int = 1536
    depth: int = 5

    def hidden_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """None: a served exit runs the layers itself."""
        return ()

    def trained_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The output of the last layer before the exit. Raises InvalidArgument where the target has no such exit."""
        if not 1 <= self.exit_layer < config.num_layers:
            raise InvalidArgument(
                "exit_layer", f"must be 1 to {config.num_layers - 1}, got {self.exit_layer}"
            )
        return (self.exit_layer - 1,)

    def make(self, config: ModelConfig, target_ids: Sequence[int]) -> ExitHead:
        """See `HeadOptions`."""
        shape = ExitShape(
            config.hidden_dim, self.exit_layer, self.width, len(target_ids), config.norm_epsilon
        )
        return ExitHead(shape, target_ids, self.depth)
