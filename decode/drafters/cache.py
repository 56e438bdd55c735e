"""Earlier answers: a request goes on as an earlier one did whose text reads like its end.

The first proposal looks for answers to the same prompt, else to prompts that ended alike. From then on a request
follows the places that it found as long as what is emitted agrees with them, and looks anew, for its last tokens, when
none is left. What followed becomes a trie weighted by the answers that go through it. Answers of other workers come
through an `AnswerLink`.
Method: a cache of suffixes over earlier outputs (SuffixDecoding, Oliaro et al. 2024), here over hashed runs, and with
the longest match instead of a score.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from core.drafter_settings import CacheSettings
from decode.draft import NO_DRAFT, Draft
from decode.drafters.answer_index import AnswerIndex, Place
from decode.drafters.answer_link import AnswerLink
from decode.drafters.answer_record import AnswerRecord, Owner, RecordLimits, owner_of, prompt_of
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.trie import heaviest
from decode.sampling.history import TokenHistory

_RECEIVED_A_STEP: Final = 4


@dataclass(slots=True)
class _Trail:
    """Where a request's text of `length` tokens goes on in earlier answers. None: it has not been looked for yet."""

    owner: Owner
    prompt: bytes
    places: list[Place] | None = None
    length: int = 0


class CacheDrafter:
    """Keeps the answers of its own requests, however they ended, and those that its link brings."""

    name = "cache"

    def __init__(self, settings: CacheSettings, num_token_ids: int) -> None:
        """`num_token_ids`: from there on nothing is proposed."""
        self.settings = settings
        self.record_limits = RecordLimits(settings.max_match, settings.max_answer_tokens, num_token_ids)
        self._link: AnswerLink | None = None
        self._trails: dict[int, _Trail] = {}
        self._index = AnswerIndex(
            settings.max_tokens,
            int(settings.max_tokens * settings.tenant_share),
            settings.min_match,
            settings.max_match,
        )
        self._num_lookups = 0
        self._num_hits = 0
        self._num_received = 0
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            max_draft_width=8,
            default_draft_width=settings.draft_width,
            remembers_answers=True,
        )

    def connect(self, link: AnswerLink) -> None:
        """Share answers through `link`. Once, before the first request."""
        assert not self._trails, "a request is known by digests of another secret"
        self._link = link

    def start(self, request: DraftRequest) -> None:
        """Only names the request's owner and prompt; nothing is looked up yet."""
        self._receive(_RECEIVED_A_STEP)
        secret = b"" if self._link is None else self._link.secret
        prompt = prompt_of(request.history.prompt_ids, secret)
        self._trails[request.key] = _Trail(owner_of(request.isolation, secret), prompt)

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`: the first proposal follows the answer so far from the prompt on."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """One draft for each budget; none where no earlier answer of the same owner reads alike."""
        return [self._propose_one(budget) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Takes in a few answers of other workers; what was emitted is followed at the next proposal."""
        self._receive(_RECEIVED_A_STEP)

    def finish(self, request: DraftRequest) -> None:
        """Keeps the answer, whole or not: what was emitted is right text all the same."""
        trail = self._trails.pop(request.key, None)
        if trail is None or request.history.num_output < self.settings.min_answer_tokens:
            return
        record = self._record_of(trail, request.history)
        if self._index.put(record) and self._link is not None:
            self._link.offer(record)

    def receive_all(self) -> None:
        """Takes in whatever other workers have answered: for an engine thread that idles."""
        while self._link is not None and self._link.has_incoming:
            self._receive(_RECEIVED_A_STEP)

    def check(self) -> None:
        """Called when idle: no trail may be left, and the answers held keep to their bounds."""
        if self._trails:
            raise AssertionError(f"cache keeps {len(self._trails)} trails of finished requests")
        self._index.check()

    def held(self) -> Mapping[str, int]:
        """What is held now, for metrics. Any thread: counts only."""
        return {"answers": self._index.num_answers, "tokens": self._index.num_tokens}

    def events(self) -> Mapping[str, int]:
        """Counts of this drafter's life, for metrics. Any thread."""
        return {
            "lookup": self._num_lookups,
            "hit": self._num_hits,
            "evicted": self._index.num_evicted,
            "received": self._num_received,
        } | _link_events(self._link)

    def _receive(self, max_records: int) -> None:
        """Takes in at most so many answers of other workers. Costs nothing where none has come."""
        if self._link is not None:
            for record in self._link.receive(max_records):
                self._index.put(record)
                self._num_received += 1

    def _propose_one(self, budget: DraftBudget) -> Draft:
        depth = min(budget.draft_length, budget.max_nodes)
        if depth < 1:
            return NO_DRAFT
        request = budget.request
        self._num_lookups += 1
        places = self._places(self._trails[request.key], request.history)
        if not places:
            return NO_DRAFT
        self._num_hits += 1
        texts = [
            answer.record.token_ids[end : end + depth]
            for answer, end in places[: self.settings.max_candidates]
        ]
        return heaviest(texts, request.draft_width, budget.max_nodes, self.record_limits.num_token_ids)

    def _places(self, trail: _Trail, history: TokenHistory) -> list[Place]:
        if trail.places is None:
            trail.places = self._index.after_prompt(trail.owner, trail.prompt, history.prompt_ids)
            trail.length = len(history.prompt_ids)
        emitted = array("I", history.token_ids[trail.length :])
        trail.length += len(emitted)
        trail.places = _followed(trail.places, emitted)
        if emitted:
            self._index.use(answer for answer, _ in trail.places)
        if not trail.places:
            trail.places = self._index.after(trail.owner, history.token_ids)
        return trail.places

    def _record_of(self, trail: _Trail, history: TokenHistory) -> AnswerRecord:
        first = len(history.prompt_ids)
        end = history.prompt_ids[-self.settings.max_match :]
        answer = history.token_ids[first : first + self.settings.max_answer_tokens]
        return AnswerRecord(trail.owner, trail.prompt, len(end), array("I", [*end, *answer]))


def _link_events(link: AnswerLink | None) -> dict[str, int]:
    if link is None:
        return {}
    return {"lost": link.num_lost, "bad_record": link.num_bad, "redis_away": link.num_failed}


def _followed(places: Sequence[Place], emitted: "array[int]") -> list[Place]:
    """The places whose answers went on with `emitted`, behind it; without those that end there or were forgotten."""
    size = len(emitted)
    return [
        (answer, end + size)
        for answer, end in places
        if answer.held
        and end + size < len(answer.record.token_ids)
        and answer.record.token_ids[end : end + size] == emitted
    ]
