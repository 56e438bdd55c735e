"""A model cut to its first layers, as a Hugging Face directory: a drafter that needs no training."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import InvalidArgument
from core.whole_file import written_whole
from engine.model_config import ModelConfig
from engine.weights import ModelFiles, layer_shapes, open_model

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def truncate_model(source: Path, num_layers: int, out: Path) -> Path:
    """Writes the embedding, the first `num_layers` layers, the last norm and the head of `source` in bfloat16.

    `source` holds config.json, tokenizer.json and weights (`core/model_store.py` makes such directories). `out`
    must not exist; it appears complete or not at all. Raises InvalidArgument.
    """
    if out.exists() or out.is_symlink():
        raise InvalidArgument("out", f"{out} exists already")
    tensors = first_layers(open_model(source), num_layers)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write_layers(source, num_layers, tensors, staging)
        staging.chmod(0o755)
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def first_layers(files: ModelFiles, num_layers: int) -> dict[str, Tensor]:
    """Tensors of a model of the first layers, in bfloat16, by Hugging Face name. Raises InvalidArgument."""
    if not 1 <= num_layers <= files.config.num_layers:
        raise InvalidArgument("layers", f"must be 1 to {files.config.num_layers}, got {num_layers}")
    shapes = _shapes(files.config, num_layers)
    return {name: files.take(name, shape).to(torch.bfloat16).contiguous() for name, shape in shapes.items()}


def write_layers(source: Path, num_layers: int, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes such tensors into `directory`, with the tokenizer of `source` and its config for so many layers.

    Each file is whole; config.json, without which a directory is no model, comes last.
    """
    with written_whole(directory / "model.safetensors") as path:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    for name in _COPIED:
        if (source / name).is_file():
            with written_whole(directory / name) as path:
                shutil.copyfile(source / name, path)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values.update(num_hidden_layers=num_layers, torch_dtype="bfloat16")
    with written_whole(directory / "config.json") as path:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _shapes(config: ModelConfig, num_layers: int) -> dict[str, tuple[int, ...]]:
    vocabulary = (config.vocab_size, config.hidden_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocabulary,
        "model.norm.weight": (config.hidden_dim,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = vocabulary
    for layer in range(num_layers):
        for suffix, shape in layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{suffix}.weight"] = shape
    return shapes
