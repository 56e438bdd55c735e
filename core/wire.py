"""Records ↔ protobuf, in this one module."""

from core.records import (
    ChoiceFinish,
    EarlyStopping,
    FinishReason,
    Grammar,
    GrammarKind,
    PrefillPeer,
    SamplingParams,
    SpeculationParams,
    SpeculationReport,
    ThinkingPace,
    Timing,
    TokenLogprobs,
    Usage,
    VerificationMode,
)
from outrider.v1 import common_pb2, decode_pb2

_FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_EARLY_STOPPING_TO_WIRE: dict[EarlyStopping, common_pb2.EarlyStopping] = {
    False: common_pb2.EARLY_STOPPING_FALSE,
    True: common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_WIRE = {wire: early for early, wire in _EARLY_STOPPING_TO_WIRE.items()}


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field set; `bad_word_ids` and `eos_token_ids` travel beside it in the DecodeRequest."""
    message = common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_words=params.bad_words,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        n=params.n,
        ignore_eos=params.ignore_eos,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY_STOPPING_TO_WIRE[params.early_stopping],
    )
    if params.seed is not None:
        message.seed = params.seed
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.grammar is not None:
        setattr(message, params.grammar.kind, params.grammar.text)
    return message


def grammar_from_wire(message: common_pb2.SamplingParams) -> Grammar | None:
    """What the answer must follow, if anything."""
    kind: GrammarKind | None = message.WhichOneof("grammar")
    return None if kind is None else Grammar(kind, getattr(message, kind))


def sampling_from_wire(request: decode_pb2.DecodeRequest) -> SamplingParams:
    """The sampling parameters of a DecodeRequest, whose router has set every field."""
    message = request.sampling
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(tuple(word.ids) for word in request.bad_word_ids),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else 256,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(request.eos_token_ids),
        seed=message.seed if message.HasField("seed") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n if message.HasField("n") else 1,
        ignore_eos=message.ignore_eos,
        beam_width=message.beam_width if message.HasField("beam_width") else 1,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=early_stopping_from_wire(message.early_stopping),
        grammar=grammar_from_wire(message),
    )


_VERIFICATIONS: dict[VerificationMode, common_pb2.Verification] = {
    "invariant": common_pb2.VERIFICATION_INVARIANT,
    "rejection": common_pb2.VERIFICATION_REJECTION,
    "block": common_pb2.VERIFICATION_BLOCK,
    "typical": common_pb2.VERIFICATION_TYPICAL,
}
_MODES = {value: mode for mode, value in _VERIFICATIONS.items()}


def early_stopping_from_wire(value: common_pb2.EarlyStopping) -> EarlyStopping:
    """Unspecified means False."""
    return _EARLY_STOPPING_FROM_WIRE.get(value, False)


def thinking_to_wire(pace: ThinkingPace) -> decode_pb2.ThinkingPace:
    """K while the answer thinks aloud."""
    return decode_pb2.ThinkingPace(draft_length=pace.draft_length, opening=pace.opening, closing=pace.closing)


def thinking_from_wire(request: decode_pb2.DecodeRequest) -> ThinkingPace | None:
    """The inverse of `thinking_to_wire`; None where the request has none."""
    if not request.HasField("thinking"):
        return None
    message = request.thinking
    return ThinkingPace(message.draft_length, message.opening, message.closing)


def verification_to_wire(mode: VerificationMode) -> common_pb2.Verification:
    """The wire's name of a verification mode."""
    return _VERIFICATIONS[mode]


def verification_from_wire(value: common_pb2.Verification) -> VerificationMode:
    """Unspecified, or a mode of a newer peer, means invariant."""
    return _MODES.get(value, "invariant")


def speculation_to_wire(params: SpeculationParams) -> common_pb2.SpeculationParams:
    """Absent lengths stay absent."""
    message = common_pb2.SpeculationParams(
        drafter=params.drafter,
        verification=verification_to_wire(params.verification),
        allow_approximate=params.allow_approximate,
    )
    if params.draft_length is not None:
        message.draft_length = params.draft_length
    if params.draft_width is not None:
        message.draft_width = params.draft_width
    return message


def speculation_from_wire(message: common_pb2.SpeculationParams) -> SpeculationParams:
    """The inverse of `speculation_to_wire`; an absent drafter is `auto`."""
    return SpeculationParams(
        drafter=message.drafter if message.HasField("drafter") else "auto",
        draft_length=message.draft_length if message.HasField("draft_length") else None,
        draft_width=message.draft_width if message.HasField("draft_width") else None,
        verification=verification_from_wire(message.verification),
        allow_approximate=message.allow_approximate,
    )


def report_to_wire(report: SpeculationReport) -> common_pb2.SpeculationReport:
    """A report as sent with deltas and at the end."""
    message = common_pb2.SpeculationReport(
        drafter=report.drafter,
        drafter_version=report.drafter_version,
        request_class=report.request_class,
        steps=report.steps,
        proposed_nodes=report.proposed_nodes,
        accepted_tokens=report.accepted_tokens,
        step_tokens=report.step_tokens,
        draft_length_sum=report.draft_length_sum,
        position_offered=report.position_offered,
        position_accepted=report.position_accepted,
        fallback_reason=report.fallback_reason,
    )
    if report.draft_length_requested is not None:
        message.draft_length_requested = report.draft_length_requested
    return message


def report_from_wire(message: common_pb2.SpeculationReport) -> SpeculationReport:
    """The inverse of `report_to_wire`."""
    requested = message.draft_length_requested if message.HasField("draft_length_requested") else None
    return SpeculationReport(
        drafter=message.drafter,
        drafter_version=message.drafter_version,
        request_class=message.request_class,
        draft_length_requested=requested,
        steps=message.steps,
        proposed_nodes=message.proposed_nodes,
        accepted_tokens=message.accepted_tokens,
        step_tokens=message.step_tokens,
        draft_length_sum=message.draft_length_sum,
        position_offered=tuple(message.position_offered),
        position_accepted=tuple(message.position_accepted),
        fallback_reason=message.fallback_reason,
    )


def logprobs_to_wire(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """One emitted token's log-probabilities."""
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in entry.top],
    )


def finish_to_wire(finish: ChoiceFinish) -> common_pb2.ChoiceFinish:
    """How a choice ended."""
    return common_pb2.ChoiceFinish(
        index=finish.index, reason=_FINISH_TO_WIRE[finish.reason], stop_string=finish.stop_string
    )


def finish_from_wire(message: common_pb2.ChoiceFinish) -> ChoiceFinish:
    """The inverse of `finish_to_wire`."""
    return ChoiceFinish(message.index, _FINISH_FROM_WIRE[message.reason], message.stop_string)


def usage_to_wire(usage: Usage) -> common_pb2.Usage:
    """Token counts."""
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def timing_to_wire(timing: Timing) -> common_pb2.Timing:
    """Seconds of a request's parts."""
    return common_pb2.Timing(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        time_to_first_token_s=timing.time_to_first_token_s,
        decode_s=timing.decode_s,
        total_s=timing.total_s,
    )


def peer_to_wire(peer: PrefillPeer) -> decode_pb2.PrefillPeer:
    """A prefill worker that a request may fetch from."""
    return decode_pb2.PrefillPeer(worker_id=peer.worker_id, epoch=peer.epoch, address=peer.address)


def peer_from_wire(message: decode_pb2.PrefillPeer) -> PrefillPeer:
    """The inverse of `peer_to_wire`."""
    return PrefillPeer(message.worker_id, message.epoch, message.address)
