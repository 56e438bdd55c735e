"""Drafters made of other hosted drafters: which can be built, and of whose instances."""

from collections.abc import Callable

from core.clock import Clock
from core.drafter_settings import DraftersSettings
from core.errors import InvalidArgument
from core.records import APPROXIMATE_DRAFTERS
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.pass_drafter import PassDrafter
from decode.drafters.protocol import Drafter
from decode.drafters.recursive import RecursiveDrafter
from decode.drafters.sequoia import SequoiaDrafter
from decode.drafters.specinfer import SpecInferDrafter
from decode.drafters.tree_drafting import TreeDrafting


def add_composed(
    hosted: dict[str, Drafter],
    settings: DraftersSettings,
    clock: Clock,
    step_seconds: Callable[[int], float],
) -> None:
    """Add the configured ones to the plain drafters in `hosted`, members first.

    Raises InvalidArgument naming the setting whose drafter is not hosted, or will not do.
    """
    if settings.sequoia is not None:
        base = _hosted(hosted, settings.sequoia.base, "decode_worker.drafters.sequoia.base")
        if not isinstance(base, TreeDrafting) or base.name in APPROXIMATE_DRAFTERS:
            raise InvalidArgument(
                "decode_worker.drafters.sequoia.base", f"{base.name} cannot draft a tree of a given shape"
            )
        hosted["sequoia"] = SequoiaDrafter(base, settings.sequoia, clock, step_seconds)
    if settings.recursive is not None:
        model = _hosted(hosted, DraftModelDrafter.name, "decode_worker.drafters.draft_model")
        assert isinstance(model, DraftModelDrafter), "another drafter has the draft model's name"
        hosted["recursive"] = RecursiveDrafter(model, settings.recursive)
    if settings.specinfer is not None:
        hosted["specinfer"] = _specinfer(hosted, settings, settings.specinfer.members)


def add_pass(hosted: dict[str, Drafter], settings: DraftersSettings) -> None:
    """Add `pass`, on a worker whose target is pipelined. Raises InvalidArgument where its drafter is not hosted."""
    inner = _hosted(hosted, settings.pass_drafter, "decode_worker.drafters.pass_drafter")
    hosted[PassDrafter.name] = PassDrafter(inner)


def _specinfer(
    hosted: dict[str, Drafter], settings: DraftersSettings, names: tuple[str, ...]
) -> SpecInferDrafter:
    field = "decode_worker.drafters.specinfer.members"
    owners: dict[str, str] = {}
    for name in names:
        _hosted(hosted, name, field)
        owner = name
        if name == "sequoia" and settings.sequoia is not None:
            owner = settings.sequoia.base
        elif name == "recursive":
            owner = DraftModelDrafter.name
        if owner in owners:
            raise InvalidArgument(field, f"{owners[owner]} and {name} both draft with {owner}")
        owners[owner] = name
    return SpecInferDrafter([hosted[name] for name in names])


def _hosted(hosted: dict[str, Drafter], name: str, field: str) -> Drafter:
    drafter = hosted.get(name)
    if drafter is None:
        raise InvalidArgument(field, f"{name!r} is not configured; these are: {', '.join(sorted(hosted))}")
    return drafter
