"""The launcher: `outrider serve` as the person at the terminal sees it. Light: neither Ray nor torch is loaded here.

It starts the supervisor (`cluster/supervisor.py`), shows its events, passes signals on, and at the end makes sure that
nothing is left. It adopts orphans too: should the supervisor be killed, what that started is seen and ended here.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Final, Protocol

from cluster.processes import adopt_orphans, end_descendants
from core import environment
from core.auth import require_safe_bind
from core.clock import Clock, SystemClock
from core.settings import ServeSettings

_STOP_MARGIN_S: Final = 7.0
_SWEEP_TIMEOUT_S: Final = 2.0
_TICKET_KEY_BYTES: Final = 32
_READ_BYTES: Final = 65536
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class ServeReport(Protocol):
    """Where the launcher shows what happens. Called from its only thread."""

    def progress(self, text: str) -> None:
        """Something went on."""
        ...

    def ready(self, address: str) -> None:
        """The deployment answers on `address`. Called once."""
        ...

    def failed(self, text: str) -> None:
        """It cannot start, or ended by itself."""
        ...


def complete_secrets(settings: ServeSettings) -> ServeSettings:
    """Fills what is not configured from the environment, then at random; such keys live in memory only."""
    security = settings.security
    keys = security.ticket_keys or environment.ticket_keys() or (secrets.token_hex(_TICKET_KEY_BYTES),)
    salt = (
        security.cache_salt_secret or environment.cache_salt_secret() or secrets.token_hex(_TICKET_KEY_BYTES)
    )
    token = security.bearer_token or environment.bearer_token()
    complete = security.model_copy(
        update={"ticket_keys": keys, "cache_salt_secret": salt, "bearer_token": token}
    )
    endpoint = settings.telemetry.otlp_endpoint or environment.otlp_endpoint()
    telemetry = settings.telemetry.model_copy(update={"otlp_endpoint": endpoint})
    return settings.model_copy(update={"security": complete, "telemetry": telemetry})


def serve(settings: ServeSettings, report: ServeReport, clock: Clock | None = None) -> int:
    """Runs a deployment until a signal ends it (cluster mode: until it is ready). Returns the exit code.

    Raises FailedPrecondition, before anything starts, where the address is open to others without a token.
    """
    settings = complete_secrets(settings)
    require_safe_bind(settings.listen, settings.security.bearer_token)
    adopt_orphans()
    launcher = _Launcher(settings, report, clock or SystemClock())
    try:
        return launcher.run()
    finally:
        end_descendants(_SWEEP_TIMEOUT_S)


class _Launcher:
    def __init__(self, settings: ServeSettings, report: ServeReport, clock: Clock) -> None:
        self._settings = settings
        self._report = report
        self._clock = clock
        self._signals_seen = 0
        self._deadline_s: float | None = None
        self._failed = False
        self._ready = False

    def run(self) -> int:
        """Events and signals, until the supervisor's pipe ends or the time to stop is over."""
        with (
            subprocess.Popen(
                [sys.executable, "-m", "cluster.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            ) as supervisor,
            _SignalPipe() as signals,
            selectors.DefaultSelector() as selector,
        ):
            assert supervisor.stdin is not None
            assert supervisor.stdout is not None
            self._say(supervisor.stdin, self._settings.model_dump_json())
            selector.register(supervisor.stdout, selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            lines = _Lines(supervisor.stdout.fileno())
            while not lines.ended and not self._is_overdue():
                for key, _ in selector.select(self._remaining_s()):
                    if key.fileobj is signals:
                        self._on_signals(signals.take(), supervisor.stdin)
                    else:
                        lines.read(self._on_event)
            if not lines.ended:
                supervisor.kill()
            supervisor.stdin.close()
        if not self._failed and not self._ended_as_wanted(supervisor.returncode):
            self._report.failed("the supervisor ended by itself")
            return 1
        return 1 if self._failed else 0

    def _ended_as_wanted(self, code: int) -> bool:
        """By a signal, or with 0: after one to the supervisor alone, or in a cluster, which it leaves when ready."""
        return self._signals_seen > 0 or code == 0

    def _on_event(self, line: bytes) -> None:
        event = json.loads(line)
        match event["kind"]:
            case "ready":
                self._ready = True
                self._report.ready(event["text"])
            case "failed":
                self._failed = True
                self._report.failed(event["text"])
            case _:
                self._report.progress(event["text"])

    def _on_signals(self, count: int, stdin: IO[bytes]) -> None:
        """The first one drains; a second one ends everything at once."""
        self._signals_seen += count
        self._say(stdin, "drain" if self._signals_seen == 1 else "now")
        grace_s = self._settings.drain_grace_s if self._ready and self._signals_seen == 1 else 0.0
        self._deadline_s = self._clock.now_s() + grace_s + _STOP_MARGIN_S

    def _say(self, stdin: IO[bytes], text: str) -> None:
        try:
            stdin.write(text.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return

    def _remaining_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock.now_s())

    def _is_overdue(self) -> bool:
        return self._deadline_s is not None and self._clock.now_s() >= self._deadline_s


class _Lines:
    """Splits what a pipe brings into lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def read(self, on_line: Callable[[bytes], None]) -> None:
        """Takes what is there now; never blocks after the selector said so."""
        data = os.read(self._descriptor, _READ_BYTES)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            on_line(line)


class _SignalPipe:
    """Turns SIGINT and SIGTERM into readable bytes, while entered."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1

    def fileno(self) -> int:
        """For the selector."""
        return self._reader.fileno()

    def take(self) -> int:
        """How many stop signals came since the last call."""
        numbers = self._reader.recv(4096)
        return sum(1 for number in numbers if number in _STOP_SIGNALS)

    def __enter__(self) -> "_SignalPipe":
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno())
        self._before = {number: signal.signal(number, lambda *_: None) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned
        self._reader.close()
        self._writer.close()
