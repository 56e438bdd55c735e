"""Weights: every tensor accounted for, and one clear error, naming file and tensor, for what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.doctor import made_up_tokens, run_chunks
from engine.engine import Engine
from engine.gguf_file import read_gguf
from engine.weights import open_model
from tests.support.tiny_model import make_tiny_model

SETTINGS = EngineSettings(dtype="float32", num_blocks=16, num_threads=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def change_tensors(model: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def change_config(model: Path, **values: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def refusal(model: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Engine.load(model, SETTINGS)
    assert caught.value.field == "model"
    return caught.value.message


def test_a_missing_tensor_is_named(model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(model, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in refusal(model)


def test_an_unexpected_tensor_is_named_with_its_file(model: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    change_tensors(model, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert refusal(model).endswith(f"model.safetensors: unexpected tensor {name}")


def test_a_misshapen_tensor_is_named_with_both_shapes(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    message = refusal(model)
    assert "model.safetensors: tensor model.norm.weight has shape [63], expected [64]" in message


def test_weights_that_are_not_finite_are_refused(model: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = torch.nan

    change_tensors(model, spoil)
    assert "model.layers.2.mlp.down_proj.weight holds values that are not finite" in refusal(model)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_named(model: Path, share: float) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "model.safetensors: damaged or truncated" in refusal(model)


def test_a_shard_that_is_not_there_is_named(model: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        "model-00002-of-00002.safetensors: shard named by model.safetensors.index.json is missing"
        in refusal(model)
    )


def test_a_shard_outside_the_directory_is_refused(model: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../tiny/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is outside the directory" in refusal(model)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unknown rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"num_key_value_heads": 3}, "no multiple of 3 KV heads"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be a positive whole number"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_a_config_that_this_engine_does_not_do_is_refused_by_key(
    model: Path, values: dict[str, Any], reason: str
) -> None:
    change_config(model, **values)
    assert reason in refusal(model)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_config_that_is_no_object_is_refused(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    assert "config.json" in refusal(model)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    assert "expected *.safetensors or one *.gguf" in refusal(tmp_path)
    assert "neither a directory nor a .gguf file" in refusal(tmp_path / "nothing")


def test_the_revision_moves_with_the_weights_and_with_the_config(model: Path) -> None:
    first = open_model(model).revision()
    assert open_model(model).revision() == first
    change_config(model, rms_norm_eps=2e-5)
    second = open_model(model).revision()
    change_tensors(model, lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    assert len({first, second, open_model(model).revision()}) == 3


def write_gguf(model: Path, path: Path, *, drop: str = "") -> None:
    """The tiny model as llama.cpp would convert it: its names, and Q and K rows in its rotary order."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.numpy()
        for suffix, heads in (("q_proj.weight", 4), ("k_proj.weight", 2)):
            if name.endswith(suffix):
                rows, columns = values.shape
                values = (
                    values.reshape(heads, 2, rows // heads // 2, columns)
                    .swapaxes(1, 2)
                    .reshape(rows, columns)
                )
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if gguf_name != drop:
            writer.add_tensor(str(gguf_name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_the_logits_of_the_safetensors_it_came_from(model: Path, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "tiny.gguf")
    token_ids = made_up_tokens(40, 256, seed=1)
    plain = run_chunks(Engine.load(model, SETTINGS), token_ids, 40).logits
    converted = run_chunks(Engine.load(tmp_path / "tiny.gguf", SETTINGS), token_ids, 40).logits
    assert torch.equal(plain, converted)


def test_a_directory_holding_one_gguf_file_is_a_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_gguf(model, tmp_path / "folder" / "tiny.gguf")
    assert Engine.load(tmp_path / "folder", SETTINGS).config.num_layers == 3


def test_a_gguf_file_without_a_tensor_names_it(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, drop="blk.1.ffn_down.weight")
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        Engine.load(path, SETTINGS)


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 20, 200, 700, 2000, 50_000])
def test_a_truncated_gguf_file_is_one_clear_error(model: Path, tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    content = path.read_bytes()
    assert len(content) > 50_000
    path.write_bytes(content[:num_bytes])
    with pytest.raises(InvalidArgument, match=r"tiny\.gguf: damaged or truncated"):
        read_gguf(path)


def test_a_gguf_header_with_absurd_counts_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 2 + bytes(64))
    with pytest.raises(InvalidArgument, match="implausible"):
        read_gguf(path)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04" + bytes(64), b"GGUF" + (99).to_bytes(4, "little") + bytes(64)]
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="damaged or truncated"):
        Engine.load(path, SETTINGS)
