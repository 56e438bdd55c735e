"""Records of answers: they come back as they were, say nothing of names, and what is no record is none."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafters.answer_record import (
    AnswerRecord,
    Owner,
    RecordLimits,
    decode_record,
    encode_record,
    owner_of,
    prompt_of,
)

LIMITS = RecordLimits(max_prompt=4, max_answer=16, num_token_ids=2**17)
HEADER_BYTES = 51
RECORD = AnswerRecord(Owner(b"t" * 16, b"s" * 16), b"p" * 16, 2, array("I", [1, 2, 70_000, 4]))


@given(
    num_prompt=st.integers(0, 4),
    token_ids=st.lists(st.integers(0, 2**17 - 1), min_size=5, max_size=16),
)
def test_a_record_comes_back_as_it_was(num_prompt: int, token_ids: list[int]) -> None:
    record = replace(RECORD, num_prompt=num_prompt, token_ids=array("I", token_ids))
    data = encode_record(record)
    assert len(data) == HEADER_BYTES + 4 * len(token_ids)
    assert decode_record(data, LIMITS) == record


def test_bytes_are_little_endian_whatever_the_machine() -> None:
    assert encode_record(RECORD)[:1] == b"\x01"
    assert encode_record(RECORD)[HEADER_BYTES - 2 :][:6] == b"\x02\x00\x01\x00\x00\x00"


@pytest.mark.parametrize(
    "data",
    {
        "empty": b"",
        "text": b"{}",
        "cut": encode_record(RECORD)[:-1],
        "header only": encode_record(RECORD)[:HEADER_BYTES],
        "another version": b"\x02" + encode_record(RECORD)[1:],
        "nothing but prompt": encode_record(replace(RECORD, num_prompt=4)),
        "prompt longer than all": encode_record(replace(RECORD, num_prompt=9)),
        "prompt too long": encode_record(replace(RECORD, num_prompt=5, token_ids=array("I", range(9)))),
        "answer too long": encode_record(replace(RECORD, num_prompt=0, token_ids=array("I", range(17)))),
        "far too long": encode_record(replace(RECORD, token_ids=array("I", [1] * 1000))),
        "no token": encode_record(replace(RECORD, token_ids=array("I", [1, 2, 2**17]))),
        "largest id": encode_record(replace(RECORD, token_ids=array("I", [1, 2, 2**32 - 1]))),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_no_record_is_nothing(data: tuple[str, bytes]) -> None:
    assert decode_record(data[1], LIMITS) is None


@given(st.binary(max_size=120))
def test_no_bytes_raise(data: bytes) -> None:
    decode_record(data, LIMITS)
    decode_record(b"\x01" + data, LIMITS)


def test_owners_are_told_apart_by_digests_that_need_the_secret() -> None:
    owner = owner_of("acme/00ff", b"secret")
    assert owner == owner_of("acme/00ff", b"secret")
    assert owner.tenant == owner_of("acme/11", b"secret").tenant
    assert owner.space != owner_of("acme/11", b"secret").space
    assert owner.tenant != owner_of("other/00ff", b"secret").tenant
    assert owner.tenant != owner_of("acme/00ff", b"another").tenant
    assert owner.space != owner_of("acme/00ff", b"another").space
    assert owner.tenant != owner.space


def test_a_tenants_name_may_be_empty_or_hold_slashes() -> None:
    assert owner_of("/00", b"").tenant == owner_of("/11", b"").tenant
    assert owner_of("a/b/00", b"").tenant == owner_of("a/b/11", b"").tenant
    assert owner_of("a/b/00", b"").tenant != owner_of("a/c/00", b"").tenant
    assert owner_of("no salt", b"").tenant != owner_of("another", b"").tenant


def test_no_name_salt_or_prompt_is_in_a_record() -> None:
    owner = owner_of("acme-corporation/00112233", b"secret")
    prompt = [11, 12, 13, 14, 15, 16]
    record = AnswerRecord(owner, prompt_of(prompt, b"secret"), 1, array("I", [16, 1, 2, 3]))
    data = encode_record(record)
    assert b"acme" not in data
    assert b"0011" not in data
    assert array("I", prompt[:2]).tobytes() not in data
    assert prompt_of(prompt, b"secret") != prompt_of(prompt, b"")
