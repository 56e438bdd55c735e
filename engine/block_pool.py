"""Who holds which block: reference counts, the free list, and the cached blocks in order of last use."""

from collections import OrderedDict
from collections.abc import Iterable

from engine.kv_layout import InvariantBroken, KvStats, OutOfBlocks
from engine.prefix_index import PrefixIndex


class BlockPool:
    """Each block is free (no owner, not published), used (owners > 0) or cached (no owner, published).

    Cached blocks are given out again when no free block is left, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.index = PrefixIndex()
        self._num_owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + len(self._cached)

    def stats(self) -> KvStats:
        """Counts by state."""
        total, free, cached = len(self._num_owners), len(self._free), len(self._cached)
        return KvStats(total=total, free=free, used=total - free - cached, cached=cached)

    def num_owners(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._num_owners[block_id]

    def take(self, count: int) -> list[int]:
        """Blocks with one owner and unknown contents. Raises OutOfBlocks and changes nothing."""
        if count > self.num_available:
            raise OutOfBlocks(count, self.num_available)
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in taken:
            self._num_owners[block_id] = 1
        return taken

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self.index.remove(block_id)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for each; a cached block is used again."""
        for block_id in block_ids:
            if self._num_owners[block_id] == 0:
                del self._cached[block_id]
            self._num_owners[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One owner less for each, in the order given: the first is evicted first."""
        for block_id in block_ids:
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                if block_id in self.index:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def drop_cached(self) -> None:
        """Forget every published block; those without an owner become free."""
        self.index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, num_holders: dict[int, int]) -> None:
        """`num_holders`: how many tables hold each block. Raises InvariantBroken."""
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached:
            raise InvariantBroken("a block is in the free list twice, or free and cached")
        if not self.index.consistent():
            raise InvariantBroken("the prefix index contradicts itself")
        for block_id, owners in enumerate(self._num_owners):
            if owners != num_holders.get(block_id, 0):
                raise InvariantBroken(
                    f"block {block_id} has {owners} owners, but {num_holders.get(block_id, 0)} tables hold it"
                )
            states = (owners > 0) + (block_id in free) + (block_id in cached)
            if states != 1:
                raise InvariantBroken(f"block {block_id} is in {states} states")
            if block_id in free and block_id in self.index:
                raise InvariantBroken(f"block {block_id} is free and published")
            if block_id in cached and block_id not in self.index:
                raise InvariantBroken(f"block {block_id} is cached and not published")
