"""Loads the drafters that run a head on the target's hidden states: `eagle`, `eagle2`, `eagle3`, `mtp`."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from core.drafter_settings import DraftersSettings, DraftQuantisation, HeadSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.tokenizer import Tokenizer
from decode.drafters.artifact import ArtifactManifest, read_manifest, read_tensors, require_target
from decode.drafters.eagle import EagleModel, eagle_shapes
from decode.drafters.eagle3 import Eagle3Model, eagle3_shapes
from decode.drafters.head_drafter import HeadDrafter
from decode.drafters.head_model import HeadModel, HeadSizes
from decode.drafters.mtp import MtpModel, mtp_shapes
from decode.drafters.protocol import DrafterNeeds
from decode.drafters.vocabulary import vocabulary_digest
from engine.engine import Engine

KINDS = {"eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3", "mtp": "mtp"}
"""The kind of artifact that each drafter takes."""


def head_settings(settings: DraftersSettings) -> dict[str, HeadSettings]:
    """The configured heads, by drafter name. Raises InvalidArgument for a version of something that is no head."""
    named = {name: getattr(settings, name) for name in KINDS}
    for name in settings.versions:
        base, at, version = name.partition("@")
        if base not in KINDS or not at or not version:
            known = ", ".join(KINDS)
            raise InvalidArgument(
                f"decode_worker.drafters.versions.{name}", f"a name is NAME@VERSION with NAME one of {known}"
            )
    return {name: head for name, head in named.items() if head is not None} | settings.versions


def head_layers(settings: HeadSettings) -> tuple[int, ...]:
    """Layers whose planes a head reads. Raises InvalidArgument where its manifest cannot be read."""
    return read_manifest(head_directory(settings)).hidden_layers


def load_head(name: str, settings: HeadSettings, engine: Engine, tokenizer: Tokenizer) -> HeadDrafter:
    """Raises InvalidArgument naming file and field, FailedPrecondition for a head of another target."""
    base = name.partition("@")[0]
    directory = head_directory(settings)
    manifest = read_manifest(directory)
    if manifest.kind != KINDS[base]:
        raise InvalidArgument(
            f"decode_worker.drafters.{name}.artifact",
            f"{directory} holds a draft of kind {manifest.kind}, not {KINDS[base]}",
        )
    require_target(directory, manifest, engine.numerics.model_revision, vocabulary_digest(tokenizer))
    sizes = _sizes(directory, manifest, engine)
    model = _MODELS[manifest.kind](directory, manifest, sizes, engine, settings.quantisation)
    needs = DrafterNeeds(
        max_draft_length=settings.max_draft_length,
        default_draft_length=min(settings.draft_length, settings.max_draft_length),
        hidden_layers=manifest.hidden_layers,
        bytes_per_token=model.kv.layout.kv_token_bytes,
        largest_position=engine.max_context - 1,
        max_draft_width=1 if base == "eagle" else 16,
        default_draft_width=1 if base == "eagle" else settings.draft_width,
    )
    rates = manifest.acceptance.get("all")
    return HeadDrafter(
        name,
        model,
        needs,
        engine.config.vocab_size,
        settings.min_probability,
        rates[0] if rates else None,
    )


def head_directory(settings: HeadSettings) -> Path:
    """The artifact's folder."""
    if settings.artifact is None:
        raise InvalidArgument("drafters", "a head without a folder; see `shipped_heads.with_shipped`")
    return Path(settings.artifact).expanduser()


def _sizes(directory: Path, manifest: ArtifactManifest, engine: Engine) -> HeadSizes:
    """Checked against the target."""
    shape, config = manifest.shape, engine.config
    try:
        whole = {
            name: int(shape[name])
            for name in (
                "hidden_dim",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "intermediate_dim",
                "draft_vocab",
            )
        }
        sizes = HeadSizes(
            **whole,
            input_dim=whole["hidden_dim"] * (2 if manifest.kind == "eagle3" else 1),
            norm_epsilon=float(shape["norm_epsilon"]),
            rope_theta=float(shape["rope_theta"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument("artifact.shape", f"{directory}: {error} is missing or no number") from error
    for name, size in {**whole, "norm_epsilon": sizes.norm_epsilon, "rope_theta": sizes.rope_theta}.items():
        if not 0 < size < math.inf:
            raise InvalidArgument(f"artifact.shape.{name}", f"{directory}: {size} is no size")
    for name, theirs, ours in (
        ("hidden_dim", sizes.hidden_dim, config.hidden_dim),
        ("rope_theta", sizes.rope_theta, config.rope_theta),
    ):
        if theirs != ours:
            raise FailedPrecondition(
                f"artifact.shape.{name}", f"{directory}: {theirs}, the target has {ours}"
            )
    if not 1 <= sizes.draft_vocab <= config.vocab_size or sizes.num_heads % sizes.num_kv_heads:
        raise InvalidArgument("artifact.shape", f"{directory}: draft_vocab or heads are impossible")
    return sizes


def draft_ids_of(directory: Path, offsets: Tensor, vocab_size: int) -> Tensor:
    """Target ids of the draft ids: [draft_vocab] int64, from `d2t`. Raises InvalidArgument for no id, or one twice."""
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidArgument(
            "artifact.d2t", f"{directory}: ids {int(ids.min())} to {int(ids.max())} of {vocab_size}"
        )
    if len(torch.unique(ids)) != len(ids):
        raise InvalidArgument("artifact.d2t", f"{directory}: an id occurs twice")
    return ids


def _places(directory: Path, manifest: ArtifactManifest, engine: Engine) -> list[int]:
    kept = engine.kv.layout.hidden_layers
    missing = [layer for layer in manifest.hidden_layers if layer not in kept]
    if missing:
        raise FailedPrecondition(
            "artifact.hidden_layers", f"{directory}: the engine keeps no planes of {missing}"
        )
    return [kept.index(layer) for layer in manifest.hidden_layers]


def _eagle3(
    directory: Path,
    manifest: ArtifactManifest,
    sizes: HeadSizes,
    engine: Engine,
    quantisation: DraftQuantisation,
) -> HeadModel:
    tensors = read_tensors(directory, eagle3_shapes(sizes, len(manifest.hidden_layers)))
    ids = draft_ids_of(directory, tensors["d2t"], engine.config.vocab_size)
    return Eagle3Model(engine, sizes, _places(directory, manifest, engine), tensors, ids, quantisation)


def _eagle(
    directory: Path,
    manifest: ArtifactManifest,
    sizes: HeadSizes,
    engine: Engine,
    quantisation: DraftQuantisation,
) -> HeadModel:
    tensors = read_tensors(directory, eagle_shapes(sizes))
    ids = draft_ids_of(directory, tensors["d2t"], engine.config.vocab_size)
    return EagleModel(engine, sizes, last_place(directory, manifest, engine), tensors, ids, quantisation)


def _mtp(
    directory: Path,
    manifest: ArtifactManifest,
    sizes: HeadSizes,
    engine: Engine,
    quantisation: DraftQuantisation,
) -> HeadModel:
    tensors = read_tensors(directory, mtp_shapes(sizes))
    ids = draft_ids_of(directory, tensors["d2t"], engine.config.vocab_size)
    return MtpModel(engine, sizes, last_place(directory, manifest, engine), tensors, ids, quantisation)


def last_place(directory: Path, manifest: ArtifactManifest, engine: Engine) -> int:
    """The last layer's place among the planes that the engine keeps, for a head that reads that plane only."""
    last = engine.config.num_layers - 1
    if manifest.hidden_layers != (last,):
        raise InvalidArgument(
            "artifact.hidden_layers",
            f"{directory}: {manifest.hidden_layers}, a head of this kind reads ({last},)",
        )
    return _places(directory, manifest, engine)[0]


_MODELS: dict[str, Callable[[Path, ArtifactManifest, HeadSizes, Engine, DraftQuantisation], HeadModel]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "mtp": _mtp,
}
