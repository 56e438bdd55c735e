"""What an artifact of Medusa heads holds, read and held against its target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from core.drafter_settings import MedusaSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.tokenizer import Tokenizer
from decode.drafters.artifact import ArtifactManifest, read_manifest, read_tensors, require_target
from decode.drafters.heads import draft_ids_of, head_directory, last_place
from decode.drafters.vocabulary import vocabulary_digest
from engine.engine import Engine

KIND = "medusa"
MAX_WIDTH = 8
"""Ranks that training measures at each depth."""


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """What an artifact holds, checked against the target.

    weight: Tensor  # [num_heads, hidden_dim, hidden_dim]; bias: Tensor  # [num_heads, hidden_dim]
    draft_ids: Tensor  # [draft_vocab] int64, the target's, ascending
    matrices: Tensor  # [num_heads, draft_vocab, hidden_dim], an output matrix of each head; None: the target's
    place: of the last layer's plane among those that the engine keeps
    rank_rates: measured acceptance by depth and rank; None where it was not measured
    promised_rate: measured acceptance of a chain at depth 1; None where it was not measured
    """

    weight: Tensor
    bias: Tensor
    draft_ids: Tensor
    matrices: Tensor | None
    place: int
    rank_rates: Sequence[Sequence[float]] | None
    promised_rate: float | None


def medusa_layers(settings: MedusaSettings) -> tuple[int, ...]:
    """Layers whose planes the heads read. Raises InvalidArgument where the manifest cannot be read."""
    return read_manifest(head_directory(settings)).hidden_layers


def read_weights(settings: MedusaSettings, engine: Engine, tokenizer: Tokenizer) -> MedusaWeights:
    """Raises InvalidArgument naming file and field, FailedPrecondition for heads of another target."""
    directory = head_directory(settings)
    manifest = read_manifest(directory)
    if manifest.kind != KIND:
        raise InvalidArgument(
            "decode_worker.drafters.medusa.artifact",
            f"{directory} holds a draft of kind {manifest.kind}, not {KIND}",
        )
    require_target(directory, manifest, engine.numerics.model_revision, vocabulary_digest(tokenizer))
    sizes = _sizes(directory, manifest)
    hidden_dim, num_heads, draft_vocab = (sizes[name] for name in ("hidden_dim", "num_heads", "draft_vocab"))
    if hidden_dim != engine.config.hidden_dim:
        raise FailedPrecondition(
            "artifact.shape.hidden_dim",
            f"{directory}: {hidden_dim}, the target has {engine.config.hidden_dim}",
        )
    if num_heads < 1 or not 1 <= draft_vocab <= engine.config.vocab_size:
        raise InvalidArgument("artifact.shape", f"{directory}: num_heads or draft_vocab are impossible")
    place = last_place(directory, manifest, engine)
    tensors = read_tensors(directory, medusa_shapes(sizes))
    draft_ids = draft_ids_of(directory, tensors["d2t"], engine.config.vocab_size)
    rates = manifest.acceptance.get("all")
    return MedusaWeights(
        weight=tensors["weight"],
        bias=tensors["bias"],
        draft_ids=draft_ids,
        matrices=tensors.get("matrices"),
        place=place,
        rank_rates=_rank_rates(directory, manifest, num_heads),
        promised_rate=rates[0] if rates else None,
    )


def medusa_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The artifact's tensors. `sizes`: hidden_dim, num_heads, draft_vocab; own_matrices 1: a matrix for each head."""
    hidden_dim, num_heads, draft_vocab = sizes["hidden_dim"], sizes["num_heads"], sizes["draft_vocab"]
    shapes: dict[str, tuple[int, ...]] = {
        "weight": (num_heads, hidden_dim, hidden_dim),
        "bias": (num_heads, hidden_dim),
        "d2t": (draft_vocab,),
    }
    if sizes.get("own_matrices"):
        shapes["matrices"] = (num_heads, draft_vocab, hidden_dim)
    return shapes


def _sizes(directory: Path, manifest: ArtifactManifest) -> dict[str, int]:
    try:
        sizes = {name: int(manifest.shape[name]) for name in ("hidden_dim", "num_heads", "draft_vocab")}
        return sizes | {"own_matrices": int(manifest.shape.get("own_matrices", 0))}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument("artifact.shape", f"{directory}: {error} is missing or no number") from error


def _rank_rates(
    directory: Path, manifest: ArtifactManifest, num_heads: int
) -> Sequence[Sequence[float]] | None:
    rates = manifest.rank_acceptance
    if not rates:
        return None
    sound = (
        isinstance(rates, list)
        and len(rates) == num_heads
        and all(isinstance(row, list) and row for row in rates)
        and all(isinstance(rate, int | float) and 0.0 <= rate <= 1.0 for row in rates for rate in row)
    )
    if not sound:
        raise InvalidArgument("artifact.rank_acceptance", f"{directory}: no rates of {num_heads} heads")
    return rates
