"""The trained exit of layerskip: what turns the state behind the target's first layers into draft logits.

With h the final-normed output of the first E layers: adapted = h + down(silu(gate(h)) · up(h)), and its logits come
from the target's own output matrix, over a reduced vocabulary. With `down` at zero it is the target's untrained exit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from core.drafter_settings import Quantisation
from core.errors import InvalidArgument
from decode.drafters.artifact import ArtifactManifest, read_manifest, read_tensors, require_target
from decode.drafters.reduced_head import ReducedHead
from decode.sampling.draft_noise import DraftDraw, DrawnToken
from engine.engine import Engine
from engine.linear import Linear, pack

KIND = "exit"


@dataclass(frozen=True, slots=True)
class ExitShape:
    """Sizes of an adapter. `exit_layer`: layers of the target that run before it. `width`: of the gated product.
    `norm_epsilon`: of the target's last norm, through which it reads them."""

    hidden_dim: int
    exit_layer: int
    width: int
    draft_vocab: int
    norm_epsilon: float

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of what an artifact holds; `token_ids`, the target's, are int64, ascending."""
        return {
            "gate.weight": (self.width, self.hidden_dim),
            "up.weight": (self.width, self.hidden_dim),
            "down.weight": (self.hidden_dim, self.width),
            "token_ids": (self.draft_vocab,),
        }


class ExitAdapter:
    """Engine thread only. Every row is computed alone, as far as the engine's row plan holds for these widths."""

    def __init__(
        self,
        shape: ExitShape,
        tensors: Mapping[str, Tensor],
        engine: Engine,
        quantisation: Quantisation = "none",
    ) -> None:
        """`tensors` as `ExitShape.tensors` names them, of any float dtype; the engine's dtype is computed in."""
        device, dtype = engine.weights.embedding.device, engine.weights.embedding.dtype
        plan = engine.weights.row_plan

        def packed(weight: Tensor) -> Linear:
            return Linear(pack(weight.to(device, dtype), quantisation), plan)

        self.shape = shape
        with torch.inference_mode():
            self._gate_up = packed(torch.cat([tensors["gate.weight"], tensors["up.weight"]]))
            self._down = packed(tensors["down.weight"])
        self._head = ReducedHead(engine, tensors["token_ids"], quantisation)

    @classmethod
    def load(
        cls, directory: Path, engine: Engine, tokenizer: str, quantisation: Quantisation = "none"
    ) -> "ExitAdapter":
        """The adapter of an artifact; `tokenizer`: digest of the target's.

        Raises FailedPrecondition where it is of another target, InvalidArgument naming file and field where it
        is no exit of this one.
        """
        manifest = read_manifest(directory)
        require_target(directory, manifest, engine.numerics.model_revision, tokenizer)
        shape = _shape_of(directory, manifest, engine)
        tensors = read_tensors(directory, shape.tensors())
        _require_ids(directory, tensors["token_ids"], engine.config.vocab_size)
        return cls(shape, tensors, engine, quantisation)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_dim], final-normed → [rows, draft vocabulary] float32."""
        with torch.inference_mode():
            gate, up = self._gate_up(hidden).chunk(2, dim=-1)
            return self._head(hidden + self._down(functional.silu(gate) * up))

    def draw(self, draws: Sequence[DraftDraw], logits: Tensor) -> list[DrawnToken | None]:
        """Draw i from row i of `logits`; None where nothing can be drawn."""
        return self._head.draw(draws, logits)


def _shape_of(directory: Path, manifest: ArtifactManifest, engine: Engine) -> ExitShape:
    """The manifest's sizes, checked against the target."""
    if manifest.kind != KIND:
        raise InvalidArgument(
            "artifact.kind", f"{directory} holds a draft of kind {manifest.kind!r}, not {KIND!r}"
        )
    shape = exit_shape(manifest, str(directory))
    config = engine.config
    limits = {
        "hidden_dim": (config.hidden_dim, config.hidden_dim),
        "exit_layer": (1, config.num_layers - 1),
        "draft_vocab": (1, config.vocab_size),
        "norm_epsilon": (config.norm_epsilon, config.norm_epsilon),
    }
    for name, (least, most) in limits.items():
        if not least <= getattr(shape, name) <= most:
            raise InvalidArgument(
                f"artifact.shape.{name}",
                f"{directory}: {getattr(shape, name)}, the target takes {least} to {most}",
            )
    return shape


def exit_shape(manifest: ArtifactManifest, source: str) -> ExitShape:
    """The sizes of a manifest. Raises InvalidArgument naming `source` where they are none of an exit."""
    sizes = dict(manifest.shape)
    names = [entry.name for entry in fields(ExitShape)]
    whole = [size for name, size in sizes.items() if name != "norm_epsilon"]
    if sizes.keys() != {*names} or not all(isinstance(size, int) and size > 0 for size in whole):
        raise InvalidArgument("artifact.shape", f"{source} must give {', '.join(names)}; it has {sizes}")
    epsilon = sizes["norm_epsilon"]
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise InvalidArgument(
            "artifact.shape", f"{source}: norm_epsilon must be above 0 and below 1, is {epsilon!r}"
        )
    return ExitShape(
        hidden_dim=int(sizes["hidden_dim"]),
        exit_layer=int(sizes["exit_layer"]),
        width=int(sizes["width"]),
        draft_vocab=int(sizes["draft_vocab"]),
        norm_epsilon=float(epsilon),
    )


def _require_ids(directory: Path, token_ids: Tensor, vocab_size: int) -> None:
    ascending = bool((token_ids.diff() > 0).all())
    if token_ids.dtype is not torch.int64 or not ascending or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise InvalidArgument("artifact", f"{directory}: token_ids are not ascending ids of the target")
