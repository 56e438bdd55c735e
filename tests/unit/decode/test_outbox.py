"""The outbox is bounded and loses nothing."""

import asyncio

import pytest

from core.errors import Overloaded, Unavailable
from core.records import ChoiceFinish, FinishReason, SpeculationReport
from decode.outbox import Delta, Outbox

REPORT = SpeculationReport(drafter="none")


def delta(token_id: int, index: int = 0, finish: ChoiceFinish | None = None) -> Delta:
    return Delta(index, (token_id,), chr(65 + token_id % 26), (), REPORT, finish)


async def read_all(outbox: Outbox) -> list[Delta]:
    deltas = []
    while (item := await outbox.get()) is not None:
        deltas.append(item)
    return deltas


async def test_deltas_come_out_in_order_and_then_the_end() -> None:
    outbox = Outbox(8, lambda blocked: None)
    for token_id in range(3):
        outbox.put(delta(token_id))
    outbox.end()
    assert [item.token_ids for item in await read_all(outbox)] == [(0,), (1,), (2,)]


async def test_an_error_comes_behind_the_deltas_that_are_left_and_the_first_one_counts() -> None:
    outbox = Outbox(8, lambda blocked: None)
    outbox.put(delta(1))
    outbox.fail(Unavailable("first"))
    outbox.fail(Overloaded("second"))
    first = await outbox.get()
    assert first is not None
    with pytest.raises(Unavailable, match="first"):
        await outbox.get()


async def test_a_reader_that_falls_behind_gets_merged_deltas_without_loss() -> None:
    outbox = Outbox(4, lambda blocked: None)
    for token_id in range(20):
        outbox.put(delta(token_id, index=token_id % 2))
    finish = ChoiceFinish(0, FinishReason.LENGTH)
    outbox.put(delta(20, finish=finish))
    outbox.end()
    assert len(outbox) == 4
    deltas = await read_all(outbox)
    for index in (0, 1):
        ids = [token_id for item in deltas if item.index == index for token_id in item.token_ids]
        assert ids == [token_id for token_id in range(21) if token_id % 2 == index]
        text = "".join(item.text for item in deltas if item.index == index)
        assert text == "".join(chr(65 + token_id % 26) for token_id in ids)
    assert [item.finish for item in deltas if item.finish] == [finish]


async def test_a_reader_further_behind_blocks_and_one_that_caught_up_goes_on() -> None:
    changes: list[bool] = []
    outbox = Outbox(4, changes.append)
    for token_id in range(8):
        outbox.put(delta(token_id))
    assert outbox.blocked
    assert changes == [True]
    await outbox.get()
    assert outbox.blocked
    await outbox.get()
    assert changes == [True, False]


async def test_a_reader_that_caught_up_owes_nothing_for_what_was_merged_before() -> None:
    changes: list[bool] = []
    outbox = Outbox(4, changes.append)
    for _ in range(10):
        for token_id in range(7):
            outbox.put(delta(token_id))
        while len(outbox):
            await outbox.get()
    assert changes == []


async def test_a_waiting_reader_is_woken() -> None:
    outbox = Outbox(4, lambda blocked: None)
    reader = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(delta(7))
    item = await asyncio.wait_for(reader, 5)
    assert item is not None
    assert item.token_ids == (7,)


async def test_a_reader_of_the_whole_gets_the_first_delta_at_once_and_the_rest_merged() -> None:
    outbox = Outbox(64, lambda blocked: None, merge_interval_s=0.05)
    outbox.put(delta(0))
    async with asyncio.timeout(0.02):
        first = await outbox.get()
    assert first is not None
    assert first.token_ids == (0,)
    for token_id in range(1, 9):
        outbox.put(delta(token_id, index=token_id % 2))
    began_s = asyncio.get_running_loop().time()
    released = [await outbox.get(), await outbox.get()]
    waited_s = asyncio.get_running_loop().time() - began_s
    assert [item.token_ids for item in released if item] == [(1, 3, 5, 7), (2, 4, 6, 8)]
    assert 0.04 < waited_s < 0.5
    outbox.put(delta(9, finish=ChoiceFinish(0, FinishReason.LENGTH)))
    outbox.end()
    async with asyncio.timeout(0.02):
        last = [item.token_ids for item in await read_all(outbox)]
    assert last == [(9,)]


async def test_a_reader_of_the_whole_never_waits_for_an_error_or_a_full_outbox() -> None:
    outbox = Outbox(4, lambda blocked: None, merge_interval_s=30.0)
    outbox.put(delta(0))
    await outbox.get()
    for token_id in range(1, 4):
        outbox.put(delta(token_id))
    async with asyncio.timeout(1.0):
        merged = await outbox.get()
    assert merged is not None
    assert merged.token_ids == (1, 2, 3)
    outbox.put(delta(4))
    outbox.fail(Unavailable("over"))
    async with asyncio.timeout(1.0):
        left = await outbox.get()
        assert left is not None
        assert left.token_ids == (4,)
        with pytest.raises(Unavailable):
            await outbox.get()
