"""One streamed request with its times, as a caller sees it."""

import time
from dataclasses import dataclass

from outrider import Client, GenerateOptions
from outrider.results import Speculation
from tests.bench.prompts import Prompt

SHORTEST_ANSWER = 16
"""Tokens; the speed of a shorter answer says little."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """One answer's tokens, and the seconds from asking to the first of them and to the last.

    `first_tokens`: how many came together at `first_s`.
    """

    token_ids: tuple[int, ...]
    first_tokens: int
    first_s: float
    whole_s: float

    @property
    def tokens(self) -> int:
        """In all."""
        return len(self.token_ids)

    @property
    def rate(self) -> float:
        """Tokens a second after the first ones; 0 where there are no others."""
        rest = self.tokens - self.first_tokens
        return rest / (self.whole_s - self.first_s) if rest else 0.0

    @property
    def whole_rate(self) -> float:
        """Tokens a second of the whole answer, its prompt included."""
        return self.tokens / self.whole_s


@dataclass(frozen=True, slots=True)
class Timed(TokenTimes):
    """An answer of the served system, and how it was drafted."""

    speculation: Speculation


def timed(
    client: Client,
    prompt: Prompt,
    drafter: str,
    max_tokens: int,
    salt: str,
    others: GenerateOptions | None = None,
) -> Timed:
    """Streams one answer to its natural end, or to `max_tokens`; greedy, unless `others` say otherwise."""
    asked: GenerateOptions = {"temperature": 0.0}
    asked |= others or {}
    asked |= {"max_tokens": max_tokens, "drafter": drafter, "cache_salt": salt}
    started_s = time.perf_counter()
    stream = client.stream(list(prompt.token_ids), **asked)
    first_s, first_tokens = 0.0, 0
    for delta in stream:
        if not first_tokens:
            first_s, first_tokens = time.perf_counter() - started_s, len(delta.token_ids)
    whole_s = time.perf_counter() - started_s
    return Timed(tuple(stream.result.token_ids), first_tokens, first_s, whole_s, stream.result.speculation)
