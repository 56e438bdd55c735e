"""A made-up exit adapter for a tiny model, in the files that `layerskip` reads."""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from core.tokenizer import Tokenizer
from decode.drafters.artifact import ArtifactManifest, write_artifact
from decode.drafters.exit_adapter import KIND, ExitShape
from decode.drafters.vocabulary import vocabulary_digest
from engine.model_config import ModelConfig
from engine.weights import open_model


def make_exit_tensors(shape: ExitShape, vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Random; the adapter changes what the exit says, and leaves some of it as it is."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5
        for name, sizes in shape.tensors().items()
        if name != "token_ids"
    }
    chosen = torch.randperm(vocab_size, generator=generator)[: shape.draft_vocab]
    return tensors | {"token_ids": chosen.sort().values}


def make_exit_artifact(
    model: Path, out: Path, exit_layer: int = 2, draft_vocab: int = 200, width: int = 32
) -> Path:
    """Writes the artifact for the target in `model`; returns `out`."""
    config = ModelConfig.from_directory(model)
    shape = ExitShape(config.hidden_dim, exit_layer, width, draft_vocab, config.norm_epsilon)
    manifest = ArtifactManifest(
        format=1,
        kind=KIND,
        target_revision=open_model(model).revision(),
        tokenizer=vocabulary_digest(Tokenizer.from_directory(model)),
        hidden_layers=(),
        shape=asdict(shape),
        recipe={},
    )
    write_artifact(out, manifest, make_exit_tensors(shape, config.vocab_size))
    return out
