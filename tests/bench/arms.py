"""One arm of a suite: the same prompts under one drafter and one temperature, against a served system."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.trace_collector import CollectedSpan, TraceCollector
from core import telemetry_names as names
from outrider import AsyncClient, OutriderError
from tests.bench.prompts import Prompt

SPANS_TIMEOUT_S = 5.0

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """How the prompts are asked. `drafter` is the served name; `salt` keeps its prefix cache to itself."""

    name: str
    drafter: str
    temperature: float
    draft_length: int | None = None
    draft_width: int | None = None
    concurrency: int = 8
    salt: str = ""
    cold: bool = True
    scripted: bool = False

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.name} t={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt: ids, or the error that it ended with."""

    prompt_id: str
    token_ids: TokenIds
    offered: int = 0
    accepted: int = 0
    attempts: int = 1
    trace_id: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm's answers against the reference, and what moved meanwhile."""

    arm: Arm
    answers: tuple[Answer, ...]
    blocks: int
    seconds: float
    differing_tokens: int = 0
    differing_prompts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens answered."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def offered(self) -> int:
        """Positions offered over all depths."""
        return sum(answer.offered for answer in self.answers)

    @property
    def accepted(self) -> int:
        """Tokens of drafts that were emitted."""
        return sum(answer.accepted for answer in self.answers)

    @property
    def rejected(self) -> int:
        """Offered, but not accepted."""
        return self.offered - self.accepted

    def failures(self) -> list[str]:
        """Why the arm fails; empty where it passed."""
        found = [f"{a.prompt_id}: {a.error}" for a in self.answers if a.error]
        if self.differing_tokens:
            found.append(f"{self.differing_tokens} tokens differ: {', '.join(self.differing_prompts[:8])}")
        if self.arm.cold and self.blocks == 0:
            found.append("no block was handed off")
        if self.arm.drafter != "none" and self.offered == 0:
            found.append("nothing was offered")
        if self.arm.drafter != "none" and not self.arm.scripted:
            found += ["nothing was accepted"] * (self.accepted == 0)
            found += ["nothing was rejected"] * (self.rejected == 0)
        return found


async def ask(client: AsyncClient, prompt: Prompt, arm: Arm, max_tokens: int) -> Answer:
    """One request; an error of the service becomes part of the answer."""
    try:
        result = await client.generate(
            list(prompt.token_ids),
            max_tokens=max_tokens,
            temperature=arm.temperature,
            seed=prompt.seed,
            drafter=arm.drafter,
            draft_length=arm.draft_length,
            draft_width=arm.draft_width,
            cache_salt=arm.salt,
        )
    except OutriderError as error:
        return Answer(prompt.prompt_id, (), error=f"{type(error).__name__}: {error}")
    report = result.speculation
    return Answer(
        prompt_id=prompt.prompt_id,
        token_ids=tuple(result.token_ids),
        offered=sum(report.position_offered),
        accepted=sum(report.position_accepted),
        attempts=result.attempts,
        trace_id=result.trace_id,
    )


async def ask_all(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    arm: Arm,
    max_tokens: int,
    answered: Callable[[int], None],
) -> tuple[Answer, ...]:
    """All prompts, `arm.concurrency` at a time; `answered` is called with the number done so far."""
    places = asyncio.Semaphore(arm.concurrency)
    done = 0

    async def one(prompt: Prompt) -> Answer:
        nonlocal done
        async with places:
            answer = await ask(client, prompt, arm, max_tokens)
        done += 1
        answered(done)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return tuple(task.result() for task in tasks)


def differences(reference: Mapping[str, TokenIds], answers: Sequence[Answer]) -> tuple[int, tuple[str, ...]]:
    """Tokens that are not the reference's, place by place (missing and surplus ones count), and where.

    Failed answers are left out: they fail the arm by themselves.
    """
    total = 0
    prompts: list[str] = []
    for answer in answers:
        expected = reference.get(answer.prompt_id)
        if answer.error or expected is None:
            continue
        common = sum(a != b for a, b in zip(expected, answer.token_ids, strict=False))
        count = common + abs(len(expected) - len(answer.token_ids))
        if count:
            total += count
            prompts.append(answer.prompt_id)
    return total, tuple(prompts)


def handed_off_blocks(collector: TraceCollector, answers: Sequence[Answer]) -> int:
    """KV blocks that decode workers took in for these answers, as the spans of their traces say."""

    def decoded(spans: Sequence[CollectedSpan]) -> bool:
        return any(span.name == names.SPAN_DECODE for span in spans)

    total = 0
    for answer in answers:
        if answer.trace_id:
            for span in collector.wait(answer.trace_id, decoded, SPANS_TIMEOUT_S):
                blocks = span.attributes.get(names.HANDOFF_BLOCKS)
                if span.name == names.SPAN_DECODE and isinstance(blocks, int):
                    total += blocks
    return total
