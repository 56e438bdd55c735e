"""The asyncio client against a scripted router."""

import asyncio

import pytest

from outrider import AsyncClient, CancelledError, DeadlineExceededError, InternalError, OutriderError
from tests.integration.client.scripted_server import SEED, ScriptedServer
from tests.integration.client.test_client import ERRORS, WAIT_S


async def _is_set(server: ScriptedServer) -> bool:
    return await asyncio.to_thread(server.router.cancelled.wait, WAIT_S)


async def test_generate_and_stream_give_the_same_result(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        whole = await client.generate("answer")
        stream = client.stream("answer")
        texts = [delta.text async for delta in stream]
    assert texts == ["Hel", "lo"]
    assert (stream.result.text, stream.result.usage) == (whole.text, whole.usage)
    assert stream.result.trace_id == stream.trace_id


async def test_calls_run_at_once_on_one_client(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        results = await asyncio.gather(*(client.generate("answer") for _ in range(50)))
    assert {result.text for result in results} == {"Hello"}
    assert len({result.trace_id for result in results}) == 50


@pytest.mark.parametrize("status", ERRORS)
async def test_each_status_is_an_error_of_its_own_with_what_had_arrived(
    server: ScriptedServer, status: str
) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(OutriderError) as caught:
            await client.generate(f"fail:{status}")
    assert type(caught.value) is ERRORS[status]
    assert (caught.value.text, caught.value.token_ids, caught.value.seed) == ("Hel", (10,), SEED)


async def test_an_answer_without_an_end_is_an_internal_error(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(InternalError):
            await client.generate("unfinished")


async def test_deadline_ends_a_call(server: ScriptedServer) -> None:
    async with AsyncClient(server.address, timeout_s=0.5) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("hang")
    assert await _is_set(server)


async def test_leaving_the_loop_cancels(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.stream("hang")
        async for _ in stream:
            break
        assert await _is_set(server)


async def test_leaving_the_with_block_cancels(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        async with client.stream("hang") as stream:
            await anext(aiter(stream))
        assert await _is_set(server)


async def test_cancelling_the_task_cancels_the_call_and_passes_through(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        task = asyncio.create_task(client.generate("hang"))
        assert await asyncio.to_thread(server.router.running.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await _is_set(server)


async def test_closing_the_stream_elsewhere_ends_iteration_with_cancelled(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.stream("hang")
        first = await anext(deltas := aiter(stream))
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.to_thread(server.router.running.wait, WAIT_S)
        await stream.aclose()
        with pytest.raises(CancelledError):
            await waiting
    assert first.text == "Hel"


async def test_workers_and_drafters_are_listed(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        assert [worker.worker_id for worker in await client.workers()] == ["decode-0"]
        assert [drafter.name for drafter in await client.drafters()] == ["ngram"]
