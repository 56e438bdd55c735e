"""Retrieval: the answer goes on as texts of a corpus do that read like its end.

The longest run of last tokens that the corpus holds is looked up, and what followed its occurrences becomes a trie
whose nodes are weighted by how many occurrences go through them; the heaviest nodes are proposed, as a chain or a tree.
Method: REST, retrieval-based speculative decoding (He et al. 2024), here over a suffix array on disk.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from core.clock import Clock, SystemClock
from core.drafter_settings import RestSettings
from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.corpus import Corpus, modified_ns
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.trie import heaviest
from decode.drafters.vocabulary import vocabulary_digest

_LOG = logging.getLogger(__name__)
RETRY_S = 30.0
"""Until a change that would not do is looked at again: its files may have been on their way."""


class _Opening:
    """A changed corpus on its way, opened on a thread of its own: the engine thread must not wait for a disk."""

    def __init__(self, directory: Path, vocabulary: str, before: Corpus) -> None:
        self.corpus: Corpus | None = None
        self._arguments = (directory, vocabulary, before)
        self._thread = Thread(target=self._open, name="corpus", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `corpus` is what it will be: None where it will not do."""
        return not self._thread.is_alive()

    def _open(self) -> None:
        try:
            self.corpus = Corpus(*self._arguments)
        except InvalidArgument as error:
            _LOG.warning("the changed corpus is not used, the earlier one goes on: %s", error.message)


class RestDrafter:
    """Holds no state of requests. A corpus that was added to is opened again when a request starts."""

    name = "rest"

    def __init__(
        self, settings: RestSettings, vocabulary: str, num_token_ids: int, clock: Clock | None = None
    ) -> None:
        """`num_token_ids`: from there on nothing is proposed. Raises InvalidArgument where the corpus will not do."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._directory = Path(settings.corpus).expanduser()
        self._vocabulary = vocabulary
        self._num_token_ids = num_token_ids
        self._opened_ns = modified_ns(self._directory)
        self._corpus = Corpus(self._directory, vocabulary)
        self._opening: _Opening | None = None
        self._tried_ns = self._opened_ns
        self._tried_s = 0.0
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
        """Notices what the corpus was given meanwhile; drafts see that once it is open, and the old one until then."""
        self._take_opened()
        changed_ns = modified_ns(self._directory)
        if self._opening is not None or changed_ns in (0, self._opened_ns):
            return
        now_s = self._clock.now_s()
        if changed_ns != self._tried_ns or now_s - self._tried_s >= RETRY_S:
            self._opening = _Opening(self._directory, self._vocabulary, self._corpus)
            self._tried_ns, self._tried_s = changed_ns, now_s

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget; none where the latest tokens are not in the corpus."""
        self._take_opened()
        return [self._propose_one(budget) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def finish(self, request: DraftRequest) -> None:
        """Nothing to free."""

    def check(self) -> None:
        """Nothing that could be broken."""

    def _take_opened(self) -> None:
        if self._opening is not None and self._opening.ended:
            if self._opening.corpus is not None:
                self._corpus, self._opened_ns = self._opening.corpus, self._tried_ns
            self._opening = None

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
