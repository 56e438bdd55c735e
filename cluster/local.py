"""A whole deployment on this machine as one subprocess: `outrider serve …`. For tests, demo and benches.

with LocalCluster(model="smollm2-135m-instruct", prefill=1, decode=2) as cluster:
    client = Client(cluster.address)
    cluster.kill("decode", 0)
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import psutil

from core.clock import Clock, SystemClock
from core.environment import child_environment
from core.errors import DeadlineExceeded, Internal, ServiceError
from core.grpc_admin import AdminClient
from core.records import WorkerRole
from outrider.v1 import admin_pb2

Result = TypeVar("Result")

READY_PREFIX: Final = "outrider ready on "
_EXIT_TIMEOUT_S: Final = 30.0
_WAIT_STEP_S: Final = 0.1


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LocalCluster:
    """One running `outrider serve`. Entering waits until it is ready; leaving stops it, by force if need be.

    `settings` are dotted keys of ServeSettings (`{"engine.num_blocks": 256}`), `variables` go into the environment
    (collector, cache, token). What it writes to stderr is kept in `log_path` where given, else discarded.
    """

    def __init__(
        self,
        *,
        model: str | Path = "smollm2-135m-instruct",
        prefill: int = 1,
        decode: int = 1,
        settings: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._port = free_port()
        self._command = [
            *(sys.executable, "-m", "cluster.cli.app", "serve", "--model", str(model)),
            *("--prefill", str(prefill), "--decode", str(decode), "--listen", f"127.0.0.1:{self._port}"),
            *(part for key, value in (settings or {}).items() for part in ("--set", f"{key}={value}")),
            *arguments,
        ]
        self._sizes: dict[str, int] = {"router": 1, "prefill": prefill, "decode": decode}
        self._variables = dict(variables or {})
        self.log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._clock: Clock = SystemClock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    @property
    def address(self) -> str:
        """The router's `HOST:PORT`."""
        return f"127.0.0.1:{self._port}"

    @property
    def process_id(self) -> int:
        """Of the CLI."""
        return self._running().pid

    def start(self) -> Self:
        """Starts and waits for the ready line. Raises Internal with the end of the log where it never comes."""
        log = subprocess.DEVNULL if self.log_path is None else self.log_path.open("ab")
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=child_environment(self._variables),
            text=True,
        )
        if not isinstance(log, int):
            log.close()
        threading.Thread(target=self._read_lines, name="local-cluster-output", daemon=True).start()
        try:
            self._await_ready()
        except BaseException:  # boundary: cleaned up, then raised again
            self.kill_launcher()
            raise
        return self

    def _read_lines(self) -> None:
        stdout = self._running().stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _await_ready(self) -> None:
        deadline_s = self._clock.now_s() + self._start_timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - self._clock.now_s()))
            except queue.Empty:
                raise DeadlineExceeded(
                    f"not ready within {self._start_timeout_s} s\n{self.log_tail()}"
                ) from None
            if line is None:
                raise Internal(f"outrider serve ended before it was ready\n{self.log_tail()}")
            if line.startswith(READY_PREFIX):
                return

    def log_tail(self, lines: int = 40) -> str:
        """The end of what it wrote to stderr."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def workers(self) -> tuple[admin_pb2.WorkerStatus, ...]:
        """What the router knows of its workers now."""
        return AdminClient(self.address, self._variables.get("OUTRIDER_TOKEN")).list_workers()

    def worker(self, role: WorkerRole, index: int) -> admin_pb2.WorkerStatus:
        """One worker's status, asked of itself. Raises ServiceError where it does not answer."""
        token = self._variables.get("OUTRIDER_TOKEN")
        if role == "router":
            return AdminClient(self.address, token).status()
        known = {status.worker_id: status for status in self.workers()}
        worker_id = f"{role}-{index}"
        if worker_id not in known:
            raise Internal(f"the router does not know {worker_id}, only {sorted(known)}")
        return AdminClient(known[worker_id].address, token).status()

    def kill(self, role: WorkerRole, index: int = 0, number: signal.Signals = signal.SIGKILL) -> str:
        """Sends a signal to one worker's process. Returns the epoch that it had."""
        status = self.worker(role, index)
        os.kill(status.process_id, number)
        return status.epoch

    def wait_for_restart(self, role: WorkerRole, index: int, old_epoch: str, timeout_s: float = 60.0) -> str:
        """Waits until the worker answers, ready, with another epoch than `old_epoch`; returns that."""

        def new_epoch() -> str | None:
            status = self.worker(role, index)
            return status.epoch if status.ready and status.epoch != old_epoch else None

        return self.wait_until(new_epoch, timeout_s, f"{role}-{index} with a new epoch")

    def wait_until(self, probe: Callable[[], Result | None], timeout_s: float, what: str) -> Result:
        """Asks `probe` again and again until it returns something; a ServiceError counts as "not yet"."""
        deadline_s = self._clock.now_s() + timeout_s
        pause = threading.Event()
        while True:
            try:
                found = probe()
            except ServiceError:
                found = None
            if found is not None:
                return found
            if self._clock.now_s() >= deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s} s\n{self.log_tail()}")
            pause.wait(_WAIT_STEP_S)

    def processes(self) -> tuple[psutil.Process, ...]:
        """The CLI and everything below it, in no order."""
        root = psutil.Process(self._running().pid)
        return (root, *root.children(recursive=True))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the CLI."""
        self._running().send_signal(number)

    def wait_exit(self, timeout_s: float = _EXIT_TIMEOUT_S) -> int:
        """Waits for the CLI to end; its exit code."""
        return self._running().wait(timeout_s)

    def kill_launcher(self) -> None:
        """Kill −9 of the CLI. What it started ends by itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(_EXIT_TIMEOUT_S)

    def stop(self) -> None:
        """SIGTERM, wait, then force. Idempotent."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill_launcher()

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
