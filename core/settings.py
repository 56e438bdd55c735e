"""All settings: read once, frozen, closed. Each part is handed its own section only.

`load_settings` merges defaults < file (TOML) < command line. Nothing here reads the environment.
"""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from core.drafter_settings import DraftersSettings
from core.errors import InvalidArgument
from core.section import Section

MAX_MARKER_CHARACTERS = 64
_CHUNK_MARGIN_BYTES = 2**18
"""What a message of planes holds beside them."""


class EngineSettings(Section):
    """One target forward over paged KV."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    num_threads: int = Field(2, ge=1, description="Compute threads of a worker's engine.")
    block_size: int = Field(16, ge=4, le=256, description="Token slots a block.")
    num_blocks: int = Field(1024, ge=8, description="Blocks of the KV pool.")
    hidden_layers: tuple[int, ...] = Field(
        (), description="Layers whose output hidden state is kept with the KV."
    )
    attention: Literal["auto", "native", "torch"] = "auto"
    max_context: int | None = Field(None, ge=16, description="None: what the model allows.")
    core_turns: Path | None = Field(
        None,
        description="Lock file of workers that share this machine's cores: one step at a time. None: no turns.",
    )
    pipeline_stages: int = Field(
        1,
        ge=1,
        le=2,
        description="2: the later layers of a decode worker's target run in a process of its own, on num_threads "
        "more: two stages want two cores.",
    )


class HandoffSettings(Section):
    """The Fetch stream between decode and prefill workers, and its faults."""

    credit_bytes: int = Field(16 * 2**20, ge=2**16, description="Plane bytes under way at most.")
    chunk_bytes: int = Field(1 * 2**20, ge=2**12, description="Plane bytes a message at most.")
    progress_timeout_s: float = Field(10.0, gt=0, description="Longest silence of a started transfer.")
    queue_timeout_s: float = Field(60.0, gt=0, description="Longest wait for the first chunk.")
    missing_prefill: Literal["lenient", "strict"] = "lenient"
    bad_checksum: Literal["prefill_here", "fail"] = "prefill_here"


class PrefillSettings(Section):
    """The prefill worker."""

    chunk_tokens: int = Field(
        256, ge=16, description="Prompt tokens computed a step; a quarter more where none are left then."
    )
    max_waiting: int = Field(256, ge=1, description="Prompts that wait; more are refused.")
    max_leases: int = Field(512, ge=1, description="Prompts held for decode workers at once.")


class DecodeSettings(Section):
    """The decode worker."""

    max_running: int = Field(
        32, ge=1, description="Choices in one step at most; a beam search counts as its beam_width."
    )
    max_waiting: int = Field(256, ge=1, description="Requests that wait; more are refused.")
    step_tokens: int = Field(
        256, ge=8, description="Rows a step at most: nodes, auxiliary nodes, own prefill."
    )
    max_tree_nodes: int = Field(
        64, ge=1, description="Draft nodes and auxiliary rows of one request a step at most."
    )
    outbox_deltas: int = Field(64, ge=1, description="Deltas a slow reader may leave before they are merged.")
    merge_interval_s: float = Field(
        0.25, ge=0, description="Longest wait of a delta for more, where the answer is read as a whole."
    )
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="How long a full outbox may hold a request up."
    )
    min_speculation_tokens: int = Field(8, ge=0, description="No drafting below this max_tokens.")
    engine_stall_s: float = Field(
        60.0, gt=0, description="Silent for longer, the worker is unhealthy; for twice that, it starts anew."
    )
    drafter_stall_s: float = Field(
        5.0,
        gt=0,
        description="A drafter that takes longer in one call is taken off the requests that the call was for.",
    )
    drafters: DraftersSettings = DraftersSettings()


class ClassPolicy(Section):
    """What `auto` means for a class of requests."""

    drafter: str | tuple[str, ...] = Field(
        "ngram",
        description="A name, or several, the likeliest first: of those hosted each worker takes what it measured to "
        "be fastest.",
    )
    draft_length: int | None = Field(None, ge=0, le=64, description="Starting K; None: the drafter's.")
    thinking_draft_length: int | None = Field(
        None,
        ge=0,
        le=64,
        description="K from the first thinking marker to the second; None: no change there.",
    )
    thinking_markers: tuple[str, str] = Field(
        ("<think>", "</think>"), description="Texts around what the model thinks aloud."
    )

    @field_validator("thinking_markers")
    @classmethod
    def _markers_say_something(cls, markers: tuple[str, str]) -> tuple[str, str]:
        if not all(1 <= len(marker) <= MAX_MARKER_CHARACTERS for marker in markers):
            raise ValueError(f"a thinking marker has 1 to {MAX_MARKER_CHARACTERS} characters")
        return markers

    @property
    def preference(self) -> tuple[str, ...]:
        """Drafters, the likeliest first."""
        return (self.drafter,) if isinstance(self.drafter, str) else self.drafter


class RouterSettings(Section):
    """The front door."""

    max_queue: int = Field(256, ge=1, description="Requests that wait for a place; more are refused.")
    max_in_flight: int = Field(512, ge=1, description="Requests answered at the same time.")
    max_prompt_bytes: int = Field(4 * 2**20, ge=1024, description="Of text, or of the ids' message.")
    max_tokens_limit: int = Field(32768, ge=1, description="Largest `max_tokens` that is taken.")
    max_n: int = Field(16, ge=1, description="Largest `n`.")
    max_beam_width: int = Field(16, ge=1, description="Largest `beam_width`.")
    max_draft_length: int = Field(64, ge=1, description="Largest K.")
    max_grammar_bytes: int = Field(2**16, ge=64, le=2**17, description="Of a JSON schema, regex or EBNF.")
    grammar_timeout_s: float = Field(5.0, gt=0, description="Longest compilation of a grammar.")
    max_attempts: int = Field(
        4, ge=1, description="A request that has lost so many workers ends; full ones do not count."
    )
    policy_file: str | None = Field(
        None, description="TOML: [class.NAME] drafter, draft_length, … Reloadable."
    )
    registry_poll_s: float = Field(0.5, gt=0, description="Between two looks at who is there.")
    stale_report_s: float = Field(
        10.0, gt=0, description="Silent for longer, a worker is taken only where no other is left."
    )
    ticket_lifetime_s: float = Field(
        600.0, gt=0, description="Of the signed right to fetch and decode one prompt."
    )
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a client to take a message."
    )


class GrpcSettings(Section):
    """Both ends of every channel take these; see core/grpc_options.py."""

    max_message_bytes: int = Field(8 * 2**20, ge=2**20, description="Of one message.")
    keepalive_time_s: float = Field(10.0, gt=0, description="Silence after which a peer is pinged.")
    keepalive_timeout_s: float = Field(5.0, gt=0, description="Wait for its answer.")
    min_ping_interval_s: float = Field(5.0, gt=0, description="Pings closer than that are refused.")


class RegistrySettings(Section):
    """Heartbeats and the control state in Redis."""

    heartbeat_s: float = Field(0.5, gt=0, description="Between two reports of a worker.")
    ttl_s: float = Field(3.0, gt=0, description="How long a worker's report stays in Redis.")
    key_prefix: str = "outrider"
    command_timeout_s: float = Field(1.0, gt=0, description="Longest wait for Redis.")


class TelemetrySettings(Section):
    """Spans and metrics. `otlp_endpoint` None: no export."""

    otlp_endpoint: str | None = None
    metrics_port: int | None = Field(
        0,
        ge=0,
        le=65000,
        description="Prometheus port on loopback: the router's; workers beside it take the next. 0: any; None: off.",
    )
    service_namespace: str = "outrider"
    pipeline_timeline: bool = Field(
        False, description="Keep the times of a pipelined target's latest steps, for `Admin.Status`."
    )


class SecuritySettings(Section):
    """Secrets; never logged, never in Redis."""

    ticket_keys: tuple[str, ...] = Field(
        (), description="Hex HMAC keys, the signing one first; two while rotating.", repr=False
    )
    bearer_token: str | None = Field(
        None, repr=False, description="What clients have to show. None: OUTRIDER_TOKEN, else nothing."
    )
    cache_salt_secret: str | None = Field(
        None,
        repr=False,
        description="Key of cache salts' digests. None: OUTRIDER_CACHE_SALT_SECRET, else drawn.",
    )


class ServeSettings(Section):
    """`outrider serve`."""

    model: str = "smollm2-135m-instruct"
    prefill: int = Field(1, ge=0, le=64, description="Prefill workers.")
    decode: int = Field(1, ge=1, le=64, description="Decode workers.")
    listen: str = "127.0.0.1:50051"
    ray_address: str | None = None
    redis_url: str | None = None
    drain_grace_s: float = Field(10.0, ge=0, description="Time that running answers get at the end.")
    start_timeout_s: float = Field(300.0, gt=0, description="Longest wait for the workers to be ready.")
    engine: EngineSettings = EngineSettings()
    handoff: HandoffSettings = HandoffSettings()
    prefill_worker: PrefillSettings = PrefillSettings()
    decode_worker: DecodeSettings = DecodeSettings()
    router: RouterSettings = RouterSettings()
    grpc: GrpcSettings = GrpcSettings()
    registry: RegistrySettings = RegistrySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    security: SecuritySettings = SecuritySettings()

    @model_validator(mode="after")
    def _chunks_fit_in_messages(self) -> Self:
        most = self.grpc.max_message_bytes - _CHUNK_MARGIN_BYTES
        if self.handoff.chunk_bytes > most:
            raise ValueError(
                f"handoff.chunk_bytes: {self.handoff.chunk_bytes} do not fit in a message; "
                f"at most {most}, or a larger grpc.max_message_bytes"
            )
        return self

    @model_validator(mode="after")
    def _a_pipeline_can_do_what_is_asked(self) -> Self:
        if self.engine.pipeline_stages == 1:
            return self
        target = f"a pipelined target (engine.pipeline_stages {self.engine.pipeline_stages})"
        if self.prefill > 0:
            raise ValueError(f"prefill: {target} reads its own prompts; take --prefill 0")
        if self.engine.core_turns is not None:
            raise ValueError(f"engine.core_turns: {target} takes no turns; leave it out")
        if self.decode_worker.drafters.layerskip is not None:
            raise ValueError(f"decode_worker.drafters.layerskip: {target} has no exits; leave it out")
        lacking = self.decode_worker.drafters.without_pass_drafter
        if lacking:
            raise ValueError(f"decode_worker.drafters.pass_drafter: {lacking}")
        return self


def load_settings(file: Path | None, overrides: dict[str, Any]) -> ServeSettings:
    """Defaults, then `file` (TOML), then `overrides` (dotted keys). Raises InvalidArgument naming the key."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text())
        except OSError as error:
            raise InvalidArgument("config", f"{file}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidArgument("config", f"{file} is no TOML: {error}") from error
    for dotted, value in overrides.items():
        section = values
        *parents, leaf = dotted.split(".")
        for name in parents:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise InvalidArgument(dotted, f"{name} is a value ({section!r}), not a section")
        section[leaf] = value
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        field, _, message = first["msg"].removeprefix("Value error, ").partition(": ")
        if place:
            field, message = place, first["msg"]
        if first["type"] == "extra_forbidden":
            message = _no_such_setting(first["loc"])
        raise InvalidArgument(field, message) from error


def _no_such_setting(place: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = ServeSettings
    for name in place[:-1]:
        if name not in section.model_fields:  # a key of a table whose names are free
            continue
        annotation = section.model_fields[str(name)].annotation
        parts = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type)]
        section = next(part for part in parts if issubclass(part, BaseModel))
    known = list(section.model_fields)
    near = get_close_matches(str(place[-1]), known, n=1)
    return (
        f"there is no such setting; did you mean {near[0]}?"
        if near
        else f"no such setting; known: {', '.join(known)}"
    )
