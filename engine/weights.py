"""Reads a model's tensors from safetensors or GGUF, every one accounted for. No pickle.

Names inside are those of Hugging Face Llama checkpoints. A missing, unexpected or misshapen tensor
raises InvalidArgument (field `model`) that names the file and the tensor.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import InvalidArgument
from engine.gguf_file import GgufTensor, dequantised, read_gguf
from engine.model_config import ModelConfig

_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of a file, read only when `load` is called (float, on the CPU)."""

    file: Path
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class ModelFiles:
    """A model on disk: its config and its tensors by Hugging Face name, read lazily.

    `take` hands out one tensor after checking its shape; `finish` raises unless all were taken.
    """

    def __init__(self, config: ModelConfig, tensors: dict[str, TensorSource], digested: list[Path]) -> None:
        self.config = config
        self._tensors = tensors
        self._digested = digested
        self._root = digested[0].parent

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; raises when it is missing, misshapen, or not finite."""
        source = self._tensors.pop(name, None)
        if source is None:
            raise InvalidArgument("model", f"{self._root}: tensor {name} is missing")
        if source.shape != shape:
            raise InvalidArgument(
                "model",
                f"{source.file}: tensor {name} has shape {list(source.shape)}, expected {list(shape)}",
            )
        tensor = source.load()
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument("model", f"{source.file}: tensor {name} holds values that are not finite")
        return tensor

    def finish(self) -> None:
        """Raise if a tensor is left that this architecture does not know."""
        for name, source in sorted(self._tensors.items()):
            raise InvalidArgument("model", f"{source.file}: unexpected tensor {name}")

    def revision(self) -> str:
        """SHA-256 over the weight files and config.json, in name order: the model revision."""
        digest = hashlib.sha256()
        for path in sorted(self._digested):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def open_model(model: Path) -> ModelFiles:
    """A directory (config.json with safetensors, or holding one .gguf) or a .gguf file."""
    if model.is_file() and model.suffix == ".gguf":
        return _open_gguf(model)
    if not model.is_dir():
        raise InvalidArgument("model", f"{model}: neither a directory nor a .gguf file")
    shards = _safetensors_files(model)
    if shards:
        return _open_safetensors(model, shards)
    found = sorted(model.glob("*.gguf"))
    if len(found) != 1:
        raise InvalidArgument(
            "model", f"{model}: expected *.safetensors or one *.gguf, found {len(found)} .gguf files"
        )
    return _open_gguf(found[0])


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted({str(file) for file in weight_map.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidArgument("model", f"{index}: not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument("model", f"{index}: shard {name!r} is outside the directory")
        if not (directory / name).is_file():
            raise InvalidArgument("model", f"{directory / name}: shard named by {index.name} is missing")
    return [directory / name for name in names]


def _open_safetensors(directory: Path, shards: list[Path]) -> ModelFiles:
    from safetensors import SafetensorError, safe_open

    config = ModelConfig.from_directory(directory)
    tensors: dict[str, TensorSource] = {}
    for shard in shards:
        try:
            reader: Any = safe_open(str(shard), framework="pt")
            names = list(reader.keys())
        except (SafetensorError, OSError) as error:
            raise InvalidArgument("model", f"{shard}: damaged or truncated: {error}") from error
        for name in names:
            if name in tensors:
                raise InvalidArgument("model", f"{shard}: tensor {name} is also in {tensors[name].file}")
            shape = tuple(reader.get_slice(name).get_shape())
            tensors[name] = TensorSource(shard, shape, _safetensors_loader(reader, name))
    if config.tied_embeddings:
        tensors.pop("lm_head.weight", None)
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]
    return ModelFiles(config, tensors, [directory / "config.json", *shards])


def _safetensors_loader(reader: Any, name: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        tensor: Tensor = reader.get_tensor(name)
        return tensor

    return load


def _open_gguf(path: Path) -> ModelFiles:
    file = read_gguf(path)
    metadata = dict(file.metadata)
    if "llama.vocab_size" not in metadata and "token_embd.weight" in file.tensors:
        metadata["llama.vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config = ModelConfig.from_gguf(metadata, str(path), tied_embeddings="output.weight" not in file.tensors)
    tensors: dict[str, TensorSource] = {}
    for gguf_name, entry in file.tensors.items():
        name = _hugging_face_name(gguf_name, path)
        tensors[name] = TensorSource(path, entry.shape, _gguf_loader(entry, name, path, config))
    return ModelFiles(config, tensors, [path])


def _hugging_face_name(gguf_name: str, path: Path) -> str:
    if gguf_name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.weight"
    raise InvalidArgument("model", f"{path}: unexpected tensor {gguf_name}")


def _gguf_loader(entry: GgufTensor, name: str, path: Path, config: ModelConfig) -> Callable[[], Tensor]:
    def load() -> Tensor:
        try:
            values = torch.from_numpy(dequantised(entry))
        except ValueError as error:
            raise InvalidArgument("model", f"{path}: {error}") from error
        if name.endswith("q_proj.weight"):
            return _unpermute(values, config.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(values, config.num_kv_heads)
        return values

    return load


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's row order of Q and K (rotary pairs interleaved; ours lie half a head apart)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def layer_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Suffix → shape of one layer's tensors."""
    return {
        "input_layernorm": (config.hidden_dim,),
        "self_attn.q_proj": (config.query_dim, config.hidden_dim),
        "self_attn.k_proj": (config.kv_dim, config.hidden_dim),
        "self_attn.v_proj": (config.kv_dim, config.hidden_dim),
        "self_attn.o_proj": (config.hidden_dim, config.query_dim),
        "post_attention_layernorm": (config.hidden_dim,),
        "mlp.gate_proj": (config.intermediate_dim, config.hidden_dim),
        "mlp.up_proj": (config.intermediate_dim, config.hidden_dim),
        "mlp.down_proj": (config.hidden_dim, config.intermediate_dim),
    }
