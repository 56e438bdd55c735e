"""One streamed request with its times, as a caller sees it."""

import time
from dataclasses import dataclass

from outrider import Client, GenerateOptions
from outrider.results import Speculation
from tests.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds to the first token, tokens in all, and tokens a second after the first ones; what came, and how."""

    first_s: float
    tokens: int
    rate: float
    token_ids: tuple[int, ...]
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
            first_s, first_tokens = time.perf_counter(), len(delta.token_ids)
    rest_s = time.perf_counter() - first_s
    token_ids = tuple(stream.result.token_ids)
    rest = len(token_ids) - first_tokens
    rate = rest / rest_s if rest else 0.0
    return Timed(first_s - started_s, len(token_ids), rate, token_ids, stream.result.speculation)
