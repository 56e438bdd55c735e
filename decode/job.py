"""One attempt at a request, as the router sends it: from the wire, checked against this worker's limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from core.grammar import check_size
from core.identity import WorkerIdentity
from core.prefix_hash import prompt_digest
from core.records import (
    APPROXIMATE_DRAFTERS,
    APPROXIMATE_MODES,
    PrefillPeer,
    SamplingParams,
    SpeculationParams,
    ThinkingPace,
    TicketClaims,
)
from core.wire import peer_from_wire, sampling_from_wire, speculation_from_wire, thinking_from_wire
from outrider.v1 import common_pb2, decode_pb2

_MAX_COUNT = 2**20
_MAX_GRAMMAR_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class CommittedChoice:
    """What earlier attempts sent for one choice."""

    index: int
    token_ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One attempt. `ticket` is passed on to prefill workers as it came.

    `auto_drafters`: what `auto` may become, the first guess first; empty where it was resolved before.
    """

    claims: TicketClaims
    ticket: common_pb2.Ticket
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    draft_length_fixed: bool
    committed: tuple[CommittedChoice, ...]
    peers: tuple[PrefillPeer, ...]
    request_class: str
    merge_deltas: bool = False
    thinking: ThinkingPace | None = None
    auto_drafters: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """(request id, attempt): one live call for each."""
        return self.claims.request_id, self.claims.attempt

    def committed_ids(self, index: int) -> tuple[int, ...]:
        """Tokens of choice `index` that the client already has."""
        return next((entry.token_ids for entry in self.committed if entry.index == index), ())

    def is_finished(self, index: int) -> bool:
        """Whether an earlier attempt ended choice `index`."""
        return any(entry.index == index and entry.finished for entry in self.committed)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What this worker can take. `pool_tokens`: token slots of its KV pool; `step_tokens`: rows of a step."""

    vocab_size: int
    max_context: int
    pool_tokens: int
    block_size: int
    max_running: int
    step_tokens: int

    def token_limit(self, prompt_tokens: int, max_tokens: int, beam_width: int = 1) -> int:
        """Tokens that an answer may have: max_tokens, cut by the context and by a pool held alone.

        In the worst case hypotheses of a search share full blocks of the prompt only. Below 1 where none has room.
        """
        shared = prompt_tokens // self.block_size
        blocks = shared + (self.pool_tokens // self.block_size - shared) // beam_width
        return min(max_tokens, self.max_context - prompt_tokens, blocks * self.block_size + 1 - prompt_tokens)


def job_from_wire(request: decode_pb2.DecodeRequest, claims: TicketClaims) -> DecodeJob:
    """The records of a request whose ticket has been verified."""
    return DecodeJob(
        claims=claims,
        ticket=request.ticket,
        prompt_ids=tuple(request.token_ids),
        sampling=sampling_from_wire(request),
        speculation=speculation_from_wire(request.speculation),
        draft_length_fixed=request.draft_length_fixed,
        committed=tuple(
            CommittedChoice(entry.index, tuple(entry.token_ids), entry.finished)
            for entry in request.committed
        ),
        peers=tuple(peer_from_wire(peer) for peer in request.prefill_peers),
        request_class=request.request_class or "chat",
        merge_deltas=request.merge_deltas,
        thinking=thinking_from_wire(request),
        auto_drafters=tuple(dict.fromkeys(request.auto_drafters)),
    )


def check_claims(job: DecodeJob, identity: WorkerIdentity, numerics_class: str) -> None:
    """The ticket is for this worker's life, this prompt and this numerics class.

    Raises FailedPrecondition naming what differs; PermissionDenied for another prompt.
    """
    claims = job.claims
    if claims.decode_worker_id != identity.worker_id:
        raise FailedPrecondition("ticket.decode_worker_id", f"this is {identity.worker_id}")
    if claims.decode_epoch != identity.epoch:
        raise FailedPrecondition("ticket.decode_epoch", "this worker has been restarted since")
    if claims.numerics_class and claims.numerics_class != numerics_class:
        raise FailedPrecondition(
            "ticket.numerics_class", f"{claims.numerics_class} asked for, this is {numerics_class}"
        )
    if claims.prompt_digest != prompt_digest(job.prompt_ids):
        raise PermissionDenied("ticket: it is for another prompt")


def check_job(job: DecodeJob, limits: JobLimits) -> None:
    """Everything that would break a step or never fit. Raises InvalidArgument naming the field."""
    sampling = job.sampling
    prompt_tokens = len(job.prompt_ids)
    _require(prompt_tokens > 0, "token_ids", "the prompt is empty")
    _check_ids("token_ids", job.prompt_ids, limits.vocab_size)
    _require(
        prompt_tokens < limits.max_context,
        "token_ids",
        f"the prompt has {prompt_tokens} tokens, the context is {limits.max_context}",
    )
    _require(
        prompt_tokens <= limits.pool_tokens,
        "token_ids",
        f"the prompt has {prompt_tokens} tokens, this worker's KV pool has room for {limits.pool_tokens}",
    )
    _check_sampling(sampling, limits)
    _check_approximation(job.speculation)
    _check_beams(job, limits)
    for entry in job.committed:
        _require(0 <= entry.index < sampling.n, "committed.index", f"{entry.index} of {sampling.n} choices")
        _check_ids("committed.token_ids", entry.token_ids, limits.vocab_size)
        _require(
            len(entry.token_ids) <= sampling.max_tokens, "committed.token_ids", "more than max_tokens allows"
        )
        longest = limits.token_limit(prompt_tokens, sampling.max_tokens)
        _require(
            len(entry.token_ids) <= longest,
            "committed.token_ids",
            f"{prompt_tokens} + {len(entry.token_ids)} tokens, there is room for {prompt_tokens + longest}",
        )


def _check_approximation(speculation: SpeculationParams) -> None:
    mode, drafter = speculation.verification, speculation.drafter
    _require(
        speculation.allow_approximate or mode not in APPROXIMATE_MODES,
        "speculation.verification",
        f"{mode} changes the distribution: set allow_approximate",
    )
    if drafter in APPROXIMATE_DRAFTERS:
        _require(
            speculation.allow_approximate,
            "speculation.drafter",
            f"{drafter} changes the distribution: set allow_approximate",
        )
        _require(
            mode == "invariant",
            "speculation.verification",
            f"{drafter} accepts by a rule of its own, not {mode}",
        )


def _check_sampling(sampling: SamplingParams, limits: JobLimits) -> None:
    _require(1 <= sampling.max_tokens <= _MAX_COUNT, "sampling.max_tokens", "must be at least 1")
    _require(
        0 <= sampling.min_tokens <= sampling.max_tokens, "sampling.min_tokens", "must not exceed max_tokens"
    )
    _require(1 <= sampling.n <= limits.max_running, "sampling.n", f"at most {limits.max_running} choices")
    _require(0.0 <= sampling.temperature <= 1e4, "sampling.temperature", "must be a number of at least 0")
    _require(0.0 < sampling.top_p <= 1.0, "sampling.top_p", "must be in (0, 1]")
    _require(0.0 <= sampling.min_p <= 1.0, "sampling.min_p", "must be in [0, 1]")
    _require(sampling.top_k >= 0, "sampling.top_k", "must not be negative")
    _require(
        1e-4 <= sampling.repetition_penalty <= 1e4, "sampling.repetition_penalty", "must be 0.0001 to 10000"
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _require(abs(getattr(sampling, name)) <= 1e4, f"sampling.{name}", "is out of range")
    _check_ids("sampling.logit_bias", tuple(sampling.logit_bias), limits.vocab_size)
    biases = sampling.logit_bias.values()
    _require(all(abs(bias) <= 1e4 for bias in biases), "sampling.logit_bias", "a bias is out of range")
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    for word in sampling.bad_word_ids:
        _check_ids("sampling.bad_words", word, limits.vocab_size)
    if sampling.logprobs is not None:
        _require(0 <= sampling.logprobs <= limits.vocab_size, "sampling.logprobs", "is out of range")
    _require(all(sampling.stop), "sampling.stop", "a stop string is empty")
    if sampling.grammar is not None:
        check_size(sampling.grammar, _MAX_GRAMMAR_BYTES)
        _require(
            not sampling.ignore_eos, "sampling.ignore_eos", "an answer under a grammar ends where it does"
        )
        _require(
            bool(sampling.eos_token_ids), "sampling.grammar", "no end-of-sequence token could end the answer"
        )
        _check_ids("eos_token_ids", sampling.eos_token_ids, limits.vocab_size)


def _check_beams(job: DecodeJob, limits: JobLimits) -> None:
    """A search honours all that shapes the distribution, and nothing that draws from it or drafts."""
    sampling, speculation = job.sampling, job.speculation
    widest = min(limits.max_running, limits.step_tokens)
    _require(1 <= sampling.beam_width <= widest, "sampling.beam_width", f"must be 1 to {widest}")
    if sampling.beam_width == 1:
        return
    for name, off in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("n", 1)):
        _require(getattr(sampling, name) == off, f"sampling.{name}", "does not go with beam search")
    _require(abs(sampling.length_penalty) <= 10.0, "sampling.length_penalty", "is out of range")
    _require(speculation.drafter in ("auto", "none"), "speculation.drafter", "does not go with beam search")
    _require(not job.draft_length_fixed, "speculation.draft_length", "does not go with beam search")
    _require(speculation.draft_width is None, "speculation.draft_width", "does not go with beam search")
    _require(
        speculation.verification == "invariant", "speculation.verification", "does not go with beam search"
    )
    _require(sampling.grammar is None, "sampling.grammar", "does not go with beam search")
    _require(not job.committed, "committed", "an answer by beam search cannot be gone on with")
    room = limits.token_limit(len(job.prompt_ids), sampling.max_tokens, sampling.beam_width)
    _require(
        room >= 1,
        "sampling.beam_width",
        f"{sampling.beam_width} beams behind {len(job.prompt_ids)} tokens need more than the KV pool's "
        f"{limits.pool_tokens}",
    )


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgument(field, f"{wrong} is no token id (0 to {vocab_size - 1})")


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(field, message)
