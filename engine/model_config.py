"""What a model is: shapes and constants, read from a Hugging Face config.json or from GGUF metadata.

The registry of architectures is closed: Llama-family decoders without biases. What a file asks for
and this engine does not do (another activation, an unknown rope scaling, biases) is refused by name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from core.errors import InvalidArgument

RopeScalingKind = Literal["none", "linear", "llama3"]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
ARCHITECTURES = frozenset({"LlamaForCausalLM"})


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. The last three fields belong to `llama3` only."""

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one Llama-family decoder."""

    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_dim: int
    vocab_size: int
    max_context: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_embeddings: bool

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def inverse_frequencies(self) -> FloatArray:  # [head_dim / 2]
        """Rotary frequencies after scaling, float32.

        `llama3` is the rule of the Llama 3.1 release: wavelengths above original/low are divided by
        `factor`, those below original/high are kept, and between them the two are blended linearly.
        """
        exponents: FloatArray = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain: FloatArray = (1.0 / np.power(np.float32(self.rope_theta), exponents)).astype(np.float32)
        scaling = self.rope_scaling
        if scaling.kind == "none":
            return plain
        if scaling.kind == "linear":
            stretched: FloatArray = (plain / np.float32(scaling.factor)).astype(np.float32)
            return stretched
        wavelengths = 2 * math.pi / plain
        turns = scaling.original_context / wavelengths
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(blend, 0.0, 1.0).astype(np.float32)
        blended: FloatArray = ((1 - kept) * plain / np.float32(scaling.factor) + kept * plain).astype(
            np.float32
        )
        return blended

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`. Raises InvalidArgument (field `model`) naming file and key."""
        path = directory / "config.json"
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument("model", f"{path}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise InvalidArgument("model", f"{path}: not an object")
        return _from_values(values, str(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str, *, tied_embeddings: bool) -> "ModelConfig":
        """From GGUF key-value metadata; `source` names the file in errors.

        The frequency factors tensor of Llama 3 GGUF files is not metadata: `engine/weights.py`
        refuses a file that has one, because its parameters cannot be read back.
        """
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise InvalidArgument("model", f"{source}: unknown architecture {architecture!r}, known: llama")
        read = _KeyReader(metadata, source)
        num_heads = read.whole("llama.attention.head_count")
        hidden_dim = read.whole("llama.embedding_length")
        head_dim = read.whole("llama.rope.dimension_count", hidden_dim // max(num_heads, 1))
        scaling_kind = metadata.get("llama.rope.scaling.type", "none")
        scaling = RopeScaling()
        if scaling_kind == "linear":
            scaling = RopeScaling("linear", read.number("llama.rope.scaling.factor"))
        elif scaling_kind != "none":
            raise InvalidArgument("model", f"{source}: unknown rope scaling {scaling_kind!r}")
        config = cls(
            num_layers=read.whole("llama.block_count"),
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            num_kv_heads=read.whole("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_dim=read.whole("llama.feed_forward_length"),
            vocab_size=read.whole("llama.vocab_size"),
            max_context=read.whole("llama.context_length"),
            norm_epsilon=read.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=read.number("llama.rope.freq_base", 10000.0),
            rope_scaling=scaling,
            tied_embeddings=tied_embeddings,
        )
        return _checked(config, source)


class _KeyReader:
    """Typed look-ups that name the file and the key when they fail."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise InvalidArgument(
                "model", f"{self._source}: {key} must be a positive whole number, is {value!r}"
            )
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value > 0:
            raise InvalidArgument("model", f"{self._source}: {key} must be a positive number, is {value!r}")
        return float(value)


def _from_values(values: dict[str, Any], source: str) -> ModelConfig:
    architectures = values.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InvalidArgument("model", f"{source}: architectures {architectures!r}, known: {known}")
    if values.get("hidden_act", "silu") != "silu":
        raise InvalidArgument("model", f"{source}: hidden_act {values['hidden_act']!r}, known: silu")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise InvalidArgument("model", f"{source}: {key} is not supported")
    read = _KeyReader(values, source)
    num_heads = read.whole("num_attention_heads")
    hidden_dim = read.whole("hidden_size")
    rope = values.get("rope_parameters") or {}
    theta_reader = _KeyReader(rope, source) if "rope_theta" in rope else read
    config = ModelConfig(
        num_layers=read.whole("num_hidden_layers"),
        hidden_dim=hidden_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads
        if values.get("num_key_value_heads") is None
        else read.whole("num_key_value_heads"),
        head_dim=hidden_dim // num_heads if values.get("head_dim") is None else read.whole("head_dim"),
        intermediate_dim=read.whole("intermediate_size"),
        vocab_size=read.whole("vocab_size"),
        max_context=read.whole("max_position_embeddings", 2048),
        norm_epsilon=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta_reader.number("rope_theta", 10000.0),
        rope_scaling=rope_scaling_of(values.get("rope_scaling") or rope, source),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
    )
    return _checked(config, source)


def rope_scaling_of(values: Mapping[str, Any], source: str) -> RopeScaling:
    """Of the object `rope_scaling` or `rope_parameters` of `config.json`. Raises InvalidArgument naming the key."""
    kind = values.get("rope_type", values.get("type", "default"))
    read = _KeyReader(values, source)
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", read.number("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            read.number("factor"),
            read.number("low_freq_factor"),
            read.number("high_freq_factor"),
            read.whole("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise InvalidArgument("model", f"{source}: high_freq_factor must exceed low_freq_factor")
        return scaling
    raise InvalidArgument("model", f"{source}: unknown rope scaling {kind!r}, known: default, linear, llama3")


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise InvalidArgument(
            "model", f"{source}: {config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise InvalidArgument("model", f"{source}: head_dim {config.head_dim} is odd")
    return config
