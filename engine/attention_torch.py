"""Attention by torch's scaled_dot_product_attention, made exact; any device.

Each root-to-leaf path is laid out contiguously, its query rows are padded to a multiple of 4 and its K
and V under a mask to a multiple of 512, so that no split of a reduction moves with the company.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.step_rows import StepRows

_QUERY_PADDING = 4
_QUERY_LIMIT = 64
_KEY_PADDING = 512


@dataclass(frozen=True, slots=True)
class _PathCall:
    """One call: `rows` of the step are the queries, `slots` the path's K and V by position (padded)."""

    rows: Tensor  # [queries]
    slots: Tensor  # [padded keys]
    mask: Tensor  # [padded queries, padded keys] True where a query sees a key
    num_keys: int


class TorchAttention:
    """See `Attention`."""

    def __init__(self, config: ModelConfig, kv: KvCache, rotary: tuple[Tensor, Tensor]) -> None:
        self.name = "torch-sdpa-pad4-keys512"
        self._config = config
        self._kv = kv
        self._cosines, self._sines = (table.to(kv.keys.device) for table in rotary)
        self._positions = torch.empty(0)
        self._write_slots = torch.empty(0)
        self._calls: list[_PathCall] = []

    def begin(self, rows: StepRows) -> None:
        """See `Attention`."""
        device = self._kv.keys.device
        self._positions = torch.from_numpy(rows.positions).to(device).long()
        self._write_slots = torch.from_numpy(rows.write_slots).to(device).long()
        self._calls = []
        for sequence in range(len(rows.row_begin) - 1):
            for path in _paths(rows, sequence):
                for first in range(0, len(path), _QUERY_LIMIT):
                    self._calls.append(self._path_call(rows, sequence, path[first : first + _QUERY_LIMIT]))

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `Attention`."""
        config = self._config
        num_rows = qkv.shape[0]
        queries, keys, values = torch.split(qkv, [config.query_dim, config.kv_dim, config.kv_dim], dim=-1)
        queries = self._rotate(queries.view(num_rows, config.num_heads, config.head_dim))
        keys = self._rotate(keys.reshape(num_rows, config.num_kv_heads, config.head_dim))
        self._kv.keys[layer].index_copy_(0, self._write_slots, keys)
        self._kv.values[layer].index_copy_(
            0, self._write_slots, values.reshape(num_rows, config.num_kv_heads, config.head_dim)
        )
        output = qkv.new_empty((num_rows, config.num_heads, config.head_dim))
        for call in self._calls:
            output[call.rows] = self._attend_path(layer, queries[call.rows], call)
        return output.view(num_rows, config.query_dim)

    def _attend_path(self, layer: int, queries: Tensor, call: _PathCall) -> Tensor:
        """queries [queries, heads, head_dim] → the same shape."""
        group = self._config.num_heads // self._config.num_kv_heads
        count = queries.shape[0]
        padded = functional.pad(queries, (0, 0, 0, 0, 0, call.mask.shape[0] - count))
        keys = self._kv.keys[layer].index_select(0, call.slots)
        values = self._kv.values[layer].index_select(0, call.slots)
        attended = functional.scaled_dot_product_attention(
            padded.transpose(0, 1)[None],
            keys.transpose(0, 1).repeat_interleave(group, dim=0)[None],
            values.transpose(0, 1).repeat_interleave(group, dim=0)[None],
            attn_mask=call.mask[None, None],
            scale=1.0 / math.sqrt(self._config.head_dim),
        )
        return attended[0].transpose(0, 1)[:count]

    def _rotate(self, heads: Tensor) -> Tensor:  # [rows, heads, head_dim]
        cosines = self._cosines[self._positions][:, None]
        sines = self._sines[self._positions][:, None]
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
        return turned.to(heads.dtype)

    def _path_call(self, rows: StepRows, sequence: int, path: list[int]) -> _PathCall:
        device = self._kv.keys.device
        slots = path_slots(rows, sequence, path[-1], self._kv.layout.block_size)
        num_keys = len(slots)
        positions = torch.from_numpy(rows.positions)[path]
        padded_queries = len(path) + -len(path) % _QUERY_PADDING
        padded_keys = num_keys + -num_keys % _KEY_PADDING
        mask = torch.zeros((padded_queries, padded_keys), dtype=torch.bool)
        mask[: len(path)] = torch.arange(padded_keys)[None] <= positions[:, None]
        mask[len(path) :, 0] = True
        slots = functional.pad(slots, (0, padded_keys - num_keys), value=int(slots[-1]))
        return _PathCall(torch.tensor(path, device=device), slots.to(device), mask.to(device), num_keys)


def _paths(rows: StepRows, sequence: int) -> list[list[int]]:
    """Rows of the sequence as paths; a row on several root-to-leaf paths is computed on the first."""
    first, end = rows.row_begin[sequence], rows.row_begin[sequence + 1]
    if rows.sequence_chain[sequence]:
        return [list(range(first, end))]
    paths: list[list[int]] = []
    seen: set[int] = set()
    row_of_slot = {int(rows.tail_slots[row]): row for row in range(first, end)}
    for row in sorted(range(first, end), key=lambda row: -int(rows.positions[row])):
        if row in seen:
            continue
        depth = int(rows.positions[row] - rows.sequence_start[sequence])
        begin = int(rows.tail_begin[row])
        tail = rows.tail_slots[begin : begin + depth + 1].tolist()
        path = [row_of_slot[slot] for slot in tail if slot in row_of_slot]
        paths.append([member for member in path if member not in seen])
        seen.update(path)
    return paths


def path_slots(rows: StepRows, sequence: int, row: int, block_size: int) -> Tensor:
    """Slots of positions 0 … the row's own, along its path: [position + 1] int64."""
    start, position = int(rows.sequence_start[sequence]), int(rows.positions[row])
    begin = int(rows.sequence_blocks[sequence])
    blocks = torch.from_numpy(rows.block_ids[begin : begin + -(-start // block_size)]).long()
    prefix = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:start]
    tail_begin = int(rows.tail_begin[row])
    tail = torch.from_numpy(rows.tail_slots[tail_begin : tail_begin + position - start + 1]).long()
    return torch.cat((prefix, tail))
