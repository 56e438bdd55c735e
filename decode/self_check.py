"""Whether trained drafters still fit their target: a short greedy answer is drafted again before the worker is ready.

A head whose id map is permuted, whose planes are those of other layers or whose weights were damaged loads without
an error and is simply never right. Such a drafter is taken off the worker, with a reason, and costs no request.
"""

import logging
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import torch

from core.records import SamplingParams
from core.tokenizer import Tokenizer
from decode.drafters.protocol import Drafter
from decode.replay import continue_prompt, drafts_along, request_over
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.engine import Engine
from outrider.v1 import common_pb2

CHECKED_TOKENS: Final = 64
LEAST_SHARE: Final = 0.4
"""Of the acceptance that the manifest promises: over so few tokens a fit drafter may well be some way below it."""

LEAST_EXPECTED: Final = 12.0
"""Tokens that should be right: a promise too small to be judged by so short an answer is believed."""

_QUESTION: Final = "Explain in detail how a bicycle works, and describe each of its most important parts."
_LOG = logging.getLogger(__name__)


@runtime_checkable
class Promising(Protocol):
    """A drafter that knows how often its first draft token should be accepted; None: it was never measured."""

    @property
    def promised_rate(self) -> float | None:
        """Acceptance at depth 1, over all classes."""
        ...


@runtime_checkable
class Composed(Protocol):
    """A drafter made of others."""

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Those that it drafts with."""
        ...


def take_off_unfit(engine: Engine, drafters: dict[str, Drafter], tokenizer: Tokenizer) -> dict[str, str]:
    """Remove the drafters that accept far less than they promise, and those made of them; why, by name.

    Engine thread, before any request. A pool with little room checks less.
    """
    promises = {
        name: drafter.promised_rate
        for name, drafter in drafters.items()
        if isinstance(drafter, Promising) and drafter.promised_rate
    }
    if not promises:
        return {}
    table = engine.kv.open()
    try:
        prompt = _prompt(tokenizer)
        token_ids = continue_prompt(
            engine, table, prompt, _largest, CHECKED_TOKENS + 1, frozenset(tokenizer.eos_token_ids)
        )
        unfit: dict[str, str] = {}
        for name, promised in promises.items():
            reason = _judge(drafters[name], engine, table, token_ids, len(prompt), promised)
            if reason:
                unfit[name] = reason
                unfit |= dict.fromkeys(_users(drafters, name), f"it drafts with {name}: {reason}")
    finally:
        engine.kv.close(table)
    for name, reason in unfit.items():
        drafters.pop(name, None)
        _LOG.error("drafter %s is not offered: %s", name, reason)
    return unfit


def _users(drafters: dict[str, Drafter], name: str) -> list[str]:
    """The drafters made of that one, at any remove; parts are hosted before what is made of them."""
    found = [name]
    for user, drafter in drafters.items():
        if isinstance(drafter, Composed) and any(part.name in found for part in drafter.parts):
            found.append(user)
    return found[1:]


def _prompt(tokenizer: Tokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.encode(
            tokenizer.apply_chat_template([common_pb2.ChatMessage(role="user", content=_QUESTION)])
        )
    return tokenizer.encode(_QUESTION)


def _largest(logits: torch.Tensor) -> int:
    return int(torch.argmax(logits[0]))


def _judge(
    drafter: Drafter,
    engine: Engine,
    table: BlockTable,
    token_ids: Sequence[int],
    prompt_tokens: int,
    promised: float,
) -> str:
    """Why the drafter is unfit; "": it is fit."""
    num_tokens = len(token_ids) - prompt_tokens - 1
    if num_tokens < 1 or promised * num_tokens < LEAST_EXPECTED:
        return ""
    try:
        right, drafted = _drafted_right(drafter, engine, table, token_ids, prompt_tokens)
    except Exception as error:  # boundary: drafters are guests; whatever they raise, the worker goes on
        _LOG.exception("drafter %s failed its self-check", drafter.name)
        return f"it raised {type(error).__name__}"
    if right < LEAST_SHARE * promised * num_tokens:
        return (
            f"{right} of {num_tokens} tokens drafted right ({drafted} drafted at all), "
            f"its manifest promises {promised:.0%}"
        )
    return ""


def _drafted_right(
    drafter: Drafter, engine: Engine, table: BlockTable, token_ids: Sequence[int], prompt_tokens: int
) -> tuple[int, int]:
    """How many drafts were right, and how many there were."""
    first = prompt_tokens + 1
    history = TokenHistory(token_ids[:prompt_tokens], token_ids[prompt_tokens:first])
    request = request_over(engine, table, history, SamplingParams(), 0, "invariant")
    right = drafted = 0
    drafts = drafts_along(drafter, request, token_ids)
    for token_id, draft in zip(token_ids[first:], drafts, strict=True):
        drafted += bool(draft.token_ids)
        right += draft.token_ids[:1] == (token_id,)
    return right, drafted
