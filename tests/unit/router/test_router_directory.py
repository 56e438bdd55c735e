"""The worker directory: last known state, suspicion, staleness, joining."""

import pytest

from core.clock import FakeClock
from core.errors import Unavailable
from core.records import WorkerRecord
from core.settings import RouterSettings
from router.directory import WorkerDirectory
from tests.unit.router.workers import record

SETTINGS = RouterSettings(stale_report_s=10.0)


class Listing:
    """A registry that answers what the test puts in."""

    def __init__(self) -> None:
        self.records: tuple[WorkerRecord, ...] = ()
        self.failing = False

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """See `router.directory.Registry`."""
        if self.failing:
            raise Unavailable("scripted")
        return self.records


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(now_s=1000.0)


def directory_of(clock: FakeClock) -> WorkerDirectory:
    return WorkerDirectory(Listing(), SETTINGS, clock)


def test_a_suspected_worker_is_trusted_again_after_its_next_report_only(clock: FakeClock) -> None:
    directory = directory_of(clock)
    directory.observe([record(reported_unix_ms=1)])
    directory.suspect("epoch-of-decode-0")
    directory.observe([record(reported_unix_ms=1)])
    assert directory.views("decode")[0].suspected
    directory.observe([record(reported_unix_ms=2)])
    assert not directory.views("decode")[0].suspected


def test_a_new_life_of_a_suspected_worker_is_trusted_and_counts_as_joining(clock: FakeClock) -> None:
    directory = directory_of(clock)
    directory.observe([record(reported_unix_ms=1)])
    directory.suspect("epoch-of-decode-0")
    clock.advance(2.0)
    directory.observe([record(epoch="second life", reported_unix_ms=2)])
    clock.advance(1.0)
    (view,) = directory.views("decode")
    assert not view.suspected
    assert view.seen_s == 1.0


def test_workers_found_at_the_start_do_not_count_as_joining(clock: FakeClock) -> None:
    directory = directory_of(clock)
    directory.observe([])
    directory.observe([record()])
    assert directory.views("decode")[0].seen_s == float("inf")


def test_a_report_that_does_not_change_goes_stale_whatever_the_clocks_of_hosts_say(clock: FakeClock) -> None:
    directory = directory_of(clock)
    directory.observe([record(running=9, reported_unix_ms=5)])
    assert directory.views("decode")[0].reported_load == 9
    clock.advance(10.5)
    directory.observe([record(running=9, reported_unix_ms=5)])
    (view,) = directory.views("decode")
    assert not view.fresh
    assert view.load == 0


def test_an_emptied_registry_takes_nobody_out_until_the_silence_is_long(clock: FakeClock) -> None:
    directory = directory_of(clock)
    directory.observe([record()])
    directory.observe([])
    assert [view.fresh for view in directory.views("decode")] == [False]
    clock.advance(10.5)
    directory.observe([])
    assert directory.views("decode") == []


async def test_an_unreadable_registry_keeps_the_last_known_state_for_ever(clock: FakeClock) -> None:
    listing = Listing()
    directory = WorkerDirectory(listing, SETTINGS, clock)
    listing.records = (record(),)
    await directory.refresh()
    listing.failing = True
    clock.advance(3600.0)
    await directory.refresh()
    assert not directory.reachable
    assert [worker.worker_id for worker in directory.records()] == ["decode-0"]


def test_own_requests_sent_since_the_report_add_to_the_reported_load(clock: FakeClock) -> None:
    directory = directory_of(clock)
    epoch = "epoch-of-decode-0"
    directory.observe([record(running=4, reported_unix_ms=1)])
    with directory.loads.holding(epoch), directory.loads.holding(epoch):
        assert directory.views("decode")[0].load == 6
        directory.observe([record(running=6, reported_unix_ms=2)])
        assert directory.views("decode")[0].load == 6
    assert directory.loads.total() == 0
    directory.loads.check()


def test_a_hold_is_counted_once_however_often_it_is_released(clock: FakeClock) -> None:
    directory = directory_of(clock)
    with directory.loads.holding("e") as hold:
        hold.release()
        hold.release()
        assert directory.loads.in_flight("e") == 0
    assert directory.loads.total() == 0


def test_the_offer_is_what_decode_workers_host_together(clock: FakeClock) -> None:
    directory = directory_of(clock)
    assert not directory.offer().known
    directory.observe(
        [
            record("a", drafters=("none",)),
            record("b", drafters=("ngram",)),
            record("p", "prefill", drafters=("x",)),
        ]
    )
    assert directory.offer().drafters == {"none", "ngram"}
    assert directory.offer().known
