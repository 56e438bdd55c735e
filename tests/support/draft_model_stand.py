"""A draft model over a tiny target, driven as the decode loop drives it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.drafter_settings import DraftModelSettings
from core.records import SamplingParams, VerificationMode
from core.settings import EngineSettings
from decode.draft import Draft
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import Drafter, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep, StepResult

ENGINE = EngineSettings(dtype="float32", num_threads=1, num_blocks=64)
HOT = 12.0
"""A temperature at which the tiny model does not merely repeat its last token."""

KEYS = itertools.count(1)


@dataclass(slots=True)
class CountedEngine:
    """`forwards` and `rows` of the engine since the last `reset`; `on_step` is called at each forward."""

    engine: Engine
    forwards: int = 0
    rows: int = 0
    on_step: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Count from now on."""
        real_step = self.engine.step

        def step(sequences: Sequence[SequenceStep]) -> StepResult:
            self.on_step()
            self.forwards += 1
            self.rows += sum(sequence.num_rows for sequence in sequences)
            return real_step(sequences)

        self.engine.step = step  # type: ignore[method-assign, assignment]

    def reset(self) -> None:
        """Start from zero."""
        self.forwards = self.rows = 0


def load_draft_model(model: Path, **settings: object) -> tuple[DraftModelDrafter, CountedEngine]:
    """The model drafts for itself."""
    chosen = DraftModelSettings.model_validate({"model": str(model), **settings})
    num_blocks = chosen.num_blocks or ENGINE.num_blocks
    engine = Engine.load(model, ENGINE.model_copy(update={"num_blocks": num_blocks}))
    counted = CountedEngine(engine)
    counted.watch()
    vocab_size = engine.config.vocab_size
    return DraftModelDrafter(engine, chosen, vocab_size, vocab_size), counted


def draft_request(
    token_ids: Sequence[int],
    temperature: float = 0.0,
    width: int = 1,
    verification: VerificationMode = "invariant",
) -> DraftRequest:
    """A choice with these tokens, all of them its prompt."""
    return DraftRequest(
        key=next(KEYS),
        history=TokenHistory(token_ids),
        sampling=SamplingParams(temperature=temperature, seed=1),
        seed=1,
        choice=0,
        verification=verification,
        hidden=lambda start, end: torch.empty(0),
        draft_width=width,
        table=BlockTable,
    )


def begin(drafter: Drafter, request: DraftRequest) -> DraftRequest:
    """Started, and its prompt taken in."""
    drafter.start(request)
    while drafter.prefill(16):
        pass
    return request


def settle(drafter: Drafter, request: DraftRequest, draft: Draft, rows: Sequence[int] = ()) -> Observation:
    """Observe the accepted `rows` of a draft and one token more that is no child of the last, as the loop does."""
    end = rows[-1] if rows else 0
    children = [draft.token_ids[node] for node, parent in enumerate(draft.parents) if parent == end]
    last = next(token_id for token_id in range(1, 256) if token_id not in children)
    token_ids = (*(draft.token_ids[row - 1] for row in rows), last)
    request.history.extend(token_ids)
    observation = Observation(request, draft, tuple(rows), token_ids)
    drafter.observe([observation])
    return observation


def rows_to(draft: Draft, row: int) -> tuple[int, ...]:
    """The rows from the root's child to `row`; none for the root."""
    rows: list[int] = []
    while row:
        rows.append(row)
        row = draft.parents[row - 1]
    return tuple(reversed(rows))


def ranked_children(draft: Draft) -> dict[int, list[int]]:
    """Rows of each row's children, in order."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(draft.parents, start=1):
        children.setdefault(parent, []).append(row)
    return children
