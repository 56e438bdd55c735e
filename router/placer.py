"""Places requests: snapshots from the directory, prefixes from the memory, decisions from `router/place.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.prefix_hash import PrefixKey, block_hashes
from core.records import WorkerRecord
from router.directory import WorkerDirectory
from router.place import place
from router.prefix_memory import PrefixMemory
from router.validate import AUTO, NO_DRAFTER
from router.views import Placement, Prepared, PromptView, WorkerView

MAX_HASHED_BLOCKS = 4096
"""Longer prompts are placed by their beginning, so that hashing never holds up the event loop."""

_HashKey = tuple[str, tuple[int, ...], int]


@dataclass(slots=True)
class _Hashes:
    """The block hashes of one prompt, by what separates the workers' caches."""

    prepared: Prepared
    by_key: dict[_HashKey, list[bytes]]

    def of(self, record: WorkerRecord) -> list[bytes]:
        key = (record.numerics_class, record.hidden_layers, record.block_size)
        if key not in self.by_key:
            self.by_key[key] = hash_blocks(self.prepared, self.prepared.token_ids, record)
        return self.by_key[key]


def hash_blocks(prepared: Prepared, token_ids: Sequence[int], record: WorkerRecord) -> list[bytes]:
    """Hashes of the first blocks of `token_ids` as that worker's prefix cache has them; at most MAX_HASHED_BLOCKS."""
    token_ids = token_ids[: MAX_HASHED_BLOCKS * record.block_size]
    key = PrefixKey(record.numerics_class, prepared.salt, prepared.adapter, record.hidden_layers)
    return block_hashes(token_ids, record.block_size, key)


class Placer:
    """One for the router. Used by the event loop alone."""

    def __init__(self, directory: WorkerDirectory, model_revision: str) -> None:
        self._directory = directory
        self._model_revision = model_revision
        self._memory = PrefixMemory()
        self._count = 0

    def place(
        self, prepared: Prepared, numerics_class: str | None, excluded: frozenset[str], moved: bool
    ) -> Placement | None:
        """The next attempt's workers, or None where nobody may take it now.

        `moved`: an earlier attempt has begun; then a worker that lacks the drafter will do where no other is left.
        """
        self._memory.keep_only(self._directory.epochs())
        hashes = _Hashes(prepared, {})
        decode = self._with_overlap(self._directory.views("decode"), hashes)
        prefill = self._with_overlap(self._directory.views("prefill"), hashes)
        named = prepared.speculation.drafter
        self._count += 1
        prompt = PromptView(
            num_tokens=len(prepared.token_ids),
            model_revision=self._model_revision,
            drafter=None if named in (AUTO, NO_DRAFTER) else named,
            numerics_class=numerics_class,
            excluded=excluded,
            spread=self._count,
        )
        placement = place(decode, prefill, prompt)
        if placement is None and moved:
            placement = place(decode, prefill, replace(prompt, drafter=None))
        if placement is not None:
            self._remember(placement, hashes)
        return placement

    def remember_answer(self, prepared: Prepared, answer_ids: Sequence[int], record: WorkerRecord) -> None:
        """The worker's cache now holds prompt and answer: the next turn of a chat should go there."""
        hashes = hash_blocks(prepared, [*prepared.token_ids, *answer_ids], record)
        self._memory.remember(record.epoch, hashes, record.total_blocks)

    def pool_tokens(self) -> int | None:
        """What the largest known decode worker's KV pool holds; None where no worker is known."""
        pools = [view.capacity_tokens for view in self._directory.views("decode")]
        return max(pools, default=None)

    def _with_overlap(self, views: Sequence[WorkerView], hashes: _Hashes) -> list[WorkerView]:
        return [
            replace(
                view,
                overlap_tokens=self._memory.overlap_blocks(view.record.epoch, hashes.of(view.record))
                * view.record.block_size,
            )
            for view in views
        ]

    def _remember(self, placement: Placement, hashes: _Hashes) -> None:
        self._memory.remember(
            placement.decode.epoch, hashes.of(placement.decode), placement.decode.total_blocks
        )
        first = placement.prefill[0].epoch if placement.prefill else None
        for view in self._directory.views("prefill"):
            if view.record.epoch == first:
                self._memory.remember(view.record.epoch, hashes.of(view.record), view.record.total_blocks)
