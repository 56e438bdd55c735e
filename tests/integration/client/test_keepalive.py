"""Quiet streams live as long as pings agree with the server, and pings that do not are refused."""

import pytest

from core.settings import GrpcSettings
from outrider import Client, UnavailableError
from tests.integration.client.scripted_server import ScriptedServer


def _ping_every(monkeypatch: pytest.MonkeyPatch, interval_ms: int) -> None:
    from outrider import channel, client

    options = dict(channel.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": interval_ms}
    monkeypatch.setattr(client, "CHANNEL_OPTIONS", tuple(options.items()))


def test_a_quiet_stream_outlives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    _ping_every(monkeypatch, 200)
    settings = GrpcSettings(keepalive_time_s=0.2, min_ping_interval_s=0.1)
    with ScriptedServer(settings) as server, Client(server.address) as client:
        assert client.generate("quiet:3").text == "Hello"


def test_pings_faster_than_the_server_allows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _ping_every(monkeypatch, 100)
    with ScriptedServer() as server, Client(server.address) as client:
        with pytest.raises(UnavailableError, match="pings"):
            client.generate("quiet:5")
        assert server.router.cancelled.wait(10)
