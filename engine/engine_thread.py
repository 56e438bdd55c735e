"""The one thread of a worker that touches its engine and its KV tables.

The event loop sends actions; between them the thread takes turns (steps) as long as there is work.
"""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from core.clock import Clock
from engine.core_turns import NoTurns, Turns, turn_of

Result = TypeVar("Result")
Answer = Callable[[Exception | None], None]
_LOG = logging.getLogger(__name__)
_LONGEST_IDLE_S = 3600.0


class EngineThread:
    """`turn` does one step and says whether there may be more to do. What it raises ends the thread for good.

    Where `has_work` says that it will compute, it waits for its turn on the cores first, and runs actions meanwhile:
    what came while it waited is part of the step. Idle, it looks again after `idle_s` seconds (None: when woken).
    """

    def __init__(
        self,
        turn: Callable[[], bool],
        clock: Clock,
        cores: Turns | None = None,
        has_work: Callable[[], bool] = lambda: False,
        idle_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._turn = turn
        self._clock = clock
        self._cores = cores or NoTurns()
        self._has_work = has_work
        self._idle_s = idle_s
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
        if self._thread.ident is not None:
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
        results: list[Result] = []

        def ask(answer: Answer) -> None:
            results.append(action())
            answer(None)

        await self.answer_to(ask)
        return results[0]

    async def answer_to(self, ask: Callable[[Answer], None]) -> None:
        """Run `ask` before the next turn, and wait until what it is given is called, maybe turns later.

        Raises the error that it is called with, or what `ask` raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def answer(error: Exception | None) -> None:
            loop.call_soon_threadsafe(_settle, future, error)

        def run() -> None:
            try:
                ask(answer)
            except Exception as error:  # boundary: it goes to the caller, the thread lives on
                answer(error)

        self.post(run)
        await future

    def stalled_s(self) -> float:
        """How long the thread has been inside one turn or action; 0 while it idles, infinite once it has died."""
        since_s = self._busy_since_s
        if not self._thread.is_alive() and not self._closing:
            return math.inf
        return 0.0 if since_s is None else self._clock.now_s() - since_s

    def _run(self) -> None:
        while True:
            self._busy_since_s = self._clock.now_s()
            self._run_actions()
            if self._closing:
                self._busy_since_s = None
                return
            if not self._turn_on_the_cores():
                self._busy_since_s = None
                idle_s = self._idle_s()
                self._wake.wait(_LONGEST_IDLE_S if idle_s is None else min(idle_s, _LONGEST_IDLE_S))
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


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
