"""The engine on a CUDA device: the same model, the same answers to rounding, exactness reported."""

from pathlib import Path

import pytest
import torch

from core.settings import EngineSettings
from engine.doctor import made_up_tokens, numerics_report, run_chunks
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_logits_on_cuda_agree_with_those_of_the_cpu(model: Path) -> None:
    settings = EngineSettings(dtype="float32", num_blocks=32)
    token_ids = made_up_tokens(100, 256, seed=1)
    on_cpu = run_chunks(Engine.load(model, settings), token_ids, 25).logits
    on_cuda = run_chunks(Engine.load(model, settings, torch.device("cuda")), token_ids, 25).logits.cpu()
    assert torch.allclose(on_cpu, on_cuda, atol=1e-3)


def test_chunks_trees_and_batches_give_the_bits_of_plain_decoding_on_cuda(model: Path) -> None:
    settings = EngineSettings(dtype="bfloat16", num_blocks=64, hidden_layers=(0, 2))
    engine = Engine.load(model, settings, torch.device("cuda"))
    assert [check for check in numerics_report(engine, 72) if not check.holds] == []
    assert engine.numerics.device == "cuda"
