"""From keyword options to a GenerateRequest. What can be seen to be wrong here is refused before sending."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn, TypedDict

from outrider.errors import InvalidArgumentError
from outrider.results import Verification
from outrider.v1 import common_pb2, inference_pb2

Prompt = str | Sequence[int]
"""Text as it is (no chat template), or token ids."""

VERIFICATIONS: dict[Verification, common_pb2.Verification] = {
    "invariant": common_pb2.VERIFICATION_INVARIANT,
    "rejection": common_pb2.VERIFICATION_REJECTION,
    "block": common_pb2.VERIFICATION_BLOCK,
    "typical": common_pb2.VERIFICATION_TYPICAL,
}
"""What the wire calls each mode."""

EarlyStopping = Literal["never"] | bool
"""When a beam search that has `beam_width` whole answers ends: True, at once; False or "never", see the protocol."""
_EARLY_STOPPING: dict[EarlyStopping, common_pb2.EarlyStopping] = {
    False: common_pb2.EARLY_STOPPING_FALSE,
    True: common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """Everything but the prompt. What is absent or None takes the server's default.

    The answer follows one of `json_schema` (as text or as a mapping), `regex` (the whole of it) and `ebnf` (from the
    rule `root` on), where one is given.
    """

    messages: Sequence[Message] | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    seed: int | None
    logprobs: int | None
    n: int | None
    ignore_eos: bool | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    ebnf: str | None
    drafter: str | None
    draft_length: int | None
    draft_width: int | None
    verification: Verification | None
    allow_approximate: bool | None
    request_class: str | None
    resume_token_ids: Sequence[int] | None
    cache_salt: str | None
    model: str | None
    idempotency_key: str | None
    timeout_s: float | None


_SAMPLING_NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "logprobs", "n", "ignore_eos",
    "beam_width", "length_penalty",
)  # fmt: skip
_GRAMMARS = ("json_schema", "regex", "ebnf")
_SPECULATION_FIELDS = ("drafter", "draft_length", "draft_width", "allow_approximate")


def build_request(prompt: Prompt | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgumentError naming the field for what the wire cannot carry."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise TypeError(f"generate() has no option {', '.join(unknown)}")
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt, options.get("messages"))
    _set_sampling(request.sampling, options)
    _set_grammar(request.sampling, options)
    _set_speculation(request.speculation, options)
    for name in ("request_class", "cache_salt", "model"):
        _assign(request, name, options.get(name), name)
    resumed = options.get("resume_token_ids")
    if resumed is not None:
        request.resume_token_ids.SetInParent()
        _extend(request.resume_token_ids.ids, resumed, "resume_token_ids")
    return request


def _set_prompt(
    request: inference_pb2.GenerateRequest, prompt: Prompt | None, messages: Sequence[Message] | None
) -> None:
    if prompt is not None and messages is not None:
        _refuse("prompt", "give prompt or messages, not both")
    if messages is not None:
        request.chat.SetInParent()
        for index, message in enumerate(messages):
            _add_message(request.chat, message, f"chat.messages[{index}]")
    elif isinstance(prompt, str):
        request.text = _text("text", prompt)
    elif prompt is not None:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, prompt, "token_ids")
    else:
        _refuse("prompt", "is missing: give prompt or messages")


def _add_message(chat: common_pb2.Chat, message: Message, field: str) -> None:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        _refuse(field, "must have exactly role and content")
    chat.messages.add(
        role=_text(f"{field}.role", message["role"]), content=_text(f"{field}.content", message["content"])
    )


def _set_sampling(sampling: common_pb2.SamplingParams, options: GenerateOptions) -> None:
    for name in _SAMPLING_NUMBERS:
        _assign(sampling, name, options.get(name), f"sampling.{name}")
    early = options.get("early_stopping")
    if early is not None:
        if early not in ("never", True, False):
            _refuse("sampling.early_stopping", f"{early!r} is not one of True, False, 'never'")
        sampling.early_stopping = _EARLY_STOPPING[early]
    stop = options.get("stop")
    texts = {"stop": [stop] if isinstance(stop, str) else stop, "bad_words": options.get("bad_words")}
    for name, values in texts.items():
        checked = [_text(f"sampling.{name}[{index}]", value) for index, value in enumerate(values or ())]
        getattr(sampling, name).extend(checked)
    _extend(sampling.stop_token_ids, options.get("stop_token_ids") or (), "sampling.stop_token_ids")
    for token_id, bias in (options.get("logit_bias") or {}).items():
        try:
            sampling.logit_bias[token_id] = bias
        except (TypeError, ValueError) as error:
            _refuse(f"sampling.logit_bias[{token_id}]", str(error))


def _set_grammar(sampling: common_pb2.SamplingParams, options: GenerateOptions) -> None:
    given = [name for name in _GRAMMARS if options.get(name) is not None]
    if len(given) > 1:
        _refuse("sampling.grammar", f"give one of {', '.join(_GRAMMARS)}, not {' and '.join(given)}")
    for name in given:
        value = options.get(name)
        if name == "json_schema" and isinstance(value, Mapping):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                _refuse("sampling.grammar", f"the JSON schema is not JSON: {error}")
        setattr(sampling, name, _text("sampling.grammar", value))


def _set_speculation(speculation: common_pb2.SpeculationParams, options: GenerateOptions) -> None:
    for name in _SPECULATION_FIELDS:
        _assign(speculation, name, options.get(name), f"speculation.{name}")
    verification = options.get("verification")
    if verification is not None:
        if verification not in VERIFICATIONS:
            _refuse("speculation.verification", f"{verification!r} is not one of {', '.join(VERIFICATIONS)}")
        speculation.verification = VERIFICATIONS[verification]


def _assign(target: object, name: str, value: object, field: str) -> None:
    if value is None:
        return
    if isinstance(value, str):
        value = _text(field, value)
    try:
        setattr(target, name, value)
    except (TypeError, ValueError) as error:
        _refuse(field, str(error))


def _extend(target: object, ids: Sequence[int], field: str) -> None:
    try:
        target.extend(ids)  # type: ignore[attr-defined]  # a repeated int32 field
    except (TypeError, ValueError) as error:
        for index, token_id in enumerate(ids):
            if not isinstance(token_id, int) or not -(2**31) <= token_id < 2**31:
                _refuse(f"{field}[{index}]", f"{token_id!r} is not a token id")
        _refuse(field, str(error))


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(field, f"must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(field, f"holds a lone surrogate at character {error.start}")
    return value


def _refuse(field: str, message: str) -> NoReturn:
    raise InvalidArgumentError(f"{field}: {message}", field=field)
