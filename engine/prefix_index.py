"""Which block holds the tokens behind a block hash."""

from collections.abc import Sequence


class PrefixIndex:
    """A bijection between block hashes and blocks. Hashes come from `core/prefix_hash.py`.

    A hash covers its block's tokens and everything before them, so it fixes the block's place in a sequence.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def leading(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def add(self, block_hash: bytes, block_id: int) -> None:
        """Publish a block. A hash that is known already keeps its block, a block its hash."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def remove(self, block_id: int) -> None:
        """Forget a block; nothing happens if it is not published."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def clear(self) -> None:
        """Forget all."""
        self._block_of.clear()
        self._hash_of.clear()

    def consistent(self) -> bool:
        """Whether both directions agree."""
        return len(self._block_of) == len(self._hash_of) and all(
            self._hash_of.get(block_id) == block_hash for block_hash, block_id in self._block_of.items()
        )
