"""One sequence's blocks. Owned by `engine/kv_cache.py`; others read it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Ordered block ids of one sequence; table index i lives in block i // block_size.

    `num_tokens` counts the positions whose K and V are valid and committed. Blocks beyond it are
    reserved. `num_published` counts leading blocks that are in the prefix index. Only `KvCache` changes it.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_published: int = 0
    closed: bool = False
