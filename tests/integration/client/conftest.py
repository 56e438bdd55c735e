"""A scripted router for each test."""

from collections.abc import Iterator

import pytest

from tests.integration.client.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A router of scripted answers."""
    with ScriptedServer() as running:
        yield running
