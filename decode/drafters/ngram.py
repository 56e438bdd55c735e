"""Prompt lookup: the answer goes on as the text went on the last time that it read like this.

For each request an index maps every run of `min_match` tokens to the places where it ended. It grows by
one entry a committed token and is never rebuilt. A proposal looks at the latest `_MAX_CANDIDATES` of
those places, extends each match backwards up to `max_match` tokens, and copies what followed the best.
Method: prompt lookup decoding (Saxena 2023); the tree merges several continuations as a trie.
"""

from collections.abc import Sequence
from itertools import islice

from core.drafter_settings import NgramSettings
from decode.draft import NO_DRAFT, Draft
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.trie import merge_paths

_MAX_CANDIDATES = 48


class _Index:
    """Where each run of `min_match` tokens of one request ended; `indexed` tokens are taken in."""

    __slots__ = ("_ends", "_min_match", "indexed")

    def __init__(self, min_match: int) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._min_match = min_match
        self.indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens behind those already indexed."""
        size = self._min_match
        first = max(0, self.indexed - size + 1)
        fresh = token_ids[first:]
        ends = self._ends
        runs = zip(*(islice(fresh, offset, None) for offset in range(size)), strict=False)
        for end, run in enumerate(runs, start=first + size):
            known = ends.get(run)
            if known is None:
                ends[run] = [end]
            else:
                known.append(end)
        self.indexed = len(token_ids)

    def ends_of(self, run: tuple[int, ...]) -> Sequence[int]:
        """Ends (exclusive) of the earlier occurrences of `run`, the last tokens, latest last."""
        known = self._ends.get(run)
        return known[-1 - _MAX_CANDIDATES : -1] if known else ()


class NgramDrafter:
    """Proposes a chain, or a tree of up to `draft_width` distinct continuations. Holds one index a request."""

    name = "ngram"

    def __init__(self, settings: NgramSettings) -> None:
        self._settings = settings
        self._indexes: dict[int, _Index] = {}
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            bytes_per_token=64,
            max_draft_width=8,
            default_draft_width=settings.draft_width,
        )

    def start(self, request: DraftRequest) -> None:
        """Index the prompt."""
        index = _Index(self._settings.min_match)
        index.extend(request.history.token_ids)
        self._indexes[request.key] = index

    def rebuild(self, request: DraftRequest) -> None:
        """Index prompt and answer so far."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget; none where the latest tokens were never seen before."""
        return [self._propose_one(budget) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Index what was emitted."""
        for observation in observations:
            index = self._indexes[observation.request.key]
            index.extend(observation.request.history.token_ids)

    def finish(self, request: DraftRequest) -> None:
        """Drop the index."""
        self._indexes.pop(request.key, None)

    def check(self) -> None:
        """Called when idle: no index may be left."""
        if self._indexes:
            raise AssertionError(f"ngram keeps {len(self._indexes)} indexes of finished requests")

    def _propose_one(self, budget: DraftBudget) -> Draft:
        token_ids = budget.request.history.token_ids
        depth = min(budget.draft_length, budget.max_nodes)
        size = self._settings.min_match
        if depth < 1 or len(token_ids) <= size:
            return NO_DRAFT
        ends = self._indexes[budget.request.key].ends_of(tuple(token_ids[-size:]))
        if not ends:
            return NO_DRAFT
        ranked = _rank(token_ids, ends, size, self._settings.max_match)
        width = budget.request.draft_width
        if width == 1:
            chain = _continuation(token_ids, ranked[0], depth)
            return Draft(chain, tuple(range(len(chain))))
        continuations = (_continuation(token_ids, end, depth) for end in ranked)
        return merge_paths(continuations, width, budget.max_nodes)


def _rank(token_ids: Sequence[int], ends: Sequence[int], min_match: int, max_match: int) -> list[int]:
    """The candidates, longest match first; among equals the latest first."""
    scored = [(_match_length(token_ids, end, min_match, max_match), end) for end in ends]
    scored.sort(reverse=True)
    return [end for _, end in scored]


def _match_length(token_ids: Sequence[int], end: int, min_match: int, max_match: int) -> int:
    """How many tokens before `end` equal the last tokens of the sequence, `min_match` of them being known to."""
    last = len(token_ids) - 1
    length = min_match
    limit = min(max_match, end)
    while length < limit and token_ids[end - 1 - length] == token_ids[last - length]:
        length += 1
    return length


def _continuation(token_ids: Sequence[int], end: int, depth: int) -> tuple[int, ...]:
    """`depth` tokens that followed `end`; where they run into the present, the repetition goes on."""
    copied = tuple(token_ids[end : end + depth])
    period = len(token_ids) - end
    while len(copied) < depth:
        copied += copied[-period:] if period <= len(copied) else copied
    return copied[:depth]
