"""The decode loop: everything that happens to requests on the engine thread, turn by turn.

A turn lets in who waits, serves reservations, steps the batch once, and hands all events to the event loop in
one call. A failure inside a step ends the requests of that step with INTERNAL; the worker lives on, unless it was half
of its target that failed.
"""

import logging
from collections.abc import Callable

from torch import Tensor

from core.clock import Clock
from core.errors import Internal
from core.metrics import LoadGauges, Metrics
from core.settings import DecodeSettings
from decode.choice import Event, Prefilling, Request
from decode.drafting import Drafting
from decode.lifecycle import Lifecycle
from decode.pass_step import PassStepper
from decode.room import Room
from decode.step import Stepper
from decode.target import Target
from engine.pipeline import PipelinedEngine
from engine.pipeline_messages import PipelineBroken

_LOG = logging.getLogger(__name__)


class DecodeLoop:
    """Its methods run on the engine thread only, save `gauges`. `deliver` is given the events of a turn."""

    def __init__(
        self,
        target: Target,
        settings: DecodeSettings,
        drafting: Drafting,
        clock: Clock,
        metrics: Metrics,
        deliver: Callable[[list[Event]], None],
        prefix_key: Callable[[Request], bytes],
    ) -> None:
        self._target = target
        self._kv = target.kv
        self._drafting = drafting
        self._deliver = deliver
        self._events: list[Event] = []
        self._room = Room(target.kv, settings.max_running, prefix_key)
        self._lifecycle = Lifecycle(target.kv, self._room, drafting, metrics, self._emit)
        self._roster = self._lifecycle.roster
        pipelined = isinstance(target.engine, PipelinedEngine)
        stepper = PassStepper if pipelined else Stepper
        self._stepper = stepper(target, self._lifecycle, drafting, settings.step_tokens, clock, metrics)
        self.num_failed_steps = 0
        self.num_failed_checks = 0
        self._idle = True

    def enqueue(self, request: Request) -> None:
        """Queue a request; its `on_admitted` is called when its table has been opened."""
        if request.dropped:
            return
        self._roster.requests[request.key] = request
        self._room.enqueue(request)

    def reserve(self, request: Request, answer: Callable[[Exception | None], None]) -> None:
        """Reserve the whole prompt for a hand-off; see `Room.reserve`."""

        def answered(error: Exception | None) -> None:
            if error is None:
                self._roster.transferring.add(request.key)
            else:
                self._lifecycle.requeued(request)
            answer(error)

        if not request.dropped:
            self._room.reserve(request, request.prompt_tokens, answered)

    def prefill_here(self, request: Request, answer: Callable[[Exception | None], None]) -> None:
        """Compute the rest of the prompt in this worker's steps; `answer` as with `reserve`."""

        def answered(error: Exception | None) -> None:
            if error is None:
                table = request.prompt_table
                assert table is not None
                self._roster.prefilling[request.key] = Prefilling(
                    request.key, request, None, table, request.job.prompt_ids, request.prompt_tokens
                )
            answer(error)

        self.reserve(request, answered)

    def begin(self, request: Request, logits: Tensor) -> None:
        """The hand-off is complete: its planes are in the reserved slots, `logits` [vocabulary] came with it.

        The first token is on its way when this returns: it does not wait for the step that draws the second.
        """
        self._target.mask_padding(logits)
        self._lifecycle.begin(request, logits)
        self._flush()

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._lifecycle.drop(request)

    def has_work(self) -> bool:
        """Whether the next turn will compute."""
        return bool(self._roster.running or self._roster.prefilling)

    def turn(self) -> bool:
        """One turn; False where there was nothing to do. Raises PipelineBroken, after which there can be no other."""
        try:
            self._let_in()
            worked = self._stepper.step()
        except PipelineBroken:
            raise
        except Exception:  # boundary: a step that fails ends its requests, not the worker
            _LOG.exception("a step failed; its requests end with INTERNAL")
            self._fail_batch()
            worked = True
        self._flush()
        if not worked and not self._idle:
            self._check_idle()
        self._idle = not worked
        return worked

    def gauges(self) -> LoadGauges:
        """What is held now. Any thread: counts only, each read at once."""
        stats = self._kv.stats()
        return LoadGauges(
            running=self._roster.occupied,
            waiting=self._room.num_waiting,
            free_blocks=stats.free,
            used_blocks=stats.used,
            cached_blocks=stats.cached,
        )

    def check(self) -> None:
        """Raise on a broken invariant; when idle, on anything left over."""
        self._kv.check()
        if self._roster.requests:
            return
        assert not self._roster.running, "running choices of no request"
        assert not self._roster.prefilling, "prompts of no request"
        assert not self._roster.transferring, "hand-offs of no request"
        assert self._room.is_empty, "room is kept for no request"
        assert self._roster.occupied == 0, f"{self._roster.occupied} places are kept for no request"
        used = self._kv.stats().used
        assert used == 0, f"{used} blocks are used by no request"
        self._drafting.check()

    def drop_cached(self) -> None:
        """Forget the prefix cache."""
        self._kv.drop_cached()

    def _check_idle(self) -> None:
        """Invariants, each time that the batch runs empty. A broken one is told and counted; serving goes on."""
        try:
            self.check()
        except Exception:  # boundary: what is broken must be seen, and must not end the other requests
            self.num_failed_checks += 1
            _LOG.exception("an invariant of the decode worker is broken")

    def _let_in(self) -> None:
        self._room.retry_reservations(alone=not self._roster.is_moving)
        for request in self._lifecycle.admit():
            request.on_admitted(request)

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _fail_batch(self) -> None:
        self.num_failed_steps += 1
        involved: dict[int, Request] = {}
        for choice in self._roster.running.values():
            involved[choice.request.key] = choice.request
        for item in self._roster.prefilling.values():
            involved[item.request.key] = item.request
        for request in involved.values():
            self._lifecycle.fail(request, Internal("the engine failed in a step of this request"))
