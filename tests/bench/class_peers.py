"""Ours against llama.cpp's 4-bit plain decoding, class by class, at batch 1.

python -m tests.bench.class_peers --llama-python PATH --gguf FILE [--prompts FILE] [--drafters auto,eagle3,ngram]

What is compared is decoding: tokens a second from the first token on, at the client for ours, inside its process
for llama.cpp (any cost of serving is ours alone). Beside it stands the same ratio of whole answers, prompt included.
Every arm answers with as many tokens as the target's own answer has (asked of plain decoding once, uncounted): past an
ignored end of sequence the text repeats itself, which flatters drafters. Answers are greedy; arms are interleaved
prompt by prompt in another order every round; ours find nothing in a prefix cache, llama.cpp keeps nothing of a prompt.
A ratio is a prompt's median over rounds, then the median over prompts with its lower 95 % bound. Exit code 1 where an
answer of ours is not plain decoding's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from outrider import Client
from tests.bench.drafter_table import ALL_CLASSES, PLAIN
from tests.bench.peers import llama_cpp
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, Prompt, few_of_each, model_directory, read_prompts
from tests.bench.ratios import MedianRatio, median_ratio, paired_median, rotated
from tests.bench.timed import SHORTEST_ANSWER, TokenTimes, timed

PEER = "llama.cpp"
GOAL_CLASSES = ("code", "structured", "summarisation", "summarization")
GOAL = 1.0
console = Console(highlight=False, width=110)

Ask = Callable[[Prompt, int, str], TokenTimes]
"""Prompt, tokens wanted, salt of the prefix cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of one arm. Rates in tokens a second."""

    arm: str
    prompt_id: str
    prompt_class: str
    tokens: int
    first_s: float
    rate: float
    whole_rate: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm of ours against the peer on one class."""

    rate: float
    peer_rate: float
    decoding: MedianRatio
    whole: MedianRatio


@dataclass(slots=True)
class Measured:
    """All answers; how many of ours were not plain decoding's, and prompts where the peer's first token is ours."""

    rows: list[Row]
    wrong: int = 0
    agreed: int = 0
    prompts: int = 0


def served(client: Client, drafter: str) -> Ask:
    """The arm of one drafter of the served system."""

    def ask(prompt: Prompt, max_tokens: int, salt: str) -> TokenTimes:
        return timed(client, prompt, drafter, max_tokens, salt)

    return ask


def measure(arms: Mapping[str, Ask], prompts: Sequence[Prompt], rounds: int, max_tokens: int) -> Measured:
    """Every arm once a prompt and round. Prompts whose answer is short are left out."""
    found = Measured([])
    names = tuple(arms)
    arms[PEER](prompts[0], SHORTEST_ANSWER, "")
    with Progress(console=console, transient=True) as progress:
        for place, prompt in enumerate(progress.track(prompts, description="prompts")):
            wanted = arms[PLAIN](prompt, max_tokens, f"reference {prompt.prompt_id}").token_ids
            if len(wanted) < SHORTEST_ANSWER:
                continue
            found.prompts += 1
            for number in range(rounds):
                for name in rotated(names, place + number):
                    answer = arms[name](prompt, len(wanted), f"{name} {number} {prompt.prompt_id}")
                    found.rows.append(_row(name, prompt, answer))
                    if name != PEER:
                        found.wrong += answer.token_ids != wanted
                    elif number == 0:
                        found.agreed += answer.token_ids[0] == wanted[0]
    return found


def _row(arm: str, prompt: Prompt, answer: TokenTimes) -> Row:
    return Row(
        arm,
        prompt.prompt_id,
        prompt.prompt_class,
        answer.tokens,
        answer.first_s,
        answer.rate,
        answer.whole_rate,
    )


def cells(rows: Sequence[Row]) -> dict[str, dict[str, Cell]]:
    """By arm of ours and class, "all" last. The rows of an arm and prompt are in the order of the rounds."""
    classes = [*dict.fromkeys(row.prompt_class for row in rows), ALL_CLASSES]
    arms = [name for name in dict.fromkeys(row.arm for row in rows) if name != PEER]
    return {arm: {name: _cell(rows, arm, name) for name in classes} for arm in sorted(arms, key=_place)}


def _place(arm: str) -> tuple[bool, str]:
    return arm != PLAIN, arm


def _cell(rows: Sequence[Row], arm: str, name: str) -> Cell:
    mine: dict[str, list[Row]] = {}
    theirs: dict[str, list[Row]] = {}
    for row in rows:
        if name in (row.prompt_class, ALL_CLASSES) and row.arm in (arm, PEER):
            (theirs if row.arm == PEER else mine).setdefault(row.prompt_id, []).append(row)

    def ratio(rate: Callable[[Row], float]) -> MedianRatio:
        return median_ratio(
            [paired_median([rate(r) for r in mine[key]], [rate(r) for r in theirs[key]]) for key in mine]
        )

    return Cell(
        rate=median(row.rate for of_prompt in mine.values() for row in of_prompt),
        peer_rate=median(row.rate for of_prompt in theirs.values() for row in of_prompt),
        decoding=ratio(lambda row: row.rate),
        whole=ratio(lambda row: row.whole_rate),
    )


def goal_mean(by_class: Mapping[str, Cell]) -> float | None:
    """The mean of the decoding ratios of those classes that the goal is set on; None where none was measured."""
    found = [cell.decoding.median for name, cell in by_class.items() if name in GOAL_CLASSES]
    return mean(found) if found else None


def show(table_of: Mapping[str, Mapping[str, Cell]]) -> None:
    """One table an arm of ours, and its mean over the goal's classes."""
    for arm, by_class in table_of.items():
        table = Table(title=f"served {arm} / {PEER} (lower 95 % bound)")
        for heading in ("class", "prompts", "ours tok/s", f"{PEER} tok/s", "decoding", "whole answer"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for name, cell in by_class.items():
            rates = (f"{cell.rate:.1f}", f"{cell.peer_rate:.1f}")
            table.add_row(name, str(cell.decoding.count), *rates, str(cell.decoding), str(cell.whole))
        console.print(table)
        reached = goal_mean(by_class)
        if reached is not None:
            names = ", ".join(name for name in by_class if name in GOAL_CLASSES)
            console.print(f"served {arm}, mean over {names}: {reached:.3f} (goal {GOAL:g})")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.class_peers", description=__doc__)
    parser.add_argument("--llama-python", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, required=True, help="the same weights in 4 bits")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-class", type=int, default=None, help="prompts of each class at most")
    parser.add_argument("--drafters", default="auto", help="names, beside `none`")
    parser.add_argument("--config", type=Path, default=None, help="TOML of the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, default=None, help="where a JSON report goes")
    return parser.parse_args(arguments)


def report(found: Measured, table_of: Mapping[str, Mapping[str, Cell]]) -> dict[str, object]:
    """As JSON: the table, the means, and every answer's figures."""
    return {
        "cells": {arm: {name: asdict(cell) for name, cell in row.items()} for arm, row in table_of.items()},
        "goal_means": {arm: goal_mean(row) for arm, row in table_of.items()},
        "wrong": found.wrong,
        "rows": [asdict(row) for row in found.rows],
    }


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0 where every answer of ours was plain decoding's."""
    options = parse(arguments)
    tokenizer = Tokenizer.from_directory(model_directory())
    prompts = few_of_each(read_prompts(options.prompts, tokenizer), options.per_class)
    extra = () if options.config is None else ("--config", str(options.config))
    peer = llama_cpp(options.llama_python, options.gguf)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="outrider-bench-") as work,
            LocalCluster(model=DEFAULT_MODEL, arguments=extra, log_path=Path(work) / "serve.log") as cluster,
            Client(cluster.address, timeout_s=300.0) as client,
        ):
            names = (PLAIN, *options.drafters.split(","))
            arms = {name: served(client, name) for name in names}
            arms[PEER] = lambda prompt, count, salt: peer.timed(prompt, count)
            found = measure(arms, prompts, options.rounds, options.max_tokens)
    finally:
        peer.close()
    table_of = cells(found.rows)
    show(table_of)
    console.print(f"{PEER}'s first token is ours for {found.agreed} of {found.prompts} prompts")
    console.print(f"{found.wrong} answers of ours differ from plain decoding")
    if options.json is not None:
        options.json.write_text(json.dumps(report(found, table_of), indent=1))
    return 0 if found.wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
