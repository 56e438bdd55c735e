"""The Hugging Face files that belong beside a GGUF file, made from its metadata.

Third party: the `gguf` library (imported when called: it is slow to load, and servers start without it).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import FailedPrecondition

FORMAT_VERSION = 1
"""Raised whenever the files written here change, so that older caches are made anew."""

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: marked special
_USER_TOKEN = 4  # gguf.TokenType.USER_DEFINED: added, not special
_END_SPELLINGS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Control tokens that end an answer in every model that has them; GGUF names only one of a model's."""

_BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_DIGITS: dict[str, object] = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, dict[str, object]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
}


def write_sidecars(gguf_file: Path, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, config.json and generation_config.json into `directory`.

    Raises FailedPrecondition naming what the metadata lacks or what is not supported.
    """
    metadata = read_metadata(gguf_file)
    files = {
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
        "config.json": _config(metadata),
        "generation_config.json": _generation_config(metadata),
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2)
        (directory / name).write_text(text + "\n", encoding="utf-8")


def read_metadata(gguf_file: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file, and `tensor_names`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError, IndexError) as error:
        raise FailedPrecondition("model", f"{gguf_file} is no GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    metadata["tensor_names"] = [tensor.name for tensor in reader.tensors]
    return metadata


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise FailedPrecondition("model", f"the GGUF metadata lack {key}")
    return metadata[key]


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, object]:
    kind = _need(metadata, "tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise FailedPrecondition(
            "model",
            f"tokenizer {kind}/{pre} cannot be made from GGUF; put the model's tokenizer.json beside it",
        )
    tokens: list[str] = _need(metadata, "tokenizer.ggml.tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, _need(metadata, "tokenizer.ggml.token_type")),
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _need(metadata, "tokenizer.ggml.merges")],
        },
    }


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, object]]:
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL_TOKEN,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]


def _special(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens: list[str] = _need(metadata, "tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found: dict[str, str] = {}
    for name, key in keys.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[name] = tokens[number]
    return found


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _hyper(metadata, "context_length"),
        **_special(metadata),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _hyper(metadata: Mapping[str, Any], key: str) -> Any:
    return _need(metadata, f"{_need(metadata, 'general.architecture')}.{key}")


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    tokens: list[str] = _need(metadata, "tokenizer.ggml.tokens")
    kinds: list[int] = _need(metadata, "tokenizer.ggml.token_type")
    named = metadata.get("tokenizer.ggml.eos_token_id")
    spelt = [
        number
        for number, token in enumerate(tokens)
        if kinds[number] == _CONTROL_TOKEN and token in _END_SPELLINGS
    ]
    first = [named] if isinstance(named, int) else []
    return list(dict.fromkeys([*first, *spelt]))


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, object]:
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _config(metadata: Mapping[str, Any]) -> dict[str, object]:
    architecture = _need(metadata, "general.architecture")
    if architecture != "llama":
        raise FailedPrecondition("model", f"GGUF architecture {architecture} is not supported; llama is")
    heads = _hyper(metadata, "attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", _hyper(metadata, "embedding_length") // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_need(metadata, "tokenizer.ggml.tokens")),
        "hidden_size": _hyper(metadata, "embedding_length"),
        "intermediate_size": _hyper(metadata, "feed_forward_length"),
        "num_hidden_layers": _hyper(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _hyper(metadata, "context_length"),
        "rms_norm_eps": _hyper(metadata, "attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in metadata["tensor_names"],
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
