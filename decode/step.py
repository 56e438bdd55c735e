"""One step of the batch: plan, propose, one target forward, verify, commit, observe. Engine thread only."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.clock import Clock
from core.metrics import Metrics
from decode.beam_group import BeamGroup
from decode.choice import Choice, Prefilling
from decode.draft import NO_DRAFT, Draft, Verdict, VerifyItem
from decode.drafters.protocol import Observation
from decode.drafting import Drafting, cut_draft
from decode.lifecycle import Lifecycle
from decode.scheduler import ChoiceView, PlannedChoice, PrefillView, StepPlan, plan_step
from decode.target import Target
from decode.verification.verify import verify
from engine.kv_cache import OutOfBlocks
from engine.step_batch import SequenceStep, StepResult


@dataclass(frozen=True, slots=True)
class Stepping:
    """A choice in this step, its draft cut to what has room."""

    choice: Choice
    draft: Draft

    @property
    def num_rows(self) -> int:
        """Root, nodes and auxiliary rows."""
        return 1 + self.draft.num_rows


class Stepper:
    """Takes the running choices and the prompts in work one step further."""

    def __init__(
        self,
        target: Target,
        lifecycle: Lifecycle,
        drafting: Drafting,
        step_tokens: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._target = target
        self._kv = target.kv
        self._lifecycle = lifecycle
        self._roster = lifecycle.roster
        self._drafting = drafting
        self._step_tokens = step_tokens
        self._clock = clock
        self._metrics = metrics
        self.num_steps = 0

    def step(self) -> bool:
        """One step; False where nothing can be stepped."""
        choices = [choice for choice in self._roster.running.values() if not choice.request.listener.blocked]
        if not choices and not self._roster.prefilling:
            return False
        self.num_steps += 1
        plan = self._plan(choices)
        if plan.drafter_rows:
            self._drafting.prefill(plan.drafter_rows)
        by_key = self._roster.running
        planned = [(by_key[item.key], item) for item in plan.choices]
        drafts = self._drafting.propose(planned)
        with_room = self._make_room(planned, drafts)
        stepping = [item for item in with_room if item.choice.beams is None]
        searches = [(item.choice, item.choice.beams) for item in with_room if item.choice.beams is not None]
        prefills = [
            (self._roster.prefilling[view.key], view.rows)
            for view in plan.prefills
            if view.key in self._roster.prefilling
        ]
        if not with_room and not prefills:
            return True
        sequences = [sequence_of(item) for item in stepping]
        sequences += [_prefill_sequence(item, rows) for item, rows in prefills]
        sequences += [sequence for _, beams in searches for sequence in beams.sequences()]
        started_s = self._clock.now_s()
        result = self._target.step(sequences)
        items = [
            drafted_item(item, start) for item, start in zip(stepping, result.logits_start, strict=False)
        ]
        verdicts = verify(items, result.logits) if items else []
        self._search(searches, result)
        rows = sum(len(sequence.token_ids) for sequence in sequences)
        prefill_rows = sum(rows for _, rows in prefills)
        self._account(rows, stepping, prefill_rows, self._clock.now_s() - started_s)
        self._settle(stepping, items, verdicts, result)
        first_prefill = len(stepping)
        for index, (item, rows) in enumerate(prefills):
            self._prefilled(item, rows, result, first_prefill + index)
        return True

    def _plan(self, choices: list[Choice]) -> StepPlan:
        roster = self._roster
        if len(choices) > 1:
            choices.sort(key=lambda choice: choice.last_step)
        prefills = [PrefillView(key, item.rows_left) for key, item in roster.prefilling.items()]
        waiting_rows = min(sum(view.rows for view in prefills), self._step_tokens)
        more_roots = sum(choice.num_roots - 1 for choice in choices)
        lengths = self._drafting.lengths(choices, waiting_rows + more_roots)
        views = [
            ChoiceView(choice.key, length, nodes, choice.num_roots)
            for choice, (length, nodes) in zip(choices, lengths, strict=True)
        ]
        plan = plan_step(views, prefills, self._step_tokens, self._drafting.pending)
        for planned in plan.choices:
            roster.running[planned.key].last_step = self.num_steps
        return plan

    def _make_room(
        self, planned: Sequence[tuple[Choice, PlannedChoice]], drafts: dict[int, Draft]
    ) -> list[Stepping]:
        """Reserve every choice's rows; where blocks run out drafts are cut first, then choices preempted."""
        stepping: list[Stepping] = []
        for choice, _ in planned:
            if choice.key not in self._roster.running:
                continue
            draft = self._reserve(choice, drafts.get(choice.key, NO_DRAFT))
            if draft is not None:
                stepping.append(Stepping(choice, draft))
        return [item for item in stepping if item.choice.key in self._roster.running]

    def _reserve(self, choice: Choice, draft: Draft) -> Draft | None:
        """The draft that has room; None where the choice itself had to give way."""
        if choice.beams is not None:
            return self._reserve_beams(choice, choice.beams)
        table = choice.table
        assert table is not None
        start = table.num_tokens
        while True:
            try:
                self._kv.reserve(table, start + 1 + draft.num_rows)
            except OutOfBlocks as shortage:
                if draft.num_rows:
                    capacity = (len(table.block_ids) + shortage.free) * self._kv.layout.block_size
                    room = max(0, min(draft.num_rows - 1, capacity - start - 1))
                    draft = cut_draft(draft, len(draft.token_ids), room)
                    continue
                if self._preempt_for(choice) is choice:
                    return None
            else:
                return draft

    def _reserve_beams(self, choice: Choice, beams: BeamGroup) -> Draft | None:
        while True:
            try:
                beams.reserve(self._kv)
            except OutOfBlocks:
                if self._preempt_for(choice) is choice:
                    return None
            else:
                return NO_DRAFT

    def _preempt_for(self, choice: Choice) -> Choice:
        """Whose blocks were taken, for want of one for `choice`."""
        victim = self._lifecycle.victim()
        assert victim is not None, f"choice {choice.key} lacks a block and holds blocks itself"
        self._lifecycle.preempt(victim)
        return victim

    def _search(self, searches: Sequence[tuple[Choice, BeamGroup]], result: StepResult) -> None:
        """Each search's rows are the last of the step, in order."""
        end = result.logits.shape[0]
        start = end - sum(beams.num_rows for _, beams in searches)
        for choice, beams in searches:
            num_rows = beams.num_rows
            beams.commit(self._kv)
            self._lifecycle.search(choice, beams, result.logits[start : start + num_rows], stepped=True)
            start += num_rows

    def _account(self, rows: int, stepping: Sequence[Stepping], prefill_rows: int, duration_s: float) -> None:
        """Metrics, the controller's table of step times, and what the step cost each choice."""
        self._metrics.step(rows, duration_s)
        self._drafting.record_step(rows, duration_s)
        self._drafting.charge([(item.choice, item.draft.num_rows) for item in stepping], rows, prefill_rows)

    def _settle(
        self,
        stepping: Sequence[Stepping],
        items: Sequence[VerifyItem],
        verdicts: Sequence[Verdict],
        result: StepResult,
    ) -> None:
        """Compact, commit and emit what was accepted, and tell the drafters."""
        observations: list[tuple[Choice, Observation]] = []
        for item, verdict, verify_input in zip(stepping, verdicts, items, strict=True):
            if item.choice.ended or item.choice.table is None:
                continue
            auxiliary = _auxiliary_logits(item, result.logits, verify_input.logits_start)
            observations += self._settle_one(item, verdict, auxiliary)
        if observations:
            self._drafting.observe(observations)

    def _settle_one(
        self,
        item: Stepping,
        verdict: Verdict,
        auxiliary: Tensor | None = None,
        *,
        keep_reserved: bool = False,
    ) -> list[tuple[Choice, Observation]]:
        """One choice's part of `_settle`; what its drafter is to be told, if anything.

        `keep_reserved`: see `Lifecycle.take`.
        """
        choice, depths = item.choice, item.draft.depths()
        assert choice.table is not None
        start = choice.table.num_tokens
        self._kv.compact(choice.table, start, (0, *verdict.accepted_rows))
        self._lifecycle.take(choice, verdict, depths, keep_reserved=keep_reserved)
        num_auxiliary = len(item.draft.auxiliary_token_ids)
        self._drafting.learn(choice, depths, len(verdict.accepted_rows), num_auxiliary)
        if not choice.drafting:
            return []
        return [(choice, self._observation(item, verdict, start, auxiliary))]

    def _observation(
        self, item: Stepping, verdict: Verdict, start: int, auxiliary: Tensor | None
    ) -> Observation:
        choice = item.choice
        hidden = None
        if choice.drafter.needs.hidden_layers:
            assert choice.table is not None
            hidden = self._kv.read_hidden(choice.table, start, start + 1 + len(verdict.accepted_rows))
        return Observation(
            request=choice.draft_request,
            draft=item.draft,
            accepted_rows=verdict.accepted_rows,
            token_ids=verdict.token_ids,
            hidden_rows=hidden,
            auxiliary_logits=auxiliary,
        )

    def _prefilled(self, item: Prefilling, rows: int, result: StepResult, sequence: int) -> None:
        if item.key not in self._roster.prefilling:
            return
        self._kv.commit(item.table, item.table.num_tokens + rows, keep_reserved=True)
        self._metrics.tokens("prefilled", rows)
        if item.rows_left:
            return
        if item.choice is None:
            self._lifecycle.begin(item.request, result.logits[result.logits_start[sequence]])
        self._lifecycle.computed(item)


def sequence_of(item: Stepping) -> SequenceStep:
    choice, draft = item.choice, item.draft
    table = choice.table
    assert table is not None
    root = choice.history.token_ids[-1]
    if not draft.num_rows:
        return SequenceStep(table, table.num_tokens, (root,))
    chain = draft.is_chain and not draft.auxiliary_token_ids
    return SequenceStep(
        table=table,
        start=table.num_tokens,
        token_ids=(root, *draft.token_ids, *draft.auxiliary_token_ids),
        parents=None if chain else (0, *draft.parents, *draft.auxiliary_parents),
        num_auxiliary=len(draft.auxiliary_token_ids),
    )


def _prefill_sequence(item: Prefilling, rows: int) -> SequenceStep:
    start = item.table.num_tokens
    last = item.choice is None and start + rows == item.end
    return SequenceStep(
        table=item.table,
        start=start,
        token_ids=item.token_ids[start : start + rows],
        logit_rows="last" if last else "none",
    )


def drafted_item(item: Stepping, logits_start: int) -> VerifyItem:
    choice = item.choice
    draft_request = choice.draft_request
    return VerifyItem(
        sampling=draft_request.sampling,
        seed=draft_request.seed,
        choice=choice.index,
        history=choice.history,
        position=len(choice.history.token_ids),
        logits_start=logits_start,
        draft=item.draft,
        verification=draft_request.verification,
        rollback_threshold=choice.drafter.needs.rollback_threshold,
    )


def _auxiliary_logits(item: Stepping, logits: Tensor, logits_start: int) -> Tensor | None:
    count = len(item.draft.auxiliary_token_ids)
    if not count:
        return None
    end = logits_start + item.num_rows
    return logits[end - count : end]
