"""Limits of the sampling parameters. Everything that passes is safe for every worker (CASES B51)."""

import math
from collections.abc import Iterable

from core.errors import InvalidArgument
from core.grammar import check_size
from core.records import SEED_LIMIT, Grammar, SamplingParams
from core.wire import grammar_from_wire
from outrider.v1 import common_pb2
from router.validate_beams import check_early_stopping, check_length_penalty

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 256

_FIELD = "sampling"


def check_sampling(
    message: common_pb2.SamplingParams,
    vocab_size: int,
    max_tokens_limit: int,
    max_n: int,
    max_beam_width: int,
    max_grammar_bytes: int,
) -> SamplingParams:
    """The record of `message`, defaults filled in. Raises InvalidArgument naming the field.

    A logit bias is finite and at most ±100, so it can favour tokens but bans none for certain; bad words and
    min_tokens ban. If they and the grammar leave nothing to draw, the decode worker ends the request naming the
    constraint.
    """
    max_tokens = (
        message.max_tokens if message.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, max_tokens_limit)
    )
    _check_range("max_tokens", max_tokens, 1, max_tokens_limit)
    _check_range("min_tokens", message.min_tokens, 0, max_tokens)
    n = message.n if message.HasField("n") else 1
    _check_range("n", n, 1, max_n)
    beam_width = message.beam_width if message.HasField("beam_width") else 1
    _check_range("beam_width", beam_width, 1, max_beam_width)
    if message.HasField("seed") and message.seed >= SEED_LIMIT:
        raise InvalidArgument(f"{_FIELD}.seed", f"must be below 2^53, got {message.seed}")
    if message.HasField("logprobs"):
        _check_range("logprobs", message.logprobs, 0, MAX_LOGPROBS)
    _check_range("top_k", message.top_k, 0, 2**31 - 1)
    return SamplingParams(
        temperature=_number(message, "temperature", 0.0, 0.0, MAX_TEMPERATURE),
        top_k=message.top_k,
        top_p=_positive(message, "top_p", 1.0, 1.0),
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(
            message, "repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=_number(message, "presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message, vocab_size),
        bad_words=_strings("bad_words", message.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=_strings("stop", message.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
        stop_token_ids=_stop_token_ids(message, vocab_size),
        seed=message.seed if message.HasField("seed") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=n,
        ignore_eos=message.ignore_eos,
        beam_width=beam_width,
        length_penalty=check_length_penalty(message),
        early_stopping=check_early_stopping(message),
        grammar=_grammar(message, max_grammar_bytes),
    )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple, each in [0, vocab_size). Raises InvalidArgument naming the first bad one."""
    ids = tuple(token_ids)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(place for place, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]", f"{ids[index]} is not a token id; they are 0 to {vocab_size - 1}"
        )
    return ids


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{_FIELD}.{name}", f"must be {low} to {high}, got {value}")


def _number(message: common_pb2.SamplingParams, name: str, default: float, low: float, high: float) -> float:
    value = float(getattr(message, name)) if message.HasField(name) else default
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"{_FIELD}.{name}", f"must be {low} to {high}, got {value}")
    return value


def _positive(message: common_pb2.SamplingParams, name: str, default: float, high: float) -> float:
    value = _number(message, name, default, 0.0, high)
    if value == 0.0:
        raise InvalidArgument(f"{_FIELD}.{name}", f"must be above 0 and at most {high}, got {value}")
    return value


def _logit_bias(message: common_pb2.SamplingParams, vocab_size: int) -> dict[int, float]:
    if len(message.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidArgument(f"{_FIELD}.logit_bias", f"more than {MAX_LOGIT_BIAS_ENTRIES} entries")
    bias = dict(message.logit_bias)
    for token, value in bias.items():
        field = f"{_FIELD}.logit_bias[{token}]"
        if not 0 <= token < vocab_size:
            raise InvalidArgument(field, f"not a token id; they are 0 to {vocab_size - 1}")
        if not math.isfinite(value) or abs(value) > MAX_LOGIT_BIAS:
            raise InvalidArgument(field, f"must be -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, got {value}")
    return bias


def _strings(name: str, values: Iterable[str], max_count: int, max_characters: int) -> tuple[str, ...]:
    texts = tuple(values)
    if len(texts) > max_count:
        raise InvalidArgument(f"{_FIELD}.{name}", f"at most {max_count} strings, got {len(texts)}")
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= max_characters:
            raise InvalidArgument(
                f"{_FIELD}.{name}[{index}]", f"must have 1 to {max_characters} characters, got {len(text)}"
            )
    return texts


def _grammar(message: common_pb2.SamplingParams, max_bytes: int) -> Grammar | None:
    """Its size only; what it says is looked at in a thread (`router/grammar.py`)."""
    grammar = grammar_from_wire(message)
    if grammar is not None:
        check_size(grammar, max_bytes)
        if message.ignore_eos:
            raise InvalidArgument(
                f"{_FIELD}.ignore_eos", "an answer under a grammar ends where the grammar does"
            )
    return grammar


def _stop_token_ids(message: common_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(f"{_FIELD}.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    return check_token_ids(f"{_FIELD}.stop_token_ids", message.stop_token_ids, vocab_size)
