"""Keyed hashes of full blocks of tokens; they name what the prefix caches hold.

hash(i) = BLAKE2b-128(key, hash(i-1) || tokens of block i), with a key made of everything that
decides the block's content and of who may see it. The router uses the same hashes to place
requests where their prefix is.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What separates caches: numerics class, adapter, kept hidden layers, and the tenant's salt."""

    numerics_class: str
    salt: bytes
    adapter: str = ""
    hidden_layers: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """The 32-byte BLAKE2b key. Every part is length-prefixed, so no two keys collide by joining."""
        parts = (
            self.numerics_class.encode(),
            self.adapter.encode(),
            ",".join(map(str, self.hidden_layers)).encode(),
            self.salt,
        )
        joined = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(joined, digest_size=32).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, key: PrefixKey) -> list[bytes]:
    """One hash for each full block of `token_ids`, in order."""
    return extend_block_hashes([], token_ids, block_size, key.digest())


def extend_block_hashes(
    known: Sequence[bytes], token_ids: Sequence[int], block_size: int, key_digest: bytes
) -> list[bytes]:
    """`known` (hashes of the first blocks) and the hashes of the full blocks behind them."""
    hashes = list(known)
    full = len(token_ids) // block_size
    if full <= len(hashes):
        return hashes[:full]
    first = len(hashes) * block_size
    raw = np.asarray(token_ids[first : full * block_size], dtype="<i4").tobytes()
    size = block_size * 4
    parent = hashes[-1] if hashes else b""
    for start in range(0, len(raw), size):
        state = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=key_digest)
        state.update(raw[start : start + size])
        parent = state.digest()
        hashes.append(parent)
    return hashes


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of the ids as little-endian int32; what a ticket is bound to."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).digest()


def tenant_salt(secret: bytes, tenant: str, request_salt: str) -> bytes:
    """The salt of a tenant's prefix cache, further split by the request's own salt."""
    joined = tenant.encode() + b"\0" + request_salt.encode()
    return hashlib.blake2b(joined, digest_size=16, key=secret[:64]).digest()
