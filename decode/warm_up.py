"""Steps over nothing before the first request: kernels get built, and the step-time table its first row counts."""

import torch

from core.clock import Clock
from core.records import SamplingParams
from decode.draft import Draft, VerifyItem
from decode.pace import Pace
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from engine.core_turns import turn_of
from engine.engine import Engine
from engine.step_batch import SequenceStep

_ROW_COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_REPEATS = 3
_CONTEXT_TOKENS = 64


def warm_up(engine: Engine, pace: Pace, clock: Clock, step_tokens: int) -> None:
    """On the engine thread, before it takes requests. Leaves no block used or cached.

    Ends with the largest step that can come, all its logits wanted: memory that does not suffice shows here.
    """
    engine.warm_up()
    block_size = engine.kv.layout.block_size
    room = min(engine.max_context, engine.kv.stats().total * block_size) - 1
    context = min(_CONTEXT_TOKENS, room // 2)
    table = engine.kv.open()
    try:
        engine.kv.reserve(table, context)
        engine.step([SequenceStep(table, 0, (0,) * context, logit_rows="last")])
        engine.kv.commit(table, context)
        for rows in _ROW_COUNTS:
            if context + rows > room:
                break
            engine.kv.reserve(table, context + rows)
            step = SequenceStep(table, context, (0,) * rows)
            for repeat in range(_REPEATS + 1):
                with turn_of(engine.turns):
                    started_s = clock.now_s()
                    logits = engine.step([step]).logits
                    _verify(rows, context, logits)
                    if repeat:
                        pace.record_step(rows, clock.now_s() - started_s)
        largest = min(step_tokens, room - context)
        engine.kv.reserve(table, context + largest)
        engine.step([SequenceStep(table, context, (0,) * largest)])
    finally:
        engine.kv.close(table)


def _verify(rows: int, context: int, logits: torch.Tensor) -> None:
    draft = Draft((0,) * (rows - 1), tuple(range(rows - 1)))
    history = TokenHistory((0,) * (context + 1))
    greedy = VerifyItem(SamplingParams(), 0, 0, history, context + 1, 0, draft)
    sampled = VerifyItem(SamplingParams(temperature=0.8, top_p=0.95), 0, 0, history, context + 1, 0, draft)
    verify([greedy, sampled], logits)
