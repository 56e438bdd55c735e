"""What a pool gives, shares, copies, forgets and refuses."""

import pytest
import torch
from torch import Tensor

from engine.block_table import BlockTable
from engine.kv_cache import InvariantBroken, KvCache, KvLayout, OutOfBlocks, PlaneKind

BLOCK_SIZE = 4
LAYOUT = KvLayout(2, 3, 4, 6, (0, 1), BLOCK_SIZE, torch.bfloat16)
CANARY = 77.0


@pytest.fixture
def kv() -> KvCache:
    return KvCache(LAYOUT, 8)


def hashes(num_blocks: int, salt: str = "") -> list[bytes]:
    return [f"{salt}{index}".encode() for index in range(num_blocks)]


def filled(kv: KvCache, num_tokens: int, value: float = 1.0) -> BlockTable:
    """A committed table whose every element is `value`."""
    table = kv.open()
    kv.reserve(table, num_tokens)
    fill(kv, table, 0, num_tokens, value)
    kv.commit(table, num_tokens)
    return table


def fill(kv: KvCache, table: BlockTable, start: int, end: int, value: float) -> None:
    slots = kv.slots(table, start, end).long()
    assert kv.hidden is not None
    for planes in (kv.keys, kv.values, kv.hidden):
        planes[:, slots] = value


def content(kv: KvCache, table: BlockTable, start: int, end: int) -> Tensor:
    """Keys, values and hidden planes of table indices, flat."""
    slots = kv.slots(table, start, end)
    parts = [kv.read_plane(kind, layer, slots) for kind in PlaneKind for layer in (0, 1)]
    return torch.cat([part.flatten() for part in parts])


def test_a_published_prefix_is_found_again_after_its_table_is_closed(kv: KvCache) -> None:
    table = filled(kv, 9)
    kv.publish(table, hashes(2))
    kv.close(table)
    assert kv.match(hashes(3)) == 2
    again = kv.open(hashes(3))
    assert again.num_tokens == 8
    assert (content(kv, again, 0, 8) == 1.0).all()
    kv.check()


def test_only_full_blocks_of_committed_tokens_are_published(kv: KvCache) -> None:
    table = filled(kv, 7)
    kv.reserve(table, 16)
    kv.publish(table, hashes(4))
    assert kv.match(hashes(4)) == 1


def test_matching_acquires_nothing(kv: KvCache) -> None:
    table = filled(kv, 8)
    kv.publish(table, hashes(2))
    kv.close(table)
    assert kv.match(hashes(2)) == 2
    assert kv.stats().used == 0


def test_a_limit_inside_a_cached_block_takes_it_and_its_writer_leaves_the_others_copy_alone(
    kv: KvCache,
) -> None:
    first = filled(kv, 8)
    kv.publish(first, hashes(2))
    second = kv.open(hashes(2), max_tokens=7)
    assert (second.num_tokens, second.block_ids) == (7, first.block_ids)
    kv.reserve(second, 8)
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    fill(kv, second, 7, 8, 2.0)
    kv.commit(second, 8)
    assert (content(kv, first, 0, 8) == 1.0).all()
    assert (content(kv, second, 0, 7) == 1.0).all()
    kv.check()


def test_a_cached_block_without_another_owner_is_written_in_place_and_no_longer_found(kv: KvCache) -> None:
    first = filled(kv, 8)
    kv.publish(first, hashes(2))
    kv.close(first)
    second = kv.open(hashes(2), max_tokens=7)
    kv.reserve(second, 8)
    assert kv.match(hashes(2)) == 1
    kv.commit(second, 8)
    kv.publish(second, hashes(2))
    assert kv.match(hashes(2)) == 2
    assert kv.stats().used == 2


def test_forks_share_blocks_until_one_of_them_writes(kv: KvCache) -> None:
    table = filled(kv, 6)
    forks = [kv.fork(table) for _ in range(2)]
    assert kv.stats().used == 2
    for value, fork in zip((2.0, 3.0), forks, strict=True):
        kv.reserve(fork, 7)
        fill(kv, fork, 6, 7, value)
        kv.commit(fork, 7)
    for value, fork in zip((2.0, 3.0), forks, strict=True):
        assert (content(kv, fork, 0, 6) == 1.0).all()
        assert (content(kv, fork, 6, 7) == value).all()
    kv.check()
    assert kv.stats().used == 4


def test_a_fork_does_not_share_what_is_only_reserved(kv: KvCache) -> None:
    table = filled(kv, 4)
    kv.reserve(table, 12)
    fork = kv.fork(table)
    assert len(fork.block_ids) == 1
    kv.check()


def test_blocks_reserved_for_a_rejected_draft_are_given_back_at_commit(kv: KvCache) -> None:
    table = filled(kv, 7)
    kv.reserve(table, 7 + 9)
    assert len(table.block_ids) == 4
    kv.commit(table, 8)
    assert len(table.block_ids) == 2
    kv.reserve(table, 16)
    kv.commit(table, 9, keep_reserved=True)
    assert len(table.block_ids) == 4


@pytest.mark.parametrize("draft_length", range(1, 9))
@pytest.mark.parametrize("distance", range(-9, 2))
def test_a_step_at_a_block_border_touches_no_other_block(draft_length: int, distance: int) -> None:
    kv = KvCache(LAYOUT, 12)
    neighbours = [filled(kv, 3 * BLOCK_SIZE, CANARY)]
    start = 3 * BLOCK_SIZE + distance
    table = filled(kv, start)
    neighbours.append(filled(kv, 2 * BLOCK_SIZE, CANARY))
    end = start + draft_length + 1
    kv.reserve(table, end)
    assert len(table.block_ids) == -(-end // BLOCK_SIZE)
    fill(kv, table, start, end, 2.0)
    kv.compact(table, start, (0, *range(2, draft_length + 1, 2)))
    kv.commit(table, start + 1)
    assert len(table.block_ids) == -(-(start + 1) // BLOCK_SIZE)
    for neighbour in neighbours:
        assert (content(kv, neighbour, 0, neighbour.num_tokens) == CANARY).all()
    assert (content(kv, table, 0, start) == 1.0).all()
    kv.check()


def test_compaction_brings_the_accepted_path_together_in_every_plane(kv: KvCache) -> None:
    table = filled(kv, 3)
    kv.reserve(table, 3 + 7)
    for row in range(7):
        fill(kv, table, 3 + row, 4 + row, 10.0 + row)
    kv.compact(table, 3, (0, 2, 3, 6))
    kv.commit(table, 7)
    for place, row in enumerate((0, 2, 3, 6)):
        assert (content(kv, table, 3 + place, 4 + place) == 10.0 + row).all()
    assert (content(kv, table, 0, 3) == 1.0).all()


def test_compaction_never_moves_committed_tokens(kv: KvCache) -> None:
    table = filled(kv, 8)
    with pytest.raises(InvariantBroken):
        kv.compact(table, 4, (0, 2))


def test_a_pool_too_small_refuses_and_changes_nothing(kv: KvCache) -> None:
    kept = filled(kv, 12)
    kv.publish(kept, hashes(3))
    table = kv.open()
    before = kv.stats()
    with pytest.raises(OutOfBlocks) as refused:
        kv.reserve(table, 24)
    assert (refused.value.needed, refused.value.free) == (6, 5)
    assert kv.stats() == before
    assert kv.match(hashes(3)) == 3
    assert table.block_ids == []
    kv.check()


def test_cached_blocks_are_evicted_least_recently_used_first_and_a_sequence_from_its_end(kv: KvCache) -> None:
    for salt in "ab":
        table = filled(kv, 12)
        kv.publish(table, hashes(3, salt))
        kv.close(table)
    kv.close(kv.open(hashes(3, "a")))
    table = filled(kv, 16)
    assert (kv.match(hashes(3, "a")), kv.match(hashes(3, "b"))) == (3, 1)
    kv.close(table)
    kv.check()


def test_a_block_in_use_is_never_evicted(kv: KvCache) -> None:
    table = filled(kv, 12)
    kv.publish(table, hashes(3))
    with pytest.raises(OutOfBlocks):
        filled(kv, 24)
    assert kv.match(hashes(3)) == 3


def test_the_first_block_published_for_a_hash_stays(kv: KvCache) -> None:
    first, second = filled(kv, 4), filled(kv, 4)
    kv.publish(first, hashes(1))
    kv.publish(second, hashes(1))
    kv.close(second)
    assert kv.open(hashes(1)).block_ids == first.block_ids
    kv.check()


def test_closing_twice_frees_once_and_a_closed_table_is_refused(kv: KvCache) -> None:
    table, other = filled(kv, 8), filled(kv, 8)
    kv.close(table)
    kv.close(table)
    assert kv.stats().free == 6
    with pytest.raises(InvariantBroken):
        kv.reserve(table, 4)
    with pytest.raises(InvariantBroken):
        kv.commit(BlockTable(), 0)
    assert other.num_tokens == 8
    kv.check()


def test_forgetting_the_cache_leaves_tables_alone(kv: KvCache) -> None:
    used, closed = filled(kv, 8), filled(kv, 8)
    kv.publish(used, hashes(2, "used"))
    kv.publish(closed, hashes(2, "closed"))
    kv.close(closed)
    kv.drop_cached()
    assert kv.match(hashes(2, "used")) == kv.match(hashes(2, "closed")) == 0
    assert (kv.stats().used, kv.stats().cached) == (2, 0)
    kv.publish(used, hashes(2, "used"))
    assert kv.match(hashes(2, "used")) == 2
    kv.check()


def test_planes_of_some_heads_are_read_and_written_alone(kv: KvCache) -> None:
    table = filled(kv, 6)
    slots = kv.slots(table, 1, 5)
    values = torch.arange(4 * 2 * 4).view(4, 2, 4).to(torch.bfloat16)
    kv.write_plane(PlaneKind.KEY, 1, slots, values, head_start=1)
    assert torch.equal(kv.read_plane(PlaneKind.KEY, 1, slots, (1, 3)), values)
    assert (kv.read_plane(PlaneKind.KEY, 1, slots, (0, 1)) == 1.0).all()
    assert (kv.read_plane(PlaneKind.KEY, 0, slots) == 1.0).all()
    assert (kv.read_plane(PlaneKind.VALUE, 1, slots) == 1.0).all()


def test_a_plane_of_another_shape_or_dtype_is_refused(kv: KvCache) -> None:
    table = filled(kv, 4)
    slots = kv.slots(table, 0, 4)
    for values in (
        torch.ones(4, 4, 4, dtype=torch.bfloat16),
        torch.ones(4, 3, 5, dtype=torch.bfloat16),
        torch.ones(4, 3, 4),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            kv.write_plane(PlaneKind.KEY, 0, slots, values)


def test_slots_outside_the_table_are_refused(kv: KvCache) -> None:
    table = filled(kv, 4)
    for start, end in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(IndexError):
            kv.slots(table, start, end)


def test_check_finds_a_block_that_two_tables_hold_by_mistake(kv: KvCache) -> None:
    first, second = filled(kv, 8), filled(kv, 8)
    second.block_ids[1] = first.block_ids[1]
    with pytest.raises(InvariantBroken):
        kv.check()


def test_check_finds_a_table_that_was_dropped_without_being_closed(kv: KvCache) -> None:
    table = filled(kv, 8)
    table.block_ids.clear()
    table.num_tokens = 0
    with pytest.raises(InvariantBroken):
        kv.check()
