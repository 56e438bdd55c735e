"""Attention by our C++ kernel (kernels/attention.cpp): CPU, head_dim a multiple of 16."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.native import NativeKernels
from engine.step_rows import StepRows

HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128})
"""What the kernel is compiled for."""
_LOG2_E = 1.4426950408889634
_UNIT_QUERIES = 48
_UNITS_PER_THREAD = 4


class _StepArrays(ctypes.Structure):
    """Mirrors `StepArrays` of kernels/attention.cpp."""

    _fields_ = [
        ("positions", ctypes.c_void_p),
        ("tail_begin", ctypes.c_void_p),
        ("tail_slots", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("sequence_start", ctypes.c_void_p),
        ("sequence_chain", ctypes.c_void_p),
        ("sequence_blocks", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("work", ctypes.c_int32),
        ("heads_at_once", ctypes.c_int32),
    ]


class _HeadShape(ctypes.Structure):
    """Mirrors `HeadShape` of kernels/attention.cpp."""

    _fields_ = [
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def rotary_tables(config: ModelConfig, max_context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles: each [max_context, head_dim / 2] float32."""
    positions = np.arange(max_context, dtype=np.float32)
    angles = torch.from_numpy(np.outer(positions, config.inverse_frequencies()))
    return angles.cos(), angles.sin()


class NativeAttention:
    """See `Attention`. A row's arithmetic is the same in every company and at every thread count."""

    def __init__(
        self,
        kernels: NativeKernels,
        config: ModelConfig,
        kv: KvCache,
        rotary: tuple[Tensor, Tensor],
        num_threads: int,
    ) -> None:
        self.name = f"native-{kernels.digest}"
        suffix = str(kv.keys.dtype).removeprefix("torch.")
        self._attend = kernels.library[f"outrider_attend_{suffix}"]
        self._attend.argtypes = [ctypes.c_void_p] * 6
        self._attend.restype = ctypes.c_int
        self._group = config.num_heads // config.num_kv_heads
        self._num_kv_heads = config.num_kv_heads
        self._num_threads = num_threads
        self._query_dim = config.query_dim
        self._block_size = kv.layout.block_size
        self._kv = kv
        self._rotary = rotary
        self._shape = _HeadShape(
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            _LOG2_E / float(np.sqrt(config.head_dim)),
        )
        self._shape_address = ctypes.addressof(self._shape)
        self._planes = [
            (kv.keys[layer].data_ptr(), kv.values[layer].data_ptr()) for layer in range(config.num_layers)
        ]
        self._rows: StepRows | None = None
        self._units: Any = None
        self._arrays = _StepArrays()
        self._arrays_address = ctypes.addressof(self._arrays)

    def begin(self, rows: StepRows) -> None:
        """See `Attention`."""
        units = self._split(rows)
        self._rows, self._units = rows, units
        arrays = self._arrays
        arrays.positions = rows.positions.ctypes.data
        arrays.tail_begin = rows.tail_begin.ctypes.data
        arrays.tail_slots = rows.tail_slots.ctypes.data
        arrays.block_ids = rows.block_ids.ctypes.data
        arrays.sequence_start = rows.sequence_start.ctypes.data
        arrays.sequence_chain = rows.sequence_chain.ctypes.data
        arrays.sequence_blocks = rows.sequence_blocks.ctypes.data
        arrays.units = units.ctypes.data
        arrays.num_rows = rows.num_rows
        arrays.num_units = len(units)
        arrays.block_size = self._block_size
        enough = len(units) >= _UNITS_PER_THREAD * self._num_threads
        arrays.heads_at_once = self._num_kv_heads if enough else 1
        arrays.work = min(int(rows.positions.sum(dtype=np.int64)) + rows.num_rows, 2**31 - 1)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `Attention`."""
        output = qkv.new_empty((qkv.shape[0], self._query_dim))
        keys, values = self._planes[layer]
        status = self._attend(
            self._arrays_address, self._shape_address, qkv.data_ptr(), keys, values, output.data_ptr()
        )
        assert status == 0, "head_dim was checked when this backend was chosen"
        return output

    def _split(self, rows: StepRows) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Work units (sequence, first row, end row): few enough to share loads, enough to feed all threads."""
        largest = max(1, _UNIT_QUERIES // self._group)
        wanted_units = -(-_UNITS_PER_THREAD * self._num_threads // self._num_kv_heads)
        per_unit = min(largest, max(1, rows.num_rows // wanted_units))
        units: list[tuple[int, int, int]] = []
        for sequence, (first, end) in enumerate(zip(rows.row_begin, rows.row_begin[1:], strict=False)):
            units.extend((sequence, row, min(row + per_unit, end)) for row in range(first, end, per_unit))
        return np.array(units, dtype=np.int32)
