"""Every drafter of one worker against plain decoding: `python -m tests.bench.every_drafter --prompts FILE`.

batch   all names and `auto` at once in one batch, with mixed sampling parameters: each answer is that of `none`, each
        report names the drafter and K asked for, and over the run every drafter offers and has some accepted; the
        approximate ones among them are marked as such
suite   each drafter as chain and as tree, at temperature 0 and 0.8, one and eight at a time, through one pool, through
        two pools, and resumed in mid-answer

Exit code 1 where a token differs, or a drafter offered nothing or had nothing accepted.

Some heads do not ship; small ones, for `--heads HEADS`, take some ten minutes:

    outrider train eagle --rollouts training/data/rollouts --out HEADS/eagle --tokens 120000 --shallow-share 0.7
    outrider train mtp --rollouts training/data/rollouts --out HEADS/mtp --tokens 120000 --shallow-share 0.7
    outrider train exit --exit-layer 20 --rollouts training/data/rollouts --out HEADS/exit --tokens 60000
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from outrider import AsyncClient, OutriderError
from outrider.results import Result
from tests.bench.full_house import EXACT, TREES, full_house
from tests.bench.prompts import DEFAULT_MODEL, Prompt, model_directory, read_prompts

MIXED: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {260: -5.0, 284: 2.0}, "bad_words": [" and"]},
    {"temperature": 0.8, "regex": "[A-Za-z0-9 ,.'\n-]{4,400}", "stop": ["Outrider"]},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.3, "min_tokens": 20},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
)
MARKED: dict[str, dict[str, str]] = {
    "bild": {"drafter": "bild"},
    "cascade": {"drafter": "cascade"},
    "typical": {"drafter": "eagle3", "verification": "typical"},
}
"""What may say something else, where a request allows it."""
TEMPERATURES = (0.0, 0.8)
TOPOLOGIES = ("one pool", "two pools", "resumed")
DRAFT_LENGTH = 4
LAYERSKIP_LENGTH = 2
console = Console(highlight=False, width=160)


@dataclass(slots=True)
class Tally:
    """What became of one drafter's answers."""

    answers: int = 0
    differing: int = 0
    offered: int = 0
    accepted: int = 0
    approximate: bool = False
    notes: list[str] = field(default_factory=list)

    def take(self, result: Result, wanted: Sequence[int], asked: str, length: int | None) -> None:
        """An answer against what plain decoding said, of an approximate drafter just whether it is marked."""
        report = result.speculation
        self.answers += 1
        if result.approximate is not self.approximate:
            self.notes.append(f"approximate is {result.approximate}")
        if not self.approximate:
            ids = tuple(result.token_ids)
            common = sum(ours != theirs for ours, theirs in zip(ids, wanted, strict=False))
            self.differing += common + abs(len(ids) - len(wanted))
        self.offered += sum(report.position_offered)
        self.accepted += sum(report.position_accepted)
        if asked != "auto" and report.drafter != asked:
            self.notes.append(f"asked for {asked}, reported {report.drafter}")
        if report.draft_length_requested != length:
            self.notes.append(f"K {length} asked for, reported {report.draft_length_requested}")
        if report.fallback_reason:
            self.notes.append(f"fell back: {report.fallback_reason}")

    def failures(self) -> list[str]:
        """Why it fails; empty: it does not."""
        found = [f"{self.differing} tokens differ"] * bool(self.differing) + self.notes[:3]
        found += ["nothing was offered"] * (self.offered == 0)
        return found + ["nothing was accepted"] * (self.accepted == 0)

    def line(self) -> str:
        """What is printed."""
        failures = "; ".join(self.failures())
        good = "marked" if self.approximate else "exact"
        verdict = f"[red]{failures}[/red]" if failures else f"[green]{good}[/green]"
        return f"{self.answers} answers, {self.offered} offered, {self.accepted} accepted: {verdict}"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    prompts: Path
    heads: Path | None
    limit: int
    max_tokens: int
    parts: tuple[str, ...]
    report: Path | None


@dataclass(frozen=True, slots=True)
class Arm:
    """One cell of the suite."""

    drafter: str
    width: int | None
    temperature: float
    concurrency: int
    topology: str

    @property
    def label(self) -> str:
        """What is printed."""
        shape = "tree" if self.width else "chain"
        return f"{self.drafter} {shape} t={self.temperature:g} x{self.concurrency} {self.topology}"


async def ask(client: AsyncClient, prompt: Prompt, max_tokens: int, **options: object) -> Result:
    """One request with the prompt's own seed."""
    given: Any = options
    return await client.generate(list(prompt.token_ids), max_tokens=max_tokens, seed=prompt.seed, **given)


def length_of(drafter: str) -> int:
    """K that is asked for."""
    return LAYERSKIP_LENGTH if drafter in ("layerskip", "lookahead") else DRAFT_LENGTH


async def one_batch(client: AsyncClient, prompts: Sequence[Prompt], options: Options) -> dict[str, Tally]:
    """Everything at once. The cache drafts from answers that it has seen: it is shown each one before."""
    plain: dict[tuple[str, int], Result] = {}
    for prompt in prompts:
        for number, sampling in enumerate(MIXED):
            plain[prompt.prompt_id, number] = await ask(
                client, prompt, options.max_tokens, drafter="none", **sampling
            )
    tallies: dict[str, Tally] = {}
    order = (*EXACT, "auto")
    for place, prompt in enumerate(prompts):
        number = (place + order.index("cache")) % len(MIXED)
        await ask(client, prompt, options.max_tokens, drafter="cache", **MIXED[number])

    async def one(prompt: Prompt, number: int, drafter: str) -> None:
        length = None if drafter == "auto" else length_of(drafter)
        result = await ask(
            client, prompt, options.max_tokens, drafter=drafter, draft_length=length, **MIXED[number]
        )
        wanted = plain[prompt.prompt_id, number]
        tally = tallies.setdefault(drafter, Tally())
        tally.take(result, wanted.token_ids, drafter, length)
        if result.choices[0].logprobs != wanted.choices[0].logprobs:
            tally.notes.append("log-probabilities differ")

    async def marked(prompt: Prompt, name: str) -> None:
        given: Any = MARKED[name]
        result = await ask(
            client, prompt, options.max_tokens, allow_approximate=True, draft_length=DRAFT_LENGTH, **given
        )
        tally = tallies.setdefault(name, Tally(approximate=True))
        tally.take(result, (), given["drafter"], DRAFT_LENGTH)

    async with asyncio.TaskGroup() as group:
        for place, prompt in enumerate(prompts):
            for index, drafter in enumerate(order):
                group.create_task(one(prompt, (place + index) % len(MIXED), drafter))
            for name in MARKED:
                group.create_task(marked(prompt, name))
    return tallies


def arms(topology: str) -> Iterator[Arm]:
    """The cells of one topology."""
    for drafter in EXACT:
        for width in (None, 3) if drafter in TREES else (None,):
            for temperature in TEMPERATURES:
                for concurrency in (1, 8):
                    yield Arm(drafter, width, temperature, concurrency, topology)


async def run_arm(
    client: AsyncClient,
    arm: Arm,
    prompts: Sequence[Prompt],
    plain: dict[tuple[str, float], tuple[int, ...]],
    max_tokens: int,
) -> Tally:
    """One cell. A resumed answer is sent its first half; the cache is shown every answer before."""
    tally = Tally()
    places = asyncio.Semaphore(arm.concurrency)
    if arm.drafter == "cache":
        for prompt in {prompt.prompt_id: prompt for prompt in prompts}.values():
            await ask(
                client,
                prompt,
                max_tokens,
                temperature=arm.temperature,
                drafter="cache",
                cache_salt=arm.label,
            )

    async def one(prompt: Prompt) -> None:
        wanted = plain[prompt.prompt_id, arm.temperature]
        begun = wanted[: len(wanted) // 2] if arm.topology == "resumed" else None
        async with places:
            result = await ask(
                client,
                prompt,
                max_tokens,
                temperature=arm.temperature,
                drafter=arm.drafter,
                draft_length=length_of(arm.drafter),
                draft_width=arm.width or 1 if arm.drafter in TREES else None,
                resume_token_ids=begun,
                cache_salt=arm.label,
            )
        said = wanted if begun is None else wanted[len(begun) :]
        tally.take(
            result,
            said if len(result.token_ids) == len(said) else wanted,
            arm.drafter,
            length_of(arm.drafter),
        )

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    return tally


async def run_suite(
    client: AsyncClient, topologies: Sequence[str], prompts: Sequence[Prompt], options: Options
) -> dict[str, Tally]:
    """All cells of these topologies on one deployment, with few prompts several answers of each at once."""
    plain: dict[tuple[str, float], tuple[int, ...]] = {}
    for prompt in prompts:
        for temperature in TEMPERATURES:
            result = await ask(client, prompt, options.max_tokens, drafter="none", temperature=temperature)
            plain[prompt.prompt_id, temperature] = tuple(result.token_ids)
    tallies: dict[str, Tally] = {}
    for topology in topologies:
        for arm in arms(topology):
            rounds = -(-arm.concurrency // len(prompts))
            asked = [*prompts] * rounds if arm.concurrency > 1 else prompts[: max(1, len(prompts) // 4)]
            tally = await run_arm(client, arm, asked, plain, options.max_tokens)
            tallies[arm.label] = tally
            if tally.differing or tally.notes:
                console.print(f"{arm.label}: {tally.line()}")
        console.print(f"{topology}: {sum(t.answers for t in tallies.values())} answers so far", style="dim")
    return tallies


def over_drafters(tallies: dict[str, Tally]) -> dict[str, Tally]:
    """Cells added up by drafter: one cell may well accept nothing."""
    sums: dict[str, Tally] = {}
    for label, tally in tallies.items():
        total = sums.setdefault(label.split()[0], Tally())
        total.answers += tally.answers
        total.differing += tally.differing
        total.offered += tally.offered
        total.accepted += tally.accepted
        total.notes += tally.notes
    return sums


def report_of(tallies: dict[str, Tally]) -> dict[str, object]:
    """As JSON."""
    return {
        name: {
            "answers": tally.answers,
            "differing": tally.differing,
            "offered": tally.offered,
            "accepted": tally.accepted,
            "failures": tally.failures(),
        }
        for name, tally in tallies.items()
    }


def run(options: Options, work: Path) -> dict[str, dict[str, Tally]]:
    """The parts, each on deployments of its own."""
    model = model_directory()
    prompts = read_prompts(options.prompts, Tokenizer.from_directory(model), options.limit)
    config = ("--config", str(full_house(work, model, options.heads)))
    found: dict[str, dict[str, Tally]] = {}

    async def on(cluster: LocalCluster, topologies: Sequence[str]) -> None:
        async with AsyncClient(cluster.address, timeout_s=600.0) as client:
            if "batch" in options.parts and "two pools" in topologies:
                found["batch"] = await one_batch(client, prompts, options)
            if "suite" in options.parts:
                found.setdefault("suite", {}).update(await run_suite(client, topologies, prompts, options))

    with LocalCluster(model=DEFAULT_MODEL, arguments=config, log_path=work / "two.log") as cluster:
        asyncio.run(on(cluster, ("two pools", "resumed")))
    if "suite" in options.parts:
        with LocalCluster(
            model=DEFAULT_MODEL, prefill=0, arguments=config, log_path=work / "one.log"
        ) as cluster:
            asyncio.run(on(cluster, ("one pool",)))
    return found


def parse(arguments: Sequence[str]) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.every_drafter", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines of {"id", "class", "turns"}')
    parser.add_argument(
        "--heads", type=Path, default=None, help="artifacts by kind, for heads that do not ship"
    )
    parser.add_argument("--limit", type=int, default=12, help="prompts taken, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--parts", default="batch,suite")
    parser.add_argument("--report", type=Path, default=None, help="where a JSON report goes")
    values = vars(parser.parse_args(arguments))
    return Options(**{**values, "parts": tuple(values["parts"].split(","))})


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; 0 where every answer is plain decoding's and every drafter was of use."""
    options = parse(arguments)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-drafters-") as work:
        try:
            found = run(options, Path(work))
        except OutriderError as error:
            console.print(f"[red]{type(error).__name__}: {error}[/red]")
            return 1
    failed = 0
    for part, tallies in found.items():
        console.print(f"[bold]{part}[/bold]")
        for name, tally in (over_drafters(tallies) if part == "suite" else tallies).items():
            console.print(f"  {name}: {tally.line()}")
            failed += bool(tally.failures())
    if options.report is not None:
        options.report.write_text(json.dumps({part: report_of(t) for part, t in found.items()}, indent=1))
    differing = sum(tally.differing for tallies in found.values() for tally in tallies.values())
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"{differing} tokens differ, {failed} drafters failed, {minutes:.1f} minutes")
    return 1 if failed or differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
