"""Public EAGLE-3 checkpoints as artifacts of ours: every tensor accounted for, nothing guessed.

Medusa's are in `public_medusa.py`.

A folder holds config.json and safetensors; pickled weights are refused. What the checkpoint does not say (which target
it is for, whether its layer numbers count from 0 or from 1) the caller says.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import FailedPrecondition, InvalidArgument
from core.tokenizer import Tokenizer
from decode.drafters.artifact import (
    FORMAT,
    ArtifactManifest,
    require_own_folder,
    value_fault,
    write_artifact,
)
from decode.drafters.eagle3 import eagle3_shapes
from decode.drafters.head_model import HeadSizes
from decode.drafters.vocabulary import vocabulary_digest
from engine.model_config import ModelConfig, rope_scaling_of
from engine.weights import open_model

_FIELD = "checkpoint"
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class PublicHead:
    """A checkpoint and its target. `layer_base`: 1 where layer numbers count the embedding's output as 0."""

    folder: Path
    target: Path
    layers: tuple[int, ...] | None = None
    layer_base: int = 0


def import_eagle3(head: PublicHead, out: Path) -> ArtifactManifest:
    """Writes the artifact. Raises InvalidArgument naming file and tensor or key, FailedPrecondition for a misfit."""
    require_own_folder(out)
    files = open_model(head.target)
    config, values = files.config, read_config(head.folder)
    tensors = _plain_names(head.folder)
    layers = _layers(head, values, config)
    draft_vocab = _whole(head.folder, values, "draft_vocab_size", config.vocab_size)
    _require_fit(head.folder, values, config)
    own_words = tensors.pop("embed_tokens.weight", None)
    if own_words is not None and not _equals_target(own_words, head.target):
        raise FailedPrecondition(
            _FIELD, f"{head.folder}: embed_tokens.weight is not the target's; not supported"
        )
    if "lm_head.weight" not in tensors:
        if draft_vocab != config.vocab_size:
            raise InvalidArgument(
                _FIELD, f"{head.folder}: lm_head.weight is missing, the vocabulary is its own"
            )
        name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        tensors["lm_head.weight"] = files.take(name, (config.vocab_size, config.hidden_dim))
    tensors["d2t"] = _id_map(head.folder, tensors, draft_vocab, config.vocab_size)
    manifest = ArtifactManifest(
        format=FORMAT,
        kind="eagle3",
        target_revision=files.revision(),
        tokenizer=vocabulary_digest(Tokenizer.from_directory(head.target)),
        hidden_layers=layers,
        shape=_shape(head.folder, values, config, len(layers), draft_vocab),
        recipe={"imported_from": head.folder.name, "trained_layers": list(layers)},
    )
    _require_shapes(head.folder, manifest, tensors)
    write_artifact(out, manifest, tensors)
    return manifest


def read_config(folder: Path) -> Mapping[str, Any]:
    """The checkpoint's config.json. Raises InvalidArgument naming the file."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(_FIELD, f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(_FIELD, f"{path} holds no JSON object")
    return values


def read_tensors(folder: Path) -> dict[str, tuple[Path, Tensor]]:
    """Every tensor of the folder's safetensors, with its file.

    Raises InvalidArgument naming the file: one that cannot be read, or pickled weights, which are not opened.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise InvalidArgument(_FIELD, f"{folder} holds no .safetensors{_mend_of_pickle(folder)}")
    tensors: dict[str, tuple[Path, Tensor]] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except Exception as error:  # boundary: the library raises its own error for a bad file
            raise InvalidArgument(_FIELD, f"{shard} cannot be read: {error}") from error
        for name, tensor in found.items():
            if name in tensors:
                raise InvalidArgument(_FIELD, f"{shard}: tensor {name} is also in {tensors[name][0]}")
            tensors[name] = shard, tensor
    return tensors


def _plain_names(folder: Path) -> dict[str, Tensor]:
    """Without the prefix that some checkpoints have."""
    found: dict[str, Tensor] = {}
    for name, (file, tensor) in read_tensors(folder).items():
        plain = name.removeprefix(_PREFIX)
        if plain in found:
            raise InvalidArgument(_FIELD, f"{file}: tensor {plain} is there with and without {_PREFIX}")
        found[plain] = tensor
    return found


def _mend_of_pickle(folder: Path) -> str:
    pickled = [path.name for suffix in ("*.bin", "*.pt") for path in sorted(folder.glob(suffix))]
    if not pickled:
        return ""
    return (
        f"; {pickled[0]} is pickled and can run code when it is opened: where you trust it, torch.load(..., "
        f"weights_only=True) and safetensors.torch.save_file make {Path(pickled[0]).stem}.safetensors of it"
    )


def _whole(folder: Path, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(
            _FIELD, f"{folder / 'config.json'}: {key} must be a positive whole number, is {value!r}"
        )
    return value


def _number(folder: Path, values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise InvalidArgument(_FIELD, f"{folder / 'config.json'}: {key} must be above 0, is {value!r}")
    return float(value)


def _nested(folder: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise InvalidArgument(_FIELD, f"{folder / 'config.json'}: {key} must be an object, is {value!r}")
    return value


def _layers(head: PublicHead, values: Mapping[str, Any], config: ModelConfig) -> tuple[int, ...]:
    """Layers whose outputs are captured, from 0: as given, as the checkpoint says, or early, middle and late."""
    said = _nested(head.folder, values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    named = said if head.layers is None else list(head.layers)
    if named is None:
        last = config.num_layers - 1
        return tuple(sorted({min(2, last), config.num_layers // 2, max(0, last - 2)}))
    sound = isinstance(named, list) and bool(named) and all(type(layer) is int for layer in named)
    layers = [layer - head.layer_base for layer in named] if sound else []
    if not layers or layers != sorted({*layers}) or layers[0] < 0 or layers[-1] >= config.num_layers:
        raise InvalidArgument(
            "layers" if head.layers else _FIELD,
            f"{head.folder}: layers {named!r} are not ascending ones of {config.num_layers}, "
            f"the first {head.layer_base}",
        )
    return tuple(layers)


def _require_fit(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> None:
    rope = _nested(folder, values, "rope_parameters")
    theta = _number(folder, rope if "rope_theta" in rope else values, "rope_theta", 10000.0)
    for name, theirs, ours in (
        ("hidden_size", _whole(folder, values, "hidden_size"), config.hidden_dim),
        ("vocab_size", _whole(folder, values, "vocab_size", config.vocab_size), config.vocab_size),
        ("rope_theta", theta, config.rope_theta),
        ("num_hidden_layers", _whole(folder, values, "num_hidden_layers", 1), 1),
    ):
        if theirs != ours:
            raise FailedPrecondition(
                _FIELD, f"{folder / 'config.json'}: {name} is {theirs}, needed is {ours}"
            )
    scaling = rope_scaling_of(_nested(folder, values, "rope_scaling") or rope, str(folder / "config.json"))
    if scaling != config.rope_scaling:
        raise FailedPrecondition(
            _FIELD, f"{folder / 'config.json'}: {scaling}, the target has {config.rope_scaling}"
        )


def _equals_target(tensor: Tensor, target: Path) -> bool:
    files = open_model(target)  # a file hands a tensor out once only
    ours = files.take("model.embed_tokens.weight", (files.config.vocab_size, files.config.hidden_dim))
    return tensor.shape == ours.shape and bool(torch.equal(tensor.bfloat16(), ours.bfloat16()))


def _id_map(folder: Path, tensors: dict[str, Tensor], draft_vocab: int, vocab_size: int) -> Tensor:
    """`d2t`, held against `t2d`, which says the same from the other side and is not kept."""
    offsets = tensors.pop("d2t", None)
    marks = tensors.pop("t2d", None)
    if offsets is not None and (offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32)):
        raise InvalidArgument(_FIELD, f"{folder}: d2t is {tuple(offsets.shape)} of {offsets.dtype}, no ids")
    if offsets is None:
        if draft_vocab != vocab_size:
            raise InvalidArgument(
                _FIELD, f"{folder}: a vocabulary of {draft_vocab} without d2t cannot be mapped"
            )
        return torch.zeros(vocab_size, dtype=torch.int64)
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if len(ids) != draft_vocab or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidArgument(
            _FIELD, f"{folder}: d2t of {len(ids)} ids, {draft_vocab} below {vocab_size} needed"
        )
    if len(torch.unique(ids)) != len(ids):
        raise InvalidArgument(_FIELD, f"{folder}: d2t names an id twice")
    if marks is not None and not torch.equal(marks.bool().nonzero().flatten(), ids.sort().values):
        raise InvalidArgument(_FIELD, f"{folder}: t2d and d2t contradict each other")
    return offsets.to(torch.int64)


def _shape(
    folder: Path, values: Mapping[str, Any], config: ModelConfig, num_planes: int, draft_vocab: int
) -> dict[str, float]:
    num_heads = _whole(folder, values, "num_attention_heads")
    return {
        "hidden_dim": config.hidden_dim,
        "num_heads": num_heads,
        "num_kv_heads": _whole(folder, values, "num_key_value_heads", num_heads),
        "head_dim": _whole(folder, values, "head_dim", config.hidden_dim // num_heads),
        "intermediate_dim": _whole(folder, values, "intermediate_size"),
        "num_planes": num_planes,
        "draft_vocab": draft_vocab,
        "norm_epsilon": _number(folder, values, "rms_norm_eps", 1e-6),
        "rope_theta": config.rope_theta,
    }


def _require_shapes(folder: Path, manifest: ArtifactManifest, tensors: Mapping[str, Tensor]) -> None:
    shape = manifest.shape
    sizes = HeadSizes(
        hidden_dim=int(shape["hidden_dim"]),
        input_dim=2 * int(shape["hidden_dim"]),
        num_heads=int(shape["num_heads"]),
        num_kv_heads=int(shape["num_kv_heads"]),
        head_dim=int(shape["head_dim"]),
        intermediate_dim=int(shape["intermediate_dim"]),
        draft_vocab=int(shape["draft_vocab"]),
        norm_epsilon=shape["norm_epsilon"],
        rope_theta=shape["rope_theta"],
    )
    wanted = eagle3_shapes(sizes, len(manifest.hidden_layers))
    missing = sorted(wanted.keys() - tensors.keys())
    extra = sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise InvalidArgument(_FIELD, f"{folder}: tensors missing: {missing}, belonging to nothing: {extra}")
    for name, expected in wanted.items():
        if tuple(tensors[name].shape) != expected:
            raise InvalidArgument(_FIELD, f"{folder}: {name} is {tuple(tensors[name].shape)}, not {expected}")
        if fault := value_fault(name, tensors[name]):
            raise InvalidArgument(_FIELD, f"{folder}: tensor {name} {fault}")
