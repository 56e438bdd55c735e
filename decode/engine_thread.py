"""The one thread that touches the engine, its KV tables and the drafters.

The event loop sends actions; between them the thread takes turns (steps) as long as there is work.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from core.clock import Clock
from engine.core_turns import NoTurns, Turns, turn_of

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


class EngineThread:
    """`turn` does one step and says whether there was anything to do. It must not raise.

    Where `has_work` says that it will compute, it waits for its turn on the cores first, and runs actions meanwhile:
    what came while it waited is part of the step.
    """

    def __init__(
        self,
        turn: Callable[[], bool],
        clock: Clock,
        cores: Turns | None = None,
        has_work: Callable[[], bool] = lambda: False,
    ) -> None:
        self._turn = turn
        self._clock = clock
        self._cores = cores or NoTurns()
        self._has_work = has_work
        self._actions: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after the running turn and the actions sent so far; whether it ended in time."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """There may be work again. From any thread."""
        self._wake.set()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` before the next turn. From any thread."""
        self._actions.append(action)
        self._wake.set()

    async def call(self, action: Callable[[], Result]) -> Result:
        """Run `action` before the next turn; its result, or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            try:
                result = action()
            except Exception as error:  # boundary: it goes to the caller, the thread lives on
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_succeed, future, result)

        self.post(run)
        return await future

    def stalled(self, limit_s: float) -> bool:
        """Whether the thread has been inside one turn or action for longer than `limit_s`, or has died."""
        since = self._busy_since_s
        if since is not None and self._clock.now_s() - since > limit_s:
            return True
        return not self._thread.is_alive() and not self._closing

    def _run(self) -> None:
        while True:
            self._busy_since_s = self._clock.now_s()
            self._run_actions()
            if self._closing:
                return
            if not self._turn_on_the_cores():
                self._busy_since_s = None
                self._wake.wait()
                self._wake.clear()

    def _turn_on_the_cores(self) -> bool:
        if not self._has_work():
            return self._turn()
        with turn_of(self._cores, self._run_actions):
            return self._turn()

    def _run_actions(self) -> None:
        while self._actions:
            self._act(self._actions.popleft())

    def _act(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # boundary: one bad action must not end the thread
            _LOG.exception("an action on the engine thread failed")


def _succeed(future: "asyncio.Future[Result]", result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Result]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
