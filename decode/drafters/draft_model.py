"""A second, smaller model with the target's tokenizer, drafting chains and trees over its own paged KV.

A tree grows by one level with each forward; its rows lie in scratch slots behind the last committed token until the
target has decided, then those of the accepted path are moved together. Between steps the cache of a request that
drafts holds all its tokens but the last two: whatever was accepted, the next proposal begins with one forward over
those two, so rows are equal from step to step and the cache never falls behind. Steps at K = 0 cost nothing here: a
few tokens of lag are made up in the next proposal's first forward, more (a prompt, a long time at K = 0) in
`prefill`, inside the step budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.drafter_settings import DraftModelSettings
from core.errors import FailedPrecondition
from core.tokenizer import Tokenizer
from decode.control.tree_shape import TreeShape
from decode.draft import NO_DRAFT, Draft
from decode.drafters.artifact import draft_model_manifest, require_target
from decode.drafters.draft_tree import DraftTree, GuessedChain, ShapeGrowth, growth_for
from decode.drafters.draws import draw_at
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.vocabulary import require_same_vocabulary, vocabulary_digest
from decode.sampling.draft_noise import DraftDraw, DrawnChildren, draw_children, draw_draft
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.kv_cache import OutOfBlocks
from engine.linear import CANDIDATE_PLANS, RowPlan
from engine.step_batch import LogitRows, SequenceStep, StepResult

LAG = 2
"""Tokens that the cache is behind the sequence after a step that drafted."""

CATCH_UP_ROWS = 16
"""Further tokens that a proposal's first forward may make up: about what one row costs."""

_ANY_ROWS = (RowPlan(),)
"""Quantised products differ by their number of rows anyhow (`engine/linear.py`), which a draft may."""


MAX_WIDTH = 8


@dataclass(slots=True, eq=False)
class _State:
    """`tree`: what was proposed last, its rows in the slots behind the table's tokens; None: nothing."""

    request: DraftRequest
    table: BlockTable
    tree: DraftTree | None = None


class DraftModelDrafter:
    """Forwards of its requests are batched; one without blocks drafts nothing and is no error."""

    name = "draft_model"

    def __init__(
        self,
        engine: Engine,
        settings: DraftModelSettings,
        num_token_ids: int,
        target_vocab: int,
        promised_rate: float | None = None,
    ) -> None:
        """`num_token_ids`: leading ids that may be drafted. `target_vocab`: width of the target's logits.

        `promised_rate`: see `decode/self_check.py`.
        """
        self._engine = engine
        self._settings = settings
        self._kv = engine.kv
        self._num_token_ids = num_token_ids
        self._target_vocab = target_vocab
        self.promised_rate = promised_rate
        self._states: dict[int, _State] = {}
        layout = engine.kv.layout
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            bytes_per_token=layout.kv_token_bytes,
            largest_position=engine.max_context - 1,
            max_draft_width=MAX_WIDTH,
            default_draft_width=settings.draft_width,
        )

    @classmethod
    def load(cls, settings: DraftModelSettings, target: Engine, tokenizer: Tokenizer) -> "DraftModelDrafter":
        """Load the model and hold its vocabulary against the target's, and its manifest where it has one.

        Raises FailedPrecondition where the tokenizers differ or the manifest names another target, InvalidArgument
        where the files are wrong.
        """
        path = Path(settings.model)
        if not path.exists():
            raise FailedPrecondition("decode_worker.drafters.draft_model.model", f"{path} does not exist")
        directory = path if path.is_dir() else path.parent
        num_token_ids = require_same_vocabulary(tokenizer, Tokenizer.from_directory(directory))
        manifest = draft_model_manifest(directory)
        rates: Sequence[float] = ()
        if manifest is not None:
            require_target(directory, manifest, target.numerics.model_revision, vocabulary_digest(tokenizer))
            rates = manifest.acceptance.get("all", ())
        num_blocks = settings.num_blocks or target.settings.num_blocks
        update = {"num_blocks": num_blocks, "hidden_layers": (), "max_context": None, "core_turns": None}
        plans = CANDIDATE_PLANS if settings.quantisation == "none" else _ANY_ROWS
        engine = Engine.load(
            path,
            target.settings.model_copy(update=update),
            quantisation=settings.quantisation,
            row_plans=plans,
        )
        num_token_ids = min(num_token_ids, engine.config.vocab_size, target.config.vocab_size)
        return cls(engine, settings, num_token_ids, target.config.vocab_size, rates[0] if rates else None)

    def start(self, request: DraftRequest) -> None:
        """Take a choice on; its prompt waits for `prefill`."""
        self._states[request.key] = _State(request, self._kv.open())

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """Catch up, the oldest requests first; rows done."""
        sequences: list[SequenceStep] = []
        states: list[_State] = []
        rows_done = 0
        for state in self._states.values():
            lag = _lag(state) - LAG
            rows = min(lag, max_rows - rows_done)
            if lag <= CATCH_UP_ROWS or rows <= 0:
                continue
            start = state.table.num_tokens
            if not self._reserved(state, start + rows):
                continue
            token_ids = state.request.history.token_ids[start : start + rows]
            sequences.append(SequenceStep(state.table, start, token_ids, logit_rows="none"))
            states.append(state)
            rows_done += rows
        if sequences:
            self._engine.step(sequences)
        for state, sequence in zip(states, sequences, strict=True):
            self._kv.commit(state.table, sequence.start + len(sequence.token_ids))
        return rows_done

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget; none for a request that lags or has no room.

        Width 1 is a chain. A wider tree is the best one by score, but where verification weighs the draft by its
        probabilities a tree of a shape that only the budget decides.
        """
        return self._propose([DraftTree(_root_id(budget), growth_for(budget)) for budget in budgets], budgets)

    def propose_shapes(self, budgets: Sequence[DraftBudget], shapes: Sequence[TreeShape]) -> Sequence[Draft]:
        """As `propose`, in the shape given for each budget, which keeps to that budget."""
        trees = [
            DraftTree(_root_id(budget), ShapeGrowth(shape))
            for budget, shape in zip(budgets, shapes, strict=True)
        ]
        return self._propose(trees, budgets)

    def propose_guessed(
        self, budgets: Sequence[DraftBudget], guesses: Sequence[Sequence[int]]
    ) -> Sequence[Draft]:
        """The chains of `propose` at width 1, in fewer forwards where a guess of their tokens is right."""
        trees = [
            GuessedChain(_root_id(budget), max(1, _depth(budget)), self._draftable(guess))
            for budget, guess in zip(budgets, guesses, strict=True)
        ]
        return self._propose(trees, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep of the cache what was accepted: all tokens but the last two."""
        for observation in observations:
            state = self._states[observation.request.key]
            num_tokens = len(state.request.history.token_ids)
            valid, tree = state.table.num_tokens, state.tree
            if tree is not None:
                rows = tree.path_rows(observation.token_ids)
                self._kv.compact(state.table, valid, rows)
                valid += len(rows)
                state.tree = None
            self._kv.commit(state.table, min(valid, num_tokens - LAG))

    def finish(self, request: DraftRequest) -> None:
        """Free the cache of a choice."""
        state = self._states.pop(request.key, None)
        if state is not None:
            self._kv.close(state.table)

    def check(self) -> None:
        """Called when idle: no block may be used."""
        self._kv.check()
        if self._states or self._kv.stats().used:
            raise AssertionError(f"draft_model keeps {len(self._states)} caches of finished requests")

    def cached_tokens(self, request: DraftRequest) -> int:
        """Tokens of a choice whose K and V are valid in the draft's cache."""
        return self._states[request.key].table.num_tokens

    def _propose(self, trees: Sequence[DraftTree], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Grow the trees in common forwards."""
        live = [
            state
            for tree, budget in zip(trees, budgets, strict=True)
            if (state := self._begin(tree, budget)) is not None
        ]
        begun = {id(state.tree) for state in live}
        while live:
            steps = [_next_rows(state) for state in live]
            result = self._engine.step(steps)
            self._take(live, steps, result)
            live = [state for state in live if state.tree is not None and state.tree.open]
        return [tree.draft() if id(tree) in begun else NO_DRAFT for tree in trees]

    def _begin(self, tree: DraftTree, budget: DraftBudget) -> _State | None:
        """Room for the rows of a tree; None where there is none, or nothing to draft."""
        state = self._states[budget.request.key]
        state.tree = None
        if _depth(budget) < 1 or not 1 <= _lag(state) <= LAG + CATCH_UP_ROWS or not any(tree.widths()):
            return None
        if not self._reserved(state, len(budget.request.history.token_ids) - 1 + tree.max_rows):
            return None
        state.tree = tree
        return state

    def _take(self, live: Sequence[_State], steps: Sequence[SequenceStep], result: StepResult) -> None:
        """Draw the children of every open row."""
        draws: list[DraftDraw] = []
        widths: list[int] = []
        rows: list[int] = []
        for state, step, start in zip(live, steps, result.logits_start, strict=True):
            tree = state.tree
            assert tree is not None
            draws += [draw_at(state.request, node.path()) for node in tree.open]
            widths += tree.widths()
            wanted = 1 if step.logit_rows == "last" else step.num_rows
            rows += range(start + wanted - len(tree.open), start + wanted)
            self._kv.commit(state.table, len(state.request.history.token_ids) - 1, keep_reserved=True)
        logits = result.logits if len(rows) == len(result.logits) else result.logits[rows]
        wide = self._to_target_ids(logits)
        drawn = _draw(draws, wide, widths)
        owners = [state.request for state in live if state.tree is not None for _ in state.tree.open]
        for index, ends in enumerate(self._end_before(owners, wide)):
            if ends:
                drawn[index] = None
        rest = iter(drawn)
        for state in live:
            assert state.tree is not None
            state.tree.take([next(rest) for _ in state.tree.open], self._num_token_ids)

    def _end_before(self, requests: Sequence[DraftRequest], logits: Tensor) -> Sequence[bool]:
        """Whether the draft of a request ends before the token that its row says; empty: none does.

        logits: Tensor  # [requests, target vocabulary]
        """
        return ()

    def _draftable(self, guess: Sequence[int]) -> Sequence[int]:
        """Up to the first id that may not be drafted."""
        end = next((i for i, token_id in enumerate(guess) if token_id >= self._num_token_ids), len(guess))
        return guess[:end]

    def _to_target_ids(self, logits: Tensor) -> Tensor:
        """[rows, target vocabulary]: ids that may not be drafted have no chance."""
        if logits.shape[1] == self._target_vocab == self._num_token_ids:
            return logits
        wide = torch.full((logits.shape[0], self._target_vocab), -torch.inf)
        wide[:, : self._num_token_ids] = logits[:, : self._num_token_ids]
        return wide

    def _reserved(self, state: _State, num_tokens: int) -> bool:
        try:
            self._kv.reserve(state.table, num_tokens)
        except OutOfBlocks:
            return False
        return True


def _lag(state: _State) -> int:
    return len(state.request.history.token_ids) - state.table.num_tokens


def _root_id(budget: DraftBudget) -> int:
    return budget.request.history.token_ids[-1]


def _depth(budget: DraftBudget) -> int:
    return min(budget.draft_length, budget.max_nodes)


def _next_rows(state: _State) -> SequenceStep:
    """The rows whose K and V are not computed yet: of the first forward also tokens that the cache lacks."""
    tree, table, token_ids = state.tree, state.table, state.request.history.token_ids
    assert tree is not None
    row_ids = [node.token_id for node in tree.rows]
    if tree.num_written:
        return SequenceStep(table, table.num_tokens, row_ids, tree.parents(), num_written=tree.num_written)
    start = table.num_tokens
    logit_rows: LogitRows = "last" if len(row_ids) == 1 else "all"
    return SequenceStep(table, start, [*token_ids[start:-1], *row_ids], logit_rows=logit_rows)


def _draw(draws: Sequence[DraftDraw], logits: Tensor, widths: Sequence[int]) -> list[DrawnChildren | None]:
    """Children of every row; where only one is wanted, by the shorter way that gives the same one."""
    drawn: list[DrawnChildren | None] = [None] * len(draws)
    single = [index for index, width in enumerate(widths) if width == 1]
    several = [index for index, width in enumerate(widths) if width > 1]
    if single:
        rows = logits if not several else logits[single]
        for index, token in zip(single, draw_draft([draws[index] for index in single], rows), strict=True):
            if token is not None:
                drawn[index] = DrawnChildren((token.token_id,), (0.0,), token.draft_probs)
    if several:
        rows = logits if not single else logits[several]
        children = draw_children([draws[i] for i in several], rows, [widths[i] for i in several])
        for index, of_one in zip(several, children, strict=True):
            drawn[index] = of_one
    return drawn
