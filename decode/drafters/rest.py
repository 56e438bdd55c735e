"""Retrieval: the answer goes on as texts of a corpus do that read like its end.

The longest run of last tokens that the corpus holds is looked up, and what followed its occurrences becomes a trie
whose nodes are weighted by how many occurrences go through them; the heaviest nodes are proposed, as a chain or a tree.
Method: REST, retrieval-based speculative decoding (He et al. 2024), here over a suffix array on disk.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from core.drafter_settings import RestSettings
from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.corpus import Corpus, modified_ns
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.trie import heaviest
from decode.drafters.vocabulary import vocabulary_digest

_LOG = logging.getLogger(__name__)


class RestDrafter:
    """Holds no state of requests. A corpus that was added to is opened again when the next request starts."""

    name = "rest"

    def __init__(self, settings: RestSettings, vocabulary: str, num_token_ids: int) -> None:
        """`num_token_ids`: from there on nothing is proposed. Raises InvalidArgument where the corpus will not do."""
        self._settings = settings
        self._directory = Path(settings.corpus).expanduser()
        self._vocabulary = vocabulary
        self._num_token_ids = num_token_ids
        self._modified_ns = modified_ns(self._directory)
        self._corpus = Corpus(self._directory, vocabulary)
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            max_draft_width=8,
            default_draft_width=settings.draft_width,
        )

    @classmethod
    def load(cls, settings: RestSettings, tokenizer: Tokenizer, vocab_size: int) -> "RestDrafter":
        """For a target of `vocab_size` logits. Raises InvalidArgument as the constructor does."""
        return cls(settings, vocabulary_digest(tokenizer), min(tokenizer.vocab_size, vocab_size))

    def start(self, request: DraftRequest) -> None:
        """Sees what the corpus was given meanwhile. One that cannot be read leaves the old one in use."""
        changed_ns = modified_ns(self._directory)
        if changed_ns not in (0, self._modified_ns):
            self._modified_ns = changed_ns
            try:
                self._corpus = Corpus(self._directory, self._vocabulary, self._corpus)
            except InvalidArgument as error:
                _LOG.warning("the changed corpus is not used, the earlier one goes on: %s", error.message)

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget; none where the latest tokens are not in the corpus."""
        return [self._propose_one(budget) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def finish(self, request: DraftRequest) -> None:
        """Nothing to free."""

    def check(self) -> None:
        """Nothing that could be broken."""

    def _propose_one(self, budget: DraftBudget) -> Draft:
        settings = self._settings
        depth = min(budget.draft_length, budget.max_nodes)
        if depth < 1:
            return NO_DRAFT
        last = budget.request.history.token_ids[-settings.max_match :]
        texts = self._corpus.continuations(
            last, settings.min_match, settings.max_match, depth, settings.max_candidates
        )
        return heaviest(texts, budget.request.draft_width, budget.max_nodes, self._num_token_ids)
