"""Folds the events of one call into deltas and a Result. Pure; the sync and async clients share it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.errors import InternalError, OutriderError
from outrider.requests import VERIFICATIONS
from outrider.results import (
    Choice,
    Delta,
    FinishReason,
    Result,
    Speculation,
    Timing,
    TokenLogprobs,
    Usage,
)
from outrider.v1 import common_pb2, inference_pb2

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}

_MODES = {value: mode for mode, value in VERIFICATIONS.items()}


@dataclass(slots=True)
class _Answer:
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Assembly:
    """What has arrived of one call."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.result: Result | None = None
        self._started: inference_pb2.Started | None = None
        self._answers: dict[int, _Answer] = {}

    @property
    def started(self) -> inference_pb2.Started | None:
        """The router's first message, once it has come."""
        return self._started

    def add(self, event: inference_pb2.GenerateResponse) -> Delta | None:
        """The delta that `event` is, if it is one. Raises InternalError for events out of order."""
        kind = event.WhichOneof("event")
        if kind == "started" and self._started is None:
            self._started = event.started
            return None
        if self._started is None or self.result is not None:
            raise InternalError(f"the server sent {kind or 'an unknown event'} out of order")
        if kind == "delta":
            return self._add_delta(event.delta)
        if kind == "finished":
            self.result = self._finish(self._started, event.finished)
        return None

    def whole(self) -> Result:
        """The result. Raises InternalError if the stream ended without one."""
        if self.result is None:
            raise InternalError("the server ended the stream without a last message")
        return self.result

    def attach(self, error: OutriderError) -> OutriderError:
        """The same error with what had arrived, so that the caller can resume."""
        answer = self._answers.get(0, _Answer())
        error.text = "".join(answer.pieces)
        error.token_ids = tuple(answer.token_ids)
        error.trace_id = self.trace_id
        if self._started is not None:
            error.seed = self._started.seed
            error.request_id = self._started.request_id
        return error

    def _add_delta(self, delta: inference_pb2.Delta) -> Delta:
        answer = self._answers.setdefault(delta.index, _Answer())
        logprobs = tuple(_logprobs(entry) for entry in delta.logprobs)
        answer.pieces.append(delta.text)
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(logprobs)
        return Delta(delta.text, tuple(delta.token_ids), delta.index, logprobs)

    def _finish(self, started: inference_pb2.Started, finished: inference_pb2.Finished) -> Result:
        if not finished.choices:
            raise InternalError("the server finished without a choice")
        return Result(
            request_id=started.request_id,
            choices=self._choices(finished.choices),
            seed=started.seed,
            usage=_usage(finished.usage),
            speculation=_speculation(finished.speculation),
            timing=_timing(finished.timing),
            trace_id=self.trace_id,
            numerics_class=started.numerics_class,
            attempts=finished.attempts,
            model=started.model,
            verification=_MODES.get(started.verification, "invariant"),
            approximate=started.approximate,
            effective_temperature=started.effective_temperature,
            route_reason=started.route_reason,
        )

    def _choices(self, finishes: Iterable[common_pb2.ChoiceFinish]) -> tuple[Choice, ...]:
        choices = []
        for finish in sorted(finishes, key=lambda finish: finish.index):
            answer = self._answers.get(finish.index, _Answer())
            reason = _FINISH_REASONS.get(finish.reason)
            if reason is None:
                raise InternalError(f"choice {finish.index} ended for an unknown reason")
            choices.append(
                Choice(
                    index=finish.index,
                    text="".join(answer.pieces),
                    token_ids=tuple(answer.token_ids),
                    finish_reason=reason,
                    stop_string=finish.stop_string or None,
                    logprobs=tuple(answer.logprobs),
                )
            )
        return tuple(choices)


def _logprobs(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


def _usage(message: common_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_prompt_tokens)


def _timing(message: common_pb2.Timing) -> Timing:
    return Timing(
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        time_to_first_token_s=message.time_to_first_token_s,
        decode_s=message.decode_s,
        total_s=message.total_s,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _speculation(message: common_pb2.SpeculationReport) -> Speculation:
    offered: Sequence[int] = tuple(message.position_offered)
    accepted: Sequence[int] = tuple(message.position_accepted)
    requested = message.draft_length_requested if message.HasField("draft_length_requested") else None
    return Speculation(
        drafter=message.drafter,
        request_class=message.request_class,
        draft_length_requested=requested,
        draft_length_mean=_ratio(message.draft_length_sum, message.steps),
        steps=message.steps,
        proposed_nodes=message.proposed_nodes,
        accepted_tokens=message.accepted_tokens,
        acceptance_rate=_ratio(sum(accepted), sum(offered)),
        acceptance_length=_ratio(message.step_tokens, message.steps),
        position_offered=tuple(offered),
        position_accepted=tuple(accepted),
        fallback_reason=message.fallback_reason or None,
    )
