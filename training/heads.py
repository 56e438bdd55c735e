"""The kinds of heads that can be read back from an artifact."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from core.errors import InvalidArgument
from decode.drafters.artifact import ArtifactManifest, read_manifest, read_tensors
from training.eagle import EagleHead
from training.eagle3 import Eagle3Head
from training.exit_head import ExitHead
from training.head import DraftHead
from training.medusa import MedusaHeads
from training.mtp import MtpHead

KINDS: Final[Mapping[str, Callable[[ArtifactManifest], DraftHead]]] = {
    kind.kind: kind.of for kind in (EagleHead, Eagle3Head, ExitHead, MtpHead, MedusaHeads)
}


def read_head(directory: Path) -> tuple[DraftHead, ArtifactManifest]:
    """The head of an artifact, in float32. Raises InvalidArgument naming file and field."""
    manifest = read_manifest(directory)
    if manifest.kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise InvalidArgument("artifact", f"{directory} is of kind {manifest.kind!r}; known here: {known}")
    try:
        head = KINDS[manifest.kind](manifest)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidArgument("artifact.shape", f"{directory}: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in head.tensors().items()}
    head.load_state_dict(read_tensors(directory, shapes))
    return head, manifest
