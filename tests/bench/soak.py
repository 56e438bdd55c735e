"""Soak: `python -m tests.bench.soak`. Streams under cancellations, killed clients and killed workers.

Three rounds of 200 streams each against two prefill and two decode workers. In each round 50 streams are left by
their client, 20 client processes are killed with signal 9, and one prefill and one decode worker are killed.
Every stream must end once, with the text of plain decoding or a mapped status; afterwards blocks, leases and
tasks must be back where they were, and after the last round resident memory within 5 %.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from cluster.local import LocalCluster
from core.errors import DeadlineExceeded
from core.records import WorkerRole
from core.tokenizer import Tokenizer
from outrider import AsyncClient, GenerateOptions, OutriderError
from tests.bench.arms import TokenIds
from tests.bench.prompts import (
    DEFAULT_MODEL,
    OWN_CODE_EDITS,
    OWN_PROMPTS,
    Prompt,
    model_directory,
    read_prompts,
)
from tests.support.held import NOTHING, Held, held, wait_until_nothing_is_held

STREAMS, CANCELLED, KILLED_CLIENTS = 200, 50, 20
DRAFTERS = ("none", "ngram", "auto")
MAX_TOKENS = 48
MEMORY_GROWTH = 0.05
SETTLE_TIMEOUT_S = 60.0
REFERENCE_AT_ONCE = 16
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One stream of a round."""

    number: int
    prompt: Prompt
    temperature: float
    drafter: str
    leave_after: int | None = None

    @property
    def key(self) -> tuple[str, float]:
        """What its answer depends on."""
        return self.prompt.prompt_id, self.temperature


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stream ended: `right`, `left` (cancelled, what came was right), `wrong`, or a status."""

    outcome: str
    attempts: int = 1


class Soak:
    """One deployment and the answers that it must give."""

    def __init__(self, cluster: LocalCluster, prompts: Sequence[Prompt]) -> None:
        self._cluster = cluster
        self._prompts = prompts
        self._answers: dict[tuple[str, float], TokenIds] = {}
        self.faults: list[str] = []

    def requests(self, round_number: int) -> list[Request]:
        """The streams of one round; the first ones are those that are left, at different places."""
        prompts = itertools.islice(itertools.cycle(self._prompts), round_number, round_number + STREAMS)
        return [
            Request(
                number=number,
                prompt=prompt,
                temperature=(0.0, 0.8)[number % 2],
                drafter=DRAFTERS[number % len(DRAFTERS)],
                leave_after=number % 12 if number % (STREAMS // CANCELLED) == 0 else None,
            )
            for number, prompt in enumerate(prompts)
        ]

    async def learn_answers(self) -> None:
        """Plain decoding's answers to everything that will be asked."""
        wanted = {r.key: r for number in range(1, 4) for r in self.requests(number)}
        places = asyncio.Semaphore(REFERENCE_AT_ONCE)
        async with AsyncClient(self._cluster.address) as client:

            async def one(request: Request) -> None:
                async with places:
                    plain = replace(request, drafter="none", leave_after=None)
                    stream = client.stream(list(plain.prompt.token_ids), **_options(plain))
                    async for _ in stream:
                        pass
                self._answers[request.key] = stream.result.token_ids

            async with asyncio.TaskGroup() as group:
                for request in wanted.values():
                    group.create_task(one(request))
        console.print(f"learnt {len(self._answers)} answers from plain decoding")

    async def round(self, number: int) -> Counter[str]:
        """One round; the outcomes by name."""
        requests = self.requests(number)
        in_processes = [r for r in requests if r.leave_after is None][:KILLED_CLIENTS]
        here = [request for request in requests if request not in in_processes]
        ended: list[Ended] = []
        async with AsyncClient(self._cluster.address) as client, asyncio.TaskGroup() as group:

            async def one(request: Request) -> None:
                ended.append(await self._stream(client, request))
                if len(ended) == len(here) // 4:
                    group.create_task(self._kill("prefill", number % 2))
                if len(ended) == len(here) // 2:
                    group.create_task(self._kill("decode", number % 2))

            for request in here:
                group.create_task(one(request))
            for request in in_processes:
                group.create_task(self._killed_client(request))
        resumed = sum(one.attempts > 1 for one in ended)
        console.print(f"  round {number}: {resumed} streams went on after their decode worker was killed")
        return Counter(one.outcome for one in ended)

    async def _stream(self, client: AsyncClient, request: Request) -> Ended:
        expected = self._answers[request.key]
        token_ids: list[int] = []
        stream = client.stream(list(request.prompt.token_ids), **_options(request))
        try:
            if request.leave_after == 0:
                await stream.aclose()
                return Ended("left")
            async for delta in stream:
                token_ids += delta.token_ids
                if request.leave_after is not None and len(token_ids) >= request.leave_after:
                    break
            else:
                right = tuple(token_ids) == expected == stream.result.token_ids
                return Ended("right" if right else "wrong", stream.result.attempts)
        except OutriderError as error:
            right = tuple(token_ids) == expected[: len(token_ids)]
            return Ended(error.status if right else "wrong")
        await stream.aclose()
        return Ended("left" if tuple(token_ids) == expected[: len(token_ids)] else "wrong")

    async def _killed_client(self, request: Request) -> None:
        """A client in a process of its own, killed with signal 9 once it streams."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.soak_client", self._cluster.address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        options = {"prompt": list(request.prompt.token_ids), **_options(request), "max_tokens": 400}
        process.stdin.write(json.dumps(options).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if line.strip() != b"streaming":
            self.faults.append(f"client {request.number} never streamed")
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _kill(self, role: WorkerRole, index: int) -> None:
        epoch = await asyncio.to_thread(self._cluster.kill, role, index)
        await asyncio.to_thread(self._cluster.wait_for_restart, role, index, epoch)
        console.print(f"  {role}-{index} was killed and is back", style="dim")

    def settle(self) -> Held:
        """Waits until nothing is held any more, or long enough; what is held then."""
        with contextlib.suppress(DeadlineExceeded):
            wait_until_nothing_is_held(self._cluster, SETTLE_TIMEOUT_S)
        return held(self._cluster)

    def resident_bytes(self) -> int:
        """Proportional memory of the whole deployment."""
        return sum(process.memory_full_info().pss for process in self._cluster.processes())


def _options(request: Request) -> GenerateOptions:
    return {
        "max_tokens": MAX_TOKENS,
        "temperature": request.temperature,
        "seed": request.prompt.seed,
        "drafter": request.drafter,
    }


def run(cluster: LocalCluster, rounds: int, prompts: Sequence[Prompt]) -> list[str]:
    """All rounds; the failures."""
    soak = Soak(cluster, prompts)
    failures: list[str] = []
    asyncio.run(soak.learn_answers())
    still = soak.settle()
    failures += [f"before the first round: still held: {still}"] * (still != NOTHING)
    before = soak.resident_bytes()
    console.print(f"at the start: {before / 2**20:.0f} MiB")
    for number in range(1, rounds + 1):
        outcomes = asyncio.run(soak.round(number))
        still = soak.settle()
        now = soak.resident_bytes()
        console.print(f"round {number}: {dict(outcomes)}, {still}, {now / 2**20:.0f} MiB")
        expected = STREAMS - KILLED_CLIENTS
        failures += [f"round {number}: {outcomes['wrong']} wrong"] * (outcomes["wrong"] > 0)
        failures += [f"round {number}: {outcomes.total()} ends"] * (outcomes.total() != expected)
        failures += [f"round {number}: INTERNAL"] * (outcomes["INTERNAL"] + outcomes["UNKNOWN"] > 0)
        failures += [f"round {number}: still held: {still}"] * (still != NOTHING)
    growth = soak.resident_bytes() / before - 1
    console.print(f"memory {growth:+.1%} against the start")
    failures += [f"memory grew by {growth:.1%}"] * (growth > MEMORY_GROWTH)
    return failures + soak.faults


def main(arguments: Sequence[str]) -> int:
    """Runs the soak; 0 where every round held."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "outrider-soak.log")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_directory(model_directory())
    prompts = read_prompts(OWN_PROMPTS, tokenizer) + read_prompts(OWN_CODE_EDITS, tokenizer)
    with LocalCluster(model=DEFAULT_MODEL, prefill=2, decode=2, log_path=options.log) as cluster:
        failures = run(cluster, options.rounds, prompts)
    for failure in failures:
        console.print(failure, style="red")
    console.print("failed" if failures else "passed", style="red" if failures else "green")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
