"""The trained exit of layerskip: what turns the state behind the target's first layers into draft logits.

With h the final-normed output of the first E layers: adapted = h + down(silu(gate(h)) · up(h)), and its logits come
from the target's own output matrix, over a reduced vocabulary. With `down` at zero it is the target's untrained exit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from core.errors import InvalidArgument
from core.settings import Quantisation
from decode.drafters.artifact import ArtifactManifest, read_manifest, read_tensors, require_target
from decode.drafters.reduced_head import ReducedHead
from decode.sampling.draft_noise import DraftDraw, DrawnToken
from engine.engine import Engine
from engine.linear import Linear, pack

KIND = "exit"


@dataclass(frozen=True, slots=True)
class ExitShape:
    """Sizes of an adapter. `exit_layer`: layers of the target that run before it. `width`: of the gated product."""

    hidden_dim: int
    exit_layer: int
    width: int
    draft_vocab: int

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
        _require_values(directory, tensors, engine.config.vocab_size)
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
            "artifact.kind", f"{directory} holds {manifest.kind!r}, layerskip takes {KIND!r}"
        )
    sizes = dict(manifest.shape)
    names = ExitShape.__dataclass_fields__.keys()
    if sizes.keys() != names or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise InvalidArgument(
            "artifact.shape", f"{directory} must give sizes {', '.join(names)}, has {sizes}"
        )
    shape = ExitShape(**{name: int(size) for name, size in sizes.items()})
    limits = {
        "hidden_dim": (engine.config.hidden_dim, engine.config.hidden_dim),
        "exit_layer": (1, engine.config.num_layers - 1),
        "draft_vocab": (1, engine.config.vocab_size),
    }
    for name, (least, most) in limits.items():
        if not least <= sizes[name] <= most:
            raise InvalidArgument(
                f"artifact.shape.{name}", f"{directory}: {sizes[name]}, the target takes {least} to {most}"
            )
    return shape


def _require_values(directory: Path, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != (name != "token_ids"):
            raise InvalidArgument("artifact", f"{directory}: {name} is {tensor.dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument("artifact", f"{directory}: {name} holds values that are not finite")
    token_ids = tensors["token_ids"]
    ascending = bool((token_ids.diff() > 0).all())
    if token_ids.dtype is not torch.int64 or not ascending or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise InvalidArgument("artifact", f"{directory}: token_ids are not ascending ids of the target")
