"""What a prefix hit and a hand-off cost in acceptance: `python -m tests.bench.warm_acceptance [--heads DIR]`.

The same prompts three ways, each drafter with a fixed K, greedy and sampled:

cold    through one pool, under a cache salt of their own: the decode worker computes the prompt
warm    the same once more: all full blocks of the prompt come from the prefix cache
pools   cold through two pools: the prompt's K, V and hidden planes come from a prefill worker

Prints tokens a step by drafter and way. Exit code 1 where a way has less than 0.98 of `cold`, an answer differs, or the
warm prompts were not found in the cache.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from decode.drafters.artifact import read_manifest
from outrider import Client
from outrider.results import Result
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, Prompt, model_directory, read_prompts

FLOOR = 0.98
DRAFT_LENGTH = 4
TEMPERATURES = (0.0, 0.8)
WAYS = ("cold", "warm", "pools")
HEADS: Mapping[str, tuple[str, ...]] = {
    "eagle": ("eagle", "eagle2"),
    "eagle3": ("eagle3",),
    "mtp": ("mtp",),
    "medusa": ("medusa",),
}
"""The drafters that an artifact of a kind makes."""
console = Console(highlight=False, width=120)


@dataclass(slots=True)
class Arm:
    """One drafter one way."""

    steps: int = 0
    tokens: float = 0.0
    cached_tokens: int = 0
    differing: int = 0

    def take(self, result: Result, expected: Sequence[int]) -> None:
        """One answer."""
        report = result.speculation
        self.steps += report.steps
        self.tokens += (report.acceptance_length or 0.0) * report.steps
        self.cached_tokens += result.usage.cached_prompt_tokens
        self.differing += tuple(result.token_ids) != tuple(expected)

    @property
    def length(self) -> float:
        """Acceptance length: tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0


Cells = dict[tuple[str, str], Arm]
Texts = dict[tuple[str, float], tuple[int, ...]]


def asked(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, float]]:
    """Every prompt at every temperature."""
    return ((prompt, temperature) for prompt in prompts for temperature in TEMPERATURES)


def answer(
    client: Client, prompt: Prompt, temperature: float, drafter: str, salt: str, max_tokens: int
) -> Result:
    """One answer with the prompt's own seed."""
    return client.generate(
        list(prompt.token_ids),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=prompt.seed,
        drafter=drafter,
        draft_length=None if drafter == "none" else DRAFT_LENGTH,
        cache_salt=salt,
    )


def measure(
    client: Client,
    ways: Sequence[str],
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    texts: Texts,
    max_tokens: int,
) -> Cells:
    """One cell for each drafter and way; the ways of one prompt follow each other under one salt."""
    cells: Cells = {}
    for prompt, temperature in asked(prompts):
        key = prompt.prompt_id, temperature
        if key not in texts:
            texts[key] = tuple(answer(client, prompt, temperature, "none", "plain", max_tokens).token_ids)
        for drafter in drafters:
            salt = f"{drafter} {prompt.prompt_id} {temperature}"
            for way in ways:
                result = answer(client, prompt, temperature, drafter, salt, max_tokens)
                cells.setdefault((drafter, way), Arm()).take(result, texts[key])
    return cells


def settings_of(heads: Path | None, work: Path) -> tuple[tuple[str, ...], Path]:
    """The drafters that there are, and the path of the settings that host them."""
    names = ["ngram"]
    sections: list[str] = []
    for manifest in sorted(heads.glob("*/manifest.json")) if heads is not None else ():
        for name in HEADS.get(read_manifest(manifest.parent).kind, ()):
            names.append(name)
            artifact = json.dumps(str(manifest.parent.resolve()))
            sections.append(f"[decode_worker.drafters.{name}]\nartifact = {artifact}\n")
    path = work / "warm.toml"
    path.write_text("\n".join(sections))
    return tuple(names), path


def findings(cells: Cells, drafters: Sequence[str]) -> list[str]:
    """Prints the table; what is wrong with it."""
    table = Table(title=f"tokens a step, K = {DRAFT_LENGTH}")
    for heading in ("drafter", *WAYS, "warm / cold", "pools / cold"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    wrong: list[str] = []
    for drafter in drafters:
        arms = {way: cells[drafter, way] for way in WAYS}
        cold = arms["cold"].length
        ratios = {way: arms[way].length / cold if cold else 0.0 for way in ("warm", "pools")}
        lengths = (f"{arm.length:.3f}" for arm in arms.values())
        table.add_row(drafter, *lengths, *(f"{ratio:.3f}" for ratio in ratios.values()))
        wrong += [f"{drafter}, {way}: {ratio:.3f} of cold" for way, ratio in ratios.items() if ratio < FLOOR]
        wrong += [
            f"{drafter}, {way}: {arm.differing} answers differ" for way, arm in arms.items() if arm.differing
        ]
        if not arms["warm"].cached_tokens or arms["cold"].cached_tokens:
            wrong.append(f"{drafter}: warm prompts were not the cached ones")
    console.print(table)
    return wrong


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.warm_acceptance", description=__doc__)
    parser.add_argument(
        "--prompts", type=Path, default=OWN_PROMPTS, help='JSON lines of {"id", "class", "turns"}'
    )
    parser.add_argument(
        "--heads", type=Path, default=None, help="folder of artifacts, each in a folder of its own"
    )
    parser.add_argument("--limit", type=int, default=12, help="prompts taken, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measures; 0 where neither way costs acceptance."""
    options = parse(arguments)
    prompts = read_prompts(options.prompts, Tokenizer.from_directory(model_directory()), options.limit)
    texts: Texts = {}
    cells: Cells = {}
    with tempfile.TemporaryDirectory(prefix="outrider-warm-") as work:
        drafters, config = settings_of(options.heads, Path(work))
        for prefill, ways in ((0, ("cold", "warm")), (1, ("pools",))):
            with (
                LocalCluster(
                    model=DEFAULT_MODEL,
                    prefill=prefill,
                    arguments=("--config", str(config)),
                    log_path=Path(work) / "serve.log",
                ) as cluster,
                Client(cluster.address, timeout_s=300.0) as client,
            ):
                cells |= measure(client, ways, drafters, prompts, texts, options.max_tokens)
    wrong = findings(cells, drafters)
    for line in wrong:
        console.print(f"[red]{line}[/red]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
