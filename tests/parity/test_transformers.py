"""Our logits and hidden planes against transformers' on the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.settings import EngineSettings
from engine.doctor import made_up_tokens, run_chunks
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.parity.transformers_oracle import compare, load_theirs

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "untied head": {"tie_word_embeddings": False},
    "one head for each KV head": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
}


def save_random_llama(directory: Path, changes: dict[str, Any], shard_size: str = "1GB") -> Any:
    """A random Llama written by transformers itself; the model is returned."""
    torch.manual_seed(11)
    values: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    model = LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def their_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save_random_llama(tmp_path, SHAPES[name])
    engine = Engine.load(tmp_path, EngineSettings(dtype="float32", num_blocks=64, num_threads=1))
    token_ids = made_up_tokens(130, 199, seed=1)
    ours = run_chunks(engine, token_ids, 50).logits
    assert torch.allclose(ours, their_logits(theirs, token_ids), atol=2e-5)


def test_sharded_weights_load_as_one_file_does(tmp_path: Path) -> None:
    theirs = save_random_llama(tmp_path, {}, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = Engine.load(tmp_path, EngineSettings(dtype="float32", num_blocks=64, num_threads=1))
    token_ids = made_up_tokens(20, 199, seed=2)
    assert torch.allclose(
        run_chunks(engine, token_ids, 20).logits, their_logits(theirs, token_ids), atol=2e-5
    )


def test_hidden_planes_hold_the_outputs_of_their_layers(tmp_path: Path) -> None:
    theirs = save_random_llama(tmp_path, {})
    engine = Engine.load(
        tmp_path, EngineSettings(dtype="float32", num_blocks=64, num_threads=1, hidden_layers=(0, 1, 2))
    )
    token_ids = made_up_tokens(40, 199, seed=3)
    outputs: list[torch.Tensor] = []
    for layer in theirs.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    their_logits(theirs, token_ids)
    table = engine.kv.open()
    engine.kv.reserve(table, 40)
    engine.step([SequenceStep(table, 0, token_ids, logit_rows="none")])
    engine.kv.commit(table, 40)
    planes = engine.kv.read_hidden(table, 0, 40)
    for layer, output in enumerate(outputs):
        assert torch.allclose(planes[layer], output.reshape(40, -1), atol=2e-5)


@pytest.mark.model
def test_the_real_model_agrees_with_transformers_on_a_few_prompts(real_model: Path) -> None:
    comparisons = compare(real_model, num_prompts=4, num_tokens=24, threads=1)
    assert [failure for comparison in comparisons for failure in comparison.failures()] == []


@pytest.mark.model
def test_the_oracle_notices_a_changed_weight(real_model: Path) -> None:
    theirs = load_theirs(real_model, torch.float32)
    engine = Engine.load(real_model, EngineSettings(dtype="float32", num_blocks=64, num_threads=1))
    token_ids = made_up_tokens(12, engine.config.vocab_size, seed=4)
    ours = run_chunks(engine, token_ids, 12).logits
    assert float((ours - their_logits(theirs, token_ids)).abs().max()) < 1e-3
    with torch.no_grad():
        theirs.model.layers[17].mlp.down_proj.weight[5] += 0.05
    assert float((ours - their_logits(theirs, token_ids)).abs().max()) > 1e-3
