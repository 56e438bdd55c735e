"""A peer as a child process: one JSON line in, one JSON line out. Runs with any Python, so it imports nothing of ours.

In: {"prompts": [[ids], ...], "max_tokens": n}: the prompts as one batch, greedy, end-of-sequence ignored.
Out: {"seconds": s, "answers": [[ids], ...]}. The first line out is {"ready": text}.
"""

import json
import os
import sys
import time
from collections.abc import Callable

# Claimed at import, before any library prints: from then on standard output is standard error.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

Batch = list[list[int]]
Generate = Callable[[Batch, int], Batch]


def answer_lines(name: str, generate: Generate) -> None:
    """Answers requests until standard input ends."""
    print(json.dumps({"ready": name}), file=OUT, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started_s = time.perf_counter()
        answers = generate(request["prompts"], request["max_tokens"])
        seconds = time.perf_counter() - started_s
        print(json.dumps({"seconds": seconds, "answers": answers}), file=OUT, flush=True)
