"""Every drafter on every class of prompts: `python -m tests.bench.drafter_table --prompts FILE [--heads FOLDER]`.

For each pair: conditional acceptance by position, acceptance length, speed against plain decoding (median over prompts
of the ratio of tokens a second after the first ones, with its lower 95 % bound), mean K (for `auto` what the controller
chose). For each drafter: what a proposal takes, against a target step. Answers are greedy, one request at a time; arms
are interleaved prompt by prompt, in another order every round; every answer must be plain decoding's, or the exit code
is 1.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from outrider import Client
from outrider.results import Speculation
from tests.bench.full_house import APPROXIMATE, full_house
from tests.bench.prompts import (
    DEFAULT_MODEL,
    OWN_PROMPTS,
    Prompt,
    by_class,
    few_of_each,
    model_directory,
    read_prompts,
)
from tests.bench.ratios import median_ratio, paired_median, rotated
from tests.bench.timed import SHORTEST_ANSWER, timed

PLAIN = "none"
AUTO = "auto"
ALL_CLASSES = "all"
_SHARES = {"of_a_step": "of a step", "depth_of_a_step": "of a step a depth"}
console = Console(highlight=False, width=200)


@dataclass(slots=True)
class Cell:
    """One drafter on one class. `ratios`: one of each prompt, median over rounds.

    `taken`: answers by the drafter that drafted them, which `auto` chose. `levels`: the sum of K by that drafter.
    """

    steps: int = 0
    step_tokens: float = 0.0
    nodes: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)

    def add(self, report: Speculation) -> None:
        """One answer."""
        self.steps += report.steps
        self.step_tokens += (report.acceptance_length or 0.0) * report.steps
        self.taken[report.drafter] += 1
        self.levels[report.drafter] += round((report.draft_length_mean or 0.0) * report.steps)
        self.nodes += report.proposed_nodes
        for mine, theirs in (
            (self.offered, report.position_offered),
            (self.accepted, report.position_accepted),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count

    def row(self) -> dict[str, object]:
        """What is printed and reported."""
        rates: list[float | None] = []
        before = self.offered[0] if self.offered else 0
        for depth, accepted in enumerate(self.accepted):
            tried = min(before, self.offered[depth])
            rates.append(round(accepted / tried, 3) if tried else None)
            before = accepted
        speed = median_ratio(self.ratios) if self.ratios else None
        return {
            "acceptance_length": round(self.step_tokens / self.steps, 3) if self.steps else None,
            "rates": rates,
            "draft_length_mean": round(self.levels.total() / self.steps, 2) if self.steps else None,
            "nodes_a_step": round(self.nodes / self.steps, 2) if self.steps else None,
            "speed": round(speed.median, 3) if speed else None,
            "speed_bound": round(speed.lower_bound, 3) if speed and speed.lower_bound is not None else None,
            "prompts": len(self.ratios),
            "taken": dict(self.taken),
        }


def measure(
    client: Client, prompts: Sequence[Prompt], drafters: Sequence[str], rounds: int, max_tokens: int
) -> tuple[dict[tuple[str, str], Cell], int]:
    """Cells by (drafter, class), and how many answers were not plain decoding's."""
    cells: dict[tuple[str, str], Cell] = {}
    wrong = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("answers", total=len(prompts) * len(drafters) * rounds)
        for place, prompt in enumerate(prompts):
            rates: dict[str, list[float]] = {}
            texts: dict[str, tuple[int, ...]] = {}
            for number in range(rounds):
                for drafter in rotated(drafters, number + place):
                    answer = timed(client, prompt, drafter, max_tokens, "table")
                    texts[drafter] = answer.token_ids
                    if answer.tokens >= SHORTEST_ANSWER:
                        rates.setdefault(drafter, []).append(answer.rate)
                    for name in (prompt.prompt_class, ALL_CLASSES):
                        cells.setdefault((drafter, name), Cell()).add(answer.speculation)
                    progress.advance(task)
            wrong += sum(text != texts[PLAIN] for text in texts.values())
            for drafter in drafters:
                if drafter in rates:
                    ratio = paired_median(rates[drafter], rates[PLAIN])
                    for name in (prompt.prompt_class, ALL_CLASSES):
                        cells[drafter, name].ratios.append(ratio)
    return cells, wrong


def learn(client: Client, prompts: Sequence[Prompt], answers: int, max_tokens: int) -> Cell:
    """Lets `auto` answer so many prompts of each class, unmeasured: it has tried its candidates then. What it did."""
    cell = Cell()
    for group in track(by_class(prompts).values(), "auto learns", console=console, transient=True):
        for number in range(answers):
            cell.add(timed(client, group[number % len(group)], AUTO, max_tokens, "table").speculation)
    return cell


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of all proposals of a drafter, or of all target steps, and how many there were."""

    seconds: float
    count: float

    @property
    def mean(self) -> float:
        """Seconds of one."""
        return self.seconds / self.count


def draft_costs(metrics_url: str) -> dict[str, Spent]:
    """What drafting cost by drafter, and the target's steps as "step"."""
    text = urllib.request.urlopen(metrics_url, timeout=10).read().decode()
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.labels.get("drafter", "step")
            wanted = "outrider_draft_duration" if name != "step" else "outrider_engine_step_duration"
            if sample.name.startswith(wanted) and sample.name.endswith("_sum"):
                sums[name] = sample.value
            elif sample.name.startswith(wanted) and sample.name.endswith("_count"):
                counts[name] = sample.value
    return {name: Spent(total, counts[name]) for name, total in sums.items() if counts.get(name)}


def levels_drafted(cells: Mapping[tuple[str, str], Cell]) -> Counter[str]:
    """The sum of K over all steps, by drafter."""
    return sum((cell.levels for (_, name), cell in cells.items() if name == ALL_CLASSES), Counter())


def cost_rows(costs: Mapping[str, Spent], levels: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Milliseconds of a proposal, and shares of a target step that a proposal and one depth of it take.

    Proposals of the warm-up count, their depths do not: shares of a depth are a little high.
    """
    step_s = costs["step"].mean
    rows = {"step": {"milliseconds": round(1e3 * step_s, 2)}}
    for drafter, spent in sorted(costs.items()):
        if drafter == "step":
            continue
        rows[drafter] = {
            "milliseconds": round(1e3 * spent.mean, 2),
            "of_a_step": round(spent.mean / step_s, 3),
        }
        if levels.get(drafter):
            rows[drafter]["depth_of_a_step"] = round(spent.seconds / levels[drafter] / step_s, 3)
    return rows


def show(
    cells: Mapping[tuple[str, str], Cell],
    drafters: Sequence[str],
    costs: Mapping[str, Mapping[str, float]],
) -> None:
    """One table a class, and the costs."""
    names = dict.fromkeys(name for _, name in cells)
    for name in names:
        table = Table(title=name)
        for heading in ("drafter", "speed", "bound", "length", "mean K", "nodes", "acceptance by position"):
            table.add_column(heading, justify="left" if heading in ("drafter",) else "right")
        for drafter in drafters:
            if (drafter, name) not in cells:
                continue
            row = cells[drafter, name].row()
            rates = " ".join("–" if rate is None else f"{rate:.2f}" for rate in row["rates"])  # type: ignore[attr-defined]
            figures = ("speed", "speed_bound", "acceptance_length", "draft_length_mean", "nodes_a_step")
            table.add_row(drafter, *("–" if row[key] is None else str(row[key]) for key in figures), rates)
        console.print(table)
    for (drafter, name), cell in cells.items():
        if drafter == AUTO:
            console.print(
                f"{AUTO} took, {name}: {', '.join(f'{a} {n}' for a, n in cell.taken.most_common())}"
            )
    for drafter, cost in costs.items():
        shares = [f"{cost[key]} {said}" for key, said in _SHARES.items() if key in cost]
        console.print(", ".join([f"{drafter}: {cost['milliseconds']} ms", *shares]))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drafter_table", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-class", type=int, default=None, help="prompts of each class at most")
    parser.add_argument("--drafters", default="", help="names; default: all that the worker hosts, and auto")
    parser.add_argument(
        "--learn", type=int, default=0, help="answers of `auto` of each class before, unmeasured"
    )
    parser.add_argument(
        "--heads",
        type=Path,
        default=None,
        help="heads that do not ship, by kind: then every drafter is hosted",
    )
    parser.add_argument("--config", type=Path, default=None, help="TOML of the server")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--report", type=Path, default=None, help="where a JSON report goes")
    return parser.parse_args(arguments)


def _served(options: argparse.Namespace, model: Path, work: Path) -> LocalCluster:
    config = options.config if options.heads is None else full_house(work, model, options.heads)
    extra = () if config is None else ("--config", str(config))
    return LocalCluster(model=options.model, arguments=extra, log_path=work / "serve.log")


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0 where every answer was plain decoding's."""
    options = parse(arguments)
    model = model_directory(options.model)
    found = read_prompts(options.prompts, Tokenizer.from_directory(model))
    prompts = few_of_each(found, options.per_class)
    with (
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as work,
        _served(options, model, Path(work)) as cluster,
        Client(cluster.address, timeout_s=300.0) as client,
    ):
        (worker,) = [status for status in cluster.workers() if status.worker_id == "decode-0"]
        hosted = tuple(name for name in worker.drafters if name not in APPROXIMATE)
        names = tuple(options.drafters.split(",")) if options.drafters else (*hosted, AUTO)
        drafters = (PLAIN, *(name for name in names if name != PLAIN))
        learnt = learn(client, found, options.learn if AUTO in drafters else 0, options.max_tokens)
        cells, wrong = measure(client, prompts, drafters, options.rounds, options.max_tokens)
        spent = draft_costs(f"http://{worker.metrics_address}/metrics")
    costs = cost_rows(spent, levels_drafted(cells) + learnt.levels)
    show(cells, drafters, costs)
    console.print(f"{wrong} answers differ from plain decoding")
    if options.report is not None:
        rows = {f"{drafter}/{name}": cell.row() for (drafter, name), cell in cells.items()}
        options.report.write_text(json.dumps({"cells": rows, "costs": costs, "wrong": wrong}, indent=1))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
