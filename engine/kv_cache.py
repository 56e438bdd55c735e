"""Paged K, V and hidden planes: what a sequence holds, shares, writes and gives back.

Bookkeeping (everything that takes a table, and `stats`, `check`, `drop_cached`) belongs to one thread, the
engine's. Committed slots never change while a table holds them, so `read_plane` of such slots may run on
another thread beside it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.block_pool import BlockPool
from engine.block_table import BlockTable
from engine.kv_layout import InvariantBroken, KvLayout, KvStats, OutOfBlocks, PlaneKind
from engine.plane_store import PlaneStore, Slots

__all__ = ["InvariantBroken", "KvCache", "KvLayout", "KvStats", "OutOfBlocks", "PlaneKind"]


class KvCache:
    """The pool's memory and the tables over it.

    keys, values: Tensor  # [layers, slots, kv_heads, head_dim]; slot = block id · block_size + offset
    hidden: Tensor | None  # [hidden layers, slots, hidden_dim]
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device | None = None) -> None:
        num_slots = num_blocks * layout.block_size
        shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
        self.layout = layout
        self._keys = PlaneStore(shape, layout.dtype, device)
        self._values = PlaneStore(shape, layout.dtype, device)
        self._hidden: PlaneStore | None = None
        if layout.hidden_layers:
            hidden_shape = (len(layout.hidden_layers), num_slots, layout.hidden_dim)
            self._hidden = PlaneStore(hidden_shape, layout.dtype, device)
        self.keys = self._keys.planes
        self.values = self._values.planes
        self.hidden = None if self._hidden is None else self._hidden.planes
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}
        self.on_copy: Callable[[Slots, Slots], None] | None = None
        """Told of every copy of slots, from and to, when it is made: for planes that lie elsewhere."""
        self._offsets = np.arange(layout.block_size, dtype=np.int32)

    def memory_bytes(self) -> int:
        """Bytes that the planes take once every block has been written."""
        planes = (self.keys, self.values, self.hidden)
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)

    def stats(self) -> KvStats:
        """Blocks by state."""
        return self._pool.stats()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that are held. Acquires nothing."""
        return len(self._pool.index.leading(hashes))

    def open(self, hashes: Sequence[bytes] = (), max_tokens: int | None = None) -> BlockTable:
        """A table over the held prefix of `hashes`, at most `max_tokens` tokens of it.

        A limit inside a block takes that block too: writing on in it copies or unpublishes it (`reserve`).
        The caller closes the table.
        """
        block_size = self.layout.block_size
        if max_tokens is not None:
            hashes = hashes[: self.layout.blocks_for(max_tokens)]
        block_ids = self._pool.index.leading(hashes)
        self._pool.share(block_ids)
        num_tokens = len(block_ids) * block_size
        if max_tokens is not None:
            num_tokens = min(num_tokens, max_tokens)
        return self._track(
            BlockTable(block_ids=block_ids, num_tokens=num_tokens, num_published=num_tokens // block_size)
        )

    def fork(self, table: BlockTable) -> BlockTable:
        """A second owner of the committed blocks; who writes next in the last one copies it (`reserve`)."""
        self._require_open(table)
        block_ids = table.block_ids[: self.layout.blocks_for(table.num_tokens)]
        self._pool.share(block_ids)
        return self._track(
            BlockTable(
                block_ids=list(block_ids), num_tokens=table.num_tokens, num_published=table.num_published
            )
        )

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Make table indices num_tokens' … `num_tokens` - 1 writable, num_tokens' being the committed ones.

        Called before each step that writes, also where the room is there already: a last block that others
        share is copied. Evicts cached blocks, the least recently used first. Raises OutOfBlocks and then
        changes nothing.
        """
        self._require_open(table)
        if num_tokens <= table.num_tokens:
            return
        first_written = table.num_tokens // self.layout.block_size
        shared = (
            first_written < len(table.block_ids) and self._pool.num_owners(table.block_ids[first_written]) > 1
        )
        missing = max(0, self.layout.blocks_for(num_tokens) - len(table.block_ids))
        taken = self._pool.take(missing + int(shared))
        if shared:
            copy = taken.pop()
            original = table.block_ids[first_written]
            self._copy_block(original, copy, table.num_tokens - first_written * self.layout.block_size)
            table.block_ids[first_written] = copy
            self._pool.release([original])
        elif first_written < len(table.block_ids):
            self._pool.index.remove(table.block_ids[first_written])
        table.num_published = min(table.num_published, first_written)
        table.block_ids.extend(taken)

    def slots(self, table: BlockTable, start: int, end: int) -> Tensor:
        """Slots of table indices `start` … `end` - 1: Tensor  # [end - start] int32."""
        return torch.from_numpy(self._slots(table, start, end)).to(self.keys.device)

    def compact(self, table: BlockTable, start: int, rows: Sequence[int]) -> None:
        """Move the accepted path of a tree together: slot start + rows[d] to start + d, every plane.

        `rows` ascend strictly from row 0, the root.
        """
        moved = [(row, depth) for depth, row in enumerate(rows) if row != depth]
        if not moved:
            return
        if start < table.num_tokens:
            raise InvariantBroken(f"compaction at {start} would move committed tokens (< {table.num_tokens})")
        slots = self._slots(table, start, start + rows[-1] + 1)
        source, target = np.array(moved).T
        self._copy_slots(slots[source], slots[target])

    def commit(self, table: BlockTable, num_tokens: int, *, keep_reserved: bool = False) -> None:
        """Table indices < `num_tokens` are valid from now on; blocks behind them are given back, or kept."""
        self._require_open(table)
        kept = self.layout.blocks_for(num_tokens)
        if kept > len(table.block_ids):
            raise InvariantBroken(f"{num_tokens} tokens committed, {len(table.block_ids)} blocks reserved")
        if not keep_reserved:
            self._pool.release(reversed(table.block_ids[kept:]))
            del table.block_ids[kept:]
        table.num_tokens = num_tokens
        table.num_published = min(table.num_published, num_tokens // self.layout.block_size)

    def publish(self, table: BlockTable, hashes: Sequence[bytes]) -> None:
        """Enter the leading full blocks in the prefix index; `hashes` are those of the table's tokens.

        Only verified tokens may be committed here. A hash that is known already keeps its block.
        """
        self._require_open(table)
        count = min(len(hashes), table.num_tokens // self.layout.block_size)
        for position in range(table.num_published, count):
            self._pool.index.add(hashes[position], table.block_ids[position])
        table.num_published = max(table.num_published, count)

    def close(self, table: BlockTable) -> None:
        """Give all blocks back; published ones stay cached, the sequence's end evicted first. Idempotent."""
        if table.closed:
            return
        self._require_open(table)
        del self._tables[id(table)]
        self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.num_tokens = table.num_published = 0
        table.closed = True

    def drop_cached(self) -> None:
        """Forget every published block, those in use included; unreferenced ones become free."""
        self._pool.drop_cached()
        for table in self._tables.values():
            table.num_published = 0

    def read_plane(
        self, kind: PlaneKind, layer: int, slots: Tensor, heads: tuple[int, int] | None = None
    ) -> Tensor:
        """A copy: Tensor  # [tokens, heads (start, end), head_dim]; hidden: [tokens, hidden_dim]."""
        store, index = self._store(kind, layer)
        return store.read(index, slots, heads)

    def write_plane(
        self, kind: PlaneKind, layer: int, slots: Tensor, values: Tensor, head_start: int = 0
    ) -> None:
        """Write `values` (shape of `read_plane`) to reserved slots, from KV head `head_start` on."""
        store, index = self._store(kind, layer)
        store.write(index, slots, values, None if kind is PlaneKind.HIDDEN else head_start)

    def read_hidden(self, table: BlockTable, start: int, end: int) -> Tensor:
        """Hidden planes of table indices: Tensor  # [num hidden, end - start, hidden_dim], a copy."""
        slots = self.slots(table, start, end)
        planes = self.keys.new_empty((len(self.layout.hidden_layers), end - start, self.layout.hidden_dim))
        for index, layer in enumerate(self.layout.hidden_layers):
            planes[index] = self.read_plane(PlaneKind.HIDDEN, layer, slots)
        return planes

    def check(self) -> None:
        """Raise InvariantBroken where counts, tables and index contradict each other."""
        places: dict[int, list[int]] = {}
        for table in self._tables.values():
            kept = self.layout.blocks_for(table.num_tokens)
            if table.closed or len(table.block_ids) < kept or table.num_published > len(table.block_ids):
                raise InvariantBroken(f"table of {len(table.block_ids)} blocks and {table.num_tokens} tokens")
            for position, block_id in enumerate(table.block_ids):
                places.setdefault(block_id, []).append(position)
                if position >= kept and (self._pool.num_owners(block_id) > 1 or block_id in self._pool.index):
                    raise InvariantBroken(
                        f"block {block_id} is reserved for writing, and shared or published"
                    )
        for block_id, positions in places.items():
            if len(set(positions)) > 1:
                raise InvariantBroken(f"block {block_id} is at different places of sequences: {positions}")
        self._pool.check({block_id: len(positions) for block_id, positions in places.items()})

    def _track(self, table: BlockTable) -> BlockTable:
        self._tables[id(table)] = table
        return table

    def _require_open(self, table: BlockTable) -> None:
        if self._tables.get(id(table)) is not table:
            raise InvariantBroken("a closed or foreign block table")

    def _store(self, kind: PlaneKind, layer: int) -> tuple[PlaneStore, int]:
        if kind is PlaneKind.HIDDEN:
            if self._hidden is None:
                raise ValueError("no hidden planes are kept")
            return self._hidden, self.layout.hidden_layers.index(layer)
        return (self._keys if kind is PlaneKind.KEY else self._values), layer

    def _slots(self, table: BlockTable, start: int, end: int) -> Slots:
        block_size = self.layout.block_size
        if not 0 <= start <= end <= len(table.block_ids) * block_size:
            raise IndexError(f"slots {start}..{end} of a table of {len(table.block_ids)} blocks")
        first = start // block_size
        block_ids = np.array(table.block_ids[first : self.layout.blocks_for(end)], dtype=np.int32)
        slots: Slots = (block_ids[:, None] * block_size + self._offsets).ravel()
        return slots[start - first * block_size : end - first * block_size]

    def _copy_block(self, source: int, target: int, num_tokens: int) -> None:
        block_size = self.layout.block_size
        offsets = self._offsets[:num_tokens]
        self._copy_slots(source * block_size + offsets, target * block_size + offsets)

    def _copy_slots(self, source: Slots, target: Slots) -> None:
        self.copy_slots(source, target)
        if self.on_copy is not None:
            self.on_copy(source, target)

    def copy_slots(self, source: Slots, target: Slots) -> None:
        """Copy every plane of slots to slots; no table is looked at."""
        for store in (self._keys, self._values, self._hidden):
            if store is not None:
                store.copy(source, target)
