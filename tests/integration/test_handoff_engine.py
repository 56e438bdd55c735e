"""The hand-off with real weights: a tiny random Llama on both sides, compared bit for bit."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.settings import EngineSettings, HandoffSettings, PrefillSettings
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.plane_codec import layout_planes
from engine.step_batch import SequenceStep
from tests.support.handoff_rig import Rig, handoff_rig
from tests.support.tiny_model import make_tiny_model

BLOCK_SIZE = 16
SETTINGS = EngineSettings(
    dtype="bfloat16", num_threads=1, block_size=BLOCK_SIZE, num_blocks=64, hidden_layers=(0, 2)
)
LONG_TRANSFERS = HandoffSettings(credit_bytes=2**16, chunk_bytes=2**12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def rig(model: Path) -> AsyncIterator[Rig]:
    engine = Engine.load(model, SETTINGS)
    receiver = KvCache(engine.kv.layout, 64)
    chunks = PrefillSettings(chunk_tokens=32)
    async with handoff_rig(engine, receiver, handoff=LONG_TRANSFERS, prefill=chunks) as rig:
        yield rig


@pytest.fixture(scope="module")
def colocated(model: Path) -> Engine:
    return Engine.load(model, SETTINGS)


def prefill_here(engine: Engine, token_ids: list[int]) -> tuple[BlockTable, Tensor]:
    """One step over the whole prompt, in the engine's own pool."""
    table = engine.kv.open()
    engine.kv.reserve(table, len(token_ids))
    result = engine.step([SequenceStep(table, 0, token_ids, logit_rows="last")])
    engine.kv.commit(table, len(token_ids))
    return table, result.logits[0]


LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 200)
STARTS = (0, 1, BLOCK_SIZE, 33)


@pytest.mark.parametrize(
    ("num_tokens", "kv_start"), [(tokens, start) for tokens in LENGTHS for start in STARTS if start < tokens]
)
async def test_fetched_kv_hidden_planes_and_logits_are_bit_equal_to_a_colocated_prefill(
    rig: Rig, colocated: Engine, num_tokens: int, kv_start: int
) -> None:
    token_ids = [(31 * index + 5) % 256 for index in range(num_tokens)]
    expected_table, expected_logits = prefill_here(colocated, token_ids)
    table, result = await rig.fetch(token_ids, kv_start)
    assert torch.equal(result.logits, expected_logits)
    ours = rig.receiver.slots(table, kv_start, num_tokens)
    theirs = colocated.kv.slots(expected_table, kv_start, num_tokens)
    for kind, layer in layout_planes(rig.receiver.layout):
        received = rig.receiver.read_plane(kind, layer, ours)
        assert torch.equal(received, colocated.kv.read_plane(kind, layer, theirs)), (kind, layer)
    colocated.kv.close(expected_table)
    await rig.idle()
