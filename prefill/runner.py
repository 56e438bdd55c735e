"""The engine thread of a prefill worker: the only caller of `Engine.step` and of the KV bookkeeping."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from core.clock import Clock
from core.errors import DeadlineExceeded, Internal, ServiceError, Unavailable
from core.metrics import Metrics
from core.numerics import NumericsClass
from engine.block_table import BlockTable
from engine.core_turns import Turns
from engine.engine_thread import EngineThread
from engine.kv_cache import KvCache, KvStats
from engine.model_config import ModelConfig
from engine.step_batch import SequenceStep, StepResult
from prefill.lease import Lease, Progress
from prefill.scheduler import ChunkPlan, RunningView, WaitingView, plan_admission, plan_chunks

_LOG = logging.getLogger(__name__)


class ForwardEngine(Protocol):
    """What a prefill worker needs of an engine; `engine.engine.Engine` has it."""

    @property
    def kv(self) -> KvCache:
        """Its paged KV."""
        ...

    @property
    def turns(self) -> Turns:
        """Its turns on the cores."""
        ...

    @property
    def numerics(self) -> NumericsClass:
        """Its numerics class."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Its model's shapes."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of a sequence at most."""
        ...

    def step(self, sequences: Sequence[SequenceStep]) -> StepResult:
        """One target forward."""
        ...


@dataclass(slots=True, eq=False)
class _Prompt:
    lease: Lease
    number: int
    overtaken: int = 0
    table: BlockTable | None = None
    progress: Progress | None = None
    started_s: float = 0.0

    @property
    def remaining(self) -> int:
        done = 0 if self.progress is None else self.progress.num_computed
        return len(self.lease.job.token_ids) - done


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A snapshot after each turn. `leased`: prompts that hold blocks. `changed_s`: when a prompt last moved."""

    kv: KvStats
    running: int
    waiting: int
    leased: int
    changed_s: float
    num_steps: int


class PrefillRunner:
    """Takes prompts, computes them in chunks, keeps their blocks until they are released.

    `submit`, `release` and `call` may come from any thread; reports go to the event loop that `start` ran on.
    """

    def __init__(self, engine: ForwardEngine, chunk_tokens: int, clock: Clock, metrics: Metrics) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._metrics = metrics
        self._prompts: dict[Lease, _Prompt] = {}
        self._num_submitted = 0
        self._num_steps = 0
        self._changed_s = clock.now_s()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(self._turn, clock, engine.turns, self._has_work, self._next_deadline_s)
        self.state = self._snapshot()

    def start(self) -> None:
        """Called once, on the event loop that leases live on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self, timeout_s: float) -> bool:
        """Fail what is left and end the thread after the step under way; whether it ended in time."""
        self._thread.post(lambda: self._fail_all(Unavailable("the prefill worker has stopped")))
        return await asyncio.to_thread(self._thread.close, timeout_s)

    def submit(self, lease: Lease) -> None:
        """Queue a prompt; its lease gets a report when its turn comes and after every chunk, or an error."""
        self._thread.post(lambda: self._add(lease))

    def release(self, lease: Lease) -> None:
        """Forget a prompt, in whatever state, and give its blocks back. Idempotent."""
        self._thread.post(lambda: self._remove(lease))

    async def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine thread, behind all that was asked of it before; `state` shows it then.

        Raises what `action` raises.
        """

        def run() -> None:
            try:
                action()
            finally:
                self.state = self._snapshot()

        await self._thread.call(run)

    def stalled_s(self) -> float:
        """See `EngineThread.stalled_s`."""
        return self._thread.stalled_s()

    def _has_work(self) -> bool:
        return any(prompt.remaining for prompt in self._prompts.values())

    def _turn(self) -> bool:
        try:
            self._drop_expired()
            self._admit()
            self.state = self._snapshot()
            self._step()
        except Exception:  # boundary: what cannot be planned ends its prompts, not the worker
            _LOG.exception("a turn of the prefill worker failed; its prompts end with INTERNAL")
            self._fail_all(Internal("the prefill worker failed"))
        self.state = self._snapshot()
        return any(prompt.table and prompt.remaining for prompt in self._prompts.values())

    def _next_deadline_s(self) -> float | None:
        deadlines = [
            prompt.lease.job.deadline_s
            for prompt in self._prompts.values()
            if prompt.lease.job.deadline_s is not None and prompt.remaining
        ]
        return max(0.0, min(deadlines) - self._clock.now_s()) if deadlines else None

    def _add(self, lease: Lease) -> None:
        self._num_submitted += 1
        self._prompts[lease] = _Prompt(lease, self._num_submitted)

    def _remove(self, lease: Lease) -> None:
        prompt = self._prompts.pop(lease, None)
        if prompt is not None and prompt.table is not None:
            self._engine.kv.close(prompt.table)
            self._changed_s = self._clock.now_s()

    def _drop_expired(self) -> None:
        now_s = self._clock.now_s()
        for prompt in list(self._prompts.values()):
            deadline_s = prompt.lease.job.deadline_s
            if prompt.remaining and deadline_s is not None and deadline_s <= now_s:
                self._fail(prompt, DeadlineExceeded("the deadline passed before the prompt was computed"))
                self._remove(prompt.lease)

    def _admit(self) -> None:
        kv = self._engine.kv
        waiting = {prompt.number: prompt for prompt in self._prompts.values() if prompt.table is None}
        views = [
            WaitingView(number, kv.layout.blocks_for(prompt.remaining), prompt.overtaken)
            for number, prompt in waiting.items()
        ]
        for number in self._plan_admission(views, waiting):
            self._open(waiting[number])

    def _plan_admission(self, views: list[WaitingView], waiting: dict[int, _Prompt]) -> tuple[int, ...]:
        stats = self._engine.kv.stats()
        admission = plan_admission(views, stats.free + stats.cached)
        for number in admission.overtaken:
            waiting[number].overtaken += 1
        return admission.admitted

    def _open(self, prompt: _Prompt) -> None:
        """Blocks for the whole prompt at once: a prompt that has begun can always end."""
        kv = self._engine.kv
        job = prompt.lease.job
        num_tokens = len(job.token_ids)
        prompt.table = kv.open(job.hashes, max_tokens=num_tokens - 1)
        num_cached = prompt.table.num_tokens
        kv.reserve(prompt.table, num_tokens)
        slots = kv.slots(prompt.table, 0, num_tokens).cpu()
        prompt.progress = Progress(slots, num_cached, num_cached)
        prompt.started_s = self._changed_s = self._clock.now_s()
        self._metrics.tokens("cached", num_cached)

    def _step(self) -> None:
        running = {p.number: p for p in self._prompts.values() if p.table is not None and p.remaining}
        views = [RunningView(number, prompt.remaining) for number, prompt in running.items()]
        plans = plan_chunks(views, self._chunk_tokens)
        if not plans:
            return
        prompts = [running[plan.key] for plan in plans]
        self._announce(prompts)
        began_s = self._clock.now_s()
        try:
            result = self._engine.step([_rows(p, plan) for p, plan in zip(prompts, plans, strict=True)])
        except Exception:  # boundary: a step that fails ends its prompts, not the worker
            _LOG.exception("prefill step of %d prompts failed", len(prompts))
            for prompt in prompts:
                self._fail(prompt, Internal("the prefill step failed"))
                self._remove(prompt.lease)
            return
        self._num_steps += 1
        self._changed_s = self._clock.now_s()
        num_rows = sum(plan.num_rows for plan in plans)
        self._metrics.step(num_rows, self._changed_s - began_s)
        self._metrics.tokens("prefilled", num_rows)
        for index, (prompt, plan) in enumerate(zip(prompts, plans, strict=True)):
            self._advance(prompt, plan, result, index)

    def _announce(self, prompts: Sequence[_Prompt]) -> None:
        """Whose turn it is for the first time: its receiver makes room while the chunk is computed."""
        for prompt in prompts:
            assert prompt.progress is not None
            if prompt.progress.num_computed == prompt.progress.num_cached:
                self._tell(prompt.lease.report, prompt.progress)

    def _advance(self, prompt: _Prompt, plan: ChunkPlan, result: StepResult, index: int) -> None:
        assert prompt.table is not None
        assert prompt.progress is not None
        num_computed = prompt.progress.num_computed + plan.num_rows
        self._engine.kv.commit(prompt.table, num_computed, keep_reserved=True)
        self._engine.kv.publish(prompt.table, prompt.lease.job.hashes)
        progress = replace(prompt.progress, num_computed=num_computed)
        if num_computed == len(prompt.lease.job.token_ids):
            logits = result.logits[result.logits_start[index]].clone()
            progress = replace(progress, logits=logits, prefill_s=self._changed_s - prompt.started_s)
        prompt.progress = progress
        self._tell(prompt.lease.report, progress)

    def _fail_all(self, error: ServiceError) -> None:
        for prompt in list(self._prompts.values()):
            self._fail(prompt, error)
            self._remove(prompt.lease)
        self.state = self._snapshot()

    def _fail(self, prompt: _Prompt, error: ServiceError) -> None:
        self._tell(prompt.lease.fail, error)

    def _tell(self, method: Callable[..., None], argument: Progress | ServiceError) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(method, argument)
        except RuntimeError:
            _LOG.debug("the event loop has closed before the engine thread")

    def _snapshot(self) -> RunnerState:
        prompts = self._prompts.values()
        leased = [prompt for prompt in prompts if prompt.table is not None]
        return RunnerState(
            kv=self._engine.kv.stats(),
            running=sum(1 for prompt in leased if prompt.remaining),
            waiting=len(prompts) - len(leased),
            leased=len(leased),
            changed_s=self._changed_s,
            num_steps=self._num_steps,
        )


def _rows(prompt: _Prompt, plan: ChunkPlan) -> SequenceStep:
    assert prompt.table is not None
    assert prompt.progress is not None
    start = prompt.progress.num_computed
    end = start + plan.num_rows
    token_ids = prompt.lease.job.token_ids
    last = end == len(token_ids)
    return SequenceStep(prompt.table, start, token_ids[start:end], logit_rows="last" if last else "none")
