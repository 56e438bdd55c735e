"""Records that cross module boundaries. Frozen, without tensors; `core/wire.py` maps them to protobuf."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

GREEDY_TEMPERATURE = 1e-2
"""Temperatures below this count as 0 (greedy)."""

SEED_LIMIT = 2**53
"""Seeds are whole numbers in [0, SEED_LIMIT)."""

VerificationMode = Literal["invariant", "rejection", "block", "typical"]
"""What is kept: the text; the distribution (`block`: of chains, judged as a whole); with `typical` neither."""

APPROXIMATE_MODES: frozenset[VerificationMode] = frozenset({"typical"})
"""Those that change the distribution: refused unless the request allows them."""

APPROXIMATE_DRAFTERS: frozenset[str] = frozenset({"bild", "cascade"})
"""Drafters with an acceptance rule of their own that changes the distribution: refused alike."""

PASS_DRAFTER = "pass"
"""The drafter that drafts ahead of a target in two stages; only decode workers with such a target host it."""

NO_PIPELINE = (
    "pass drafts ahead of a target in two stages: serve with `--prefill 0 --set engine.pipeline_stages=2`"
)
"""What a request for it is told elsewhere."""

EarlyStopping = Literal[True, False, "never"]
"""When a beam search ends that has `beam_width` finished hypotheses; see `decode/beam_search.py`."""

WorkerRole = Literal["router", "prefill", "decode"]
RequestClass = Literal[
    "structured", "code", "chat", "reasoning", "creative", "translation", "summarisation", "batch"
]
REQUEST_CLASSES: tuple[RequestClass, ...] = (
    "structured",
    "code",
    "chat",
    "reasoning",
    "creative",
    "translation",
    "summarisation",
    "batch",
)


class FinishReason(Enum):
    """Why a choice ended: the first event in token order wins."""

    STOP = "stop"
    LENGTH = "length"


GrammarKind = Literal["json_schema", "regex", "ebnf"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must follow; `core/grammar.py` says what each kind may hold."""

    kind: GrammarKind
    text: str

    @property
    def digest(self) -> bytes:
        """The same for the same grammar, by which compiled ones are kept."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode()).digest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `seed` is None only before the router has fixed it.

    `beam_width` above 1: nothing is drawn, the answer is searched for; the two fields behind it are of that search.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """Whether the next token is a plain argmax."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How the answer is drafted. `draft_length` None: the controller moves K."""

    drafter: str = "auto"
    draft_length: int | None = None
    draft_width: int | None = None
    verification: VerificationMode = "invariant"
    allow_approximate: bool = False

    @property
    def approximation(self) -> str:
        """The verification mode or drafter that changes the distribution; "": none does."""
        if self.verification in APPROXIMATE_MODES:
            return self.verification
        return self.drafter if self.drafter in APPROXIMATE_DRAFTERS else ""


@dataclass(frozen=True, slots=True)
class ThinkingPace:
    """K of an answer while it thinks aloud: `draft_length` behind the text `opening`, until `closing`."""

    draft_length: int
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's raw log-probabilities at one emitted token: the chosen one and the best ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinish:
    """How choice `index` ended."""

    index: int
    reason: FinishReason
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion tokens are summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Acceptance of one request. Rates are None where nothing was offered."""

    drafter: str
    request_class: str = "chat"
    drafter_version: str = ""
    draft_length_requested: int | None = None
    steps: int = 0
    proposed_nodes: int = 0
    accepted_tokens: int = 0
    step_tokens: int = 0
    draft_length_sum: int = 0
    position_offered: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    fallback_reason: str = ""

    @property
    def acceptance_rate(self) -> float | None:
        """Σ accepted / Σ offered over depths."""
        offered = sum(self.position_offered)
        return sum(self.position_accepted) / offered if offered else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted by steps / steps."""
        return self.step_tokens / self.steps if self.steps else None

    @property
    def draft_length_mean(self) -> float | None:
        """Mean depth of the draft over steps."""
        return self.draft_length_sum / self.steps if self.steps else None

    def plus(self, later: "SpeculationReport") -> "SpeculationReport":
        """The report over this attempt and a later one of the same request."""
        return SpeculationReport(
            drafter=later.drafter,
            request_class=later.request_class,
            drafter_version=later.drafter_version,
            draft_length_requested=later.draft_length_requested,
            steps=self.steps + later.steps,
            proposed_nodes=self.proposed_nodes + later.proposed_nodes,
            accepted_tokens=self.accepted_tokens + later.accepted_tokens,
            step_tokens=self.step_tokens + later.step_tokens,
            draft_length_sum=self.draft_length_sum + later.draft_length_sum,
            position_offered=_add(self.position_offered, later.position_offered),
            position_accepted=_add(self.position_accepted, later.position_accepted),
            fallback_reason=later.fallback_reason or self.fallback_reason,
        )


def _add(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(first), len(second))
    padded_first = first + (0,) * (length - len(first))
    padded_second = second + (0,) * (length - len(second))
    return tuple(a + b for a, b in zip(padded_first, padded_second, strict=True))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a request's parts."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TicketClaims:
    """What a ticket grants: fetching and decoding one prompt on one decode worker. See `core/ticket.py`."""

    request_id: str
    attempt: int
    tenant: str
    prompt_digest: bytes
    model_revision: str
    adapter: str
    numerics_class: str
    seed: int
    decode_worker_id: str
    decode_epoch: str
    prefill_worker_ids: tuple[str, ...]
    expires_unix_ms: int
    cache_salt: bytes


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """A prefill worker that a request may fetch from."""

    worker_id: str
    epoch: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says of itself in the registry, renewed by heartbeat (TTL)."""

    worker_id: str
    role: WorkerRole
    address: str
    epoch: str
    model: str
    model_revision: str
    numerics_class: str
    ready: bool
    draining: bool
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    block_size: int
    max_context: int
    drafters: tuple[str, ...] = ()
    max_draft_length: int = 0
    reported_unix_ms: int = 0
    process_id: int = 0
    metrics_address: str = ""
    hidden_layers: tuple[int, ...] = ()
