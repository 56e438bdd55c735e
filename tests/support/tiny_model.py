"""A tiny random Llama in the files that a Hugging Face directory has; loads in milliseconds."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

NUM_BYTES = 256


def make_tiny_model(
    path: Path,
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 256,
    seed: int = 0,
    logit_scale: float = 1.0,
) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; returns `path`.

    Token id i < 256 is byte i; ids from 256 on are special tokens `<|i|>`. Id 0 (the byte NUL) ends a sequence.
    The usual one is sure of every token; with `logit_scale` 0.1 it is surer of some than of others.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    weights = _weights(layers, hidden, kv_heads * (hidden // heads), vocab, seed)
    weights["model.norm.weight"] *= logit_scale
    save_file(weights, path / "model.safetensors")
    _tokenizer(vocab).save(str(path / "tokenizer.json"))
    return path


def _weights(layers: int, hidden: int, kv_dim: int, vocab: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * math.sqrt(1.0 / columns)

    weights = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(2 * hidden, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def _byte_characters() -> list[str]:
    """The character that a byte-level vocabulary writes for each byte: itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    characters: list[str] = []
    num_moved = 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(NUM_BYTES + num_moved))
            num_moved += 1
    return characters


def _tokenizer(vocab: int) -> Tokenizer:
    characters = _byte_characters()[:vocab]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{index}|>" for index in range(NUM_BYTES, vocab)])
    return tokenizer
