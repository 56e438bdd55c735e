"""An answer by hand, outside the decode loop: the target continues a prompt, and a drafter drafts behind its tokens."""

from collections.abc import Callable, Generator, Sequence
from typing import Final

from torch import Tensor

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget, Drafter, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.core_turns import turn_of
from engine.engine import Engine
from engine.step_batch import SequenceStep

PREFILL_ROWS: Final = 64
_KEY: Final = -1


def continue_prompt(
    engine: Engine,
    table: BlockTable,
    prompt: Sequence[int],
    choose: Callable[[Tensor], int],
    max_tokens: int,
    end_ids: frozenset[int],
) -> list[int]:
    """Prompt and answer, up to its end or as far as there is room; the table has the states of all but the last.

    `choose` takes logits [1, vocabulary] and is called once a token, in order. The table is the caller's, and empty.
    """
    token_ids = list(prompt)
    stats, layout = engine.kv.stats(), engine.kv.layout
    room = min(stats.free * layout.block_size, engine.max_context) - len(prompt)
    for _ in range(min(max_tokens, room)):
        fresh = token_ids[table.num_tokens :]
        engine.kv.reserve(table, len(token_ids))
        with turn_of(engine.turns):
            step = SequenceStep(table, table.num_tokens, fresh, logit_rows="last")
            logits = engine.step([step]).logits
        engine.kv.commit(table, len(token_ids))
        token_ids.append(choose(logits))
        if token_ids[-1] in end_ids:
            break
    return token_ids


def request_over(
    engine: Engine,
    table: BlockTable,
    history: TokenHistory,
    sampling: SamplingParams,
    seed: int,
    verification: VerificationMode,
) -> DraftRequest:
    """What a drafter is told of an answer whose states are in `table`; `history` grows as the answer is replayed."""
    return DraftRequest(
        key=_KEY,
        history=history,
        sampling=sampling,
        seed=seed,
        choice=0,
        verification=verification,
        hidden=lambda start, end: engine.kv.read_hidden(table, start, end),
        draft_width=1,
        table=lambda: table,
    )


def drafts_along(drafter: Drafter, request: DraftRequest, token_ids: Sequence[int]) -> Generator[Draft]:
    """A draft of one token at every position from the history's end to that of `token_ids`, in order.

    `token_ids` are prompt and answer; the history holds their beginning and gets each token after its draft. The
    drafter lets go of the request when the generator ends or is closed. Raises what the drafter raises.
    """
    drafter.start(request)
    try:
        while drafter.prefill(PREFILL_ROWS):
            pass
        for position in range(len(request.history.token_ids), len(token_ids)):
            (draft,) = drafter.propose([DraftBudget(request, 1, 1)])
            yield draft
            came = (token_ids[position],)
            request.history.extend(came)
            planes = request.hidden(position - 1, position)
            drafter.observe([Observation(request, draft, (), came, planes)])
    finally:
        drafter.finish(request)
