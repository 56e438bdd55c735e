"""A peer as a child process: one JSON line in, one JSON line out. Runs with any Python, so it imports nothing of ours.

In: {"prompts": [[ids], ...], "max_tokens": n}: the prompts as one batch, greedy, end-of-sequence ignored.
Out: {"seconds": s, "answers": [[ids], ...]}, and of a peer that answers one prompt token by token "first_seconds", when
its first token was there. The first line out is {"ready": text}.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

# Claimed at import, before any library prints: from then on standard output is standard error.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

Batch = list[list[int]]
Generate = Callable[[Batch, int], Batch]
Stream = Callable[[list[int], int], Iterator[int]]


def answer_lines(name: str, generate: Generate) -> None:
    """Answers requests until standard input ends."""

    def answer(prompts: Batch, max_tokens: int) -> dict[str, object]:
        started_s = time.perf_counter()
        answers = generate(prompts, max_tokens)
        return {"seconds": time.perf_counter() - started_s, "answers": answers}

    _serve(name, answer)


def stream_lines(name: str, stream: Stream) -> None:
    """As `answer_lines`, of a peer that takes one prompt at a time and yields each token when it has it."""

    def answer(prompts: Batch, max_tokens: int) -> dict[str, object]:
        (prompt,) = prompts
        started_s = time.perf_counter()
        tokens = stream(prompt, max_tokens)
        first = next(tokens)
        first_s = time.perf_counter() - started_s
        answers = [[first, *tokens]]
        return {"seconds": time.perf_counter() - started_s, "first_seconds": first_s, "answers": answers}

    _serve(name, answer)


def _serve(name: str, answer: Callable[[Batch, int], dict[str, object]]) -> None:
    print(json.dumps({"ready": name}), file=OUT, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = answer(request["prompts"], request["max_tokens"])
        print(json.dumps(reply), file=OUT, flush=True)
