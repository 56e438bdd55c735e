"""Idempotency by (tenant, key), without a store: the key fixes the seed, so a repeat gives the same text anywhere."""

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import Cancelled, InvalidArgument
from core.records import SEED_LIMIT
from router.metadata import IDEMPOTENCY_KEY
from router.views import Caller

_SEED_BITS = 53


def seed_of(caller: Caller, given: int | None) -> int:
    """The client's seed; else the first 53 bits of SHA-256(tenant, key); else a random one.

    Tenant and key are length-prefixed (8 bytes, big-endian), so that no two pairs are joined to the same bytes.
    """
    if given is not None:
        return given
    if caller.idempotency_key is None:
        return secrets.randbelow(SEED_LIMIT)
    state = hashlib.sha256()
    for part in (caller.tenant.encode(), caller.idempotency_key.encode()):
        state.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(state.digest()[:8], "big") >> (64 - _SEED_BITS)


class _Call:
    def __init__(self, body_digest: bytes, task: "asyncio.Task[object] | None") -> None:
        self.body_digest = body_digest
        self.task = task
        self.superseded = False

    def supersede(self) -> None:
        self.superseded = True
        if self.task is not None:
            self.task.cancel("superseded")


class LiveCalls:
    """The calls that run now under an idempotency key. Used by the event loop alone."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def running(self, caller: Caller, body: bytes) -> Iterator[None]:
        """Wraps a call, in the task that serves it. A call without a key passes through.

        Raises InvalidArgument where another body runs under the key. The same body cancels the older call, whose own
        `running` then raises Cancelled out of it.
        """
        if caller.idempotency_key is None:
            yield
            return
        key = (caller.tenant, caller.idempotency_key)
        digest = hashlib.sha256(body).digest()
        older = self._calls.get(key)
        if older is not None and older.body_digest != digest:
            raise InvalidArgument(IDEMPOTENCY_KEY, "is in use by a running request with another body")
        if older is not None:
            older.supersede()
        task = asyncio.current_task()
        call = self._calls[key] = _Call(digest, task)
        try:
            yield
        except asyncio.CancelledError:
            if call.superseded and task is not None and task.uncancel() == 0:
                raise Cancelled("superseded by a later call with the same idempotency key") from None
            raise
        finally:
            if self._calls.get(key) is call:
                del self._calls[key]
