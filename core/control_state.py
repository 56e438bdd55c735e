"""The control state in Redis: worker registry, acceptance statistics, and answers that workers share.

Soft state: losing it costs hit rate only. Nothing here caches. Whoever reads keeps the last known answer;
whoever publishes does so again at every heartbeat, so an empty Redis fills by itself.

Keys: `<prefix>:workers` (set of ids), `<prefix>:worker:<id>` (JSON, TTL),
`<prefix>:acceptance:<model>:<drafter>:<class>` (hash of counts), `<prefix>:answers:<lineage>:<shard>` (capped
stream of opaque records, TTL).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from core.errors import Unavailable
from core.records import WorkerRecord
from core.settings import RegistrySettings

Result = TypeVar("Result")

_RECORD = b"record"
_WITHDRAW = """
local record = redis.call('GET', KEYS[1])
if record and cjson.decode(record).epoch == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  return 1
end
return 0
"""


class ControlStateUnavailable(Unavailable):
    """Redis did not answer in time; the last known state stays in use."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Sums over requests of one (model, drafter, class). Positions are indexed by depth - 1."""

    requests: int = 0
    steps: int = 0
    step_tokens: int = 0
    offered: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class WorkerRegistry(Protocol):
    """What router and workers need of the control state."""

    async def publish(self, record: WorkerRecord, ttl_s: float) -> None:
        """Makes `record` known for `ttl_s`."""
        ...

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        """Forgets that life of the worker; a later life's record stays."""
        ...

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose record has not expired, by id."""
        ...


class ControlState:
    """The control state behind one Redis URL (redis or unix scheme). Calls raise ControlStateUnavailable."""

    def __init__(self, url: str, settings: RegistrySettings) -> None:
        self._prefix = settings.key_prefix
        self._timeout_s = settings.command_timeout_s
        self._client = _connected(url, settings, decode_responses=True)
        self._bytes_client = _connected(url, settings, decode_responses=False)

    async def publish(self, record: WorkerRecord, ttl_s: float) -> None:
        """See `WorkerRegistry.publish`."""
        text = json.dumps(asdict(record), separators=(",", ":"))

        async def call() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.set(self._worker_key(record.worker_id), text, px=max(1, int(ttl_s * 1000)))
                pipeline.sadd(self._workers_key(), record.worker_id)
                await pipeline.execute()

        await self._bounded(call)

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        """See `WorkerRegistry.withdraw`."""

        async def call() -> None:
            keys = (self._worker_key(worker_id), self._workers_key())
            await _awaited(self._client.eval(_WITHDRAW, 2, *keys, epoch, worker_id))

        await self._bounded(call)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """See `WorkerRegistry.list_workers`."""

        async def call() -> tuple[WorkerRecord, ...]:
            worker_ids = sorted(await _awaited(self._client.smembers(self._workers_key())))
            if not worker_ids:
                return ()
            texts = await self._client.mget([self._worker_key(worker_id) for worker_id in worker_ids])
            gone = [worker_id for worker_id, text in zip(worker_ids, texts, strict=True) if text is None]
            if gone:
                await _awaited(self._client.srem(self._workers_key(), *gone))
            return tuple(_record_from_json(str(text)) for text in texts if text is not None)

        return await self._bounded(call)

    async def add_acceptance(
        self, model: str, drafter: str, request_class: str, counts: AcceptanceCounts
    ) -> None:
        """Adds `counts` to the sums of (model, drafter, request_class)."""
        increments = {"requests": counts.requests, "steps": counts.steps, "step_tokens": counts.step_tokens}
        increments |= {f"offered:{depth}": value for depth, value in enumerate(counts.offered)}
        increments |= {f"accepted:{depth}": value for depth, value in enumerate(counts.accepted)}
        key = self._acceptance_key(model, drafter, request_class)

        async def call() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                for name, value in increments.items():
                    if value:
                        pipeline.hincrby(key, name, value)
                await pipeline.execute()

        await self._bounded(call)

    async def get_acceptance(self, model: str, drafter: str, request_class: str) -> AcceptanceCounts:
        """The sums so far; zeros where nothing is known."""

        async def call() -> dict[str, str]:
            key = self._acceptance_key(model, drafter, request_class)
            return dict(await _awaited(self._client.hgetall(key)))

        return _counts_from_fields(await self._bounded(call))

    async def add_answers(
        self, lineage: str, records: Sequence[tuple[int, bytes]], max_records: int, ttl_s: float
    ) -> None:
        """Appends (shard, record) pairs. A shard keeps about its last `max_records`, and for `ttl_s` after these."""

        async def call() -> None:
            async with self._bytes_client.pipeline(transaction=True) as pipeline:
                for shard, record in records:
                    key = self._answers_key(lineage, shard)
                    pipeline.xadd(key, {_RECORD: record}, maxlen=max_records, approximate=True)
                for shard in sorted({shard for shard, _ in records}):
                    pipeline.pexpire(self._answers_key(lineage, shard), max(1, int(ttl_s * 1000)))
                await pipeline.execute()

        await self._bounded(call)

    async def read_answers(
        self, lineage: str, cursors: Mapping[int, bytes], max_records: int
    ) -> list[tuple[int, bytes, bytes]]:
        """Up to `max_records` of each shard behind its cursor (b"0": all), as (shard, cursor behind it, record)."""

        async def call() -> list[tuple[int, bytes, bytes]]:
            async with self._bytes_client.pipeline(transaction=False) as pipeline:
                for shard, cursor in cursors.items():
                    key = self._answers_key(lineage, shard)
                    pipeline.xrange(key, min=b"(" + cursor, count=max_records)
                found = await pipeline.execute()
            return [
                (shard, cursor, fields.get(_RECORD, b""))
                for shard, entries in zip(cursors, found, strict=True)
                for cursor, fields in entries
            ]

        return await self._bounded(call)

    async def ping(self) -> None:
        """Raises ControlStateUnavailable unless Redis answers."""

        async def call() -> None:
            await _awaited(self._client.ping())

        await self._bounded(call)

    async def close(self) -> None:
        """Ends the connections. Idempotent."""
        await self._client.aclose()
        await self._bytes_client.aclose()

    async def _bounded(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Passes a cancellation on: the client sends through `asyncio.wait_for`, which until Python 3.12 loses one
        that comes as its call ends, and a task that loops over calls would never end."""
        task = asyncio.current_task()
        assert task is not None, "called outside of any task"
        requested = task.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await call()
        except (RedisError, OSError, TimeoutError) as error:
            if task.cancelling() > requested:
                raise asyncio.CancelledError from error
            raise ControlStateUnavailable(f"control state: {type(error).__name__}") from error
        if task.cancelling() > requested:
            raise asyncio.CancelledError
        return result

    def _workers_key(self) -> str:
        return f"{self._prefix}:workers"

    def _worker_key(self, worker_id: str) -> str:
        return f"{self._prefix}:worker:{worker_id}"

    def _acceptance_key(self, model: str, drafter: str, request_class: str) -> str:
        return f"{self._prefix}:acceptance:{model}:{drafter}:{request_class}"

    def _answers_key(self, lineage: str, shard: int) -> str:
        return f"{self._prefix}:answers:{lineage}:{shard}"


def _connected(url: str, settings: RegistrySettings, *, decode_responses: bool) -> redis.Redis:
    """A client of `url`; it connects when it is first used."""
    client: redis.Redis = redis.Redis.from_url(
        url,
        decode_responses=decode_responses,
        socket_timeout=settings.command_timeout_s,
        socket_connect_timeout=settings.command_timeout_s,
        retry=Retry(NoBackoff(), 1),
        max_connections=8,
    )
    return client


async def _awaited(value: Any) -> Any:  # Any: redis-py types its replies as "awaitable or plain"
    return await value


def _record_from_json(text: str) -> WorkerRecord:
    values = json.loads(text)
    values["drafters"] = tuple(values["drafters"])
    values["hidden_layers"] = tuple(values["hidden_layers"])
    return WorkerRecord(**values)


def _counts_from_fields(fields: dict[str, str]) -> AcceptanceCounts:
    return AcceptanceCounts(
        requests=int(fields.get("requests", 0)),
        steps=int(fields.get("steps", 0)),
        step_tokens=int(fields.get("step_tokens", 0)),
        offered=_by_depth(fields, "offered"),
        accepted=_by_depth(fields, "accepted"),
    )


def _by_depth(fields: dict[str, str], name: str) -> tuple[int, ...]:
    found = {
        int(key.split(":")[1]): int(value) for key, value in fields.items() if key.startswith(f"{name}:")
    }
    return tuple(found.get(depth, 0) for depth in range(max(found, default=-1) + 1))
