"""The heads that ship with Outrider, by target: `shipped/TARGET/KIND/` beside this file, each an artifact.

A model that was trained together with heads has them in its own directory, `heads/KIND/`: they ship with it.
"""

from pathlib import Path

from core.drafter_settings import (
    DraftersSettings,
    HeadSettings,
    LayerSkipSettings,
    MedusaSettings,
    SequoiaSettings,
    SpecInferSettings,
)
from core.errors import InvalidArgument
from core.section import Section
from decode.drafters.artifact import read_manifest
from decode.drafters.exit_adapter import KIND as EXIT
from decode.drafters.heads import KINDS
from decode.drafters.medusa_artifact import KIND as MEDUSA

_SHIPPED = Path(__file__).parent / "shipped"


def heads_folder(model: Path) -> Path:
    """Where a model's directory holds heads of its own, each in a folder named by its kind."""
    return model / "heads"


def shipped_heads(model_revision: str, root: Path = _SHIPPED, model: Path | None = None) -> dict[str, Path]:
    """Folders of the heads for a target, by kind; those in its directory `model` before others."""
    found: dict[str, Path] = {}
    manifests = sorted(root.glob("*/*/manifest.json"))
    if model is not None:
        manifests += sorted(heads_folder(model).glob("*/manifest.json"))
    for manifest in manifests:
        held = read_manifest(manifest.parent)
        if held.target_revision == model_revision:
            found[held.kind] = manifest.parent
    return found


def with_shipped(
    settings: DraftersSettings, model_revision: str, root: Path = _SHIPPED, model: Path | None = None
) -> DraftersSettings:
    """Settings in which every head has its folder: heads without one, and those that nobody spoke of, ship with us.

    `model`: the target's directory, which may hold heads of its own. Where EAGLE-3 ships, `specinfer` and `sequoia` are
    made of it unless they are configured. Raises InvalidArgument for a head that was asked for without a folder and
    does not ship for this target.
    """
    found = shipped_heads(model_revision, root, model)
    update: dict[str, Section] = {}
    for name, kind in (*KINDS.items(), (MEDUSA, MEDUSA)):
        head: HeadSettings | None = getattr(settings, name)
        if head is None and settings.shipped and kind in found:
            head = MedusaSettings() if kind == MEDUSA else HeadSettings()
        if head is None or head.artifact is not None:
            continue
        if kind not in found:
            raise InvalidArgument(
                f"decode_worker.drafters.{name}.artifact",
                "no head of this kind ships for the target; name the folder of one",
            )
        update[name] = head.model_copy(update={"artifact": str(found[kind])})
    if settings.shipped:
        update |= _beside(settings, found)
    return settings.model_copy(update=update)


def _beside(settings: DraftersSettings, found: dict[str, Path]) -> dict[str, Section]:
    """What follows from the heads that ship, where the settings say nothing of it."""
    update: dict[str, Section] = {}
    exit_layer = settings.layerskip or LayerSkipSettings()
    if EXIT in found and exit_layer.artifact is None and exit_layer.exit_layer is None:
        update["layerskip"] = exit_layer.model_copy(update={"artifact": str(found[EXIT])})
    if "eagle3" in found and settings.specinfer is None and settings.ngram is not None:
        update["specinfer"] = SpecInferSettings(members=("ngram", "eagle3"))
    if "eagle3" in found and settings.sequoia is None:
        update["sequoia"] = SequoiaSettings(base="eagle3")
    return update
