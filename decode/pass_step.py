"""The step of a pipelined worker: while the last stage verifies a burst, the first one drafts and computes the next.

A message carries at most one burst of each choice. Of a choice whose burst is on its way the next one may be sent
*ahead*, where that pays, on the guess that the draft is accepted whole and that the drafter also knows the token behind
it. The last stage draws, so it knows whether the guess came true when it comes to the rows ahead; so does the first
stage when the answer is there. Rows on a wrong guess lie behind everything committed: they are never committed, hashed
or emitted, and whoever gets their slots next writes them later, on both stages. (Asynchronous pipelined speculation:
compare Butler et al. 2024, PipeInfer.)

The text is that of the plain step. Requests that the last stage cannot draw for (logprobs, grammars, other than
invariant verification, beam search) and prompts drain the pipe and take the plain step, the whole batch with them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.metrics import Metrics
from decode.choice import Choice
from decode.draft import NO_DRAFT, Draft, Verdict
from decode.drafters.protocol import Observation
from decode.drafting import Drafting, leading_chain
from decode.last_word import Question
from decode.lifecycle import Lifecycle
from decode.pass_flight import Flown, Message
from decode.sampling import native
from decode.sampling.step_items import pack
from decode.scheduler import PlannedChoice
from decode.step import Stepper, Stepping
from decode.target import Target
from engine.kv_cache import OutOfBlocks
from engine.pipeline import PipelinedEngine
from engine.pipeline_messages import PipelineBroken


@dataclass(slots=True)
class GuessCounts:
    """What became of guesses: `held` and `failed`; `missed`: the drafter had none where one was wanted."""

    held: int = 0
    failed: int = 0
    missed: int = 0


class PassStepper(Stepper):
    """As `Stepper`, over a `PipelinedEngine`."""

    def __init__(
        self,
        target: Target,
        lifecycle: Lifecycle,
        drafting: Drafting,
        step_tokens: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(target, lifecycle, drafting, step_tokens, clock, metrics)
        assert isinstance(target.engine, PipelinedEngine), "there is no pipeline"
        self._engine = target.engine
        self._vocab_size = target.vocab_size
        self._last_stage_draws = native.kernels() is not None
        self._pipe: deque[Message] = deque()
        self._num_questions = 0
        self.guesses = GuessCounts()

    @property
    def num_in_flight(self) -> int:
        """Messages that are on their way; none when `step` had nothing to do."""
        return len(self._pipe)

    def step(self) -> bool:
        """One step; False where nothing can be stepped and nothing is on its way.

        The last message stays on its way when this returns if another one may be sent behind it. Where the only choice
        had to give way itself there is more to do: its blocks may let others in.
        """
        choices = [choice for choice in self._roster.running.values() if not choice.request.listener.blocked]
        drawn_there = self._last_stage_draws and all(_is_drawn_there(choice) for choice in choices)
        if self._roster.prefilling or not drawn_there:
            settled = self._settle_down_to(0)
            return super().step() or settled
        launched = bool(choices) and self._launch(choices)
        followed = launched and any(item.is_pass for item in self._pipe[-1].flown)
        settled = self._settle_down_to(1 if followed else 0)
        return settled or bool(choices)

    def _launch(self, choices: Sequence[Choice]) -> bool:
        """Draft for and send what may be sent now: bursts of choices without one on its way, and those ahead."""
        on_the_way = {
            item.choice.key: item for message in self._pipe for item in message.flown if item.is_wanted
        }
        ready = [
            choice
            for choice in choices
            if choice.key not in on_the_way or on_the_way[choice.key].may_be_followed
        ]
        if not ready:
            return False
        self.num_steps += 1
        plan = self._plan(ready)
        if plan.drafter_rows:
            self._drafting.prefill(plan.drafter_rows)
        fresh: list[tuple[Choice, PlannedChoice]] = []
        deeper: list[tuple[Choice, PlannedChoice]] = []
        for item in plan.choices:
            choice = self._roster.running[item.key]
            if item.key not in on_the_way:
                fresh.append((choice, item))
            elif (planned := self._beyond(on_the_way[item.key], item)) is not None:
                deeper.append((choice, planned))
        drafts = self._drafting.propose([*fresh, *deeper])
        flown = [_flown(stepping) for stepping in self._make_room(fresh, drafts)]
        for choice, _ in deeper:
            ahead = self._ahead(on_the_way[choice.key], drafts.get(choice.key, NO_DRAFT))
            if ahead is not None:
                flown.append(ahead)
        if flown:
            self._send(flown)
        return bool(flown)

    def _beyond(self, base: Flown, planned: PlannedChoice) -> PlannedChoice | None:
        """What the drafter may draft from the root of `base`: its draft, the token behind it, and what is planned next.

        None where nothing is planned, the answer cannot go on behind the token that is guessed, or it would not pay.
        """
        choice = base.choice
        room = choice.finisher.tokens_left - 1
        limit = choice.drafter.needs.largest_position
        if limit is not None:
            room = min(room, limit - (len(choice.history.token_ids) - 1))
        known = len(base.draft.token_ids) + 1
        if not choice.drafting or not planned.draft_length or room < known:
            return None
        depth = min(room, known + planned.draft_length)
        if not self._drafting.pays_ahead(choice, known, planned.draft_length, depth):
            return None
        return PlannedChoice(planned.key, depth, depth)

    def _ahead(self, base: Flown, draft: Draft) -> Flown | None:
        """The burst behind `base` by a draft that begins at the same root; None where there is no guess, or no room.

        Nobody gives way to it.
        """
        if not base.is_wanted:
            return None
        chain, known = leading_chain(draft).token_ids, base.draft.token_ids
        if len(chain) <= len(known) or chain[: len(known)] != known:
            self.guesses.missed += 1
            return None
        try:
            self._kv.reserve(base.table, base.table.num_tokens + 1 + len(chain))
        except OutOfBlocks:
            return None
        rest = chain[len(known) + 1 :]
        ahead = Draft(rest, tuple(range(len(rest))))
        return Flown(base.choice, ahead, base.table, base, guess_id=chain[len(known)], held=False)

    def _send(self, flown: Sequence[Flown]) -> None:
        """Run the first stage, and send the rest on its way."""
        sequences = [item.sequence() for item in flown]
        draws = []
        row = 0
        for place, (item, sequence) in enumerate(zip(flown, sequences, strict=True)):
            item.place = place
            draws.append(item.draw(row))
            row += sequence.num_rows
        links = [item.link() for item in flown]
        question = Question.of(self._num_questions + 1, self._vocab_size, pack(draws), links)
        flight = self._engine.launch(sequences, question.to_tensor())
        self._num_questions += 1
        self._pipe.append(Message(flight, question, tuple(flown)))
        for item in flown:
            if item.base is not None:
                item.base.ahead = item

    def _settle_down_to(self, num_left: int) -> bool:
        """Wait for the oldest messages and settle them, until so many are left; whether there were any."""
        settled = len(self._pipe) > num_left
        while len(self._pipe) > num_left:
            self._settle_oldest()
        return settled

    def _settle_oldest(self) -> None:
        """Wait for a message's answer; commit and emit what was accepted of what is wanted, and tell the drafters."""
        message = self._pipe.popleft()
        flight, flown = message.flight, message.flown
        reply = self._engine.answer(flight, [item.place for item in flown if not item.is_wanted])
        verdicts = message.question.verdicts(reply.verdicts)
        if verdicts is not None:
            last_began_s, last_ended_s = reply.times.tolist()
            seconds = (flight.ended_s - flight.began_s) + (last_ended_s - last_began_s)
            stepped = [Stepping(item.choice, item.draft) for item in flown]
            self._account(flight.rows.num_rows, stepped, 0, seconds)
        observations: list[tuple[Choice, Observation]] = []
        for item, verdict in zip(flown, verdicts or [None] * len(flown), strict=True):
            if not item.is_wanted:
                continue
            if verdict is None:
                raise PipelineBroken(f"step {flight.number}: rows that are wanted were taken for void")
            observations += self._settle_flown(item, verdict)
        if observations:
            self._drafting.observe(observations)

    def _settle_flown(self, item: Flown, verdict: Verdict) -> list[tuple[Choice, Observation]]:
        """One choice's part; the rows sent ahead of it are held from now on, or void."""
        ahead = item.ahead
        held = ahead is not None and ahead.comes_true(verdict)
        observations = self._settle_one(Stepping(item.choice, item.draft), verdict, keep_reserved=held)
        if ahead is not None:
            ahead.held, ahead.base = held, None
            if item.choice.table is item.table:
                self.guesses.held += held
                self.guesses.failed += not held
        return observations


def _is_drawn_there(choice: Choice) -> bool:
    """Whether the last stage can draw for it: by the invariant walk, of which tokens are all that is wanted."""
    request, needs = choice.draft_request, choice.drafter.needs
    if choice.beams is not None or choice.history.grammar is not None:
        return False
    if request.verification != "invariant" or request.sampling.logprobs is not None:
        return False
    return needs.rollback_threshold is None and not needs.auxiliary_rows


def _flown(stepping: Stepping) -> Flown:
    table = stepping.choice.table
    assert table is not None
    return Flown(stepping.choice, stepping.draft, table)
