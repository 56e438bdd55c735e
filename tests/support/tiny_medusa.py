"""Medusa heads for the tiny model, as an artifact: nearly the target's own head, so that they repeat the last token."""

from pathlib import Path

import torch

from core.tokenizer import Tokenizer
from decode.drafters.artifact import FORMAT, ArtifactManifest, write_artifact
from decode.drafters.medusa_artifact import KIND
from decode.drafters.vocabulary import vocabulary_digest
from engine.weights import open_model

NUM_HEADS = 4


def make_tiny_medusa(
    out: Path,
    model: Path,
    *,
    noise: float = 0.1,
    draft_vocab: int = 256,
    rates: list[list[float]] | None = None,
) -> Path:
    """Drafts the ids below `draft_vocab`. `noise`: scale of the blocks; `rates`: measured acceptance by rank."""
    files = open_model(model)
    hidden = files.config.hidden_dim
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "weight": noise * torch.randn(NUM_HEADS, hidden, hidden, generator=generator),
        "bias": noise * torch.randn(NUM_HEADS, hidden, generator=generator),
        "d2t": torch.zeros(draft_vocab, dtype=torch.int64),
    }
    manifest = ArtifactManifest(
        format=FORMAT,
        kind=KIND,
        target_revision=files.revision(),
        tokenizer=vocabulary_digest(Tokenizer.from_directory(model)),
        hidden_layers=(files.config.num_layers - 1,),
        shape={"hidden_dim": hidden, "num_heads": NUM_HEADS, "draft_vocab": draft_vocab},
        recipe={},
        rank_acceptance=rates or [],
    )
    write_artifact(out, manifest, tensors)
    return out
