"""Where a prompt's KV comes from, and what happens when it does not come (CASES B29, S11)."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
from grpc.aio import ServicerContext
from torch import Tensor

from core.errors import DataLoss, FailedPrecondition, Unavailable
from core.grpc_server import make_server
from core.records import PrefillPeer, SamplingParams, SpeculationParams
from core.settings import DecodeSettings, EngineSettings, GrpcSettings, HandoffSettings
from decode.choice import Request
from decode.handoff import HandoffSink, PeerUnavailable
from decode.loop import DecodeLoop
from engine.engine import Engine
from engine.step_batch import SequenceStep, StepResult
from outrider.v1 import prefill_pb2, prefill_pb2_grpc
from prefill.service import PrefillService
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=16, seed=7)
BLOCK = 16
FAST = HandoffSettings(progress_timeout_s=0.5, queue_timeout_s=2.0)
FetchContext = ServicerContext[prefill_pb2.FetchUp, prefill_pb2.FetchDown]
NOWHERE = PrefillPeer("prefill-9", "0" * 32, "127.0.0.1:9")


def outcome(answer: Answer) -> str:
    assert answer.finished is not None
    return answer.finished.handoff.outcome


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_cold_warm_and_own_prompts_give_one_answer_and_move_only_what_is_missing(
    stand: DecodeStand, length: int
) -> None:
    prompt = prompt_of(length)
    cold = await stand.ask(prompt, SAMPLED)
    warm = await stand.ask(prompt, SAMPLED)
    own = await stand.ask(prompt, SAMPLED, peers=[], salt=b"own")
    assert cold.ids == warm.ids == own.ids
    assert cold.finished is not None
    assert warm.finished is not None
    token_bytes = (
        stand.worker.engine.kv.layout.kv_token_bytes + stand.worker.engine.kv.layout.hidden_token_bytes
    )
    cached = min(length - 1, length // BLOCK * BLOCK)
    assert warm.finished.usage.cached_prompt_tokens == cached
    if length == 1:
        assert outcome(cold) == "none_needed"
    else:
        assert (outcome(cold), cold.finished.handoff.bytes) == ("ok", length * token_bytes)
    if length - cached == 1:
        assert (outcome(warm), warm.finished.handoff.bytes) == ("none_needed", 0)
    else:
        assert (outcome(warm), warm.finished.handoff.bytes) == ("ok", (length - cached) * token_bytes)
    assert outcome(own) == ("none_needed" if length == 1 else "own_prefill")


async def test_other_salts_do_not_share_a_prefix(stand: DecodeStand) -> None:
    first = await stand.ask(prompt_of(40), SAMPLED, salt=b"a")
    second = await stand.ask(prompt_of(40), SAMPLED, salt=b"b")
    third = await stand.ask(prompt_of(40), SAMPLED, salt=b"a")
    cached = [
        answer.finished.usage.cached_prompt_tokens for answer in (first, second, third) if answer.finished
    ]
    assert cached == [0, 0, 32]
    assert first.ids == second.ids == third.ids


async def test_an_answer_is_a_prefix_for_the_next_turn(stand: DecodeStand) -> None:
    first = await stand.ask(prompt_of(30), replace(SAMPLED, max_tokens=20))
    turn = await stand.ask([*prompt_of(30), *first.ids, 65, 66], SAMPLED)
    assert turn.finished is not None
    assert turn.finished.usage.cached_prompt_tokens == 48


async def test_a_dead_peer_is_passed_for_the_next_one_and_then_for_own_prefill(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    async with decode_stand(tiny_model, script, decode=all_drafters, handoff=FAST) as stand:
        expected = await stand.ask(prompt_of(40), SAMPLED, salt=b"0")
        retried = await stand.ask(prompt_of(40), SAMPLED, peers=[NOWHERE, stand.peers[0]], salt=b"1")
        assert (outcome(retried), retried.ids) == ("retried", expected.ids)
        own = await stand.ask(prompt_of(40), SAMPLED, peers=[NOWHERE], salt=b"2")
        assert (outcome(own), own.ids) == ("own_prefill", expected.ids)
        reborn = replace(stand.peers[0], epoch="1" * 32)
        other_life = await stand.ask(prompt_of(40), SAMPLED, peers=[reborn], salt=b"3")
        assert (outcome(other_life), other_life.ids) == ("own_prefill", expected.ids)
        await stand.idle()


async def test_a_broken_hand_off_does_not_wait_for_blocks_behind_one_that_waits_for_its_own(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineSettings(dtype="float32", num_threads=1, block_size=BLOCK, num_blocks=20)
    reserved: list[int] = []
    first_reserved, broken = asyncio.Event(), asyncio.Event()

    async def fetch(
        _: PrefillPeer, __: object, token_ids: list[int], ___: int, sink: HandoffSink, ____: object
    ) -> None:
        if len(token_ids) == 10 * BLOCK:
            await sink.reserve(len(token_ids))
            first_reserved.set()
            await broken.wait()
        else:
            asyncio.get_running_loop().call_later(0.2, broken.set)
            await sink.reserve(len(token_ids))
        reserved.append(len(token_ids))
        raise PeerUnavailable("the peer is gone")

    async with decode_stand(tiny_model, script, decode=all_drafters, engine=engine) as stand:
        prefix = prompt_of(6 * BLOCK, 5)
        await stand.ask(prefix, replace(SAMPLED, max_tokens=1), peers=[])
        monkeypatch.setattr(stand.worker._client, "fetch", fetch)
        first = asyncio.create_task(stand.answer(stand.request(prompt_of(10 * BLOCK), SAMPLED), 20))
        await first_reserved.wait()
        second = await stand.answer(stand.request([*prefix, *prompt_of(6 * BLOCK, 9)], SAMPLED), 20)
        assert reserved == [10 * BLOCK, 12 * BLOCK], "nobody had to wait"
        for answer in (await first, second):
            assert answer.error is None
            assert len(answer.ids) == SAMPLED.max_tokens
        await stand.idle()


async def test_requests_wait_for_a_silent_peer_together_not_one_after_another(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = PrefillPeer("prefill-9", "0" * 32, f"127.0.0.1:{silent.getsockname()[1]}")
        async with decode_stand(tiny_model, script, decode=all_drafters, handoff=FAST) as stand:
            started_s = time.monotonic()
            answers = await asyncio.gather(
                *(stand.ask(prompt_of(40, number), SAMPLED, peers=[peer]) for number in range(8))
            )
            assert time.monotonic() - started_s < 6 * FAST.progress_timeout_s
            assert {outcome(answer) for answer in answers} == {"own_prefill"}
            await stand.idle()


async def test_a_strict_worker_refuses_rather_than_prefills(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    strict = FAST.model_copy(update={"missing_prefill": "strict"})
    async with decode_stand(tiny_model, script, decode=all_drafters, handoff=strict) as stand:
        for peers in ([], [NOWHERE]):
            answer = await stand.answer(stand.request(prompt_of(40), SAMPLED, peers=peers))
            assert isinstance(answer.error, Unavailable)
            assert answer.token_ids == {}
        await stand.idle()


async def test_an_incompatible_peer_is_named(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    async with (
        decode_stand(tiny_model, script, decode=all_drafters) as stand,
        decode_stand(
            tiny_model,
            script,
            decode=all_drafters,
            engine=EngineSettings(dtype="float32", num_threads=1, block_size=32, num_blocks=64),
        ) as other,
    ):
        answer = await stand.answer(stand.request(prompt_of(40), SAMPLED, peers=other.peers))
        assert isinstance(answer.error, FailedPrecondition)
        assert answer.error.field == "block_size"
        await stand.idle()


class _DamagingContext:
    """A server's context that flips a bit of each chunk's first plane."""

    def __init__(self, context: FetchContext) -> None:
        self._context = context
        self.damaged = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    async def write(self, message: prefill_pb2.FetchDown) -> None:
        if message.HasField("chunk"):
            self.damaged += 1
            plane = message.chunk.planes[0]
            plane.data = bytes([plane.data[0] ^ 1]) + plane.data[1:]
        await self._context.write(message)


class _Damaging(PrefillService):
    """Damages its first `times` transfers."""

    def __init__(self, stand: DecodeStand, times: int) -> None:
        super().__init__(stand.prefill[0])
        self.fetches = 0
        self.damaged = 0
        self._times = times

    async def Fetch(self, request_iterator: object, context: FetchContext) -> None:  # gRPC names it
        self.fetches += 1
        if self.fetches > self._times:
            await super().Fetch(request_iterator, context)
            return
        damaging = _DamagingContext(context)
        try:
            await super().Fetch(request_iterator, cast(FetchContext, damaging))
        finally:
            self.damaged += bool(damaging.damaged)


@asynccontextmanager
async def _damaging_peer(stand: DecodeStand, times: int) -> AsyncIterator[tuple[_Damaging, PrefillPeer]]:
    server = make_server(GrpcSettings())
    service = _Damaging(stand, times)
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.server)
    address = await server.listen("127.0.0.1:0")
    yield service, replace(stand.peers[0], address=address)
    await server.stop(0.0)


@pytest.mark.parametrize(
    ("times", "policy", "expected"),
    [(1, "prefill_here", "retried"), (2, "prefill_here", "own_prefill"), (2, "fail", "DATA_LOSS")],
)
async def test_a_failed_checksum_means_one_more_fetch_then_the_policy(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings, times: int, policy: str, expected: str
) -> None:
    handoff = FAST.model_copy(update={"bad_checksum": policy})
    async with decode_stand(tiny_model, script, decode=all_drafters, handoff=handoff) as stand:
        right = await stand.ask(prompt_of(40), SAMPLED, salt=b"right")
        async with _damaging_peer(stand, times) as (service, peer):
            answer = await stand.answer(stand.request(prompt_of(40), SAMPLED, peers=[peer], salt=b"damaged"))
            assert service.damaged >= times, "the fault never fired"
            assert service.fetches == 2
        if expected == "DATA_LOSS":
            assert isinstance(answer.error, DataLoss)
            assert answer.token_ids == {}
        else:
            assert outcome(answer) == expected
            assert answer.ids == right.ids
        await stand.idle()


async def test_long_prompts_do_not_stop_running_answers(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    decode = all_drafters.model_copy(update={"step_tokens": 32})
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        sampling = replace(SAMPLED, max_tokens=60)
        expected = await stand.ask(prompt_of(20), sampling)
        running = asyncio.create_task(stand.ask(prompt_of(20), sampling))
        long = [
            asyncio.create_task(stand.ask(prompt_of(400, number), SAMPLED, peers=[])) for number in range(4)
        ]
        assert (await running).ids == expected.ids
        assert [len(answer.ids) for answer in await asyncio.gather(*long)] == [16] * 4
        rows, steps = (
            stand.worker.metrics.totals()[name] for name in ("outrider.engine.rows", "outrider.engine.steps")
        )
        assert rows / steps <= 32
        await stand.idle()


async def test_a_drafters_own_prompt_work_is_chunked_and_catches_up(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    decode = all_drafters.model_copy(update={"step_tokens": 32})
    async with decode_stand(tiny_model, script, decode=decode) as stand:
        sampling = replace(SAMPLED, max_tokens=80)
        plain = await stand.ask(prompt_of(400), sampling)
        answer = await stand.ask(
            prompt_of(400), sampling, SpeculationParams(drafter="draft_model", draft_length=3)
        )
        assert answer.ids == plain.ids
        assert answer.report is not None
        assert answer.report.proposed_nodes > 0
        assert answer.report.acceptance_rate == 1.0
        await stand.idle()


async def test_a_ticket_that_expires_in_the_queue_costs_no_answer(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    one_at_a_time = all_drafters.model_copy(update={"max_running": 1})
    async with decode_stand(tiny_model, script, decode=one_at_a_time) as stand:
        expected = await stand.ask(prompt_of(40), SAMPLED, salt=b"0")
        first = asyncio.create_task(stand.ask(prompt_of(30), replace(SAMPLED, max_tokens=150)))
        while not stand.worker.gauges().running:  # noqa: ASYNC110  # it tells only when asked
            await asyncio.sleep(0.001)
        began_s = time.monotonic()
        queued = await stand.ask(prompt_of(40), SAMPLED, salt=b"1", ticket_lifetime_ms=20)
        assert first.done(), "the second was served beside the first"
        assert time.monotonic() - began_s > 0.02, "its ticket had not expired"
        assert (queued.ids, outcome(queued)) == (expected.ids, "own_prefill")
        await stand.idle()


async def test_the_first_token_does_not_wait_for_the_step_that_draws_the_second(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = threading.Event()
    waited: list[bool] = []
    step = Engine.step

    def step_after_the_first_token(engine: Engine, sequences: Sequence[SequenceStep]) -> StepResult:
        if engine is stand.worker.engine and not waited:
            waited.append(arrived.wait(5.0))
        return step(engine, sequences)

    monkeypatch.setattr(Engine, "step", step_after_the_first_token)
    answer = Answer()
    async for event in stand.stub.Generate(stand.request(prompt_of(40), SAMPLED), timeout=30):
        answer.take(event)
        if answer.ids:
            arrived.set()
    assert outcome(answer) == "ok"
    assert waited == [True]
    assert len(answer.ids) == SAMPLED.max_tokens


async def test_an_answer_that_ends_with_its_first_token_tells_of_its_hand_off(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = DecodeLoop.begin

    def begin_and_linger(loop: DecodeLoop, request: Request, logits: Tensor) -> None:
        begin(loop, request, logits)
        time.sleep(0.02)

    monkeypatch.setattr(DecodeLoop, "begin", begin_and_linger)
    answer = await stand.ask(prompt_of(40), replace(SAMPLED, max_tokens=1), salt=b"one")
    assert outcome(answer) == "ok"
    assert answer.finished is not None
    assert answer.finished.handoff.prefill_worker_id == "prefill-0"
    assert answer.finished.timing.prefill_s > 0


@pytest.mark.parametrize("missing_prefill", ["lenient", "strict"])
async def test_a_peer_that_gave_up_while_there_was_no_room_is_asked_again(
    tiny_model: Path, tmp_path: Path, missing_prefill: Literal["lenient", "strict"]
) -> None:
    engine = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=14)
    handoff = FAST.model_copy(update={"queue_timeout_s": 20.0, "missing_prefill": missing_prefill})
    async with decode_stand(tiny_model, tmp_path / "script", engine=engine, handoff=handoff) as stand:
        reserve = stand.worker._loop.reserve
        may_reserve = threading.Event()

        def reserve_late(request: Request, answer: Callable[[Exception | None], None]) -> None:
            timer = threading.Timer(2.0, lambda: stand.worker._thread.post(lambda: reserve(request, answer)))
            may_reserve.set()
            timer.start()

        stand.worker._loop.reserve = reserve_late  # type: ignore[method-assign]
        answer = await stand.answer(stand.request(prompt_of(100), SAMPLED))
        assert may_reserve.is_set()
        assert answer.error is None
        assert outcome(answer) == "retried"
        assert len(answer.ids) == SAMPLED.max_tokens
        await stand.idle()
