"""What a caller may rely on: statuses, deadlines, cancellation, tickets, resumption, drain, reports.

CASES B32, B43, B49, B51, B53.
"""

import asyncio
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest

from core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from core.records import SamplingParams, SpeculationParams
from decode.service import DecodeService, EventContext
from outrider.v1 import admin_pb2, decode_pb2
from tests.integration.decode.conftest import VOCAB, prompt_of
from tests.support.decode_stand import Answer, DecodeStand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=24, seed=7)
RIGHT = SpeculationParams(drafter="scripted-right", draft_length=7)

BAD: dict[str, list[dict[str, object]]] = {
    "token_ids": [{"prompt": []}, {"prompt": [-1]}, {"prompt": [VOCAB]}, {"prompt": [2**31 - 1]}],
    "sampling.max_tokens": [{"max_tokens": 0}, {"max_tokens": -1}],
    "sampling.min_tokens": [{"min_tokens": 25}, {"min_tokens": -1}],
    "sampling.temperature": [{"temperature": value} for value in (float("nan"), float("inf"), -1.0)],
    "sampling.top_p": [{"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")}],
    "sampling.min_p": [{"min_p": -0.1}, {"min_p": 1.1}],
    "sampling.top_k": [{"top_k": -1}],
    "sampling.repetition_penalty": [{"repetition_penalty": 0.0}, {"repetition_penalty": 1e-42}],
    "sampling.frequency_penalty": [{"frequency_penalty": float("inf")}],
    "sampling.logit_bias": [
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {5: float("nan")}},
    ],
    "sampling.stop_token_ids": [{"stop_token_ids": (VOCAB,)}],
    "sampling.stop": [{"stop": ("",)}],
    "sampling.n": [{"n": 0}, {"n": 33}],
    "sampling.logprobs": [{"logprobs": -1}],
    "speculation.drafter": [{"drafter": "oracle"}],
    "speculation.draft_length": [{"draft_length": -1}, {"draft_length": 10**6}],
    "speculation.draft_width": [{"draft_width": 0}, {"draft_width": 99}],
    "speculation.verification": [{"verification": "typical"}],
}
SPECULATION = {"drafter", "draft_length", "draft_width", "verification"}


@pytest.mark.parametrize(
    ("field", "change"),
    [(field, change) for field, changes in BAD.items() for change in changes],
    ids=lambda value: str(value)[:40],
)
async def test_bad_input_is_refused_naming_the_field_beside_a_healthy_request(
    shared: DecodeStand, field: str, change: dict[str, object]
) -> None:
    prompt = change.pop("prompt", None) if "prompt" in change else None
    speculation = {key: value for key, value in change.items() if key in SPECULATION}
    sampling = {key: value for key, value in change.items() if key not in speculation}
    request = shared.request(
        prompt_of(20) if prompt is None else prompt,  # type: ignore[arg-type]
        replace(SAMPLED, **sampling),  # type: ignore[arg-type]
        replace(SpeculationParams(drafter="ngram"), **speculation),  # type: ignore[arg-type]
    )
    healthy, refused = await asyncio.gather(shared.ask(prompt_of(20), SAMPLED), shared.answer(request))
    assert isinstance(refused.error, InvalidArgument)
    assert refused.error.field == field
    assert refused.token_ids == {}
    assert healthy.ids == (await shared.ask(prompt_of(20), SAMPLED)).ids


async def test_a_request_that_may_draw_nothing_ends_naming_the_constraint(stand: DecodeStand) -> None:
    banned = replace(SAMPLED, bad_word_ids=tuple((token_id,) for token_id in range(VOCAB)))
    healthy, refused = await asyncio.gather(
        stand.ask(prompt_of(20), SAMPLED), stand.answer(stand.request(prompt_of(20), banned))
    )
    assert isinstance(refused.error, InvalidArgument)
    assert "bad_words" in refused.error.message
    assert len(healthy.ids) == 24


async def test_each_request_of_a_batch_gets_the_drafter_and_length_that_it_asked_for(
    stand: DecodeStand,
) -> None:
    prompts = [prompt_of(20 + number, number) for number in range(5)]
    sampling = replace(SAMPLED, max_tokens=40)
    plain = [await stand.ask(prompt, sampling) for prompt in prompts]
    for prompt, answer in zip(prompts, plain, strict=True):
        stand.record(prompt, sampling, answer)
    asked = [
        SpeculationParams(drafter="none"),
        SpeculationParams(drafter="ngram", draft_length=1),
        SpeculationParams(drafter="scripted-right", draft_length=4),
        SpeculationParams(drafter="scripted-tree", draft_length=3, draft_width=4),
        SpeculationParams(drafter="auto"),
    ]
    answers = await asyncio.gather(
        *(stand.ask(prompt, sampling, wanted) for prompt, wanted in zip(prompts, asked, strict=True))
    )
    assert [answer.ids for answer in answers] == [answer.ids for answer in plain]
    reports = [answer.report for answer in answers]
    assert all(report is not None and not report.fallback_reason for report in reports)
    names = [report.drafter for report in reports if report]
    assert names == ["none", "ngram", "scripted-right", "scripted-tree", "ngram"]
    none, ngram, right, tree, auto = (report for report in reports if report)
    assert (none.proposed_nodes, none.position_offered) == (0, ())
    assert len(ngram.position_offered) == 1
    assert len(right.position_offered) == 4
    assert right.draft_length_requested == 4
    assert len(tree.position_offered) <= 3
    assert tree.proposed_nodes > tree.draft_length_sum
    assert auto.draft_length_requested is None


async def test_a_short_answer_is_not_drafted_unless_a_length_was_asked_for(stand: DecodeStand) -> None:
    short = replace(SAMPLED, max_tokens=4)
    report = (await stand.ask(prompt_of(30), short, SpeculationParams(drafter="ngram"))).report
    assert report is not None
    assert (report.drafter, report.fallback_reason, report.proposed_nodes) == ("ngram", "short_answer", 0)
    report = (
        await stand.ask(prompt_of(30), short, SpeculationParams(drafter="ngram", draft_length=2))
    ).report
    assert report is not None
    assert report.fallback_reason == ""


@pytest.mark.parametrize("ending", ["eos", "stop", "length"])
@pytest.mark.parametrize("position", [2, 3, 5, 8])
async def test_counts_are_cut_where_the_answer_is_cut(stand: DecodeStand, ending: str, position: int) -> None:
    prompt = prompt_of(30)
    whole = await stand.ask(prompt, replace(SAMPLED, max_tokens=30))
    ended = {
        "eos": replace(SAMPLED, eos_token_ids=(whole.ids[position],), max_tokens=30),
        "stop": replace(SAMPLED, stop=(whole.text[0][position],), max_tokens=30),
        "length": replace(SAMPLED, max_tokens=position + 1),
    }[ending]
    stand.record(prompt, ended, whole)
    plain = await stand.ask(prompt, ended)
    answer = await stand.ask(prompt, ended, RIGHT)
    assert (answer.ids, answer.text, answer.reasons) == (plain.ids, plain.text, plain.reasons)
    report = answer.report
    assert report is not None
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == len(answer.ids) == 1 + report.step_tokens
    assert sum(answer.bursts) == len(answer.ids)
    assert report.accepted_tokens == sum(report.position_accepted) <= sum(report.position_offered)
    assert report.step_tokens <= report.accepted_tokens + report.steps
    if report.steps:
        assert report.acceptance_length == sum(answer.bursts[1:]) / report.steps


@pytest.mark.parametrize("split", range(1, 9))
async def test_a_stop_string_across_tokens_and_bursts_never_shows(stand: DecodeStand, split: int) -> None:
    prompt = prompt_of(30)
    free = replace(SAMPLED, max_tokens=24)
    whole = await stand.ask(prompt, free)
    text = whole.text[0]
    stop = text[split : split + 4]
    stopped = replace(free, stop=(stop, stop + "never"))
    stand.record(prompt, stopped, whole)
    for speculation in (SpeculationParams(drafter="none"), RIGHT, replace(RIGHT, drafter="scripted-tree")):
        answer = await stand.ask(prompt, stopped, speculation)
        assert answer.text[0] == text[: text.index(stop)]
        assert (answer.reasons[0], answer.stop_strings[0]) == ("FINISH_REASON_STOP", stop)
        assert answer.ids == whole.ids[: len(answer.ids)]
        decoded = stand.tokenizer.decode(answer.ids)
        assert decoded.startswith(answer.text[0] + stop)


async def test_a_deadline_that_passes_in_the_queue_spends_no_prefill(stand: DecodeStand) -> None:
    filling = [
        stand.stub.Generate(stand.request(prompt_of(20, n), replace(SAMPLED, max_tokens=1500)))
        for n in range(32)
    ]
    for call in filling:
        await call.read()
    prefilled = stand.prefill[0].metrics.totals().get("outrider.requests", 0.0)
    late = await asyncio.gather(
        *(stand.answer(stand.request(prompt_of(60, 100 + n), SAMPLED), timeout_s=0.3) for n in range(8))
    )
    assert all(isinstance(answer.error, DeadlineExceeded) for answer in late)
    assert all(answer.token_ids == {} for answer in late)
    assert stand.prefill[0].metrics.totals().get("outrider.requests", 0.0) == prefilled
    for call in filling:
        call.cancel()
    await stand.idle()
    assert len((await stand.ask(prompt_of(20), SAMPLED)).ids) == 24


async def test_cancelling_at_any_point_frees_everything(stand: DecodeStand) -> None:
    for events in range(5):
        call = stand.stub.Generate(stand.request(prompt_of(100, events), replace(SAMPLED, max_tokens=500)))
        for _ in range(events):
            await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
    await stand.idle()


async def test_a_ticket_binds_worker_epoch_and_prompt(stand: DecodeStand) -> None:
    wrong_prompt = stand.request([1, 2, 3], SAMPLED, ticket_prompt=[1, 2])
    assert isinstance((await stand.answer(wrong_prompt)).error, PermissionDenied)
    forged = stand.request([1, 2, 3], SAMPLED)
    forged.ticket.signature = bytes(32)
    assert isinstance((await stand.answer(forged)).error, PermissionDenied)
    for name, value in (("worker_id", "decode-9"), ("epoch", "0" * 32)):
        real = stand.worker.identity
        stand.worker.identity = replace(real, **{name: value})  # type: ignore[arg-type]
        request = stand.request([1, 2, 3], SAMPLED)
        stand.worker.identity = real
        error = (await stand.answer(request)).error
        assert isinstance(error, FailedPrecondition)
        assert error.field == f"ticket.decode_{name}"


async def test_a_second_live_call_of_one_attempt_is_refused_and_the_first_goes_on(stand: DecodeStand) -> None:
    expected = await stand.ask(prompt_of(20), replace(SAMPLED, max_tokens=200))
    request = stand.request(prompt_of(20), replace(SAMPLED, max_tokens=200), request_id="twice")
    first = stand.stub.Generate(request)
    await first.read()
    second = await stand.answer(request)
    assert isinstance(second.error, FailedPrecondition)
    ids = []
    while (event := await first.read()) is not grpc.aio.EOF:
        ids += event.delta.token_ids
    assert ids == expected.ids[-len(ids) :]


@pytest.mark.parametrize("have", [1, 2, 10, 23])
@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted-tree", "draft_model", "scripted-hidden"])
async def test_a_resumed_answer_goes_on_where_it_was_cut(stand: DecodeStand, have: int, drafter: str) -> None:
    prompt = prompt_of(30)
    sampling = replace(SAMPLED, repetition_penalty=1.2, stop=("never ever",), logprobs=1)
    whole = await stand.ask(prompt, sampling)
    stand.record(prompt, sampling, whole)
    length = None if drafter == "none" else 4
    resumed = await stand.ask(
        prompt,
        sampling,
        SpeculationParams(drafter=drafter, draft_length=length),
        committed={0: whole.ids[:have]},
    )
    assert whole.ids[:have] + resumed.ids == whole.ids
    assert list(whole.logprobs[0][have:]) == list(resumed.logprobs[0])
    assert whole.text[0].endswith(resumed.text[0])
    assert resumed.finished is not None
    assert resumed.finished.usage.completion_tokens == 24
    assert resumed.report is not None
    assert resumed.report.fallback_reason == ""


async def test_a_resumed_answer_that_was_whole_already_ends_at_once(stand: DecodeStand) -> None:
    whole = await stand.ask(prompt_of(30), SAMPLED)
    resumed = await stand.ask(prompt_of(30), SAMPLED, committed={0: whole.ids})
    assert resumed.ids == []
    assert resumed.reasons == {0: "FINISH_REASON_LENGTH"}


async def test_choices_resume_each_from_its_own_place(stand: DecodeStand) -> None:
    sampling = replace(SAMPLED, n=3)
    whole = await stand.ask(prompt_of(30), sampling)
    have = {0: whole.token_ids[0][:5], 2: whole.token_ids[2][:11]}
    resumed = await stand.ask(prompt_of(30), sampling, SpeculationParams(drafter="ngram"), committed=have)
    for index in range(3):
        assert list(have.get(index, [])) + resumed.token_ids[index] == whole.token_ids[index]


async def test_draining_refuses_new_requests_lets_others_finish_and_then_ends_them(
    stand: DecodeStand,
) -> None:
    short = asyncio.create_task(stand.ask(prompt_of(20), replace(SAMPLED, max_tokens=30)))
    endless = stand.stub.Generate(stand.request(prompt_of(21), replace(SAMPLED, max_tokens=1900)))
    await endless.read()
    drain = asyncio.create_task(_drain(stand, 1.0))
    while not stand.worker.draining:  # noqa: ASYNC110  # set by another call, a loop's turn away
        await asyncio.sleep(0)
    assert isinstance((await stand.answer(stand.request(prompt_of(20), SAMPLED))).error, Unavailable)
    assert len((await short).ids) == 30
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await endless.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await drain).remaining == 1


async def _drain(stand: DecodeStand, grace_s: float) -> admin_pb2.DrainResponse:
    reply: admin_pb2.DrainResponse = await stand.admin.Drain(admin_pb2.DrainRequest(grace_s=grace_s))
    return reply


async def test_status_tells_what_is_held(stand: DecodeStand) -> None:
    call = stand.stub.Generate(stand.request(prompt_of(40), replace(SAMPLED, max_tokens=500)))
    await call.read()
    status: admin_pb2.WorkerStatus = await stand.admin.Status(admin_pb2.StatusRequest())
    assert (status.role, status.running, status.ready, status.tasks) == ("decode", 1, True, 1)
    assert status.used_blocks + status.free_blocks + status.cached_blocks == status.total_blocks
    assert status.used_blocks >= 3
    assert "ngram" in status.drafters
    call.cancel()
    await stand.idle()
    status = await stand.admin.Status(admin_pb2.StatusRequest())
    assert (status.running, status.waiting, status.tasks, status.used_blocks) == (0, 0, 0, 0)


async def test_a_caller_of_the_whole_answer_gets_the_same_tokens_in_few_deltas(stand: DecodeStand) -> None:
    sampling = SamplingParams(temperature=12.0, max_tokens=60, seed=5)
    plain = await stand.ask(prompt_of(20), sampling)
    request = stand.request(prompt_of(20), sampling)
    request.merge_deltas = True
    answer, num_deltas = Answer(), 0
    async for event in stand.stub.Generate(request, timeout=60.0):
        answer.take(event)
        num_deltas += event.HasField("delta")
    assert answer.ids == plain.ids
    assert 2 <= num_deltas < 30
    await stand.idle()


async def test_who_hangs_up_with_the_last_message_in_hand_was_answered(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[str] = []
    finished = stand.worker.metrics.request_finished

    def record(status: str, *labels: str) -> None:
        statuses.append(status)
        finished(status, *labels)

    monkeypatch.setattr(stand.worker.metrics, "request_finished", record)

    class HangsUp:
        """The server's side of a call whose other end has gone when its last message is written."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

        def time_remaining(self) -> float:
            return 30.0

        async def write(self, event: decode_pb2.DecodeEvent) -> None:
            if event.HasField("finished"):
                raise asyncio.CancelledError

    request = stand.request(prompt_of(9), SAMPLED)
    with pytest.raises(asyncio.CancelledError):
        await DecodeService(stand.worker).Generate(request, cast(EventContext, HangsUp()))
    await stand.idle()
    assert statuses == ["OK"]
