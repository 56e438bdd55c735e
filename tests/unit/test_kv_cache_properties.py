"""Random lives of sequences in a small pool: no block is lost, doubled or overwritten (CASES B15, B16, B20)."""

import hashlib
from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.block_table import BlockTable
from engine.kv_cache import KvCache, KvLayout, OutOfBlocks, PlaneKind

BLOCK_SIZE = 4
NUM_BLOCKS = 8
LAYOUT = KvLayout(2, 2, 2, 3, (1,), BLOCK_SIZE, torch.float32)
GARBAGE = -7.0
TEXTS = ([0] * 16, [0] * 6 + [1] * 10, [1] * 16)


@dataclass(eq=False)
class Sequence:
    """A table and the tokens that it should hold."""

    table: BlockTable
    token_ids: list[int] = field(default_factory=list)


def prefix_values(token_ids: list[int]) -> torch.Tensor:
    """One number a token that depends on everything before it, as K and V do: Tensor  # [tokens]."""
    digest = hashlib.sha256()
    numbers = []
    for token_id in token_ids:
        digest.update(bytes([token_id]))
        numbers.append(float(int.from_bytes(digest.digest()[:2], "little")))
    return torch.tensor(numbers)


def prefix_hashes(token_ids: list[int]) -> list[bytes]:
    ends = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
    return [hashlib.sha256(bytes(token_ids[:end])).digest() for end in ends]


def write_tokens(kv: KvCache, table: BlockTable, start: int, values: torch.Tensor) -> None:
    slots = kv.slots(table, start, start + len(values))
    for layer in range(LAYOUT.num_layers):
        planes = (values + layer)[:, None, None].expand(-1, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        kv.write_plane(PlaneKind.KEY, layer, slots, planes)
        kv.write_plane(PlaneKind.VALUE, layer, slots, planes + 0.5)
    kv.write_plane(PlaneKind.HIDDEN, 1, slots, values[:, None].expand(-1, LAYOUT.hidden_dim) + 0.25)


def assert_holds(kv: KvCache, sequence: Sequence) -> None:
    values = prefix_values(sequence.token_ids)
    slots = kv.slots(sequence.table, 0, len(values))
    for layer in range(LAYOUT.num_layers):
        keys = kv.read_plane(PlaneKind.KEY, layer, slots)
        assert torch.equal(keys, (values + layer)[:, None, None].expand_as(keys))
        assert torch.equal(kv.read_plane(PlaneKind.VALUE, layer, slots), keys + 0.5)
    hidden = kv.read_hidden(sequence.table, 0, len(values))[0]
    assert torch.equal(hidden, (values + 0.25)[:, None].expand_as(hidden))


class SequenceLives(RuleBasedStateMachine):
    """Opens, steps with trees, forks, preempts and closes sequences; every slot is checked after every rule."""

    sequences = Bundle("sequences")

    @initialize()
    def make_pool(self) -> None:
        self.kv = KvCache(LAYOUT, NUM_BLOCKS)
        self.live: list[Sequence] = []

    @rule(target=sequences, text=st.sampled_from(TEXTS), num_tokens=st.integers(1, 16))
    def start(self, text: list[int], num_tokens: int) -> Sequence:
        sequence, missing = self._open(text[:num_tokens])
        self._extend(sequence, missing, ())
        return sequence

    @rule(text=st.sampled_from(TEXTS), num_tokens=st.integers(1, 4).map(lambda blocks: blocks * BLOCK_SIZE))
    def start_and_abort_in_the_first_step(self, text: list[int], num_tokens: int) -> None:
        sequence, missing = self._open(text[:num_tokens])
        self._abort(sequence, len(missing))

    @rule(
        sequence=sequences,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        rejected=st.lists(st.integers(0, 3), max_size=4),
    )
    def step(self, sequence: Sequence, token_ids: list[int], rejected: list[int]) -> None:
        self._extend(sequence, token_ids, rejected)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        copy = Sequence(self.kv.fork(sequence.table), list(sequence.token_ids))
        self.live.append(copy)
        return copy

    @rule(sequence=sequences, kept=st.integers(1, 14))
    def roll_back(self, sequence: Sequence, kept: int) -> None:
        kept = min(kept, len(sequence.token_ids))
        del sequence.token_ids[kept:]
        self.kv.commit(sequence.table, kept)

    @rule(sequence=consumes(sequences), num_rows=st.integers(1, 6))
    def abort_in_mid_step(self, sequence: Sequence, num_rows: int) -> None:
        self._abort(sequence, num_rows)

    @rule(sequence=sequences)
    def publish(self, sequence: Sequence) -> None:
        self.kv.publish(sequence.table, prefix_hashes(sequence.token_ids))

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self.publish(sequence)
        self._close(sequence)

    @precondition(lambda self: self.kv.stats().cached > 6)
    @rule()
    def forget_cached(self) -> None:
        self.kv.drop_cached()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        stats = self.kv.stats()
        assert stats.free + stats.used + stats.cached == stats.total == NUM_BLOCKS
        for sequence in self.live:
            assert_holds(self.kv, sequence)

    def teardown(self) -> None:
        for sequence in self.live:
            self.kv.close(sequence.table)
        self.kv.drop_cached()
        self.kv.check()
        assert self.kv.stats().free == NUM_BLOCKS

    def _open(self, token_ids: list[int]) -> tuple[Sequence, list[int]]:
        hashes = prefix_hashes(token_ids)
        held = self.kv.match(hashes)
        table = self.kv.open(hashes, max_tokens=len(token_ids) - 1)
        assert table.num_tokens == min(held * BLOCK_SIZE, len(token_ids) - 1)
        sequence = Sequence(table, token_ids[: table.num_tokens])
        self.live.append(sequence)
        return sequence, token_ids[table.num_tokens :]

    def _abort(self, sequence: Sequence, num_rows: int) -> None:
        """The step has written, and is never committed."""
        start = len(sequence.token_ids)
        try:
            self.kv.reserve(sequence.table, start + num_rows)
        except OutOfBlocks:
            pass
        else:
            write_tokens(self.kv, sequence.table, start, torch.full((num_rows,), GARBAGE))
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.kv.close(sequence.table)
        self.kv.close(sequence.table)

    def _extend(self, sequence: Sequence, token_ids: list[int], rejected: "list[int] | tuple[()]") -> None:
        """One step: accepted rows interleaved with rejected ones, compacted, committed; or no room."""
        start = len(sequence.token_ids)
        is_rejected = [False] * len(token_ids)
        for place in rejected:
            is_rejected.insert(min(place + 1, len(is_rejected)), True)
        try:
            self.kv.reserve(sequence.table, start + len(is_rejected))
        except OutOfBlocks as error:
            assert error.needed > error.free == self.kv.stats().free + self.kv.stats().cached
            return
        accepted = [row for row, wrong in enumerate(is_rejected) if not wrong]
        values = torch.full((len(is_rejected),), GARBAGE)
        values[accepted] = prefix_values(sequence.token_ids + token_ids)[start:]
        write_tokens(self.kv, sequence.table, start, values)
        self.kv.compact(sequence.table, start, accepted)
        sequence.token_ids += token_ids
        self.kv.commit(sequence.table, len(sequence.token_ids))
        assert len(sequence.table.block_ids) == LAYOUT.blocks_for(len(sequence.token_ids))


TestSequenceLives = SequenceLives.TestCase
TestSequenceLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
