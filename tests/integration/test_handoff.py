"""The hand-off over a real socket gives the planes and logits that a colocated prefill gives."""

from collections.abc import AsyncIterator

import pytest
import torch

from engine.block_table import BlockTable
from engine.kv_cache import KvCache
from tests.support.handoff_rig import Rig, handoff_rig
from tests.support.toy_engine import HIDDEN_LAYERS, ToyEngine, toy_logits, toy_planes, toy_states

BLOCK_SIZE = 4


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = ToyEngine(hidden_layers=HIDDEN_LAYERS, block_size=BLOCK_SIZE)
    async with handoff_rig(engine, KvCache(engine.kv.layout, 64)) as rig:
        yield rig


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 90 for index in range(num_tokens)]


def assert_planes(kv: KvCache, table: BlockTable, token_ids: list[int], start: int = 0) -> None:
    states = toy_states(token_ids)[start:]
    slots = kv.slots(table, start, len(token_ids))
    for (kind, layer), values in toy_planes(kv.layout, states).items():
        assert torch.equal(kv.read_plane(kind, layer, slots), values)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 40, 41])
async def test_fetched_planes_and_logits_are_those_of_a_colocated_prefill(rig: Rig, num_tokens: int) -> None:
    token_ids = prompt(num_tokens)
    table, result = await rig.fetch(token_ids)
    assert_planes(rig.receiver, table, token_ids)
    assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    assert result.bytes == num_tokens * (
        rig.receiver.layout.kv_token_bytes + rig.receiver.layout.hidden_token_bytes
    )
    assert result.blocks == -(-num_tokens // BLOCK_SIZE)
    await rig.idle()
