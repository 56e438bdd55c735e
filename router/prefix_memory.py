"""What the router remembers of where prefixes should be cached: a bounded LRU of block hashes per worker life.

A hint only: a worker may have evicted a block, which costs a prefill and nothing else. Used by the event loop alone.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_BLOCKS_PER_WORKER = 65536


class PrefixMemory:
    """Block hashes by worker epoch. A restarted worker has another epoch, so nothing is expected of it."""

    def __init__(self, max_blocks_per_worker: int = MAX_BLOCKS_PER_WORKER) -> None:
        self._max_blocks = max_blocks_per_worker
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def overlap_blocks(self, epoch: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that the worker should hold. Changes nothing."""
        known = self._blocks.get(epoch)
        if known is None:
            return 0
        for count, block_hash in enumerate(hashes):
            if block_hash not in known:
                return count
        return len(hashes)

    def remember(self, epoch: str, hashes: Sequence[bytes], capacity_blocks: int) -> None:
        """The worker is about to hold these blocks. The least recently used ones are forgotten beyond its capacity."""
        known = self._blocks.setdefault(epoch, OrderedDict())
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        limit = min(self._max_blocks, capacity_blocks)
        while len(known) > limit:
            known.popitem(last=False)

    def keep_only(self, epochs: frozenset[str]) -> None:
        """Forgets the workers that are gone."""
        for epoch in self._blocks.keys() - epochs:
            del self._blocks[epoch]

    def num_blocks(self) -> int:
        """Blocks remembered, over all workers."""
        return sum(len(known) for known in self._blocks.values())
