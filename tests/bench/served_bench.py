"""The served system against its own limits: `python -m tests.bench.served_bench --prompts FILE`.

speed        tokens a second at batch 1 through the SDK ≥ 0.9 × the engine alone
classes      `ngram` ≥ 1.4 × plain on its home classes; `auto` nowhere below 0.98 × plain, by the lower 95 %
             bound of the median ratio (classes with fewer than 30 prompts are pooled); tokens a second after
             the first ones, prompts whose answer has fewer than 16 tokens left out
load         `auto` nowhere below 0.98 × plain with 8 and with 32 requests at a time (whole answers; the lower
             bound, or the median of fewer than 5 batches)
first-token  time to first token through two pools ≤ 1.15 × a colocated prefill + 15 ms
memory       an idle deployment of one prefill and one decode worker ≤ 2.5 GiB

Arms are interleaved prompt by prompt, every round in another order. Exit code 1 where a limit is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from outrider import Client
from tests.bench.child_peer import ChildPeer
from tests.bench.peers import ServedPeer, engine_alone
from tests.bench.prompts import (
    DEFAULT_MODEL,
    OWN_CODE_EDITS,
    OWN_PROMPTS,
    Prompt,
    model_directory,
    read_prompts,
)
from tests.bench.ratios import MedianRatio, median_ratio, paired_median, rotated
from tests.bench.timed import SHORTEST_ANSWER, timed

HOME_CLASSES = ("summarisation", "summarization", "rag", "structured", "code-edit")
DRAFTERS = ("none", "ngram", "auto")
FULL_CLASS = 30
POOLED = "pooled"
SERVED_SHARE, HOME_SPEEDUP, AUTO_FLOOR = 0.9, 1.4, 0.98
LOAD_BATCHES = (8, 32)
FIRST_TOKEN_RATIO, FIRST_TOKEN_EXTRA_S = 1.15, 0.015
IDLE_GIB = 2.5
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    prompts: Path
    limit: int | None
    rounds: int
    max_tokens: int
    parts: tuple[str, ...]
    report: Path | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit and what was measured against it."""

    what: str
    measured: float
    limit: float
    holds: bool


def measure_speed(options: Options, cluster: LocalCluster, prompts: Sequence[Prompt]) -> list[Finding]:
    """Served plain decoding against the engine alone, batch 1, whole requests."""
    engine = engine_alone(model_directory())
    served = ServedPeer(cluster, "none")
    ratios: list[float] = []
    chats = [prompt for prompt in prompts if prompt.prompt_class == "chat"][:4]
    try:
        for number in range(options.rounds + 1):
            for prompt in chats:
                pair = _pair(engine, served, prompt, options.max_tokens, f"{number}-{prompt.prompt_id}")
                ratios += [pair] * (number > 0)
    finally:
        engine.close()
    share = statistics.median(ratios)
    return [Finding("served / engine alone, batch 1", share, SERVED_SHARE, share >= SERVED_SHARE)]


def _pair(engine: ChildPeer, served: ServedPeer, prompt: Prompt, max_tokens: int, salt: str) -> float:
    alone_s = engine.measure([prompt], max_tokens, salt)
    return alone_s / served.measure([prompt], max_tokens, salt)


def measure_classes(options: Options, cluster: LocalCluster, prompts: Sequence[Prompt]) -> list[Finding]:
    """`ngram` and `auto` against plain, class by class; every ratio is of one prompt in one round."""
    rates: dict[tuple[str, str], list[float]] = {}
    with Client(cluster.address, timeout_s=300.0) as client:
        for number in range(options.rounds):
            console.print(f"classes: round {number + 1} of {options.rounds}", style="dim")
            for place, prompt in enumerate(prompts):
                for drafter in rotated(DRAFTERS, number + place):
                    result = timed(client, prompt, drafter, options.max_tokens, "classes")
                    if result.tokens >= SHORTEST_ANSWER:
                        rates.setdefault((prompt.prompt_id, drafter), []).append(result.rate)
    prompts = [prompt for prompt in prompts if (prompt.prompt_id, "none") in rates]
    ngram = _class_ratios(prompts, rates, "ngram")
    auto = _class_ratios(prompts, rates, "auto")
    _print_classes(ngram, auto)
    home = [n for n in ngram if n in HOME_CLASSES]
    found = [_home_finding(name, ngram[name]) for name in home]
    return found + [_auto_finding(name, ratio) for name, ratio in _pooled(prompts, rates).items()]


def _home_finding(name: str, ratio: MedianRatio) -> Finding:
    return Finding(f"ngram / plain, {name}", ratio.median, HOME_SPEEDUP, ratio.median >= HOME_SPEEDUP)


def _auto_finding(name: str, ratio: MedianRatio) -> Finding:
    bound = ratio.lower_bound if ratio.lower_bound is not None else 0.0
    return Finding(f"auto / plain, {name}, lower 95 % bound", bound, AUTO_FLOOR, bound >= AUTO_FLOOR)


def _prompt_ratio(rates: dict[tuple[str, str], list[float]], prompt_id: str, drafter: str) -> float:
    """The median over rounds of one prompt's ratio to plain."""
    return paired_median(rates[prompt_id, drafter], rates[prompt_id, "none"])


def _class_ratios(
    prompts: Sequence[Prompt], rates: dict[tuple[str, str], list[float]], drafter: str
) -> dict[str, MedianRatio]:
    names = dict.fromkeys(prompt.prompt_class for prompt in prompts)
    return {
        name: median_ratio(
            [_prompt_ratio(rates, p.prompt_id, drafter) for p in prompts if p.prompt_class == name]
        )
        for name in names
    }


def _pooled(prompts: Sequence[Prompt], rates: dict[tuple[str, str], list[float]]) -> dict[str, MedianRatio]:
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.prompt_class] = counts.get(prompt.prompt_class, 0) + 1
    groups: dict[str, list[float]] = {}
    for prompt in prompts:
        group = prompt.prompt_class if counts[prompt.prompt_class] >= FULL_CLASS else POOLED
        groups.setdefault(group, []).append(_prompt_ratio(rates, prompt.prompt_id, "auto"))
    return {name: median_ratio(ratios) for name, ratios in groups.items()}


def _print_classes(ngram: dict[str, MedianRatio], auto: dict[str, MedianRatio]) -> None:
    table = Table(title="Against plain decoding, median over prompts (lower 95 % bound)")
    for heading in ("class", "prompts", "ngram", "auto"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, ratio in ngram.items():
        table.add_row(name, str(ratio.count), str(ratio), str(auto[name]))
    console.print(table)


def measure_load(options: Options, cluster: LocalCluster, prompts: Sequence[Prompt]) -> list[Finding]:
    """Batches of prompts of all classes, each asked plainly and by `auto`, in another order every time."""
    plain, auto = ServedPeer(cluster, "none"), ServedPeer(cluster, "auto")
    mixed = list(prompts)
    Random(0).shuffle(mixed)
    found: list[Finding] = []
    for batch in LOAD_BATCHES:
        groups = [mixed[start : start + batch] for start in range(0, len(mixed) - batch + 1, batch)]
        ratios: list[float] = []
        for place, group in enumerate(groups):
            seconds: dict[ServedPeer, list[float]] = {plain: [], auto: []}
            for number in range(options.rounds):
                for arm in rotated((plain, auto), number + place):
                    salt = f"load-{batch}-{place}-{number}"
                    seconds[arm].append(arm.measure(group, options.max_tokens, salt))
            ratios.append(paired_median(seconds[plain], seconds[auto]))
        if not ratios:
            console.print(f"load: {len(mixed)} prompts are too few for {batch} at a time")
            continue
        ratio = median_ratio(ratios)
        console.print(f"auto / plain, {batch} at a time: {ratio}, {ratio.count} batches")
        least = ratio.median if ratio.lower_bound is None else ratio.lower_bound
        found.append(Finding(f"auto / plain, {batch} at a time", least, AUTO_FLOOR, least >= AUTO_FLOOR))
    return found


def measure_first_token(options: Options, cluster: LocalCluster, prompts: Sequence[Prompt]) -> list[Finding]:
    """The same prompts through two pools and through one decode worker that prefills by itself."""
    few = [p for p in prompts if p.prompt_class in {"rag", "summarisation", "chat"}][:24]
    pooled: list[float] = []
    alone: list[float] = []
    with (
        LocalCluster(model=DEFAULT_MODEL, prefill=0) as colocated,
        Client(cluster.address, timeout_s=120.0) as two_pools,
        Client(colocated.address, timeout_s=120.0) as one_pool,
    ):
        for number in range(options.rounds + 1):
            for prompt in few:
                through = timed(two_pools, prompt, "none", 2, f"first-{number}").first_s
                direct = timed(one_pool, prompt, "none", 2, f"first-{number}").first_s
                if number:
                    pooled.append(through)
                    alone.append(direct)
    limits = [FIRST_TOKEN_RATIO * direct + FIRST_TOKEN_EXTRA_S for direct in alone]
    shares = [through / limit for through, limit in zip(pooled, limits, strict=True)]
    console.print(
        f"time to first token: two pools {1e3 * statistics.median(pooled):.0f} ms, "
        f"colocated {1e3 * statistics.median(alone):.0f} ms (medians)"
    )
    share = statistics.median(shares)
    return [Finding("time to first token / (1.15 × colocated + 15 ms)", share, 1.0, share <= 1.0)]


def measure_memory(options: Options, cluster: LocalCluster, prompts: Sequence[Prompt]) -> list[Finding]:
    """Proportional memory of every process of a fresh, idle deployment."""
    with LocalCluster(model=DEFAULT_MODEL) as idle:
        sizes = {f"{p.pid} {p.name()}": p.memory_full_info().pss for p in idle.processes()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        console.print(f"  {size / 2**20:8.0f} MiB  {name}", style="dim")
    gib = sum(sizes.values()) / 2**30
    return [Finding("idle deployment, GiB", gib, IDLE_GIB, gib <= IDLE_GIB)]


Part = Callable[[Options, LocalCluster, Sequence[Prompt]], list[Finding]]
PARTS: dict[str, Part] = {
    "speed": measure_speed,
    "first-token": measure_first_token,
    "memory": measure_memory,
    "classes": measure_classes,
    "load": measure_load,
}


def parse(arguments: Sequence[str]) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.served_bench", description=__doc__)
    parser.add_argument(
        "--prompts", type=Path, default=OWN_PROMPTS, help="beside it, the code edits are asked"
    )
    parser.add_argument("--limit", type=int, default=None, help="prompts taken, spread over the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--report", type=Path, default=None, help="where a JSON report goes")
    values = vars(parser.parse_args(arguments))
    return Options(**{**values, "parts": tuple(values["parts"].split(","))})


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; 0 where every limit holds."""
    options = parse(arguments)
    tokenizer = Tokenizer.from_directory(model_directory())
    prompts = read_prompts(options.prompts, tokenizer, options.limit) + read_prompts(
        OWN_CODE_EDITS, tokenizer
    )
    findings: list[Finding] = []
    with (
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as work,
        LocalCluster(model=DEFAULT_MODEL, log_path=Path(work) / "serve.log") as cluster,
    ):
        for part in options.parts:
            found = PARTS[part](options, cluster, prompts)
            for one in found:
                _say(one)
            findings += found
    if options.report is not None:
        options.report.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 0 if all(finding.holds for finding in findings) else 1


def _say(finding: Finding) -> None:
    verdict = "[green]holds[/green]" if finding.holds else "[red]MISSED[/red]"
    console.print(f"{finding.what}: {finding.measured:.3f} (limit {finding.limit:g}) {verdict}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
