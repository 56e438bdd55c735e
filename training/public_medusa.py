"""Public Medusa heads as artifacts of ours, named as the authors' code names them (FasterDecoding/Medusa).

Head h has a block `h.0.linear.weight` [hidden_dim, hidden_dim] with `h.0.linear.bias`, and an output matrix of its own,
`h.1.weight` [vocabulary, hidden_dim]; all names may begin with `medusa_head.`. They are kept as they are: the whole
vocabulary may be drafted, and a draft of depth K reads K of these matrices. Where all of them are the target's own,
they are left out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from core.errors import FailedPrecondition, InvalidArgument
from core.tokenizer import Tokenizer
from decode.drafters.artifact import (
    FORMAT,
    ArtifactManifest,
    require_own_folder,
    value_fault,
    write_artifact,
)
from decode.drafters.medusa_artifact import KIND
from decode.drafters.vocabulary import vocabulary_digest
from engine.model_config import ModelConfig
from engine.weights import ModelFiles, open_model
from training.public_checkpoint import PublicHead, read_config, read_tensors

_FIELD: Final = "checkpoint"
_PREFIX: Final = "medusa_head."
_NAME: Final = re.compile(r"(0|[1-9]\d?)\.(0\.linear\.weight|0\.linear\.bias|1\.weight)")
_MOST_HEADS: Final = 16

Sourced = dict[str, tuple[Path, Tensor]]


def is_medusa(folder: Path) -> bool:
    """Whether a checkpoint calls itself Medusa heads. Raises InvalidArgument where its config.json cannot be read."""
    if any(folder.glob("medusa_lm_head.*")):
        return True
    return "medusa_num_heads" in read_config(folder)


def import_medusa(head: PublicHead, out: Path) -> ArtifactManifest:
    """Writes the artifact. Raises InvalidArgument naming file and tensor or key, FailedPrecondition for a misfit."""
    if head.layers is not None or head.layer_base:
        raise InvalidArgument("layers", "Medusa heads read the last layer; no layers may be named")
    require_own_folder(out)
    files = open_model(head.target)
    config = files.config
    found = _plain_names(read_tensors(head.folder))
    num_heads = _require_all(head.folder, found, config)
    tensors = _stacked(found, num_heads)
    if _are_all(tensors["matrices"], _output_matrix(files)):
        del tensors["matrices"]
    tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    shape = {"hidden_dim": config.hidden_dim, "num_heads": num_heads, "draft_vocab": config.vocab_size}
    manifest = ArtifactManifest(
        format=FORMAT,
        kind=KIND,
        target_revision=files.revision(),
        tokenizer=vocabulary_digest(Tokenizer.from_directory(head.target)),
        hidden_layers=(config.num_layers - 1,),
        shape={**shape, "own_matrices": 1} if "matrices" in tensors else shape,
        recipe={"imported_from": head.folder.name, "trained_layers": []},
    )
    write_artifact(out, manifest, tensors)
    return manifest


def _plain_names(tensors: Mapping[str, tuple[Path, Tensor]]) -> Sourced:
    """Without the prefix, each name known."""
    found: Sourced = {}
    for name, (file, tensor) in tensors.items():
        plain = name.removeprefix(_PREFIX)
        if not _NAME.fullmatch(plain):
            raise InvalidArgument(_FIELD, f"{file}: tensor {name} belongs to nothing")
        if plain in found:
            raise InvalidArgument(_FIELD, f"{file}: tensor {plain} is there with and without {_PREFIX}")
        found[plain] = file, tensor
    return found


def _require_all(folder: Path, found: Sourced, config: ModelConfig) -> int:
    """The number of heads, each whole and of the target's sizes."""
    num_heads = max(1 + max((int(name.partition(".")[0]) for name in found), default=0), _named_heads(folder))
    if not 1 <= num_heads <= _MOST_HEADS:
        raise InvalidArgument(_FIELD, f"{folder}: {num_heads} heads; 1 to {_MOST_HEADS} are taken")
    file = next((file for file, _ in found.values()), folder)
    shapes = {
        "0.linear.weight": (config.hidden_dim, config.hidden_dim),
        "0.linear.bias": (config.hidden_dim,),
        "1.weight": (config.vocab_size, config.hidden_dim),
    }
    for name, shape in (
        (f"{head}.{part}", shape) for head in range(num_heads) for part, shape in shapes.items()
    ):
        if name not in found:
            raise InvalidArgument(_FIELD, f"{file}: tensor {name} is missing")
        source, tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise FailedPrecondition(
                _FIELD, f"{source}: tensor {name} is {tuple(tensor.shape)}, the target needs {shape}"
            )
        if fault := value_fault(name, tensor):
            raise InvalidArgument(_FIELD, f"{source}: tensor {name} {fault}")
    return num_heads


def _named_heads(folder: Path) -> int:
    """Heads that config.json names; published files may hold more. 0 without one."""
    path = folder / "config.json"
    if not path.exists():
        return 0
    values = read_config(folder)
    for key, default in (("medusa_num_layers", 1), ("medusa_num_heads", 0)):
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(_FIELD, f"{path}: {key} must be a whole number, is {value!r}")
    if values.get("medusa_num_layers", 1) != 1:
        raise FailedPrecondition(
            _FIELD, f"{path}: medusa_num_layers is {values['medusa_num_layers']}, heads of 1 are taken"
        )
    return int(values.get("medusa_num_heads", 0))


def _stacked(found: Sourced, num_heads: int) -> dict[str, Tensor]:
    """The artifact's tensors but `d2t`, bfloat16."""
    parts = {"weight": "0.linear.weight", "bias": "0.linear.bias", "matrices": "1.weight"}
    return {
        ours: torch.stack([found[f"{head}.{theirs}"][1].bfloat16() for head in range(num_heads)])
        for ours, theirs in parts.items()
    }


def _output_matrix(files: ModelFiles) -> Tensor:
    config = files.config
    name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return files.take(name, (config.vocab_size, config.hidden_dim)).bfloat16()


def _are_all(matrices: Tensor, output: Tensor) -> bool:
    return all(torch.equal(matrix, output) for matrix in matrices)
