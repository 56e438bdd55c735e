"""Events of a turn reach their requests, whatever one of them does with its own."""

from types import SimpleNamespace
from typing import cast

from core.errors import Internal
from decode.choice import Burst, Ended, Event, Request
from decode.worker import _dispatch


class Recorder:
    """Takes what ends a request, and nothing else where `fails`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.events: list[Event] = []

    def take(self, event: Event) -> None:
        if self.fails and not isinstance(event, Ended):
            raise RuntimeError("cannot take this")
        self.events.append(event)


def burst_of(listener: Recorder) -> Burst:
    return cast(Burst, SimpleNamespace(choice=SimpleNamespace(request=SimpleNamespace(listener=listener))))


def test_an_event_that_its_request_cannot_take_ends_that_request_only() -> None:
    broken, sound = Recorder(fails=True), Recorder(fails=False)
    _dispatch([burst_of(broken), burst_of(sound)])
    assert len(sound.events) == 1
    (ended,) = broken.events
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, Internal)
    assert isinstance(ended.request, SimpleNamespace | Request)
