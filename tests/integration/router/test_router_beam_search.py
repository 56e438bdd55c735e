"""Beam search from the front door to real workers and back, and again when its worker is lost."""

import asyncio
from pathlib import Path

import pytest

from outrider.v1 import common_pb2, inference_pb2
from tests.integration.router.test_router_real_workers import asked, pools
from tests.support.router_stand import collect
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def searched(max_tokens: int, drafter: str = "auto") -> inference_pb2.GenerateRequest:
    message = asked(drafter, 0.0, max_tokens)
    message.sampling.ClearField("seed")
    message.sampling.beam_width = 4
    message.sampling.length_penalty = 0.5
    message.sampling.early_stopping = common_pb2.EARLY_STOPPING_NEVER
    message.sampling.repetition_penalty = 1.4
    return message


async def test_one_delta_brings_the_answer_and_the_reply_says_that_nothing_was_drafted(model: Path) -> None:
    async with pools(model) as running:
        deltas = [
            response.delta
            async for response in running.inference.Generate(searched(24))
            if response.HasField("delta")
        ]
        assert [len(delta.token_ids) for delta in deltas] == [24]
        for drafter in ("auto", "none"):
            reply = await collect(running.inference.Generate(searched(24, drafter)))
            assert reply.token_ids == {0: list(deltas[0].token_ids)}
            assert reply.text == {0: deltas[0].text}
            assert reply.started.drafter == reply.finished.speculation.drafter == "none"
            assert "beam search" in reply.started.route_reason
            assert reply.finished.usage.completion_tokens == 24
        greedy = await collect(running.inference.Generate(asked("none", 0.0, 24)))
        assert greedy.token_ids != reply.token_ids


async def test_a_search_whose_worker_is_lost_is_made_again_elsewhere_with_the_same_answer(
    model: Path,
) -> None:
    async with pools(model) as running:
        plain = await collect(running.inference.Generate(searched(150)))
        again = asyncio.create_task(collect(running.inference.Generate(searched(150))))
        lost: list[int] = []
        async for _ in running.inference.Generate(asked("none", 0.0, 300)):
            busy = [index for index, worker in enumerate(running.decode) if worker.gauges().running >= 4]
            if busy and not lost:
                lost += busy
                await running.lose(busy[0])
        assert lost, "no worker was lost in the middle of the search"
        reply = await again
        assert reply.finished.attempts == 2
        assert (reply.token_ids, reply.text) == (plain.token_ids, plain.text)
        assert running.router.status().counters["worker_load"] == 0
