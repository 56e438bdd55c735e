"""Exactness: every drafter answers with the tokens of plain decoding, through faults too. One command:

    python -m tests.bench.exactness --prompts FILE [--limit N]

(a) all prompts (arbitrary trees: some) under every arm at temperature 0 and 0.8, 8 at a time and the two temperatures
side by side, one prefill and one decode worker;
(b) some of them one at a time; (c) some while the prefill worker is killed and comes back; (d) some while
one of two decode workers is killed. The first arms are `none`: the reference. Every arm has a cache salt of
its own, so that every prompt is handed off; one arm is repeated warm. Exit code 1 where any arm fails.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.local import LocalCluster
from cluster.trace_collector import TraceCollector
from core.prefix_hash import prompt_digest
from core.tokenizer import Tokenizer
from engine.truncate import truncate_model
from outrider import AsyncClient
from outrider.v1 import admin_pb2
from tests.bench.arms import Arm, ArmResult, TokenIds, ask_all, differences, handed_off_blocks
from tests.bench.prompts import DEFAULT_MODEL, Prompt, model_directory, read_prompts

TEMPERATURES = (0.0, 0.8)
DRAFT_LAYERS = 24
ONE_AT_A_TIME = 24
TREE_PROMPTS = 50
"""Arbitrary trees are an extra arm beside the drafters' own: some prompts are enough for it."""
PREFILL_FAULT = 100
DECODE_FAULT = 50
SPECULATING = (
    Arm("ngram chain", "ngram", 0.0, draft_length=8, draft_width=1),
    Arm("ngram tree", "ngram", 0.0, draft_length=6, draft_width=3),
    Arm("scripted-wrong", "scripted-wrong", 0.0, draft_length=6, scripted=True),
    Arm("scripted-right", "scripted-right", 0.0, draft_length=7, scripted=True),
    Arm("scripted-tree", "scripted-tree", 0.0, draft_length=5, draft_width=3, scripted=True),
    Arm("draft_model", "draft_model", 0.0, draft_length=3),
)
console = Console()

Interference = Callable[[int], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    prompts: Path
    limit: int
    max_tokens: int
    report: Path | None
    log: Path


class Suite:
    """Runs arms and keeps their results; `reference` is filled by the `none` arms."""

    def __init__(
        self, options: Options, prompts: list[Prompt], script: Path, collector: TraceCollector
    ) -> None:
        self.options = options
        self.collector = collector
        self.prompts = prompts
        self.script = script
        self.reference: dict[float, dict[str, TokenIds]] = {}
        self.results: list[ArmResult] = []

    async def run(self, cluster: LocalCluster, arm: Arm, prompts: Sequence[Prompt]) -> ArmResult:
        """One arm without interference; it must differ nowhere."""

        async def leave_alone(done: int) -> None:
            return None

        return await self.run_under(cluster, arm, prompts, leave_alone)

    async def run_under(
        self, cluster: LocalCluster, arm: Arm, prompts: Sequence[Prompt], interfere: Interference
    ) -> ArmResult:
        """One arm; `interfere` is awaited after every answer with the number of answers so far."""
        started_s = time.monotonic()
        async with AsyncClient(cluster.address) as client, asyncio.TaskGroup() as group:

            def answered(done: int) -> None:
                if done % 25 == 0:
                    console.print(f"  {arm.label}: {done}/{len(prompts)}", style="dim", highlight=False)
                group.create_task(interfere(done))

            answers = await ask_all(client, prompts, arm, self.options.max_tokens, answered)
        seconds = time.monotonic() - started_s
        blocks = await asyncio.to_thread(handed_off_blocks, self.collector, answers)
        reference = self.reference.get(arm.temperature)
        total, where = differences(reference, answers) if reference is not None else (0, ())
        result = ArmResult(arm, answers, blocks, seconds, total, where)
        self.keep(result)
        return result

    def keep(self, result: ArmResult) -> None:
        """Adds a result and says how it went."""
        self.results.append(result)
        failures = result.failures()
        style = "red" if failures else "green"
        verdict = "; ".join(failures[:4]) if failures else "exact"
        console.print(f"{result.arm.label}: {verdict} ({result.seconds:.0f} s)", style=style, highlight=False)

    async def references(self, cluster: LocalCluster) -> None:
        """The `none` arms; what they say is what every other arm must say, and what the script holds."""
        arms = [Arm("none", "none", temperature, salt=f"none-{temperature}") for temperature in TEMPERATURES]
        for result in await asyncio.gather(*(self.run(cluster, arm, self.prompts) for arm in arms)):
            told = {answer.prompt_id: answer.token_ids for answer in result.answers if not answer.error}
            self.reference[result.arm.temperature] = told
        write_script(self.script, self.prompts, self.reference)


async def workers_of(cluster: LocalCluster) -> tuple[admin_pb2.WorkerStatus, ...]:
    """The workers' statuses, asked without holding the loop up."""
    return await asyncio.to_thread(cluster.workers)


def write_script(path: Path, prompts: Sequence[Prompt], reference: dict[float, dict[str, TokenIds]]) -> None:
    """What the scripted drafters read: the recorded answer of each (prompt, seed, temperature)."""
    lines = [
        json.dumps(
            {
                "prompt_digest": prompt_digest(prompt.token_ids).hex(),
                "seed": prompt.seed,
                "temperature": temperature,
                "answer": list(answers[prompt.prompt_id]),
            }
        )
        for temperature, answers in reference.items()
        for prompt in prompts
        if prompt.prompt_id in answers
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


async def eight_at_a_time(suite: Suite, cluster: LocalCluster) -> None:
    """Part (a), and one arm again with a warm cache."""
    for arm in SPECULATING:
        prompts = spread(suite.prompts, TREE_PROMPTS) if arm.name == "scripted-tree" else suite.prompts
        both = [
            replace(arm, temperature=temperature, salt=f"{arm.name}-{temperature}")
            for temperature in TEMPERATURES
        ]
        await asyncio.gather(*(suite.run(cluster, served, prompts) for served in both))
    chain = SPECULATING[0]
    warm = replace(chain, name="ngram chain, warm", salt=f"{chain.name}-0.0", cold=False)
    await suite.run(cluster, warm, suite.prompts)


async def one_at_a_time(suite: Suite, cluster: LocalCluster) -> None:
    """Part (b)."""
    few = spread(suite.prompts, ONE_AT_A_TIME)
    for arm in SPECULATING:
        for temperature in TEMPERATURES:
            alone = replace(
                arm,
                name=f"{arm.name}, alone",
                temperature=temperature,
                concurrency=1,
                salt=f"alone-{arm.name}-{temperature}",
            )
            await suite.run(cluster, alone, few)


async def prefill_worker_dies(suite: Suite, cluster: LocalCluster) -> None:
    """Part (c): killed after a fifth of the answers; must be back, and used again, before the last fifth."""
    prompts = spread(suite.prompts, PREFILL_FAULT)
    killed: list[str] = []

    async def kill_once(done: int) -> None:
        if done == max(1, len(prompts) // 5):
            killed.append(await asyncio.to_thread(cluster.kill, "prefill", 0))

    arm = replace(SPECULATING[1], name="ngram tree, prefill killed", temperature=0.8, salt="prefill-killed")
    await suite.run_under(cluster, arm, prompts, kill_once)
    notes = [] if killed else ["the prefill worker was never killed"]
    if killed:
        await asyncio.to_thread(cluster.wait_for_restart, "prefill", 0, killed[0])
        console.print(f"  prefill-0 was killed (epoch {killed[0][:8]}) and is back", style="dim")
    after = replace(arm, name="ngram tree, prefill back", salt="prefill-back")
    await suite.run(cluster, after, prompts[: len(prompts) // 5])
    fail_with(suite, -2, notes)


async def decode_worker_dies(suite: Suite, cluster: LocalCluster) -> None:
    """Part (d): the busier of two decode workers is killed; its requests go on elsewhere."""
    prompts = spread(suite.prompts, DECODE_FAULT)
    killed: list[str] = []

    async def kill_once(done: int) -> None:
        if done == max(1, len(prompts) // 5):
            statuses = [w for w in await workers_of(cluster) if w.role == "decode"]
            busiest = max(statuses, key=lambda worker: worker.running)
            index = int(busiest.worker_id.rsplit("-", 1)[1])
            killed.append(await asyncio.to_thread(cluster.kill, "decode", index))

    arm = replace(SPECULATING[1], name="ngram tree, decode killed", temperature=0.8, salt="decode-killed")
    result = await suite.run_under(cluster, arm, prompts, kill_once)
    resumed = sum(answer.attempts > 1 for answer in result.answers)
    console.print(f"  {resumed} requests went on on another decode worker", style="dim")
    notes = [] if killed else ["no decode worker was killed"]
    fail_with(suite, -1, notes + ([] if resumed else ["no request was resumed: the fault hit nothing"]))


def fail_with(suite: Suite, index: int, notes: Sequence[str]) -> None:
    """Adds reasons of failure to a result that is there already."""
    suite.results[index] = replace(suite.results[index], notes=tuple(notes))


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, evenly over the list; all where there are fewer."""
    number = min(count, len(prompts))
    return [prompts[index * len(prompts) // number] for index in range(number)]


async def run_suite(options: Options, work: Path, collector: TraceCollector) -> Suite:
    """All parts, on two deployments one after the other."""
    model = model_directory()
    draft = truncate_model(model, DRAFT_LAYERS, work / "draft")
    prompts = read_prompts(options.prompts, Tokenizer.from_directory(model), options.limit)
    console.print(f"{len(prompts)} prompts, {options.max_tokens} tokens each", highlight=False)
    suite = Suite(options, prompts, work / "script.jsonl", collector)
    suite.script.write_text("")
    settings = {
        "telemetry.otlp_endpoint": collector.endpoint,
        "decode_worker.drafters.draft_model.model": str(draft),
        "decode_worker.drafters.scripted.script": str(suite.script),
    }
    with LocalCluster(model=DEFAULT_MODEL, settings=settings, log_path=options.log) as cluster:
        await suite.references(cluster)
        await eight_at_a_time(suite, cluster)
        await one_at_a_time(suite, cluster)
        await prefill_worker_dies(suite, cluster)
    with LocalCluster(model=DEFAULT_MODEL, settings=settings, decode=2, log_path=options.log) as cluster:
        await decode_worker_dies(suite, cluster)
    return suite


def print_table(results: Sequence[ArmResult]) -> None:
    """One line an arm."""
    table = Table(title="Exactness against `none`")
    for heading in ("arm", "at a time", "requests", "tokens", "blocks", "offered", "accepted", "rejected"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    table.add_column("differing", justify="right")
    table.add_column("verdict")
    for result in results:
        counts = (len(result.answers), result.tokens, result.blocks, result.offered, result.accepted)
        verdict = "FAILED" if failures_of(result) else "exact"
        table.add_row(
            *(result.arm.label, str(result.arm.concurrency), *map(str, counts)),
            *(str(result.rejected), str(result.differing_tokens), verdict),
        )
    Console(width=150).print(table)


def failures_of(result: ArmResult) -> list[str]:
    """An arm's own failures and what was noted beside it."""
    return [*result.failures(), *result.notes]


def as_record(result: ArmResult) -> dict[str, object]:
    """An arm as JSON."""
    return {
        "arm": result.arm.label,
        "at_a_time": result.arm.concurrency,
        "requests": len(result.answers),
        "tokens": result.tokens,
        "blocks_handed_off": result.blocks,
        "offered": result.offered,
        "accepted": result.accepted,
        "rejected": result.rejected,
        "differing_tokens": result.differing_tokens,
        "seconds": round(result.seconds, 1),
        "failures": failures_of(result),
    }


def parse(arguments: Sequence[str]) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.exactness", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines of {"id", "class", "turns"}')
    parser.add_argument("--limit", type=int, default=200, help="prompts taken, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--report", type=Path, default=None, help="where a JSON report goes")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "outrider-exactness.log")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str]) -> int:
    """Runs the suite; 0 where every arm is exact."""
    options = parse(arguments)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-exactness-") as work, TraceCollector() as collector:
        suite = asyncio.run(run_suite(options, Path(work), collector))
    print_table(suite.results)
    failed = [result for result in suite.results if failures_of(result)]
    for result in failed:
        for failure in failures_of(result)[:8]:
            console.print(f"{result.arm.label}: {failure}", style="red", highlight=False)
    if options.report is not None:
        options.report.write_text(json.dumps([as_record(result) for result in suite.results], indent=1))
    minutes = (time.monotonic() - started_s) / 60
    differing = sum(result.differing_tokens for result in suite.results)
    arms = len(suite.results)
    console.print(f"{differing} tokens differ, {len(failed)} of {arms} arms failed, {minutes:.1f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
