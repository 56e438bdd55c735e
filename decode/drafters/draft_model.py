"""A second, smaller model with the target's tokenizer, drafting token by token over its own paged KV.

Between steps the cache of a request that drafts holds all its tokens but the last two: whatever was accepted,
the next proposal begins with one forward over those two, so rows are equal from step to step and the cache never
falls behind. Steps at K = 0 cost nothing here: a few tokens of lag are made up in the next proposal's first
forward, more (a prompt, a long time at K = 0) in `prefill`, inside the step budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import FailedPrecondition
from core.settings import DraftModelSettings
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.chain import GrowingChain
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.vocabulary import require_same_vocabulary
from decode.sampling.draft_noise import draw_draft
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.kv_cache import OutOfBlocks
from engine.step_batch import SequenceStep

LAG = 2
"""Tokens that the cache is behind the sequence after a step that drafted."""

CATCH_UP_ROWS = 16
"""Further tokens that a proposal's first forward may make up: about what one row costs."""


@dataclass(slots=True, eq=False)
class _State:
    request: DraftRequest
    table: BlockTable


@dataclass(slots=True, eq=False)
class _Proposal:
    """One draft in the making, and the cache that it reads."""

    state: _State
    chain: GrowingChain


class DraftModelDrafter:
    """Chains only. Its requests' forwards are batched; one without blocks drafts nothing and is no error."""

    name = "draft_model"

    def __init__(
        self, engine: Engine, settings: DraftModelSettings, num_token_ids: int, target_vocab: int
    ) -> None:
        """`num_token_ids`: leading ids that may be drafted. `target_vocab`: width of the target's logits."""
        self._engine = engine
        self._settings = settings
        self._kv = engine.kv
        self._num_token_ids = num_token_ids
        self._target_vocab = target_vocab
        self._states: dict[int, _State] = {}
        layout = engine.kv.layout
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            bytes_per_token=layout.kv_token_bytes,
            largest_position=engine.max_context - 1,
        )

    @classmethod
    def load(cls, settings: DraftModelSettings, target: Engine, tokenizer: Tokenizer) -> "DraftModelDrafter":
        """Load the model and hold its vocabulary against the target's.

        Raises FailedPrecondition where the tokenizers differ, InvalidArgument where the files are wrong.
        """
        path = Path(settings.model)
        if not path.exists():
            raise FailedPrecondition("drafters.draft_model.model", f"{path} does not exist")
        directory = path if path.is_dir() else path.parent
        num_token_ids = require_same_vocabulary(tokenizer, Tokenizer.from_directory(directory))
        num_blocks = settings.num_blocks or target.settings.num_blocks
        update = {"num_blocks": num_blocks, "hidden_layers": (), "max_context": None, "core_turns": None}
        engine = Engine.load(
            path, target.settings.model_copy(update=update), quantisation=settings.quantisation
        )
        num_token_ids = min(num_token_ids, engine.config.vocab_size, target.config.vocab_size)
        return cls(engine, settings, num_token_ids, target.config.vocab_size)

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
        """One chain for each budget, drawn token by token; none for a request that lags or has no room."""
        drafts: list[Draft] = [NO_DRAFT] * len(budgets)
        proposals = [
            proposal
            for index, budget in enumerate(budgets)
            if (proposal := self._begin(index, budget)) is not None
        ]
        live = proposals
        while live:
            logits = self._engine.step([self._next_rows(proposal) for proposal in live]).logits
            live = self._draw(live, self._to_target_ids(logits))
        for proposal in proposals:
            drafts[proposal.chain.index] = proposal.chain.draft()
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Roll the cache back to what was accepted: all tokens but the last two."""
        for observation in observations:
            state = self._states[observation.request.key]
            num_tokens = len(state.request.history.token_ids)
            tokens_before = num_tokens - len(observation.token_ids)
            still_right = tokens_before + len(observation.accepted_rows)
            self._kv.commit(state.table, min(state.table.num_tokens, still_right, num_tokens - LAG))

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

    def _begin(self, index: int, budget: DraftBudget) -> _Proposal | None:
        state = self._states[budget.request.key]
        depth = min(budget.draft_length, budget.max_nodes)
        lag = _lag(state)
        if depth < 1 or not 1 <= lag <= LAG + CATCH_UP_ROWS:
            return None
        if not self._reserved(state, len(budget.request.history.token_ids) + depth - 1):
            return None
        return _Proposal(state, GrowingChain(index, budget.request, depth))

    def _next_rows(self, proposal: _Proposal) -> SequenceStep:
        """The tokens whose K and V are not computed yet; the last one's logits give the next token."""
        table, history = proposal.state.table, proposal.state.request.history
        start = table.num_tokens
        token_ids = [*history.token_ids[start:], *proposal.chain.token_ids]
        drafted_before = start - len(history.token_ids)
        if drafted_before > 0:
            token_ids = proposal.chain.token_ids[drafted_before:]
        return SequenceStep(table, start, token_ids, logit_rows="last")

    def _draw(self, live: Sequence[_Proposal], logits: Tensor) -> list[_Proposal]:
        """One more token for each; those that go on."""
        drawn_tokens = draw_draft([proposal.chain.next_draw() for proposal in live], logits)
        ends = self._end_before([proposal.chain.request for proposal in live], logits)
        going_on: list[_Proposal] = []
        for proposal, drawn, end in zip(live, drawn_tokens, ends, strict=True):
            table, history = proposal.state.table, proposal.state.request.history
            computed = len(history.token_ids) + len(proposal.chain.token_ids)
            self._kv.commit(table, computed, keep_reserved=True)
            if end or drawn is None or drawn.token_id >= self._num_token_ids:
                continue
            if proposal.chain.take(drawn):
                going_on.append(proposal)
        return going_on

    def _end_before(self, requests: Sequence[DraftRequest], logits: Tensor) -> list[bool]:
        """Which chains end without the token that row i of `logits` gives; may look at the distributions only."""
        return [False] * len(requests)

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
