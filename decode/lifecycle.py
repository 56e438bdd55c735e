"""How choices come and go: begun from a prompt's logits, parked when blocks run out, ended. Engine thread only.

Whoever takes a table here gives it back here: `end_choice`, `preempt` and `drop` are the only ways out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from core.errors import Internal, InvalidArgument, ServiceError
from core.metrics import Metrics
from decode.beam_group import BeamGroup
from decode.choice import Burst, Choice, Ended, Event, Prefilling, Request
from decode.draft import Verdict, VerifyItem
from decode.drafting import Drafting
from decode.room import Room
from decode.sampling.pipeline import NOT_FINITE
from decode.verification.verify import verify
from engine.kv_cache import KvCache, OutOfBlocks


@dataclass(slots=True)
class Roster:
    """Everything that is in the worker, by key. `transferring`: prompts on their way here, blocks reserved."""

    requests: dict[int, Request] = field(default_factory=dict)
    running: dict[int, Choice] = field(default_factory=dict)
    prefilling: dict[int, Prefilling] = field(default_factory=dict)
    transferring: set[int] = field(default_factory=set)
    occupied: int = 0
    joined: int = 0

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way that will give blocks back by itself."""
        return bool(self.running or self.prefilling or self.transferring)


class Lifecycle:
    """See the module's docstring. `emit` hands an event to the end of the turn."""

    def __init__(
        self, kv: KvCache, room: Room, drafting: Drafting, metrics: Metrics, emit: Callable[[Event], None]
    ) -> None:
        self.roster = Roster()
        self._kv = kv
        self._room = room
        self._drafting = drafting
        self._metrics = metrics
        self._emit = emit

    def admit(self) -> list[Request]:
        """Let in who may join; the requests among them, whose prompts are to be brought."""
        requests: list[Request] = []
        for entry in self._room.admit(self.roster.occupied):
            if isinstance(entry, Request):
                self.roster.occupied += entry.open_places
                entry.placed = True
                requests.append(entry)
            else:
                self.roster.occupied += entry.places
                entry.parked = False
                self._resume(entry)
        return requests

    def requeued(self, request: Request) -> None:
        """A request went back to the queue: its places are free again."""
        self.roster.occupied -= request.open_places
        request.placed = False

    def begin(self, request: Request, logits: Tensor) -> None:
        """The prompt's K and V are in its table, `logits` [vocabulary] is its last row: start the choices."""
        self.roster.transferring.discard(request.key)
        table = request.prompt_table
        if request.dropped or table is None:
            return
        self._kv.commit(table, request.prompt_tokens)
        self._kv.publish(table, request.hashes)
        choices = [choice for choice in request.choices if not choice.ended]
        for choice in choices[1:]:
            choice.table = self._kv.fork(table)
        choices[0].table = table
        request.prompt_table = None
        if choices[0].beams is not None:
            self._run(choices[0], again=False)
            self.search(choices[0], choices[0].beams, logits.reshape(1, -1))
            return
        fresh = [choice for choice in choices if choice.emitted_tokens == 0]
        items = [verify_item(choice, 0) for choice in fresh]
        for choice, verdict in zip(fresh, verify(items, logits.reshape(1, -1)), strict=True):
            if not choice.ended:
                self.take(choice, verdict, None)
        for choice in choices:
            if not choice.ended:
                self._join(choice, again=choice not in fresh)

    def search(self, choice: Choice, beams: BeamGroup, logits: Tensor, *, stepped: bool = False) -> None:
        """Take a search one token further; emit its answer when it is over.

        logits: Tensor  # [hypotheses, vocabulary]. `stepped`: they are a step's, whose K and V have been committed;
        else the prompt's row.
        """
        error = beams.advance(self._kv, logits)
        if error is not None:
            self.fail(choice.request, _drawing_error(error))
            return
        best = None if beams.best is None else beams.best.hypothesis
        if stepped:
            num_emitted = 0 if best is None else len(best.token_ids) - 1
            choice.request.tally.add_step((), 0, num_emitted, best is not None)
        if best is not None:
            self.take(choice, Verdict((), best.token_ids, best.logprobs), None)
            assert choice.ended, "a hypothesis ends where the answer does"

    def take(
        self,
        choice: Choice,
        verdict: Verdict,
        depths: Sequence[int] | None,
        *,
        keep_reserved: bool = False,
    ) -> None:
        """Append a burst to the answer, commit its K and V, count it, emit it, and end the choice where it ends.

        `depths` are those of the draft's nodes; None: the token comes from a prompt's row and belongs to no step.
        The accepted path has been compacted. `keep_reserved`: rows further on are on their way, their blocks stay.
        """
        if verdict.error is not None and not verdict.token_ids:
            self.fail(choice.request, _drawing_error(verdict.error))
            return
        cut = choice.finisher.push(verdict.token_ids)
        kept = verdict.token_ids[: cut.num_tokens]
        choice.history.extend(kept)
        if depths is not None:
            table = choice.table
            assert table is not None
            num_accepted = len(verdict.accepted_rows)
            num_tokens = table.num_tokens + 1 + min(num_accepted, cut.num_tokens)
            self._kv.commit(table, num_tokens, keep_reserved=keep_reserved)
            choice.request.tally.add_step(depths, num_accepted, cut.num_tokens, cut.finish is not None)
        finish = cut.finish_of(choice.index)
        choice.finish = finish
        self._emit(
            Burst(
                choice=choice,
                token_ids=kept,
                logprobs=verdict.logprobs[: cut.num_tokens],
                text=cut.text,
                num_text_tokens=cut.num_text_tokens,
                report=choice.request.tally.snapshot(),
                finish=finish,
            )
        )
        if finish is not None:
            self.end_choice(choice)
        elif verdict.error is not None:
            self.fail(choice.request, _drawing_error(verdict.error))

    def end_choice(self, choice: Choice) -> None:
        """A choice's answer is whole: give all back, and end the request with its last choice."""
        if choice.table is not None:
            self._room.publish(choice)
        self._let_go(choice)
        request = choice.request
        if request.open_choices == 0:
            self._forget(request)
            self._emit(Ended(request))

    def fail(self, request: Request, error: ServiceError) -> None:
        """End a request with an error; its neighbours go on."""
        if not request.dropped:
            self.drop(request)
            self._emit(Ended(request, error))

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it is. Idempotent."""
        if request.dropped:
            return
        request.dropped = True
        self._room.withdraw(request)
        for key, item in list(self.roster.prefilling.items()):
            if item.request is request and item.choice is None:
                del self.roster.prefilling[key]
        for choice in request.choices:
            if not choice.ended:
                self._let_go(choice)
        self._forget(request)

    def preempt(self, choice: Choice) -> None:
        """Take a choice's blocks; what it has goes to the prefix cache, and it waits at the head of the queue.

        The hypotheses of a search are given up: it begins again from the prompt.
        """
        if choice.table is not None:
            self._room.publish(choice)
        self._leave(choice)
        choice.parked = True
        self.roster.occupied -= choice.places
        self._metrics.preempted()
        self._room.enqueue(choice, front=True)

    def victim(self) -> Choice | None:
        """Who gives its blocks back next."""
        holders = [item.choice for item in self.roster.prefilling.values() if item.choice is not None]
        return self._room.victim([*self.roster.running.values(), *holders])

    def computed(self, item: Prefilling) -> None:
        """A choice's past is computed: it steps with the others from now on. Of a prompt: its choices have begun."""
        self.roster.prefilling.pop(item.key, None)
        if item.choice is not None:
            self._run(item.choice, again=True)

    def _resume(self, choice: Choice) -> None:
        self._join(choice, again=True)

    def _join(self, choice: Choice, again: bool) -> None:
        """Running if only the last token is to be computed, else its past is computed first."""
        table = choice.table
        assert table is not None
        computed = len(choice.history.token_ids) - 1
        if table.num_tokens == computed:
            self._run(choice, again)
            return
        try:
            self._kv.reserve(table, computed)
        except OutOfBlocks:
            self.preempt(choice)
            return
        self.roster.prefilling[choice.key] = Prefilling(
            choice.key, choice.request, choice, table, choice.history.token_ids, computed
        )

    def _run(self, choice: Choice, again: bool) -> None:
        self.roster.joined += 1
        choice.joined = self.roster.joined
        if choice.beams is not None:
            assert choice.table is not None
            choice.beams.start(choice.table)
            choice.table = None
        self.roster.running[choice.key] = choice
        self._drafting.start(choice, again)

    def _leave(self, choice: Choice) -> None:
        """Out of the batch, blocks given back."""
        self.roster.running.pop(choice.key, None)
        self.roster.prefilling.pop(choice.key, None)
        self._drafting.finish(choice)
        if choice.table is not None:
            self._kv.close(choice.table)
            choice.table = None
        if choice.beams is not None:
            choice.beams.close(self._kv)

    def _let_go(self, choice: Choice) -> None:
        self._leave(choice)
        choice.history.grammar = None
        choice.ended = True
        choice.request.open_choices -= 1
        if choice.request.placed and not choice.parked:
            self.roster.occupied -= choice.places

    def _forget(self, request: Request) -> None:
        if request.prompt_table is not None:
            self._kv.close(request.prompt_table)
            request.prompt_table = None
        self.roster.requests.pop(request.key, None)
        self.roster.transferring.discard(request.key)


def verify_item(choice: Choice, logits_start: int) -> VerifyItem:
    """The item of a choice without a draft."""
    draft_request = choice.draft_request
    return VerifyItem(
        sampling=draft_request.sampling,
        seed=draft_request.seed,
        choice=choice.index,
        history=choice.history,
        position=len(choice.history.token_ids),
        logits_start=logits_start,
        verification=draft_request.verification,
    )


def _drawing_error(message: str) -> ServiceError:
    """What a verdict's error is to the caller: constraints are theirs, numbers ours."""
    if message == NOT_FINITE:
        return Internal(f"the target's {message}")
    field = "sampling.grammar" if message.startswith("the grammar") else "sampling"
    return InvalidArgument(field, message)
