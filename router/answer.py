"""What is known of one answer while attempts come and go: the tokens sent, how choices ended, the reports."""

from collections.abc import Sequence
from dataclasses import replace

from core.records import RequestClass, SpeculationReport
from core.wire import report_from_wire
from outrider.v1 import common_pb2, decode_pb2


class AnswerState:
    """Kept by one request's task. Every token taken in has been, or is about to be, sent to the client once."""

    def __init__(
        self, num_choices: int, resume_token_ids: Sequence[int], request_class: RequestClass
    ) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.token_ids[0].extend(resume_token_ids)
        self.finishes: dict[int, common_pb2.ChoiceFinish] = {}
        self.request_class = request_class
        self.fallback = ""
        self._earlier: SpeculationReport | None = None
        self._current: SpeculationReport | None = None

    def begin_attempt(self, fallback: str) -> None:
        """A new attempt: what the one before reported last is added up."""
        self._earlier = self._merged()
        self._current = None
        self.fallback = self.fallback or fallback

    def take(self, delta: decode_pb2.DecodeDelta) -> None:
        """One delta of the running attempt."""
        self.token_ids[delta.index].extend(delta.token_ids)
        if delta.HasField("report"):
            self._current = report_from_wire(delta.report)
        if delta.HasField("finish"):
            self.finishes[delta.index] = delta.finish

    def close(self, finished: decode_pb2.DecodeFinished) -> None:
        """The last message of the attempt that brought the answer to its end."""
        if finished.HasField("report"):
            self._current = report_from_wire(finished.report)
        for choice in finished.choices:
            self.finishes[choice.index] = choice

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self.finishes) == len(self.token_ids)

    def committed(self) -> list[decode_pb2.Committed]:
        """What the next attempt has to go on from; nothing where no token was sent."""
        return [
            decode_pb2.Committed(index=index, token_ids=ids, finished=index in self.finishes)
            for index, ids in enumerate(self.token_ids)
            if ids or index in self.finishes
        ]

    def num_tokens(self) -> int:
        """Tokens of all choices, resumed ones included."""
        return sum(len(ids) for ids in self.token_ids)

    def choices(self) -> list[common_pb2.ChoiceFinish]:
        """How the choices ended, by index."""
        return [self.finishes[index] for index in sorted(self.finishes)]

    def report(self, drafter: str) -> SpeculationReport:
        """The report over all attempts. `drafter` is the last attempt's, for an answer that nothing reported on."""
        merged = self._merged() or SpeculationReport(drafter=drafter)
        return replace(
            merged, request_class=self.request_class, fallback_reason=merged.fallback_reason or self.fallback
        )

    def _merged(self) -> SpeculationReport | None:
        if self._earlier is None or self._current is None:
            return self._current or self._earlier
        return self._earlier.plus(self._current)
