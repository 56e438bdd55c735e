"""The blocking client against a scripted router."""

import gc
import math
import threading
from typing import Any

import pytest

from outrider import (
    CancelledError,
    Client,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    OutriderError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.v1 import common_pb2
from tests.integration.client.scripted_server import SEED, ScriptedServer, as_json

WAIT_S = 10.0

ERRORS: dict[str, type[OutriderError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "FAILED_PRECONDITION": FailedPreconditionError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": CancelledError,
    "DATA_LOSS": DataLossError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "INTERNAL": InternalError,
}


def test_result_holds_everything_that_the_router_said(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        result = client.generate("answer")
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello", (10, 11, 12), "length")
    assert (result.seed, result.request_id, result.numerics_class) == (SEED, "request-1", "class-1")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.attempts) == (5, 7, 2)
    assert result.timing.time_to_first_token_s == 0.25
    assert result.speculation.acceptance_rate == pytest.approx(3 / 4)
    assert result.speculation.acceptance_length == pytest.approx(2.0)
    assert result.speculation.draft_length_mean == pytest.approx(4 / 3)


def test_json_of_a_result_has_the_promised_keys(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        values = client.generate("logprobs").to_dict()
    assert list(values["speculation"]) == [
        "drafter", "request_class", "draft_length_requested", "draft_length_mean", "steps", "proposed_nodes",
        "accepted_tokens", "acceptance_rate", "acceptance_length", "position_offered", "position_accepted",
        "fallback_reason",
    ]  # fmt: skip
    assert values["logprobs"][0]["logprob"] == -0.5
    assert {"text", "token_ids", "finish_reason", "seed", "usage", "timing", "trace_id"} <= set(values)
    assert as_json(values)


def test_stream_yields_deltas_and_then_has_the_result(server: ScriptedServer) -> None:
    with Client(server.address) as client, client.stream("answer") as stream:
        deltas = list(stream)
        assert [(item.text, item.token_ids) for item in deltas] == [("Hel", (10,)), ("lo", (11, 12))]
        assert stream.result.text == "Hello"


def test_result_of_a_stream_that_has_not_ended_is_refused(server: ScriptedServer) -> None:
    with Client(server.address) as client, client.stream("hang") as stream, pytest.raises(RuntimeError):
        _ = stream.result


def test_choices_are_kept_apart(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        result = client.generate("two", n=2)
    assert [(choice.text, choice.token_ids) for choice in result.choices] == [("a", (1,)), ("bbb", (2, 22))]
    assert result.text == "a"


@pytest.mark.parametrize(("early_stopping", "wire"), [(None, 0), (False, 1), (True, 2), ("never", 3)])
def test_what_a_search_is_asked_for_reaches_the_router(
    server: ScriptedServer, early_stopping: Any, wire: int
) -> None:
    with Client(server.address) as client:
        client.generate("answer", beam_width=4, length_penalty=0.5, early_stopping=early_stopping)
        with pytest.raises(InvalidArgumentError, match=r"sampling\.early_stopping"):
            client.generate("answer", beam_width=4, early_stopping="soon")  # type: ignore[arg-type]
    sampling = server.router.requests[0].sampling
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (4, 0.5, wire)


def test_every_option_reaches_the_router(server: ScriptedServer) -> None:
    options: dict[str, Any] = {
        "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 9, "logprobs": 2,
        "n": 1, "ignore_eos": True,
    }  # fmt: skip
    with Client(server.address, token="secret", tenant="acme", timeout_s=60) as client:
        client.generate(
            "answer",
            **options,
            logit_bias={7: -1.5},
            bad_words=["bad"],
            stop="end",
            stop_token_ids=[2],
            drafter="ngram",
            draft_length=0,
            draft_width=2,
            verification="rejection",
            allow_approximate=True,
            request_class="code",
            resume_token_ids=[],
            cache_salt="salt",
            idempotency_key="key-1",
        )
    request, metadata = server.router.requests[0], server.router.metadata[0]
    assert {name: getattr(request.sampling, name) for name in options} == options
    assert dict(request.sampling.logit_bias) == {7: -1.5}
    assert (list(request.sampling.stop), list(request.sampling.bad_words)) == (["end"], ["bad"])
    assert list(request.sampling.stop_token_ids) == [2]
    assert request.speculation.HasField("draft_length")
    assert request.speculation.draft_length == 0
    assert (request.speculation.draft_width, request.speculation.verification) == (2, 2)
    assert (request.request_class, request.cache_salt) == ("code", "salt")
    assert request.HasField("resume_token_ids")
    assert metadata["authorization"] == "Bearer secret"
    assert metadata["x-outrider-tenant"] == "acme"
    assert metadata["x-outrider-idempotency-key"] == "key-1"
    deadline_s = server.router.deadlines_s[0]
    assert deadline_s is not None
    assert 30 < deadline_s < 61


def test_a_result_names_the_mode_and_whether_it_is_approximate(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        typical = client.generate("typical", verification="typical", allow_approximate=True)
        plain = client.generate("answer", verification="block")
    modes = [request.speculation.verification for request in server.router.requests]
    assert modes == [common_pb2.VERIFICATION_TYPICAL, common_pb2.VERIFICATION_BLOCK]
    assert server.router.requests[0].speculation.allow_approximate
    assert (typical.verification, typical.approximate) == ("typical", True)
    assert (plain.verification, plain.approximate) == ("invariant", False)


def test_absent_options_stay_absent_on_the_wire(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.generate("answer", temperature=None)
    request = server.router.requests[0]
    assert not request.sampling.ListFields()
    assert not request.speculation.ListFields()
    assert not request.HasField("resume_token_ids")


def test_prompt_may_be_token_ids_or_messages(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.generate([1, 2, 3])
        client.generate(messages=[{"role": "user", "content": "hi\0"}])
    first, second = server.router.requests
    assert list(first.token_ids.ids) == [1, 2, 3]
    assert [(turn.role, turn.content) for turn in second.chat.messages] == [("user", "hi\0")]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "\ud800"}, "text"),
        ({"prompt": [1, 2**31]}, "token_ids[1]"),
        ({"prompt": [1, "a"]}, "token_ids[1]"),
        ({"messages": [{"role": "user"}]}, "chat.messages[0]"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "chat.messages[0].content"),
        ({"prompt": "a", "max_tokens": 10**12}, "sampling.max_tokens"),
        ({"prompt": "a", "temperature": "warm"}, "sampling.temperature"),
        ({"prompt": "a", "seed": -1}, "sampling.seed"),
        ({"prompt": "a", "stop": ["ok", "\ud800"]}, "sampling.stop[1]"),
        ({"prompt": "a", "bad_words": [3]}, "sampling.bad_words[0]"),
        ({"prompt": "a", "stop_token_ids": [2**40]}, "sampling.stop_token_ids[0]"),
        ({"prompt": "a", "logit_bias": {2**40: 1.0}}, f"sampling.logit_bias[{2**40}]"),
        ({"prompt": "a", "verification": "exact"}, "speculation.verification"),
        ({"prompt": "a", "draft_length": 2**40}, "speculation.draft_length"),
        ({"prompt": "a", "idempotency_key": "naïve"}, "x-outrider-idempotency-key"),
    ],
)
def test_input_that_the_wire_cannot_carry_is_refused_here(
    server: ScriptedServer, arguments: dict[str, Any], field: str
) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.generate(**arguments)
    assert caught.value.field == field
    assert not server.router.requests


def test_input_that_the_wire_can_carry_is_left_to_the_router(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.generate("answer", temperature=math.nan, max_tokens=-1)
    assert server.router.requests[0].sampling.max_tokens == -1


@pytest.mark.parametrize("status", ERRORS)
def test_each_status_is_an_error_of_its_own_with_what_had_arrived(
    server: ScriptedServer, status: str
) -> None:
    with Client(server.address) as client, pytest.raises(OutriderError) as caught:
        client.generate(f"fail:{status}")
    error = caught.value
    assert type(error) is ERRORS[status]
    assert "told to" in error.message
    assert (error.text, error.token_ids, error.seed, error.request_id) == ("Hel", (10,), SEED, "request-1")
    has_field = status in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
    assert error.field == ("sampling.top_p" if has_field else None)
    assert error.retry_after_s == (2.5 if status == "RESOURCE_EXHAUSTED" else None)


@pytest.mark.parametrize("status", ["UNKNOWN", "UNIMPLEMENTED", "ABORTED", "NOT_FOUND", "OUT_OF_RANGE"])
def test_a_status_that_outrider_never_sends_is_an_internal_error(server: ScriptedServer, status: str) -> None:
    with Client(server.address) as client, pytest.raises(InternalError):
        client.generate(f"status:{status}")


@pytest.mark.parametrize("script", ["unfinished", "unordered"])
def test_an_answer_that_breaks_the_protocol_is_an_internal_error(server: ScriptedServer, script: str) -> None:
    with Client(server.address) as client, pytest.raises(InternalError):
        client.generate(script)


def test_no_server_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.generate("answer", timeout_s=WAIT_S)


def test_deadline_ends_a_call_with_what_had_arrived(server: ScriptedServer) -> None:
    with Client(server.address) as client, pytest.raises(DeadlineExceededError) as caught:
        client.generate("hang", timeout_s=0.5)
    assert caught.value.token_ids == (10,)
    assert server.router.cancelled.wait(WAIT_S)


def test_leaving_the_loop_cancels(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        stream = client.stream("hang")
        for _ in stream:
            break
        assert server.router.cancelled.wait(WAIT_S)


def test_leaving_the_with_block_cancels(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        with client.stream("hang"):
            assert server.router.running.wait(WAIT_S)
        assert server.router.cancelled.wait(WAIT_S)


def test_dropping_a_stream_cancels(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        stream = client.stream("hang")
        assert server.router.running.wait(WAIT_S)
        del stream
        gc.collect()
        assert server.router.cancelled.wait(WAIT_S)


def test_closing_from_another_thread_ends_iteration_with_cancelled(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        stream = client.stream("hang")
        deltas = iter(stream)
        next(deltas)
        threading.Thread(target=stream.close).start()
        with pytest.raises(CancelledError) as caught:
            next(deltas)
    assert caught.value.text == "Hel"


@pytest.mark.parametrize("size_bytes", [3_900_000, 4_100_000, 5_000_000, 8_000_000])
def test_large_prompts_arrive(server: ScriptedServer, size_bytes: int) -> None:
    with Client(server.address) as client:
        client.generate("answer:" + "x" * size_bytes)
        client.generate([40_000] * (size_bytes // 3))
    assert len(server.router.requests[0].text) > size_bytes
    assert len(server.router.requests[1].token_ids.ids) == size_bytes // 3


def test_a_request_above_the_limit_is_refused_here_and_the_channel_stays_usable(
    server: ScriptedServer,
) -> None:
    with Client(server.address) as client:
        with pytest.raises(MessageTooLargeError) as caught:
            client.generate("answer:" + "x" * (8 * 2**20))
        assert caught.value.field == "request"
        assert client.generate("answer").text == "Hello"
    assert len(server.router.requests) == 1


def test_a_reply_above_the_limit_is_a_clear_error_and_the_channel_stays_usable(
    server: ScriptedServer,
) -> None:
    with Client(server.address) as client:
        assert len(client.generate("large:8000000").text) == 8_000_000
        with pytest.raises(MessageTooLargeError, match="larger than max"):
            client.generate(f"large:{9 * 2**20}")
        assert client.generate("answer").text == "Hello"


def test_workers_and_drafters_are_listed(server: ScriptedServer) -> None:
    with Client(server.address, token="secret") as client:
        (worker,) = client.workers()
        (drafter,) = client.drafters()
    assert (worker.worker_id, worker.ready, worker.free_blocks) == ("decode-0", True, 7)
    assert worker.drafters == ("none", "ngram")
    assert (drafter.name, drafter.max_draft_length, drafter.workers) == ("ngram", 16, ("decode-0",))
    assert server.router.metadata[0]["authorization"] == "Bearer secret"


def test_an_unknown_option_is_a_type_error(server: ScriptedServer) -> None:
    with Client(server.address) as client, pytest.raises(TypeError, match="temprature"):
        client.generate("answer", temprature=1)  # type: ignore[call-arg]
