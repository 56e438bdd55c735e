"""A trained draft on disk: `model.safetensors`, and a manifest that binds it to its target.

What does not fit is refused by file and field: another target, another tokenizer, a tensor that is missing, left over
or of another shape. Nothing is unpickled.

A trained draft model is a model directory, with its manifest under a name of its own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.errors import FailedPrecondition, InvalidArgument
from core.whole_file import written_whole

FORMAT = 1
DRAFT_MODEL = "draft_model"
_MANIFEST, _WEIGHTS = "manifest.json", "model.safetensors"
_DRAFT_MANIFEST = "outrider-draft.json"
"""Of a draft model: others may keep a manifest.json in a model directory."""
_CONFIG = "config.json"
"""Every model directory has one, and no artifact but a draft model."""
_IDS = frozenset({"d2t", "token_ids"})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True, slots=True)
class ArtifactManifest:
    """What a draft is. `target_revision`, `tokenizer`: digests. `hidden_layers`: planes that it reads, ascending.

    `shape`: sizes by name. `recipe`: how it was trained. `acceptance`: measured, by class: rate at each depth.
    `rank_acceptance`: measured, by depth and rank: share of places whose token had that rank among the drafts of it.
    """

    format: int
    kind: str
    target_revision: str
    tokenizer: str
    hidden_layers: tuple[int, ...]
    shape: Mapping[str, float]
    recipe: Mapping[str, Any]
    acceptance: Mapping[str, list[float]] = field(default_factory=dict)
    rank_acceptance: list[list[float]] = field(default_factory=list)


def write_artifact(directory: Path, manifest: ArtifactManifest, tensors: Mapping[str, Tensor]) -> None:
    """Weights first, the manifest last: a folder without one is no artifact. One that is there already goes before."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MANIFEST).unlink(missing_ok=True)
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with written_whole(directory / _WEIGHTS) as path:
        save_file(held, path)
    write_manifest(directory, manifest)


def require_own_folder(directory: Path, *, draft_model: bool = False) -> None:
    """Called before a training or an import begins: what is written may overwrite an earlier one, never a model.

    `draft_model`: such a one is written, and may overwrite another. Raises InvalidArgument (`out`).
    """
    if directory.exists() and not directory.is_dir():
        raise InvalidArgument("out", f"{directory} is no folder")
    ours = draft_model and (directory / _DRAFT_MANIFEST).is_file()
    if ((directory / _CONFIG).exists() and not ours) or any(directory.glob("*.gguf")):
        raise InvalidArgument("out", f"{directory} holds a model; take another folder")


def write_manifest(directory: Path, manifest: ArtifactManifest) -> None:
    """Under the name that its kind has."""
    name = _DRAFT_MANIFEST if manifest.kind == DRAFT_MODEL else _MANIFEST
    with written_whole(directory / name) as path:
        path.write_text(json.dumps(asdict(manifest), indent=1))


def read_manifest(directory: Path) -> ArtifactManifest:
    """Raises InvalidArgument naming file and field."""
    path = _manifest_path(directory)
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("not an object")
        known = {entry.name for entry in fields(ArtifactManifest)}
        if missing := known - values.keys() - {"rank_acceptance"}:
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        if extra := values.keys() - known:
            raise ValueError(f"{', '.join(sorted(extra))} unknown")
        for name, sound in _SOUND.items():
            if name in values and not sound(values[name]):
                raise ValueError(f"{name} is {str(values[name])[:80]}")
        values["hidden_layers"] = tuple(values["hidden_layers"])
        manifest = ArtifactManifest(**values)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument("artifact", f"{path} is no manifest of a draft: {error}") from error
    if manifest.format != FORMAT:
        raise InvalidArgument("artifact", f"{path}: format {manifest.format}, this reads {FORMAT}")
    return manifest


def draft_model_manifest(directory: Path) -> ArtifactManifest | None:
    """Of a trained draft model; None for any other model directory. Raises InvalidArgument naming file and field."""
    path = directory / _DRAFT_MANIFEST
    if not path.is_file():
        return None
    manifest = read_manifest(directory)
    if manifest.kind != DRAFT_MODEL:
        raise InvalidArgument("artifact.kind", f"{path}: {manifest.kind!r}, not {DRAFT_MODEL}")
    return manifest


def require_target(directory: Path, manifest: ArtifactManifest, revision: str, tokenizer: str) -> None:
    """Raises FailedPrecondition where the draft is of another target."""
    for name, wanted in (("target_revision", revision), ("tokenizer", tokenizer)):
        if getattr(manifest, name) != wanted:
            raise FailedPrecondition(
                f"artifact.{name}", f"{_manifest_path(directory)} was trained for another target"
            )


def read_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Every tensor of `shapes`, and none beside them: ids whole numbers, all others finite floats.

    Raises InvalidArgument naming file and tensor.
    """
    path = directory / _WEIGHTS
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in names if names <= shapes.keys() else ():
                found[name] = file.get_tensor(name)
    except Exception as error:  # boundary: the library raises its own error for a bad file
        raise InvalidArgument("artifact", f"{path} cannot be read: {error}") from error
    for name in sorted(names ^ shapes.keys()):
        what = "is missing" if name in shapes else "belongs to nothing"
        raise InvalidArgument("artifact", f"{path}: tensor {name} {what}")
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise InvalidArgument("artifact", f"{path}: {name} is {tuple(found[name].shape)}, not {shape}")
        if fault := value_fault(name, found[name]):
            raise InvalidArgument("artifact", f"{path}: tensor {name} {fault}")
    return found


def value_fault(name: str, tensor: Tensor) -> str | None:
    """What is wrong with the values of an artifact's tensor; None: nothing."""
    if name in _IDS:
        return None if tensor.dtype in (torch.int64, torch.int32) else f"holds {tensor.dtype}, no ids"
    if tensor.dtype not in _FLOATS:
        return f"holds {tensor.dtype}, not a float of 16 to 64 bits"
    return None if bool(torch.isfinite(tensor.float()).all()) else "holds values that are no finite numbers"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _are_rates(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_rate, value))


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "format": _is_whole,
    "kind": lambda value: isinstance(value, str),
    "target_revision": lambda value: isinstance(value, str),
    "tokenizer": lambda value: isinstance(value, str),
    "hidden_layers": lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    "shape": lambda value: isinstance(value, dict),
    "recipe": lambda value: isinstance(value, dict),
    "acceptance": lambda value: isinstance(value, dict) and all(map(_are_rates, value.values())),
}
"""What each field of a manifest must be, as JSON has it; `medusa_artifact.py` looks at `rank_acceptance`."""


def _manifest_path(directory: Path) -> Path:
    own = directory / _DRAFT_MANIFEST
    return own if own.is_file() else directory / _MANIFEST
