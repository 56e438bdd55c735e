"""What an opening message must satisfy, and how it is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from core.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ServiceError
from core.prefix_hash import prompt_digest
from core.records import TicketClaims
from engine.kv_cache import KvLayout
from outrider.v1 import common_pb2, prefill_pb2
from prefill.credit import CreditWindow
from prefill.planes import Span
from prefill.request import FetchRequest, ServedLimits, check_fetch

LAYOUT = KvLayout(2, 2, 4, 6, (), 4, torch.float32)
PEER = common_pb2.PeerInfo(worker_id="prefill-0", model_revision="r1", numerics_class="n1")
LIMITS = ServedLimits(PEER, LAYOUT, num_blocks=8, max_context=40, vocab_size=100)
PROMPT = list(range(10))
CLAIMS = TicketClaims(
    request_id="request",
    attempt=3,
    tenant="tenant",
    prompt_digest=prompt_digest(PROMPT),
    model_revision="r1",
    adapter="",
    numerics_class="n1",
    seed=1,
    decode_worker_id="decode-0",
    decode_epoch="e",
    prefill_worker_ids=("prefill-1", "prefill-0"),
    expires_unix_ms=1,
    cache_salt=b"salt",
)


def open_message(token_ids: list[int] | None = None, kv_start: int = 0) -> prefill_pb2.FetchOpen:
    token_ids = PROMPT if token_ids is None else token_ids
    return prefill_pb2.FetchOpen(
        token_ids=token_ids,
        kv_range=prefill_pb2.TokenRange(start=kv_start, end=len(token_ids)),
        transport="grpc",
        credit_bytes=2**16,
    )


def check(message: prefill_pb2.FetchOpen, claims: TicketClaims = CLAIMS) -> FetchRequest:
    return check_fetch(message, claims, LIMITS, None)


def test_a_good_message_gives_its_prompt_and_ranges() -> None:
    request = check(open_message(kv_start=3))
    assert (request.key, request.kv, request.hidden) == (("request", 3), Span(3, 10), Span(0, 0))
    assert request.job.token_ids == tuple(PROMPT)
    assert len(request.job.hashes) == 2


def test_prefix_hashes_differ_by_salt_numerics_class_and_kept_layers() -> None:
    plain = check(open_message()).job.hashes
    salted = check(open_message(), replace(CLAIMS, cache_salt=b"other")).job.hashes
    hidden = replace(LIMITS, layout=KvLayout(2, 2, 4, 6, (1,), 4, torch.float32))
    assert plain[0] != salted[0]
    assert plain[0] != check_fetch(open_message(), CLAIMS, hidden, None).job.hashes[0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prefill_worker_ids": ("prefill-1",)}, PermissionDenied),
        ({"prompt_digest": prompt_digest([1])}, PermissionDenied),
        ({"model_revision": "r2"}, FailedPrecondition),
        ({"numerics_class": "n2"}, FailedPrecondition),
        ({"adapter": "lora"}, InvalidArgument),
    ],
)
def test_a_ticket_for_something_else_is_refused(change: dict[str, object], error: type[ServiceError]) -> None:
    with pytest.raises(error):
        check(open_message(), replace(CLAIMS, **change))  # type: ignore[arg-type]  # real fields


def kv_range(start: int, end: int) -> Callable[[prefill_pb2.FetchOpen], None]:
    return lambda message: message.kv_range.CopyFrom(prefill_pb2.TokenRange(start=start, end=end))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (kv_range(-1, 10), "kv_range"),
        (kv_range(10, 10), "kv_range"),
        (kv_range(0, 9), "kv_range"),
        (kv_range(0, 11), "kv_range"),
        (
            lambda message: message.hidden_range.CopyFrom(prefill_pb2.TokenRange(start=0, end=10)),
            "hidden_range",
        ),
        (
            lambda message: message.hidden_range.CopyFrom(prefill_pb2.TokenRange(start=0, end=11)),
            "hidden_range",
        ),
        (lambda message: setattr(message, "transport", "pigeon"), "transport"),
    ],
)
def test_ranges_and_transport_are_checked(
    change: Callable[[prefill_pb2.FetchOpen], None], field: str
) -> None:
    message = open_message()
    change(message)
    with pytest.raises(ServiceError) as refused:
        check(message)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([], "empty"),
        ([1, -1], "-1"),
        ([1, 100], "100"),
        ([2**31 - 1], str(2**31 - 1)),
        ([1] * 41, "41 tokens"),
        ([1] * 33, "9 blocks, the pool has 8"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_its_own_numbers(
    token_ids: list[int], says: str
) -> None:
    claims = replace(CLAIMS, prompt_digest=prompt_digest(token_ids))
    with pytest.raises(InvalidArgument, match=says) as refused:
        check(open_message(token_ids), claims)
    assert refused.value.field == "token_ids"


def test_a_prompt_as_large_as_the_pool_is_served() -> None:
    token_ids = [1] * 32
    check(open_message(token_ids), replace(CLAIMS, prompt_digest=prompt_digest(token_ids)))


def test_credit_bounds_what_is_under_way_and_a_larger_message_goes_alone() -> None:
    window = CreditWindow(100)
    assert window.allows(1000)
    window.sent(60)
    assert window.allows(40)
    assert not window.allows(41)
    window.returned(60)
    assert window.allows(1000)


@pytest.mark.parametrize("num_bytes", [0, -1, 61])
def test_credit_that_was_not_taken_cannot_be_returned(num_bytes: int) -> None:
    window = CreditWindow(100)
    window.sent(60)
    with pytest.raises(InvalidArgument):
        window.returned(num_bytes)


@pytest.mark.parametrize("limit_bytes", [0, -5])
def test_a_window_that_lets_nothing_through_is_refused(limit_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        CreditWindow(limit_bytes)
