"""Asks prompts of several arms in turn, so that every arm sees the same machine and the same prompts."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cluster.cli.bench_stats import BASELINE, Sample
from cluster.cli.prompts import PromptCase
from core.clock import Clock
from core.errors import InvalidArgument
from outrider import AsyncClient, AsyncStream, GenerateOptions, OutriderError

_ARM = re.compile(r"(?P<drafter>[A-Za-z0-9_.@-]+)(:(?P<length>\d+)(x(?P<width>\d+))?)?")

Salting = Literal["arm", "shared", "request"]
"""Who shares cached prefixes: each arm for itself, all arms, or nobody."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared: a drafter, perhaps with a fixed draft."""

    name: str
    drafter: str
    draft_length: int | None = None
    draft_width: int | None = None


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything of a run but the server. `options` hold for every arm."""

    cases: tuple[PromptCase, ...]
    arms: tuple[Arm, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    options: GenerateOptions
    salting: Salting = "arm"

    @property
    def num_requests(self) -> int:
        """Requests of the whole run."""
        return len(self.cases) * len(self.arms) * len(self.concurrencies) * self.rounds


@dataclass(frozen=True, slots=True)
class GroupTime:
    """How long one arm took over one group of prompts asked at once."""

    arm: str
    concurrency: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was measured."""

    samples: tuple[Sample, ...]
    group_times: tuple[GroupTime, ...]


def parse_arms(text: str) -> tuple[Arm, ...]:
    """`none,ngram,ngram:8,ngram:4x2`: drafter, perhaps K, perhaps width. Raises InvalidArgument."""
    arms: list[Arm] = []
    for name in (part.strip() for part in text.split(",")):
        match = _ARM.fullmatch(name)
        if match is None or any(arm.name == name for arm in arms):
            raise InvalidArgument("drafters", f"{name!r} is not a new NAME, NAME:K or NAME:KxWIDTH")
        length, width = match["length"], match["width"]
        arms.append(
            Arm(name, match["drafter"], int(length) if length else None, int(width) if width else None)
        )
    return tuple(arms)


class BenchRun:
    """Runs a plan on one client. `finished` is called after each request."""

    def __init__(
        self, client: AsyncClient, plan: BenchPlan, clock: Clock, finished: Callable[[], None]
    ) -> None:
        self._client = client
        self._plan = plan
        self._clock = clock
        self._finished = finished
        self._nonce = secrets.token_hex(8)
        self._num_asked = 0

    async def run(self) -> Outcome:
        """One unrecorded request an arm, then every group of prompts by every arm in turn."""
        samples: list[Sample] = []
        group_times: list[GroupTime] = []
        for arm in self._plan.arms:
            await self._ask(arm, self._plan.cases[0], "warm-up", (1, 0))
        async for group_samples, group_time in self._groups():
            samples.extend(group_samples)
            group_times.append(group_time)
        return Outcome(tuple(samples), tuple(group_times))

    async def _groups(self) -> AsyncIterator[tuple[list[Sample], GroupTime]]:
        arms = self._plan.arms
        for concurrency in self._plan.concurrencies:
            for round_number in range(self._plan.rounds):
                for number, start in enumerate(range(0, len(self._plan.cases), concurrency)):
                    group = self._plan.cases[start : start + concurrency]
                    first = (number + round_number) % len(arms)
                    for arm in (*arms[first:], *arms[:first]):
                        yield await self._group(arm, group, concurrency, round_number)

    async def _group(
        self, arm: Arm, group: Sequence[PromptCase], concurrency: int, round_number: int
    ) -> tuple[list[Sample], GroupTime]:
        salt = f"{concurrency}-{round_number}"
        started_s = self._clock.now_s()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._counted(arm, case, salt, (concurrency, round_number)))
                for case in group
            ]
        seconds = self._clock.now_s() - started_s
        samples = [task.result() for task in running]
        tokens = sum(len(sample.token_ids) for sample in samples)
        return samples, GroupTime(arm.name, concurrency, tokens, seconds)

    async def _counted(self, arm: Arm, case: PromptCase, salt: str, place: tuple[int, int]) -> Sample:
        sample = await self._ask(arm, case, salt, place)
        self._finished()
        return sample

    async def _ask(self, arm: Arm, case: PromptCase, salt: str, place: tuple[int, int]) -> Sample:
        started_s = self._clock.now_s()
        arrivals: list[tuple[float, int]] = []
        try:
            stream = self._client.stream(case.text, **self._options(arm, case, salt))
            async for delta in stream:
                if delta.token_ids:
                    arrivals.append((self._clock.now_s() - started_s, len(delta.token_ids)))
        except OutriderError as error:
            return _failed(arm, case, place, f"{error.status}: {error.message}")
        return _sample(arm, case, place, (stream, self._clock.now_s() - started_s, arrivals))

    def _options(self, arm: Arm, case: PromptCase, salt: str) -> GenerateOptions:
        self._num_asked += 1
        parts = {"arm": f"{arm.name}-{salt}", "shared": "", "request": str(self._num_asked)}
        options = GenerateOptions(
            drafter=arm.drafter,
            draft_length=0 if arm.drafter == BASELINE else arm.draft_length,
            draft_width=arm.draft_width,
            cache_salt=f"bench-{self._nonce}-{parts[self._plan.salting]}",
        )
        if case.text is None:
            options["messages"] = case.messages
        return {**self._plan.options, **options}


def _sample(
    arm: Arm,
    case: PromptCase,
    place: tuple[int, int],
    seen: tuple[AsyncStream, float, list[tuple[float, int]]],
) -> Sample:
    stream, seconds, arrivals = seen
    result = stream.result
    gaps: list[float] = []
    for (before_s, _), (at_s, tokens) in pairwise(arrivals):
        gaps.extend([(at_s - before_s) / tokens] * tokens)
    speculation = result.speculation
    return Sample(
        arm=arm.name,
        concurrency=place[0],
        round_number=place[1],
        case_id=case.case_id,
        class_name=case.class_name,
        token_ids=result.token_ids,
        seconds=seconds,
        first_token_s=arrivals[0][0] if arrivals else seconds,
        token_gaps_s=tuple(gaps),
        steps=speculation.steps,
        step_tokens=(speculation.acceptance_length or 0.0) * speculation.steps,
        offered=sum(speculation.position_offered),
        accepted=sum(speculation.position_accepted),
    )


def _failed(arm: Arm, case: PromptCase, place: tuple[int, int], error: str) -> Sample:
    return Sample(
        arm=arm.name,
        concurrency=place[0],
        round_number=place[1],
        case_id=case.case_id,
        class_name=case.class_name,
        token_ids=(),
        seconds=0.0,
        first_token_s=0.0,
        token_gaps_s=(),
        steps=0,
        step_tokens=0.0,
        offered=0,
        accepted=0,
        error=error,
    )
