"""The header of a GGUF file and its tensors' raw bytes.

Written for two reasons: the `gguf` package's reader takes seconds over a vocabulary that the engine
does not need, and a truncated or hostile file must end in one clear error. Layout after the public
specification (ggml, docs/gguf.md, version 3): little-endian, strings and arrays with 64-bit lengths.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InvalidArgument

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 20
_MAX_RANK = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` outermost dimension first, `data` the raw bytes of its blocks (a view of the file)."""

    name: str
    shape: tuple[int, ...]
    quantisation: int
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata (arrays left out: only their presence is kept, as None) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forwards through the mapped file; every read is checked against its end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._buffer):
            raise ValueError(f"ends at byte {len(self._buffer)}, inside its header")
        taken = self._buffer[self.offset : end]
        self.offset = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        value: int = self.scalar("Q")
        if value > _MAX_COUNT:
            raise ValueError(f"a count of {value} is implausible")
        return value

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._skip_array()
        raise ValueError(f"unknown metadata type {kind}")

    def _skip_array(self) -> None:
        kind, length = self.scalar("I"), self.count()
        if kind in _SCALARS:
            self.take(length * struct.calcsize("<" + _SCALARS[kind]))
            return
        if kind != _STRING:
            raise ValueError(f"arrays of metadata type {kind} are not supported")
        for _ in range(length):
            self.take(self.count())


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and read its header. Raises InvalidArgument (field `model`) naming the file."""
    try:
        with path.open("rb") as stream:
            buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return _read(buffer)
    except (OSError, ValueError, struct.error) as error:
        raise InvalidArgument("model", f"{path}: damaged or truncated: {error}") from error


def _read(buffer: mmap.mmap) -> GgufFile:
    cursor = _Cursor(buffer)
    if cursor.take(4) != _MAGIC:
        raise ValueError("no GGUF file")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is not known")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise ValueError(f"an alignment of {alignment}")
    data_start = cursor.offset + -cursor.offset % alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, quantisation, offset in headers:
        if name in tensors:
            raise ValueError(f"tensor {name} appears twice")
        num_bytes = _num_bytes(name, shape, quantisation)
        first = data_start + offset
        if first + num_bytes > len(buffer):
            raise ValueError(f"ends at byte {len(buffer)}, inside tensor {name}")
        data = np.frombuffer(buffer, dtype=np.uint8, count=num_bytes, offset=first)
        tensors[name] = GgufTensor(name, shape, quantisation, data)
    return GgufFile(metadata, tensors)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first), quantisation type, offset behind the header."""
    name = cursor.text()
    rank = cursor.scalar("I")
    if not 1 <= rank <= _MAX_RANK:
        raise ValueError(f"tensor {name} has rank {rank}")
    shape = tuple(int(cursor.scalar("Q")) for _ in range(rank))
    return name, shape[::-1], int(cursor.scalar("I")), int(cursor.scalar("Q"))


def _num_bytes(name: str, shape: tuple[int, ...], quantisation: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantisation)]
    except (KeyError, ValueError) as error:
        raise ValueError(f"tensor {name} has the unknown type {quantisation}") from error
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} are no multiple of {block_elements}")
    elements = 1
    for size in shape:
        elements *= size
    return elements // block_elements * block_bytes


def dequantised(tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor's values in float32, in its shape. Raises ValueError for a type `gguf` cannot read."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(tensor.quantisation)
        data: Any = tensor.data
        if kind is GGMLQuantizationType.F32:
            values: Any = data.view(np.float32)
        elif kind is GGMLQuantizationType.F16:
            values = data.view(np.float16).astype(np.float32)
        else:
            rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
            values = dequantize(data.reshape(rows, -1), kind)
    except NotImplementedError as error:
        raise ValueError(f"tensor {tensor.name}: type {tensor.quantisation} cannot be dequantised") from error
    shaped: np.ndarray[Any, np.dtype[np.float32]] = np.array(values, dtype=np.float32).reshape(tensor.shape)
    return shaped
