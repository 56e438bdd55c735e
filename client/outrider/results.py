"""What the client hands back. Plain frozen records; `to_dict` gives what `--json` prints."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
Verification = Literal["invariant", "rejection", "block", "typical"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probabilities at one emitted token: the chosen one, and the best as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What arrived at once for one choice. `text` may be empty while characters or stop strings are held."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; completion tokens are summed over choices and attempts."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """Acceptance of this request. Rates are None where nothing was offered.

    `acceptance_rate` is the sum of accepted over the sum of offered, over depths; `acceptance_length` is tokens
    emitted by steps over steps; lists are indexed by depth - 1.
    """

    drafter: str
    request_class: str
    draft_length_requested: int | None
    draft_length_mean: float | None
    steps: int
    proposed_nodes: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_length: float | None
    position_offered: tuple[int, ...]
    position_accepted: tuple[int, ...]
    fallback_reason: str | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds as the server measured them."""

    queue_s: float
    prefill_s: float
    time_to_first_token_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `text`, `token_ids`, `finish_reason` and `logprobs` are those of choice 0.

    `approximate`: the answer need not follow the target's distribution, as the request allowed.
    """

    request_id: str
    choices: tuple[Choice, ...]
    seed: int
    usage: Usage
    speculation: Speculation
    timing: Timing
    trace_id: str
    numerics_class: str
    attempts: int
    model: str
    verification: Verification
    approximate: bool
    effective_temperature: float
    route_reason: str

    @property
    def text(self) -> str:
        """The answer."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's token ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each token, where they were asked for."""
        return self.choices[0].logprobs

    def to_dict(self) -> dict[str, Any]:
        """JSON values: choice 0 at the top, everything else under its own name."""
        fields: Mapping[str, Any] = asdict(self)
        first = fields["choices"][0]
        head = {name: first[name] for name in ("text", "token_ids", "finish_reason", "logprobs")}
        return {**head, **fields}


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker as the router knows it."""

    worker_id: str
    role: str
    address: str
    epoch: str
    model: str
    ready: bool
    draining: bool
    running: int
    waiting: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    leases: int
    resident_bytes: int
    process_id: int
    drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One drafter that the deployment offers."""

    name: str
    max_draft_length: int
    max_draft_width: int
    workers: tuple[str, ...]
