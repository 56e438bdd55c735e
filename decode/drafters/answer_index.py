"""Earlier answers, bounded, and where the end of a text occurs in them. Engine thread only.

Every space (one value of `DraftRequest.isolation`) has an index of its own, so nothing of one can be seen in another:
whole prompts and their ends, by which an answer is found before its first word, and every run of `min_match` tokens,
whose latest `_MAX_PLACES` occurrences are compared backwards for the longest match.

Why no suffix tree: answers must be forgotten one by one, and a hash of runs forgets exactly what it was given, at some
250 bytes a token. A tree of Python nodes takes a multiple of that; what it would be better at, long matches among very
many short ones, is rare where a request goes on following the answers that it has found.

Bounds: `max_tokens` in all. Room is made by the answers used least recently: those of tenants that hold more than
`tenant_tokens` as long as there are any, so that whoever is beyond its share pushes out nobody but its like.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from decode.drafters.answer_record import AnswerRecord, Owner

_MAX_PLACES: Final = 64
"""Answers kept of one prompt, and occurrences of one run: the latest ones."""

_END_BITS: Final = 16
_END_MASK: Final = 2**_END_BITS - 1
_TOKEN_BYTES: Final = array("I").itemsize


@dataclass(slots=True, eq=False)
class Answer:
    """A held answer. `number` counts up; `used` is the tick of its last use; `held`: not yet forgotten."""

    record: AnswerRecord
    number: int
    used: int
    held: bool = True

    @property
    def prompt_end(self) -> bytes:
        """The last tokens of its prompt, as a key."""
        return self.record.token_ids[: self.record.num_prompt].tobytes()


Place: TypeAlias = tuple[Answer, int]
"""An answer and the index in its `token_ids` where a text goes on."""

_Order: TypeAlias = "OrderedDict[int, Answer]"


@dataclass(slots=True)
class _Tenant:
    """What a tenant holds, used least recently first."""

    num_tokens: int = 0
    order: _Order = field(default_factory=OrderedDict)


class _Space:
    """The answers of one space, by number. What leads to them: numbers, or numbers and ends packed; latest last."""

    __slots__ = ("_min_match", "_prompt_ends", "_prompts", "_runs", "answers")

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._prompts: dict[bytes, list[int]] = {}
        self._prompt_ends: dict[bytes, list[int]] = {}
        self._runs: dict[bytes, list[int]] = {}
        self.answers: dict[int, Answer] = {}

    def of_prompt(self, prompt: bytes) -> list[Answer]:
        """The answers to a prompt of this digest, latest first."""
        return [self.answers[number] for number in reversed(self._prompts.get(prompt, ()))]

    def of_prompt_end(self, end: bytes) -> list[Answer]:
        """The latest answers to prompts with this end, latest first."""
        latest = self._prompt_ends.get(end, [])[-_MAX_PLACES:]
        return [self.answers[number] for number in reversed(latest)]

    def of_run(self, run: bytes) -> Iterator[Place]:
        """Where these `min_match` tokens ended, latest first."""
        for packed in reversed(self._runs.get(run, ())):
            yield self.answers[packed >> _END_BITS], packed & _END_MASK

    def add(self, answer: Answer) -> None:
        """Takes in an answer of less than 2 ** _END_BITS tokens."""
        self.answers[answer.number] = answer
        self._prompts.setdefault(answer.record.prompt, []).append(answer.number)
        self._prompt_ends.setdefault(answer.prompt_end, []).append(answer.number)
        base = answer.number << _END_BITS
        for end, run in self._runs_of(answer.record):
            known = self._runs.get(run)
            if known is None:
                self._runs[run] = [base | end]
                continue
            known.append(base | end)
            if len(known) > _MAX_PLACES:
                del known[0]

    def remove(self, answer: Answer) -> None:
        """Leaves no trace of an answer."""
        del self.answers[answer.number]
        _without(self._prompts, answer.record.prompt, {answer.number})
        _without(self._prompt_ends, answer.prompt_end, {answer.number})
        for run in {run for _, run in self._runs_of(answer.record)}:
            known = self._runs.get(run, ())
            _without(self._runs, run, {packed for packed in known if packed >> _END_BITS == answer.number})

    def _runs_of(self, record: AnswerRecord) -> Iterator[tuple[int, bytes]]:
        """Each end of a run that something of the answer follows, and the run."""
        data = record.token_ids.tobytes()
        size = self._min_match * _TOKEN_BYTES
        for end in range(max(record.num_prompt, self._min_match), len(record.token_ids)):
            last = end * _TOKEN_BYTES
            yield end, data[last - size : last]


class AnswerIndex:
    """See the module's docstring. Deterministic: the same calls leave the same answers."""

    def __init__(self, max_tokens: int, tenant_tokens: int, min_match: int, max_match: int) -> None:
        self._max_tokens = max_tokens
        self._tenant_tokens = tenant_tokens
        self._min_match = min_match
        self._max_match = max(min_match, max_match)
        self._spaces: dict[bytes, _Space] = {}
        self._tenants: dict[bytes, _Tenant] = {}
        self._beyond_share: dict[bytes, None] = {}
        self._order: _Order = OrderedDict()
        self._ticks = 0
        self.num_tokens = 0
        self.num_evicted = 0

    @property
    def num_answers(self) -> int:
        """Answers held."""
        return len(self._order)

    def put(self, record: AnswerRecord) -> bool:
        """Holds an answer; False where that is nothing new, or it alone is beyond the bound.

        An answer that goes on where a held one to the same prompt stops takes its place: a request that was
        preempted, resumed or cancelled is held once, as far as it came.
        """
        if len(record.token_ids) > min(self._max_tokens, _END_MASK):
            return False
        space = self._spaces.setdefault(record.owner.space, _Space(self._min_match))
        self._ticks += 1
        answer = Answer(record, self._ticks, self._ticks)
        others = space.of_prompt(record.prompt)
        for other in others:
            if _begins_with(other.record, record):
                self.use([other])
                return False
        replaced = [other for other in others if _begins_with(record, other.record)]
        for other in replaced or others[_MAX_PLACES - 1 :]:
            self._remove(other)
        self._add(answer)
        while self.num_tokens > self._max_tokens:
            self.num_evicted += 1
            self._remove(self._victim())
        return answer.held

    def after_prompt(self, owner: Owner, prompt: bytes, prompt_ids: Sequence[int]) -> list[Place]:
        """The beginnings of the answers to this prompt, else to prompts that ended like it; latest first."""
        space = self._spaces.get(owner.space)
        if space is None:
            return []
        end = array("I", prompt_ids[-self._max_match :]).tobytes()
        answers = space.of_prompt(prompt) or space.of_prompt_end(end)
        return [(answer, answer.record.num_prompt) for answer in answers]

    def after(self, owner: Owner, token_ids: Sequence[int]) -> list[Place]:
        """Where the longest run of last tokens went on, of `min_match` to `max_match` tokens; latest first."""
        space = self._spaces.get(owner.space)
        last = array("I", token_ids[-self._max_match :])
        if space is None or len(last) < self._min_match:
            return []
        longest = 0
        places: list[Place] = []
        for place in space.of_run(last[-self._min_match :].tobytes()):
            length = _match_length(place, last, self._min_match)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
        return places

    def use(self, answers: Iterable[Answer]) -> None:
        """These were of use: they are forgotten last."""
        for answer in answers:
            if answer.held:
                self._ticks += 1
                answer.used = self._ticks
                self._order.move_to_end(answer.number)
                self._tenants[answer.record.owner.tenant].order.move_to_end(answer.number)

    def check(self) -> None:
        """Called when idle: sums and bounds hold."""
        sizes = [len(answer.record.token_ids) for answer in self._order.values()]
        by_tenant = sum(tenant.num_tokens for tenant in self._tenants.values())
        by_space = sum(len(space.answers) for space in self._spaces.values())
        if not self.num_tokens == sum(sizes) == by_tenant <= self._max_tokens or by_space != len(sizes):
            raise AssertionError(f"answers: {sum(sizes)} tokens held, {self.num_tokens}, {by_tenant} counted")

    def _victim(self) -> Answer:
        if not self._beyond_share:
            return next(iter(self._order.values()))
        oldest = [next(iter(self._tenants[tenant].order.values())) for tenant in self._beyond_share]
        return min(oldest, key=lambda answer: answer.used)

    def _add(self, answer: Answer) -> None:
        owner = answer.record.owner
        self._spaces.setdefault(owner.space, _Space(self._min_match)).add(answer)
        self._order[answer.number] = answer
        self._tenants.setdefault(owner.tenant, _Tenant()).order[answer.number] = answer
        self._count(owner.tenant, len(answer.record.token_ids))

    def _remove(self, answer: Answer) -> None:
        owner = answer.record.owner
        space = self._spaces[owner.space]
        space.remove(answer)
        if not space.answers:
            del self._spaces[owner.space]
        del self._order[answer.number]
        del self._tenants[owner.tenant].order[answer.number]
        self._count(owner.tenant, -len(answer.record.token_ids))
        answer.held = False

    def _count(self, name: bytes, num_tokens: int) -> None:
        tenant = self._tenants[name]
        tenant.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if tenant.num_tokens > self._tenant_tokens:
            self._beyond_share[name] = None
        else:
            self._beyond_share.pop(name, None)
        if not tenant.order:
            del self._tenants[name]


def _begins_with(whole: AnswerRecord, start: AnswerRecord) -> bool:
    return whole.token_ids[: len(start.token_ids)] == start.token_ids


def _match_length(place: Place, last: "array[int]", known: int) -> int:
    """How many tokens before the place equal the last ones of a text, `known` of them being known to."""
    answer, end = place
    token_ids = answer.record.token_ids
    limit = min(len(last), end)
    length = known
    while length < limit and token_ids[end - 1 - length] == last[-1 - length]:
        length += 1
    return length


def _without(lists: dict[bytes, list[int]], key: bytes, gone: set[int]) -> None:
    left = [value for value in lists.get(key, ()) if value not in gone]
    if left:
        lists[key] = left
    else:
        lists.pop(key, None)
