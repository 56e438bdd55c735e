"""Caches that share through a real redis-server: between workers, over restarts, and when Redis is lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from cluster.answer_sharing import NUM_SHARDS, AnswerSharing, lineage_of
from cluster.local import LocalCluster
from cluster.redis_server import RedisServer
from core.control_state import ControlState, ControlStateUnavailable
from core.drafter_settings import CacheSettings
from core.settings import RegistrySettings
from decode.drafters.answer_link import AnswerLink
from decode.drafters.cache import CacheDrafter
from outrider import Client, Result
from tests.integration.cluster.conftest import SMALL
from tests.integration.cluster.test_deployment import redis_url
from tests.unit.decode.drafters.test_cache import ANSWER, PROMPT, VOCAB, answered, propose, request

REGISTRY = RegistrySettings.model_validate({"command_timeout_s": 0.5})
SECRET = b"of the deployment"
LINEAGE = lineage_of("revision", "vocabulary")


def direct_to(server: RedisServer) -> Any:  # Any: redis-py types its replies for every encoding at once
    """A client of the test's own, which answers in bytes."""
    return redis.asyncio.Redis.from_url(server.url)


def numbered(number: int) -> list[int]:
    """A prompt like no other."""
    return [*PROMPT, number // 100, number % 100]


class Worker:
    """A cache and its end at Redis; its engine thread idles."""

    def __init__(
        self, url: str, lineage: str = LINEAGE, secret: bytes = SECRET, **settings: int | float
    ) -> None:
        self.cache = CacheDrafter(CacheSettings.model_validate({"min_match": 2, **settings}), VOCAB)
        self.link = AnswerLink(secret, self.cache.record_limits)
        self.cache.connect(self.link)
        self.state = ControlState(url, REGISTRY)
        self.sharing = AnswerSharing(self.link, self.state, lineage, self.cache.settings, self.take_in)

    async def take_in(self) -> None:
        self.cache.receive_all()

    async def close(self) -> None:
        await self.sharing.stop()
        await self.state.close()

    @property
    def num_answers(self) -> int:
        return self.cache.held()["answers"]

    def knows(self, number: int = 0) -> bool:
        """Whether a request with this prompt is drafted for at once."""
        asked = request(numbered(number), key=1000 + number)
        self.cache.start(asked)
        draft = propose(self.cache, asked)
        self.cache.finish(asked)
        return draft.token_ids == ANSWER[:4]

    def answers(self, number: int = 0, isolation: str = "tenant/salt") -> None:
        answered(self.cache, asked=request(numbered(number), key=number, isolation=isolation))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path, REGISTRY) as server:
        yield server


@pytest.fixture
async def pair(server: RedisServer) -> AsyncIterator[tuple[Worker, Worker]]:
    one, two = Worker(server.url), Worker(server.url)
    yield one, two
    await one.close()
    await two.close()


async def test_what_one_answered_serves_the_other(pair: tuple[Worker, Worker]) -> None:
    one, two = pair
    one.answers()
    assert not two.knows()
    await one.sharing.exchange()
    assert await two.sharing.exchange() == 1
    assert two.knows()
    assert await two.sharing.exchange() == 0
    await one.sharing.exchange()
    assert one.num_answers == two.num_answers == 1


async def test_answers_travel_by_themselves_while_both_run(pair: tuple[Worker, Worker]) -> None:
    one, two = pair
    one.sharing.start(0.01)
    two.sharing.start(0.01)
    one.answers(1)
    two.answers(2)
    async with asyncio.timeout(10):
        while not (one.knows(2) and two.knows(1)):  # noqa: ASYNC110  # the caches tell only when asked
            await asyncio.sleep(0.01)


async def test_a_worker_that_starts_again_reads_what_earlier_lives_answered(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, _ = pair
    for number in range(300):
        one.answers(number, f"tenant {number}/salt" if number else "tenant/salt")
        if number % 100 == 0:
            await one.sharing.exchange()
    await one.sharing.exchange()
    later = Worker(server.url)
    await later.sharing.catch_up()
    assert later.num_answers == 300
    assert later.knows()
    await later.close()


async def test_the_last_answers_are_sent_when_a_worker_stops(server: RedisServer) -> None:
    one, later = Worker(server.url), Worker(server.url)
    one.answers()
    await one.close()
    await later.sharing.catch_up()
    assert later.knows()
    await later.close()


@pytest.mark.parametrize(
    "other",
    [{"lineage": lineage_of("another", "vocabulary")}, {"secret": b"another"}],
    ids=["another model", "another secret"],
)
async def test_workers_with_nothing_in_common_share_nothing(
    server: RedisServer, pair: tuple[Worker, Worker], other: dict[str, str | bytes]
) -> None:
    stranger = Worker(server.url, **other)  # type: ignore[arg-type]
    pair[0].answers()
    await pair[0].sharing.exchange()
    await stranger.sharing.catch_up()
    assert not stranger.knows()
    await stranger.close()


async def test_streams_are_capped_shard_by_shard_and_expire(server: RedisServer) -> None:
    worker = Worker(server.url, shared_answers=80, shared_for_s=100)
    worker.answers(999, "quiet/salt")
    for number in range(1000):
        worker.answers(number, "busy/salt")
        if number % 50 == 0:
            await worker.sharing.exchange()
    await worker.sharing.exchange()
    async with direct_to(server) as direct:
        keys = [f"outrider:answers:{LINEAGE}:{shard}" for shard in range(NUM_SHARDS)]
        lengths = {key: await direct.xlen(key) for key in keys}
        assert {key.decode() for key in await direct.keys("*")} == {key for key in keys if lengths[key]}
        largest, second = sorted(lengths.values(), reverse=True)[:2]
        assert 80 // NUM_SHARDS <= largest < 60
        assert second == 1
        for key in filter(lengths.__getitem__, keys):
            assert 0 < await direct.ttl(key) <= 100
    await worker.close()


async def test_no_name_or_salt_is_in_redis(server: RedisServer, pair: tuple[Worker, Worker]) -> None:
    pair[0].answers(0, "acme-corporation/0011223344556677")
    await pair[0].sharing.exchange()
    async with direct_to(server) as direct:
        (key,) = await direct.keys("*")
        ((_, fields),) = await direct.xrange(key)
        stored = key + b"".join([*fields, *fields.values()])
    for name in (b"acme", b"corporation", b"00112233", bytes.fromhex("00112233"), SECRET):
        assert name not in stored


async def test_what_is_no_record_is_passed_over_and_counted(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, two = pair
    one.answers(1)
    await one.sharing.exchange()
    async with direct_to(server) as direct:
        key = (await direct.keys("outrider:answers:*"))[0].decode()
        (entry,) = await direct.xrange(key)
        good = entry[1][b"record"]
        for data in (b"", b"\x80\x04K\x01.", good[:-1], good + b"\xff" * 4, b"\x07" + good[1:], good * 900):
            await direct.xadd(key, {b"record": data})
        await direct.xadd(key, {b"other": good})
    one.answers(2)
    await one.sharing.exchange()
    await two.sharing.catch_up()
    assert two.link.num_bad == 7
    assert two.knows(1)
    assert two.knows(2)
    two.cache.check()


async def test_an_emptied_redis_takes_what_comes_next(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, two = pair
    one.answers(1)
    await one.sharing.exchange()
    await two.sharing.exchange()
    async with direct_to(server) as direct:
        await direct.flushall()
    one.answers(2)
    await one.sharing.exchange()
    assert await two.sharing.exchange() == 1
    assert two.knows(1)
    assert two.knows(2)


async def test_answers_given_while_redis_is_dead_are_shared_when_it_is_back(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, two = pair
    one.answers(1)
    await one.sharing.exchange()
    await two.sharing.exchange()
    old_id = server.process_id
    os.kill(old_id, signal.SIGSTOP)
    one.answers(2)
    assert await one.sharing.exchange() == 0
    assert await two.sharing.exchange() == 0
    assert (one.link.num_failed, two.link.num_failed) == (1, 1)
    assert one.knows(2)
    assert two.knows(1)
    os.kill(old_id, signal.SIGKILL)
    one.answers(3)
    await restarted(server, one.state, old_id)
    await one.sharing.exchange()
    assert await two.sharing.exchange() == 2
    assert two.knows(2)
    assert two.knows(3)


async def test_a_frozen_redis_is_read_rightly_when_it_goes_on(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, two = pair
    one.answers(1)
    await one.sharing.exchange()
    await two.sharing.exchange()
    os.kill(server.process_id, signal.SIGSTOP)
    try:
        one.answers(2)
        assert await one.sharing.exchange() == 0
        assert await two.sharing.exchange() == 0
    finally:
        os.kill(server.process_id, signal.SIGCONT)
    one.answers(3)
    for _ in range(2):
        await one.sharing.exchange()
        await two.sharing.exchange()
    assert all(worker.knows(number) for worker in pair for number in (1, 2, 3))
    assert (one.num_answers, two.num_answers) == (3, 3)
    assert (one.link.num_bad, two.link.num_bad) == (0, 0)


async def restarted(server: RedisServer, state: ControlState, old_id: int) -> None:
    """Waits until another redis-server answers."""
    async with asyncio.timeout(10):
        while True:
            try:
                await state.ping()
                if server.process_id != old_id:
                    return
            except ControlStateUnavailable:
                pass
            await asyncio.sleep(0.02)


async def test_without_a_redis_a_worker_starts_and_stops(tmp_path: Path) -> None:
    worker = Worker(f"unix://{tmp_path}/nobody.sock")
    await worker.sharing.catch_up()
    worker.answers()
    await worker.close()
    assert worker.link.num_failed == 2
    assert worker.knows()


async def test_a_busy_engine_thread_is_handed_no_more_than_the_queue_holds(
    server: RedisServer, pair: tuple[Worker, Worker]
) -> None:
    one, _ = pair
    for number in range(250):
        one.answers(number, f"tenant {number}/salt")
    await one.sharing.exchange()
    busy = Worker(server.url)

    async def never() -> None:
        return None

    busy.sharing = AnswerSharing(busy.link, busy.state, LINEAGE, busy.cache.settings, never)
    await busy.sharing.catch_up()
    assert busy.num_answers == 0
    assert 128 - NUM_SHARDS < 128 - busy.link.room <= 128
    while busy.link.has_incoming or await busy.sharing.exchange():
        busy.answers(7)
        if busy.link.has_incoming:
            busy.cache.receive_all()
    assert busy.num_answers == 250 + 1
    await busy.close()


@pytest.mark.cluster
def test_a_killed_worker_knows_in_its_next_life_what_it_answered(tiny_model: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "decode_worker.drafters.cache.share": "true"}

    def ask(cluster: LocalCluster) -> Result:
        with Client(cluster.address) as client:
            return client.generate(
                "once more", max_tokens=41, ignore_eos=True, temperature=0, drafter="cache", draft_length=4
            )

    with LocalCluster(
        model=tiny_model, settings=settings, log_path=tmp_path / "serve.log", decode=1
    ) as cluster:
        first = ask(cluster)

        def shared() -> bool | None:
            with redis.Redis.from_url(redis_url(cluster)) as direct:
                return True if list(direct.scan_iter("outrider:answers:*")) else None

        cluster.wait_until(shared, 10, "the answer in redis")
        cluster.wait_for_restart("decode", 0, cluster.kill("decode", 0))
        second = cluster.wait_until(lambda: ask(cluster), 20, "an answer of the next life")
    assert second.token_ids == first.token_ids
    speculation = second.speculation
    assert speculation.accepted_tokens == speculation.proposed_nodes == 32
