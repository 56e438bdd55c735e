"""Self-speculation by early exit: the target's first layers draft, all of its layers verify.

A draft's forwards read and write the target's own paged KV: those of the first E layers, in slots behind the committed
tokens, so the draft needs no cache, no catching up and no memory of its own. Nothing is committed here; the step that
verifies writes the same slots again, in every layer, and its commit gives back what is reserved behind them.

Method: LayerSkip (Elhoushi et al. 2024). There the target is trained for its exits; here it stays as it is, so that
the text does, and an adapter behind layer E is trained instead (as in Kangaroo, Liu et al. 2024). Without an adapter
the exit goes through the target's last norm and whole head: no training, but slow, and little of it is accepted.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.drafter_settings import LayerSkipSettings
from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.chain import GrowingChain
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.head_drafter import NOT_FINITE
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.vocabulary import vocabulary_digest
from decode.sampling.draft_noise import draw_draft
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.kv_cache import OutOfBlocks
from engine.step_batch import SequenceStep, StepResult


class LayerSkipDrafter:
    """Chains only; its requests' forwards are batched, one a depth. Holds no state of requests.

    A state that is no number ends a request's draft as a fault: told, and the answer goes on plainly.
    """

    name = "layerskip"

    def __init__(
        self,
        engine: Engine,
        settings: LayerSkipSettings,
        exit_layer: int,
        adapter: ExitAdapter | None,
        num_token_ids: int,
    ) -> None:
        """`exit_layer`: layers that a draft runs. `num_token_ids`: from there on ids mean nothing (full head only)."""
        self._engine = engine
        self._kv = engine.kv
        self._exit_layer = exit_layer
        self._adapter = adapter
        self._num_token_ids = num_token_ids
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
        )

    @classmethod
    def load(cls, settings: LayerSkipSettings, engine: Engine, tokenizer: Tokenizer) -> "LayerSkipDrafter":
        """With the adapter of `settings.artifact`, or without one.

        Raises FailedPrecondition where the artifact is of another target, InvalidArgument naming file or field.
        """
        adapter: ExitAdapter | None = None
        if settings.artifact is not None:
            directory = Path(settings.artifact).expanduser()
            digest = vocabulary_digest(tokenizer)
            adapter = ExitAdapter.load(directory, engine, digest, settings.quantisation)
        num_token_ids = min(tokenizer.vocab_size, engine.config.vocab_size)
        return cls(engine, settings, _exit_layer(settings, adapter, engine), adapter, num_token_ids)

    def start(self, request: DraftRequest) -> None:
        """Nothing to take on: the target's KV is all that it reads."""

    def rebuild(self, request: DraftRequest) -> None:
        """Nothing to take on."""

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One chain for each budget, drawn token by token; a shorter one, or none, where blocks are short."""
        drafts: list[Draft] = [NO_DRAFT] * len(budgets)
        chains = [
            GrowingChain(index, budget.request, depth)
            for index, budget in enumerate(budgets)
            if (depth := self._reserved_depth(budget)) > 0
        ]
        live = chains
        while live:
            live = self._grow(live)
        for chain in chains:
            drafts[chain.index] = Draft(fault=NOT_FINITE) if chain.broken else chain.draft()
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to roll back: only the step commits."""

    def finish(self, request: DraftRequest) -> None:
        """Nothing to free: reserved slots belong to the choice's table."""

    def check(self) -> None:
        """Nothing that could be broken."""

    def _reserved_depth(self, budget: DraftBudget) -> int:
        """How deep there is room to draft and to verify; that room is reserved."""
        table = budget.request.table()
        depth = min(budget.draft_length, budget.max_nodes)
        while depth > 0:
            try:
                self._kv.reserve(table, table.num_tokens + 1 + depth)
                return depth
            except OutOfBlocks as shortage:
                depth = min(depth - 1, self._capacity(table, shortage.free) - table.num_tokens - 1)
        return 0

    def _capacity(self, table: BlockTable, free_blocks: int) -> int:
        return (len(table.block_ids) + free_blocks) * self._kv.layout.block_size

    def _grow(self, live: Sequence[GrowingChain]) -> list[GrowingChain]:
        """One forward of the first layers over the last token of each chain; those that go on."""
        with_adapter = self._adapter is not None
        result = self._engine.step(
            [_last_row(chain, wants_logits=not with_adapter) for chain in live],
            exit_layer=self._exit_layer,
            want_last_hidden=with_adapter,
        )
        logits = self._logits(result)
        draws = [chain.next_draw() for chain in live]
        drawn = draw_draft(draws, logits) if self._adapter is None else self._adapter.draw(draws, logits)
        going_on: list[GrowingChain] = []
        for chain, token, row in zip(live, drawn, logits, strict=True):
            if token is None:
                chain.broken = not bool(torch.isfinite(row.max()))
            elif chain.take(token):
                going_on.append(chain)
        return going_on

    def _logits(self, result: StepResult) -> Tensor:
        """One row a chain, over the adapter's vocabulary or the target's."""
        if self._adapter is not None:
            assert result.last_hidden is not None
            return self._adapter.logits(result.last_hidden)
        with torch.inference_mode():
            result.logits[:, self._num_token_ids :] = -torch.inf
        return result.logits


def _last_row(chain: GrowingChain, *, wants_logits: bool) -> SequenceStep:
    """Root and drafted tokens, of which all but the last were evaluated before."""
    table, token_ids = chain.request.table(), chain.request.history.token_ids
    assert table.num_tokens == len(token_ids) - 1, "all tokens but the last are committed"
    return SequenceStep(
        table=table,
        start=table.num_tokens,
        token_ids=(token_ids[-1], *chain.token_ids),
        logit_rows="last" if wants_logits else "none",
        num_written=len(chain.token_ids),
    )


def _exit_layer(settings: LayerSkipSettings, adapter: ExitAdapter | None, engine: Engine) -> int:
    """What is set, else what the adapter was trained behind, else half of the layers."""
    num_layers = engine.config.num_layers
    trained = None if adapter is None else adapter.shape.exit_layer
    wanted = settings.exit_layer
    if wanted is not None and trained is not None and wanted != trained:
        raise InvalidArgument(
            "decode_worker.drafters.layerskip.exit_layer",
            f"{settings.artifact} was trained behind {trained} layers",
        )
    exit_layer = wanted or trained or max(1, num_layers // 2)
    if not 1 <= exit_layer <= num_layers:
        raise InvalidArgument(
            "decode_worker.drafters.layerskip.exit_layer", f"{exit_layer} of {num_layers} layers"
        )
    return exit_layer
