"""The kinds of drafts that can be read back from what training wrote."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from core.errors import InvalidArgument
from decode.drafters.artifact import DRAFT_MODEL, ArtifactManifest, read_manifest
from engine.model_config import ModelConfig
from training.draft_model import DraftModel
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
    """The head of an artifact, or a trained draft model, in float32. Raises InvalidArgument naming file and field."""
    manifest = read_manifest(directory)
    if manifest.kind not in {*KINDS, DRAFT_MODEL}:
        known = ", ".join(sorted({*KINDS, DRAFT_MODEL}))
        raise InvalidArgument("artifact", f"{directory} is of kind {manifest.kind!r}; known here: {known}")
    try:
        head = (
            _draft_model(directory, manifest)
            if manifest.kind == DRAFT_MODEL
            else KINDS[manifest.kind](manifest)
        )
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidArgument("artifact.shape", f"{directory}: {error}") from error
    head.read(directory)
    return head, manifest


def _draft_model(directory: Path, manifest: ArtifactManifest) -> DraftHead:
    return DraftModel(ModelConfig.from_directory(directory), len(manifest.acceptance["all"]))
