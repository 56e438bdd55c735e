"""An earlier answer as the cache keeps it and as workers hand it on: token ids and digests, never names or salts.

Bytes of a record, little-endian: version u8, three digests of 16 (tenant, space, prompt), prompt tokens u16, then all
token ids, u32 each.
What is read was written by somebody else: every field is checked, and a record that is none is nothing.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

VERSION: Final = 1
DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct("<B" + 3 * f"{DIGEST_BYTES}s" + "H")
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose an answer is: `space` decides who may see it, `tenant` whose share of the cache it takes."""

    tenant: bytes
    space: bytes


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """`prompt` is the whole prompt's digest; `token_ids`: its last `num_prompt` tokens, then the answer."""

    owner: Owner
    prompt: bytes
    num_prompt: int
    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What a record may hold at most. `num_token_ids`: ids from there on are no tokens."""

    max_prompt: int
    max_answer: int
    num_token_ids: int


def owner_of(isolation: str, secret: bytes) -> Owner:
    """The owner behind `DraftRequest.isolation`, TENANT/SALT, by digests that cannot be made without `secret`.

    A tenant has one share however many salts its requests bring.
    """
    tenant, slash, _ = isolation.rpartition("/")
    return Owner(
        tenant=_digest(secret, b"tenant", (tenant if slash else isolation).encode()),
        space=_digest(secret, b"space", isolation.encode()),
    )


def prompt_of(prompt_ids: Sequence[int], secret: bytes) -> bytes:
    """The digest of a prompt, which cannot be made without `secret` either."""
    return _digest(secret, b"prompt", _bytes_of(prompt_ids))


def encode_record(record: AnswerRecord) -> bytes:
    """The bytes of a record."""
    owner = record.owner
    header = _HEADER.pack(VERSION, owner.tenant, owner.space, record.prompt, record.num_prompt)
    return header + _bytes_of(record.token_ids)


def decode_record(data: bytes, limits: RecordLimits) -> AnswerRecord | None:
    """The record in `data`; None where it is of another version, cut, too long, or holds ids that are no tokens."""
    num_tokens, rest = divmod(len(data) - _HEADER.size, _TOKEN_BYTES)
    if rest or not 0 < num_tokens <= limits.max_prompt + limits.max_answer:
        return None
    version, tenant, space, prompt, num_prompt = _HEADER.unpack_from(data)
    num_answer = num_tokens - num_prompt
    if version != VERSION or num_prompt > limits.max_prompt or not 0 < num_answer <= limits.max_answer:
        return None
    token_ids = np.frombuffer(data, dtype=f"<u{_TOKEN_BYTES}", offset=_HEADER.size)
    if int(token_ids.max()) >= limits.num_token_ids:
        return None
    return AnswerRecord(Owner(tenant, space), prompt, num_prompt, array("I", token_ids.tolist()))


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=f"<u{_TOKEN_BYTES}").tobytes()


def _digest(secret: bytes, kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=secret[:64], person=kind).digest()
