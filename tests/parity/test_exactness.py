"""Chunks, trees and batches give the bits of plain decoding: logits, K, V and hidden planes."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from core.settings import EngineSettings
from engine.doctor import NumericsCheck, difference, made_up_tokens, numerics_report, run_chunks, run_trees
from engine.engine import Engine

Dtype = Literal["bfloat16", "float32"]
Backend = Literal["native", "torch"]


def load(
    model: Path, attention: Backend, dtype: Dtype, hidden_layers: tuple[int, ...] = (0, 2), threads: int = 1
) -> Engine:
    settings = EngineSettings(
        attention=attention, dtype=dtype, num_threads=threads, num_blocks=256, hidden_layers=hidden_layers
    )
    return Engine.load(model, settings)


def broken(checks: list[NumericsCheck]) -> list[NumericsCheck]:
    return [check for check in checks if not check.holds]


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tiny_model_gives_the_same_bits_by_steps_chunks_trees_and_batches(
    tiny_model: Path, attention: Backend, dtype: Dtype
) -> None:
    engine = load(tiny_model, attention, dtype)
    checks = numerics_report(engine)
    assert broken(checks) == []
    assert {check.name for check in checks} >= {"chunks of 200", "tree, wide", "every node of the trees"}
    engine.kv.check()
    assert engine.kv.stats().used == 0


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_bits_hold_where_the_context_passes_the_padding_of_keys(tiny_model: Path, attention: Backend) -> None:
    engine = load(tiny_model, attention, "bfloat16")
    token_ids = made_up_tokens(530, engine.config.vocab_size, seed=3)
    plain = run_chunks(engine, token_ids, 1)
    assert difference("chunks of 300", run_chunks(engine, token_ids, 300), plain).holds
    assert difference("trees", run_trees(engine, token_ids, (0, 0, 1, 1, 2, 2, 5)), plain).holds


def test_bits_do_not_depend_on_the_number_of_threads(tiny_model: Path) -> None:
    traces = []
    for threads in (1, 2, 3):
        engine = load(tiny_model, "native", "bfloat16", threads=threads)
        token_ids = made_up_tokens(150, engine.config.vocab_size, seed=4)
        traces.append(run_chunks(engine, token_ids, 64))
    assert difference("2 threads", traces[1], traces[0]).holds
    assert difference("3 threads", traces[2], traces[0]).holds


def test_a_differing_bit_is_counted(tiny_model: Path) -> None:
    engine = load(tiny_model, "native", "float32")
    trace = run_chunks(engine, made_up_tokens(20, engine.config.vocab_size, seed=5), 8)
    other = run_chunks(engine, made_up_tokens(20, engine.config.vocab_size, seed=5), 8)
    other.logits[7, 3] = torch.nextafter(other.logits[7, 3], torch.tensor(torch.inf))
    check = difference("one bit", other, trace)
    assert check.num_differing == 1
    assert not check.holds


def test_both_attentions_agree_to_rounding(tiny_model: Path) -> None:
    logits = []
    for attention in ("native", "torch"):
        engine = load(tiny_model, attention, "float32")
        token_ids = made_up_tokens(100, engine.config.vocab_size, seed=6)
        logits.append(run_chunks(engine, token_ids, 32).logits)
    assert torch.allclose(logits[0], logits[1], atol=2e-5)


@pytest.mark.model
@pytest.mark.parametrize("attention", ["native", "torch"])
def test_the_real_model_gives_the_same_bits_by_steps_chunks_trees_and_batches(
    real_model: Path, attention: Backend
) -> None:
    engine = load(real_model, attention, "bfloat16", hidden_layers=(2, 14, 29))
    assert broken(numerics_report(engine, 72)) == []


@pytest.mark.model
def test_the_real_model_gives_the_same_bits_in_a_chunk_of_two_hundred(real_model: Path) -> None:
    engine = load(real_model, "native", "bfloat16")
    token_ids = made_up_tokens(200, engine.config.vocab_size, seed=7)
    plain = run_chunks(engine, token_ids, 1)
    assert difference("chunk of 200", run_chunks(engine, token_ids, 200), plain).holds
