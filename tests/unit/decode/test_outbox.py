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


async def test_a_waiting_reader_is_woken() -> None:
    outbox = Outbox(4, lambda blocked: None)
    reader = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(delta(7))
    item = await asyncio.wait_for(reader, 5)
    assert item is not None
    assert item.token_ids == (7,)
