"""All settings: read once, frozen, closed. Each part is handed its own section only.

`load_settings` merges defaults < file (TOML) < command line. Nothing here reads the environment.
"""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.errors import InvalidArgument

Quantisation = Literal["none", "int8", "int4"]
MAX_MARKER_CHARACTERS = 64
_CHUNK_MARGIN_BYTES = 2**18
"""What a message of planes holds beside them."""


class Section(BaseModel):
    """A frozen, closed group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
    max_waiting: int = Field(256, ge=1)
    max_leases: int = Field(512, ge=1)


class NgramSettings(Section):
    """Prompt lookup over prompt and answer."""

    min_match: int = Field(2, ge=1)
    max_match: int = Field(8, ge=1)
    draft_length: int = Field(8, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64)


class BildSettings(Section):
    """Big Little Decoder with the draft model (`draft_model` must be set); approximate."""

    fallback_threshold: float = Field(
        0.5, ge=0, le=1, description="The draft stops where its largest probability is below."
    )
    rollback_threshold: float = Field(
        2.0, ge=0, description="-log of the target's probability up to which a draft token is kept."
    )
    draft_length: int = Field(8, ge=1, le=64)
    max_draft_length: int = Field(16, ge=1, le=64)


class CascadeSettings(Section):
    """Easy answers by the draft model (`draft_model` must be set), hard ones by the target; approximate."""

    confidence_threshold: float = Field(
        0.6, ge=0, le=1, description="Mean of the draft's largest probabilities from which an answer is easy."
    )
    first_tokens: int = Field(4, ge=1, description="Tokens before an answer may become hard.")
    draft_length: int = Field(16, ge=1, le=64)
    max_draft_length: int = Field(16, ge=1, le=64)


class RestSettings(Section):
    """Retrieval from a corpus that `outrider corpus build` made."""

    corpus: str = Field(description="Folder of the corpus.")
    min_match: int = Field(2, ge=1, le=8)
    max_match: int = Field(8, ge=1, le=8)
    max_candidates: int = Field(64, ge=1, le=1024, description="Occurrences looked at in one draft.")
    draft_length: int = Field(6, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64)


class LookaheadSettings(Section):
    """Jacobi iteration in a window of W columns and N - 1 levels: W · (N - 1) - 1 rows beside the nodes of a step.

    They are evaluated only where they fit into `max_tree_nodes` beside the nodes.
    """

    window: int = Field(4, ge=1, le=32, description="Columns of the window (W).")
    ngram: int = Field(3, ge=3, le=16, description="Tokens of an n-gram (N); the longest draft has N - 1.")
    guesses: int = Field(
        3, ge=1, le=16, description="n-grams kept for each first token (G); also the default width."
    )
    draft_length: int | None = Field(None, ge=1, description="Default K; None: the longest.")

    @model_validator(mode="after")
    def _draft_within_ngram(self) -> Self:
        if self.draft_length is not None and self.draft_length >= self.ngram:
            raise ValueError(f"draft_length must be less than ngram, which is {self.ngram}")
        return self


class CacheSettings(Section):
    """Earlier answers of the same tenant and cache salt."""

    max_tokens: int = Field(
        262_144, ge=4096, description="Tokens held by a worker at most, some 250 bytes of memory each."
    )
    tenant_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Part of them that others cannot push out; what is beyond it goes first.",
    )
    min_match: int = Field(3, ge=1, le=64)
    max_match: int = Field(24, ge=1, le=64, description="Tokens of a prompt's end kept with its answer, too.")
    max_candidates: int = Field(
        16, ge=1, le=64, description="Earlier answers that a draft is made of at most."
    )
    min_answer_tokens: int = Field(8, ge=1, description="Shorter answers are not kept.")
    max_answer_tokens: int = Field(
        2048, ge=8, le=4032, description="Of a longer answer the beginning is kept."
    )
    draft_length: int = Field(8, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64)
    share: bool = Field(
        False,
        description="Keep the token ids of answers and of the ends of prompts in Redis, for all workers of the model "
        "and beyond their restarts. Whoever reads that Redis can read them: an operator's decision.",
    )
    shared_answers: int = Field(4096, ge=8, description="Answers in Redis at most, about.")
    shared_for_s: float = Field(
        7 * 86400.0, ge=1, description="They are gone so long after the last of their shard was added."
    )


class DraftModelSettings(Section):
    """A second model with the target's tokenizer."""

    model: str = Field(description="Model directory, alias or GGUF file.")
    draft_length: int = Field(4, ge=1, le=64)
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(8, ge=1, le=64)
    num_blocks: int | None = Field(None, description="None: as many as the target's.")
    quantisation: Quantisation = Field(
        "none", description="Of the draft's weights; the target keeps its own."
    )


class HeadSettings(Section):
    """A trained head on the target's hidden states."""

    artifact: str | None = Field(
        None,
        description="Folder of the head, as `outrider train` writes it. None: the one that ships for the target.",
    )
    draft_length: int = Field(4, ge=1, le=16, description="Default K.")
    draft_width: int = Field(4, ge=1, le=16, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(8, ge=1, le=16)
    min_probability: float = Field(
        0.05, ge=0.0, lt=1.0, description="A path that the head thinks less likely is drafted no further."
    )
    quantisation: Quantisation = Field("none", description="Of the head's weights.")


class MedusaSettings(HeadSettings):
    """Heads that each say one of the next tokens, as `outrider train medusa` writes them."""

    min_probability: float = Field(0.02, ge=0.0, lt=1.0, description="Less likely nodes are not drafted.")
    tree: Literal["measured", "confident"] = Field(
        "measured",
        description="Nodes of a greedy draft: by the acceptance that the artifact measured, or by each draft's own "
        "probabilities. Sampled drafts take the latter.",
    )


class SequoiaSettings(Section):
    """Trees of the shape that pays best, drafted by another drafter."""

    base: str = Field("draft_model", description="Hosted drafter that can draft a tree of a given shape.")
    plan: str | None = Field(
        None, description="JSON measurements (`outrider plan-tree --help`). None: learnt from live traffic."
    )
    draft_length: int = Field(6, ge=1, le=64, description="Default K.")
    draft_width: int = Field(4, ge=1, le=8, description="Default width: most children of a node.")
    max_draft_length: int = Field(8, ge=1, le=64)
    replan_steps: int = Field(64, ge=1, description="Steps between two plans.")
    decay: float = Field(0.99, gt=0, lt=1, description="What a trial of a rank leaves of its earlier ones.")


class SpecInferSettings(Section):
    """The drafts of several hosted drafters, merged into one tree."""

    members: tuple[str, ...] = Field(min_length=2, description="Names of hosted drafters.")


class RecursiveSettings(Section):
    """The draft model's own drafts in fewer of its forwards, where n-grams guess them."""

    guess_length: int = Field(4, ge=1, le=64, description="Tokens guessed at most.")
    ngram: NgramSettings = NgramSettings()


class LayerSkipSettings(Section):
    """The target's first layers as a draft, behind which a trained adapter speaks."""

    artifact: str | None = Field(
        None,
        description="Folder of a trained exit. None: untrained, through the whole head; slow, seldom right.",
    )
    exit_layer: int | None = Field(
        None, ge=1, description="Layers that a draft runs. None: the artifact's, or half of them without one."
    )
    draft_length: int = Field(3, ge=1, le=64, description="Default K.")
    max_draft_length: int = Field(8, ge=1, le=64)
    quantisation: Quantisation = Field("none", description="Of the adapter's weights and its output rows.")


class ScriptedSettings(Section):
    """The test drafter: proposes what a file says, right or wrong, in any tree. Never for production."""

    script: str = Field(
        description="JSON lines: {prompt_digest, seed, answer} or {mode}; see decode/drafters/scripted.py."
    )
    max_draft_length: int = Field(16, ge=1, le=64)


class DraftersSettings(Section):
    """Which drafters a decode worker hosts; `none` is always there."""

    ngram: NgramSettings | None = NgramSettings()
    draft_model: DraftModelSettings | None = None
    sequoia: SequoiaSettings | None = None
    recursive: RecursiveSettings | None = None
    specinfer: SpecInferSettings | None = None
    rest: RestSettings | None = None
    eagle: HeadSettings | None = None
    eagle2: HeadSettings | None = None
    eagle3: HeadSettings | None = None
    mtp: HeadSettings | None = None
    medusa: MedusaSettings | None = None
    versions: dict[str, HeadSettings] = Field(
        {}, description="Further heads by the name that requests give: NAME@VERSION, such as eagle3@next."
    )
    shipped: bool = Field(True, description="Host the heads that ship for the target, where there are any.")
    lookahead: LookaheadSettings | None = LookaheadSettings()
    cache: CacheSettings | None = CacheSettings()
    layerskip: LayerSkipSettings | None = None
    bild: BildSettings | None = None
    cascade: CascadeSettings | None = None
    scripted: ScriptedSettings | None = None


class DecodeSettings(Section):
    """The decode worker."""

    max_running: int = Field(
        32, ge=1, description="Choices in one step at most; a beam search counts as its beam_width."
    )
    max_waiting: int = Field(256, ge=1)
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
    slow_reader_timeout_s: float = Field(60.0, gt=0)
    min_speculation_tokens: int = Field(8, ge=0, description="No drafting below this max_tokens.")
    engine_stall_s: float = Field(60.0, gt=0)
    drafter_stall_s: float = Field(
        5.0,
        gt=0,
        description="A drafter that takes longer in one step is taken off the requests of that step.",
    )
    drafters: DraftersSettings = DraftersSettings()


class ClassPolicy(Section):
    """What `auto` means for a class of requests."""

    drafter: str | tuple[str, ...] = Field(
        "ngram", description="A name, or several: the first that is hosted."
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
        """Drafters, the best first."""
        return (self.drafter,) if isinstance(self.drafter, str) else self.drafter


class RouterSettings(Section):
    """The front door."""

    max_queue: int = Field(256, ge=1)
    max_in_flight: int = Field(512, ge=1)
    max_prompt_bytes: int = Field(4 * 2**20, ge=1024)
    max_tokens_limit: int = Field(32768, ge=1)
    max_n: int = Field(16, ge=1)
    max_beam_width: int = Field(16, ge=1)
    max_draft_length: int = Field(64, ge=1)
    max_grammar_bytes: int = Field(2**16, ge=64, le=2**17, description="Of a JSON schema, regex or EBNF.")
    grammar_timeout_s: float = Field(5.0, gt=0, description="Longest compilation of a grammar.")
    max_attempts: int = Field(4, ge=1)
    policy_file: str | None = Field(
        None, description="TOML: [class.NAME] drafter, draft_length, … Reloadable."
    )
    registry_poll_s: float = Field(0.5, gt=0)
    stale_report_s: float = Field(10.0, gt=0)
    ticket_lifetime_s: float = Field(600.0, gt=0)
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a client to take a message."
    )


class GrpcSettings(Section):
    """Both ends of every channel take these; see core/grpc_options.py."""

    max_message_bytes: int = Field(8 * 2**20, ge=2**20)
    keepalive_time_s: float = Field(10.0, gt=0)
    keepalive_timeout_s: float = Field(5.0, gt=0)
    min_ping_interval_s: float = Field(5.0, gt=0)


class RegistrySettings(Section):
    """Heartbeats and the control state in Redis."""

    heartbeat_s: float = Field(0.5, gt=0)
    ttl_s: float = Field(3.0, gt=0)
    key_prefix: str = "outrider"
    command_timeout_s: float = Field(1.0, gt=0)


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


class SecuritySettings(Section):
    """Secrets; never logged, never in Redis."""

    ticket_keys: tuple[str, ...] = Field(
        (), description="Hex HMAC keys, the signing one first; two while rotating.", repr=False
    )
    bearer_token: str | None = Field(None, repr=False)
    cache_salt_secret: str | None = Field(None, repr=False)


class ServeSettings(Section):
    """`outrider serve`."""

    model: str = "smollm2-135m-instruct"
    prefill: int = Field(1, ge=0, le=64, description="Prefill workers.")
    decode: int = Field(1, ge=1, le=64, description="Decode workers.")
    listen: str = "127.0.0.1:50051"
    ray_address: str | None = None
    redis_url: str | None = None
    drain_grace_s: float = Field(10.0, ge=0)
    start_timeout_s: float = Field(300.0, gt=0)
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
