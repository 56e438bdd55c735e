"""Snapshots that the router's pure functions decide on."""

from dataclasses import dataclass

from core.records import (
    PrefillPeer,
    RequestClass,
    SamplingParams,
    SpeculationParams,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves. `max_context` counts prompt and answer tokens together."""

    name: str
    revision: str
    vocab_size: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What the live decode workers can do together; requests are checked against it.

    `known` is False while no worker has ever been seen: then drafter names cannot be judged.
    """

    drafters: frozenset[str]
    max_draft_length: int
    known: bool = True


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt as the client gave it: exactly one of the three is not None."""

    text: str | None = None
    chat: tuple[ChatTurn, ...] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A GenerateRequest after validation. `sampling` still lacks seed, bad word ids and end ids.

    `max_tokens_given`: whether the client chose `max_tokens`; otherwise the context may cut it.
    `request_class` is None where the router classifies.
    """

    prompt: PromptInput
    sampling: SamplingParams
    speculation: SpeculationParams
    max_tokens_given: bool
    resume_token_ids: tuple[int, ...]
    request_class: RequestClass | None
    adapter: str
    cache_salt: str
    merge_deltas: bool


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as placement sees it at one moment.

    `in_flight`: this router's own requests on it. `fresh`: its registry report is recent enough to be believed; then
    `reported_load` is what it runs and holds waiting (requests of all routers), and `sent_since_report` by how much
    this router's own requests on it have grown since; else both are 0. `suspected`: it failed a call and has not
    reported since. `seen_s`: seconds since this life of it was first seen. `overlap_tokens`:
    leading prompt tokens that it should hold.
    """

    record: WorkerRecord
    in_flight: int = 0
    reported_load: int = 0
    sent_since_report: int = 0
    fresh: bool = True
    suspected: bool = False
    seen_s: float = float("inf")
    overlap_tokens: int = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that its KV pool holds in all."""
        return self.record.total_blocks * self.record.block_size

    @property
    def load(self) -> int:
        """Its load as far as this router can know; never less than this router's own requests on it."""
        return max(self.in_flight, self.reported_load + self.sent_since_report)


@dataclass(frozen=True, slots=True)
class PromptView:
    """What placement must know of a request.

    `drafter`: must be hosted (None: any worker will do). `numerics_class`: the class that earlier attempts ran in
    (None: any). `excluded`: epochs that this request has tried. `spread`: any number, another one for each request;
    it breaks ties.
    """

    num_tokens: int
    model_revision: str
    drafter: str | None = None
    numerics_class: str | None = None
    excluded: frozenset[str] = frozenset()
    spread: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt runs: the decode worker, and the prefill workers that it may fetch from, best first."""

    decode: WorkerRecord
    prefill: tuple[PrefillPeer, ...]
    overlap_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as told by metadata. `deadline_s` is on the router's monotonic clock; None: no deadline."""

    tenant: str = ""
    idempotency_key: str | None = None
    deadline_s: float | None = None
    metadata: tuple[tuple[str, str | bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be placed. `sampling` is complete; `speculation` is as the client asked."""

    request_id: str
    caller: Caller
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    resume_token_ids: tuple[int, ...]
    request_class: RequestClass
    class_reason: str
    adapter: str
    salt: bytes
    merge_deltas: bool
