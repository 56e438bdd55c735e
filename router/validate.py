"""From a GenerateRequest to core records, or InvalidArgument naming the field (DESIGN §8, CASES B51)."""

from core.drafter_settings import DraftersSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.records import (
    APPROXIMATE_DRAFTERS,
    APPROXIMATE_MODES,
    NO_PIPELINE,
    PASS_DRAFTER,
    REQUEST_CLASSES,
    RequestClass,
    SamplingParams,
    SpeculationParams,
    VerificationMode,
)
from core.settings import RouterSettings
from core.wire import verification_from_wire
from outrider.v1 import common_pb2, inference_pb2
from router.validate_beams import check_beam_search
from router.validate_sampling import check_sampling, check_token_ids
from router.views import ChatTurn, CheckedRequest, Offer, PromptInput, ServedModel

AUTO = "auto"
NO_DRAFTER = "none"
CHAT_ROLES = ("system", "user", "assistant")
CLASS_SPELLINGS: dict[str, RequestClass] = {
    **{name: name for name in REQUEST_CLASSES},
    "summarization": "summarisation",
    "rag": "summarisation",
    "qa": "chat",
}
"""How a client may name a class: question answering counts as chat, retrieval as summarisation."""

MAX_CHAT_MESSAGES = 1024
MAX_DRAFT_WIDTH = 8
MAX_CACHE_SALT_CHARACTERS = 256
_BYTES_PER_TOKEN_ID = 4


def check_request(
    request: inference_pb2.GenerateRequest, model: ServedModel, offer: Offer, settings: RouterSettings
) -> CheckedRequest:
    """Checks every field; sizes first, so that nothing large is copied, tokenised or parsed further.

    Raises InvalidArgument; FailedPrecondition for the drafter `pass` where no target is pipelined. A NUL character is
    text like any other; invalid Unicode does not reach this function (see `router/service.py`).
    """
    if request.model not in ("", model.name):
        raise InvalidArgument("model", f"{request.model!r} is not served here; {model.name!r} is")
    if request.adapter:
        raise InvalidArgument("adapter", f"{request.adapter!r} is not known; only the base model is served")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", f"longer than {MAX_CACHE_SALT_CHARACTERS} characters")
    sampling = check_sampling(
        request.sampling,
        model.vocab_size,
        min(settings.max_tokens_limit, model.max_context),
        settings.max_n,
        settings.max_beam_width,
        settings.max_grammar_bytes,
    )
    check_beam_search(request)
    return CheckedRequest(
        prompt=_check_prompt(request, model, settings.max_prompt_bytes),
        sampling=sampling,
        speculation=_check_speculation(request.speculation, offer, settings.max_draft_length),
        max_tokens_given=request.sampling.HasField("max_tokens"),
        resume_token_ids=_check_resume(request, model, sampling),
        request_class=_check_class(request.request_class),
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        merge_deltas=request.merge_deltas,
    )


def fit_context(
    checked: CheckedRequest, num_prompt_tokens: int, model: ServedModel, pool_tokens: int | None
) -> int:
    """The `max_tokens` that the request may have. Called once the prompt is tokenised.

    A `max_tokens` that the client gave is kept or refused; the default one is cut to the room that is left.
    `pool_tokens` is the largest decode worker's KV pool (None: unknown). Raises InvalidArgument naming `prompt` with
    the sizes, or `sampling.max_tokens`.
    """
    if num_prompt_tokens == 0:
        raise InvalidArgument("prompt", "is empty")
    if num_prompt_tokens >= model.max_context:
        raise InvalidArgument(
            "prompt",
            f"{num_prompt_tokens} tokens leave no room for an answer in a context of {model.max_context}",
        )
    if pool_tokens is not None and num_prompt_tokens > pool_tokens:
        raise InvalidArgument(
            "prompt",
            f"{num_prompt_tokens} tokens exceed the {pool_tokens} that a decode worker's KV pool holds",
        )
    room = model.max_context - num_prompt_tokens
    wanted = checked.sampling.max_tokens
    if checked.max_tokens_given and wanted > room:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{wanted} after a prompt of {num_prompt_tokens} tokens exceed the context of {model.max_context}",
        )
    if checked.sampling.min_tokens > room:
        raise InvalidArgument("sampling.min_tokens", f"exceeds the {room} tokens left in the context")
    return min(wanted, room)


def _check_prompt(request: inference_pb2.GenerateRequest, model: ServedModel, max_bytes: int) -> PromptInput:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _check_bytes("text", len(request.text.encode()), max_bytes)
        if not request.text:
            raise InvalidArgument("text", "is empty")
        return PromptInput(text=request.text)
    if kind == "token_ids":
        count = len(request.token_ids.ids)
        _check_bytes("token_ids", count * _BYTES_PER_TOKEN_ID, max_bytes)
        if count == 0:
            raise InvalidArgument("token_ids", "is empty")
        if count >= model.max_context:
            raise InvalidArgument(
                "token_ids", f"{count} ids leave no room for an answer in {model.max_context}"
            )
        return PromptInput(token_ids=check_token_ids("token_ids", request.token_ids.ids, model.vocab_size))
    if kind == "chat":
        return PromptInput(chat=_check_chat(request.chat, max_bytes))
    raise InvalidArgument("prompt", "is missing: give text, chat or token_ids")


def _check_bytes(field: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise InvalidArgument(field, f"{size_bytes} bytes exceed the limit of {max_bytes}")


def _check_chat(chat: common_pb2.Chat, max_bytes: int) -> tuple[ChatTurn, ...]:
    if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
        raise InvalidArgument("chat.messages", f"must be 1 to {MAX_CHAT_MESSAGES}, got {len(chat.messages)}")
    _check_bytes("chat", sum(len(message.content.encode()) for message in chat.messages), max_bytes)
    for index, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise InvalidArgument(
                f"chat.messages[{index}].role", f"{message.role!r} is not one of {', '.join(CHAT_ROLES)}"
            )
        if not message.content:
            raise InvalidArgument(f"chat.messages[{index}].content", "is empty")
    return tuple(ChatTurn(message.role, message.content) for message in chat.messages)


def _check_resume(
    request: inference_pb2.GenerateRequest, model: ServedModel, sampling: SamplingParams
) -> tuple[int, ...]:
    ids = check_token_ids("resume_token_ids", request.resume_token_ids.ids, model.vocab_size)
    if not ids:
        return ()
    if sampling.n != 1:
        raise InvalidArgument("resume_token_ids", "an answer can be resumed for n = 1 only")
    if sampling.seed is None and not sampling.greedy:
        raise InvalidArgument("resume_token_ids", "resuming a sampled answer needs its sampling.seed")
    if len(ids) >= sampling.max_tokens:
        raise InvalidArgument(
            "resume_token_ids",
            f"hold {len(ids)} tokens; sampling.max_tokens of {sampling.max_tokens} leaves none to add",
        )
    return ids


def _check_class(name: str) -> RequestClass | None:
    if not name:
        return None
    known = CLASS_SPELLINGS.get(name)
    if known is None:
        raise InvalidArgument("request_class", f"{name!r} is not one of {', '.join(CLASS_SPELLINGS)}")
    return known


def _check_speculation(
    message: common_pb2.SpeculationParams, offer: Offer, max_length: int
) -> SpeculationParams:
    drafter = message.drafter if message.HasField("drafter") and message.drafter else AUTO
    if offer.known and drafter not in {AUTO, NO_DRAFTER} | offer.drafters:
        if drafter == PASS_DRAFTER:
            raise FailedPrecondition("speculation.drafter", NO_PIPELINE)
        names = ", ".join(sorted({AUTO, NO_DRAFTER} | offer.drafters))
        known = drafter in DraftersSettings.model_fields.keys() - {"shipped", "versions", "pass_drafter"}
        mend = f"; the setting decode_worker.drafters.{drafter} hosts it" if known else ""
        raise InvalidArgument("speculation.drafter", f"{drafter!r} is not offered here; {names} are{mend}")
    if message.verification not in common_pb2.Verification.values():
        raise InvalidArgument(
            "speculation.verification", f"{message.verification} is not a verification mode"
        )
    verification = verification_from_wire(message.verification)
    if verification in APPROXIMATE_MODES and not message.allow_approximate:
        raise InvalidArgument(
            "speculation.verification", f"{verification} changes the distribution: set allow_approximate"
        )
    if drafter in APPROXIMATE_DRAFTERS:
        _check_approximate_drafter(drafter, verification, message.allow_approximate)
    return SpeculationParams(
        drafter=drafter,
        draft_length=_draft_length(message, drafter, offer, max_length),
        draft_width=_draft_width(message, verification == "block"),
        verification=verification,
        allow_approximate=message.allow_approximate,
    )


def _check_approximate_drafter(drafter: str, verification: VerificationMode, allowed: bool) -> None:
    if not allowed:
        raise InvalidArgument(
            "speculation.drafter", f"{drafter} changes the distribution: set allow_approximate"
        )
    if verification != "invariant":
        raise InvalidArgument(
            "speculation.verification", f"{drafter} accepts by a rule of its own, not {verification}"
        )


def _draft_length(
    message: common_pb2.SpeculationParams, drafter: str, offer: Offer, max_length: int
) -> int | None:
    if not message.HasField("draft_length"):
        return None
    length = message.draft_length
    highest = min(max_length, offer.max_draft_length) if offer.known else max_length
    if not 0 <= length <= highest and drafter != NO_DRAFTER:
        raise InvalidArgument("speculation.draft_length", f"must be 0 to {highest}, got {length}")
    if drafter == NO_DRAFTER and length != 0:
        raise InvalidArgument(
            "speculation.draft_length", f"must be 0 or absent for the drafter none, got {length}"
        )
    return length


def _draft_width(message: common_pb2.SpeculationParams, chains: bool) -> int | None:
    """Block verification takes chains only, so there the drafter's default width is 1."""
    highest = 1 if chains else MAX_DRAFT_WIDTH
    if not message.HasField("draft_width"):
        return 1 if chains else None
    if not 1 <= message.draft_width <= highest:
        raise InvalidArgument("speculation.draft_width", f"must be 1 to {highest}, got {message.draft_width}")
    return message.draft_width
