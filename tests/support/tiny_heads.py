"""Heads for the tiny model, as artifacts on disk: EAGLE and MTP that repeat the last token, an EAGLE-3 of chance."""

from pathlib import Path

import torch
from torch import Tensor

from core.tokenizer import Tokenizer
from decode.drafters.artifact import FORMAT, ArtifactManifest, write_artifact
from decode.drafters.eagle import eagle_shapes
from decode.drafters.eagle3 import eagle3_shapes
from decode.drafters.head_model import HeadSizes
from decode.drafters.mtp import mtp_shapes
from decode.drafters.vocabulary import vocabulary_digest
from engine.model_config import ModelConfig
from engine.weights import open_model

DRAFT_VOCAB = 256


def make_tiny_head(out: Path, model: Path, kind: str, *, seed: int = 0) -> Path:
    """An artifact of `kind` ("eagle", "eagle3", "mtp") for `model`; drafts the ids below `DRAFT_VOCAB`."""
    files = open_model(model)
    sizes = _sizes(files.config, kind)
    layers = (files.config.num_layers - 1,) if kind != "eagle3" else tuple(range(files.config.num_layers))
    shapes = {
        "eagle": lambda: eagle_shapes(sizes),
        "mtp": lambda: mtp_shapes(sizes),
        "eagle3": lambda: eagle3_shapes(sizes, len(layers)),
    }[kind]()
    manifest = ArtifactManifest(
        format=FORMAT,
        kind=kind,
        target_revision=files.revision(),
        tokenizer=vocabulary_digest(Tokenizer.from_directory(model)),
        hidden_layers=layers,
        shape=_shape(sizes, len(layers)),
        recipe={},
    )
    write_artifact(out, manifest, _tensors(kind, shapes, seed))
    return out


def _sizes(config: ModelConfig, kind: str) -> HeadSizes:
    return HeadSizes(
        hidden_dim=config.hidden_dim,
        input_dim=config.hidden_dim * (2 if kind == "eagle3" else 1),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_dim=config.intermediate_dim,
        draft_vocab=DRAFT_VOCAB,
        norm_epsilon=config.norm_epsilon,
        rope_theta=config.rope_theta,
    )


def _shape(sizes: HeadSizes, num_planes: int) -> dict[str, float]:
    names = ("hidden_dim", "num_heads", "num_kv_heads", "head_dim", "intermediate_dim", "draft_vocab")
    shape: dict[str, float] = {name: getattr(sizes, name) for name in names}
    return shape | {
        "num_planes": num_planes,
        "norm_epsilon": sizes.norm_epsilon,
        "rope_theta": sizes.rope_theta,
    }


def _tensors(kind: str, shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64)
        elif len(shape) == 1:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    if kind != "eagle3":
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name].mul_(0.05)
        fuse = "fc.weight" if kind == "eagle" else "eh_proj.weight"
        hidden = shapes[fuse][0]
        tensors[fuse] = torch.cat([torch.eye(hidden), 0.05 * tensors[fuse][:, hidden:]], dim=1)
    return tensors
