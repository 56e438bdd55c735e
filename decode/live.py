"""A request as the event loop sees it: its outbox, its times, its text, and how it is told to its caller."""

import asyncio
from collections.abc import Callable

from core.clock import Clock
from core.errors import DeadlineExceeded, Overloaded, ServiceError
from core.metrics import Metrics
from core.records import ChoiceFinish, SpeculationReport, Timing, Usage
from decode.bring_in import Handoff
from decode.choice import Burst, Event, Request
from decode.job import DecodeJob
from decode.outbox import Delta, Outbox


class LiveRequest:
    """The `Listener` of one request. `wake` tells the engine thread that a blocked request may go on."""

    request: Request

    def __init__(
        self,
        job: DecodeJob,
        max_deltas: int,
        merge_interval_s: float,
        slow_reader_timeout_s: float,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self.job = job
        self.outbox = Outbox(max_deltas, self._on_blocked, merge_interval_s)
        self.handoff = Handoff()
        self.report: SpeculationReport | None = None
        self.arrived_s = clock.now_s()
        self.first_token_s: float | None = None
        self._last_burst_s = self.arrived_s
        self._clock = clock
        self._wake = wake
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._slow_timer: asyncio.TimerHandle | None = None
        self._scope: asyncio.Timeout | None = None
        self._interruption: ServiceError | None = None
        self.emitted_tokens = 0
        self.metrics: Metrics = Metrics()

    @property
    def blocked(self) -> bool:
        """See `Listener`."""
        return self.outbox.blocked

    def take(self, event: Event) -> None:
        """See `Listener`."""
        if isinstance(event, Burst):
            self._take_burst(event)
        elif event.error is not None:
            self.outbox.fail(event.error)
        else:
            self.outbox.end()

    def limit(self, scope: asyncio.Timeout, deadline_s: float | None) -> None:
        """The scope that the request runs in; it ends at `deadline_s`, or when interrupted."""
        self._scope = scope
        if deadline_s is not None:
            remaining_s = max(0.0, deadline_s - self._clock.now_s())
            scope.reschedule(asyncio.get_running_loop().time() + remaining_s)

    def interrupt(self, error: ServiceError) -> None:
        """End the request now, whatever its reader does; nothing happens to one that is ending already."""
        self._interruption = self._interruption or error
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def timeout_error(self) -> ServiceError:
        """What the end of the scope means."""
        return self._interruption or DeadlineExceeded("the deadline passed")

    def account(self) -> None:
        """Count, once, what the attempt used."""
        usage, handoff = self.usage(), self.handoff
        self.metrics.tokens("prompt", usage.prompt_tokens)
        self.metrics.tokens("cached", usage.cached_prompt_tokens)
        self.metrics.tokens("completion", self.emitted_tokens)
        if handoff.admitted_s:
            self.metrics.handoff(handoff.outcome, handoff.transport, handoff.num_bytes)

    def close(self) -> None:
        """The scope is left: no timer may end the request any more. News may still come, for nobody."""
        self._scope = None
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def final_report(self) -> SpeculationReport:
        """The report of this attempt, also where it ended before its first token."""
        return self.report if self.report is not None else self.request.tally.snapshot()

    def finishes(self) -> list[ChoiceFinish]:
        """How the choices ended, in order, those of earlier attempts included."""
        return [choice.finish for choice in self.request.choices if choice.finish is not None]

    def tell_ended(self) -> None:
        """Tell of choices that the committed tokens had ended already, without saying so."""
        for choice in self.request.choices:
            if choice.finish is not None and not self.job.is_finished(choice.index):
                self.outbox.put(Delta(choice.index, (), "", (), self.final_report(), choice.finish))

    def usage(self) -> Usage:
        """Token counts, committed ones included."""
        committed = sum(len(entry.token_ids) for entry in self.job.committed)
        return Usage(len(self.job.prompt_ids), committed + self.emitted_tokens, self.request.cached_tokens)

    def timing(self) -> Timing:
        """Seconds of the parts so far."""
        now_s = self._clock.now_s()
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        admitted_s = self.handoff.admitted_s or first_s
        return Timing(
            queue_s=admitted_s - self.arrived_s,
            prefill_s=first_s - admitted_s,
            time_to_first_token_s=first_s - self.arrived_s,
            decode_s=now_s - first_s,
            total_s=now_s - self.arrived_s,
        )

    def _take_burst(self, burst: Burst) -> None:
        now_s = self._clock.now_s()
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.metrics.time_to_first_token(now_s - self.arrived_s)
        else:
            self.metrics.inter_token(now_s - self._last_burst_s, len(burst.token_ids))
        self._last_burst_s = now_s
        text = burst.text
        if text is None:
            text = burst.choice.finisher.text_of(
                burst.token_ids[: burst.num_text_tokens], burst.finish is not None
            )
        self.emitted_tokens += len(burst.token_ids)
        self.report = burst.report
        index = burst.choice.index
        self.outbox.put(Delta(index, burst.token_ids, text, burst.logprobs, burst.report, burst.finish))

    def _on_blocked(self, blocked: bool) -> None:
        self._stop_timer()
        if blocked and self._scope is not None:
            loop = asyncio.get_running_loop()
            error = Overloaded("the caller reads too slowly")
            self._slow_timer = loop.call_later(self._slow_reader_timeout_s, self.interrupt, error)
        elif not blocked:
            self._wake()
