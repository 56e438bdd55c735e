"""What one engine step costs, against its linears alone and against the memory's bandwidth.

    python -m tests.bench.engine_bench --model DIR_OR_GGUF [--threads 2] [--rounds 30] [--json FILE]

All cases are timed in turn within each round, and each number is the median over rounds, so that the
ratios come from one run. `linears` are the engine's own packed products, called with one row each.
`floor` is the time to read the weights once at the bandwidth measured here.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.records import SamplingParams
from core.settings import EngineSettings
from decode.draft import Draft, VerifyItem
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import LogitRows, SequenceStep

TREE_PARENTS = (0, 0, 0, 1, 1, 2, 3, 3)
"""A root with seven nodes in three levels, siblings on each."""

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
SEED = 11


@dataclass(frozen=True, slots=True)
class Case:
    """A thing to time; `run` does it once."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ratio:
    """`case` over `base`, and the limit that the project set itself (None: for information)."""

    name: str
    case: str
    base: str
    limit: float | None


RATIOS = (
    Ratio("1 row / linears alone, context 256", "1 row, context 256", "linears, 1 row", 1.7),
    Ratio(
        "8 nodes of one request / 1 row, context 256 (chain)",
        "8 nodes chain, context 256",
        "1 row, context 256",
        1.25,
    ),
    Ratio(
        "8 nodes of one request / 1 row, context 256 (tree)",
        "8 nodes tree, context 256",
        "1 row, context 256",
        1.25,
    ),
    Ratio("8 requests of 1 row / 1 row, context 512", "8 requests, context 512", "1 row, context 512", 1.3),
    Ratio(
        "8 nodes sampled / greedy, all accepted",
        "8 nodes verified, sampled",
        "8 nodes verified, greedy",
        1.15,
    ),
    Ratio("linears alone / bandwidth floor", "linears, 1 row", "floor", None),
    Ratio("256-token chunk / its linears", "chunk of 256, context 0", "linears, 256 rows", None),
)


def filled_table(engine: Engine, num_tokens: int) -> BlockTable:
    """A table whose first `num_tokens` positions were computed."""
    table = engine.kv.open()
    token_ids = [(7 * index + 11) % engine.config.vocab_size for index in range(num_tokens)]
    for start in range(0, num_tokens, 256):
        chunk = token_ids[start : start + 256]
        engine.kv.reserve(table, start + len(chunk))
        engine.step([SequenceStep(table=table, start=start, token_ids=chunk, logit_rows="none")])
        engine.kv.commit(table, start + len(chunk))
    return table


def step_case(
    engine: Engine, name: str, tables: list[BlockTable], rows: int = 1, parents: tuple[int, ...] | None = None
) -> Case:
    """A step of `rows` rows on each table; nothing is committed, so it can be repeated."""
    for table in tables:
        engine.kv.reserve(table, table.num_tokens + rows)
    logit_rows: LogitRows = "all" if rows <= 64 else "last"
    sequences = [
        SequenceStep(table, table.num_tokens, tuple(range(20, 20 + rows)), parents, logit_rows)
        for table in tables
    ]
    return Case(name, lambda: engine.step(sequences))


class ModelText:
    """A text that the model drew itself, so that its distributions are those of real use."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.engine = engine
        self.table = engine.kv.open()
        self.token_ids = [1]
        while self.table.num_tokens < num_tokens:
            self._extend(self.token_ids, SAMPLED)
            engine.kv.commit(self.table, len(self.token_ids) - 1)

    def _extend(self, token_ids: list[int], sampling: SamplingParams) -> None:
        """Add the next token of `token_ids`, whose last ones, not committed, are computed as a chain."""
        start = self.table.num_tokens
        self.engine.kv.reserve(self.table, len(token_ids))
        logits = self.engine.step([SequenceStep(self.table, start, token_ids[start:])]).logits
        item = VerifyItem(sampling, SEED, 0, TokenHistory(token_ids), len(token_ids), len(logits) - 1)
        token_ids.extend(verify([item], logits)[0].token_ids)

    def verified_case(self, name: str, sampling: SamplingParams, num_nodes: int = 8) -> Case:
        """A step of `num_nodes` rows and its verification; the draft is all accepted, so each row is drawn from."""
        token_ids = list(self.token_ids)
        for _ in range(num_nodes - 1):
            self._extend(token_ids, sampling)
        start = self.table.num_tokens
        chain = tuple(token_ids[start:])
        self.engine.kv.reserve(self.table, start + num_nodes)
        draft = Draft(chain[1:], tuple(range(num_nodes - 1)))
        history = TokenHistory(self.token_ids)

        def run() -> None:
            logits = self.engine.step([SequenceStep(self.table, start, chain)]).logits
            item = VerifyItem(sampling, SEED, 0, history, len(self.token_ids), 0, draft)
            (verdict,) = verify([item], logits)
            assert len(verdict.token_ids) == num_nodes, "the draft was drawn by this very model"

        return Case(name, run)


def linears_case(engine: Engine, name: str, num_rows: int) -> Case:
    """All products of one step, layer by layer, with `num_rows` rows, and the head with one."""
    config, dtype = engine.config, engine.kv.layout.dtype
    weights = engine.weights
    hidden = torch.randn(num_rows, config.hidden_dim).to(dtype)
    attended = torch.randn(num_rows, config.query_dim).to(dtype)
    activated = torch.randn(num_rows, config.intermediate_dim).to(dtype)

    def run() -> None:
        with torch.inference_mode():
            for layer in weights.layers:
                layer.qkv(hidden)
                layer.output(attended)
                layer.gate_up(hidden)
                layer.down(activated)
            weights.head(hidden[:1])

    return Case(name, run)


def floor_case(engine: Engine) -> Case:
    """Reading as many bytes as the products' weights take, with all threads."""
    config = engine.config
    layer = config.hidden_dim * (2 * config.query_dim + 2 * config.kv_dim + 3 * config.intermediate_dim)
    elements = config.num_layers * layer + config.vocab_size * config.hidden_dim
    words = torch.ones(elements * engine.kv.layout.dtype.itemsize // 8, dtype=torch.int64)
    return Case("floor", lambda: words.sum())


def measure(cases: list[Case], rounds: int) -> dict[str, float]:
    """Median seconds by name, over interleaved rounds after two that warm up."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 2):
        for case in cases:
            case.run()
            started = time.perf_counter()
            case.run()
            if number >= 2:
                seconds[case.name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def build_cases(engine: Engine) -> list[Case]:
    """All cases over one engine."""
    short = filled_table(engine, 256)
    long_tables = [filled_table(engine, 512) for _ in range(8)]
    text = ModelText(engine, 256)
    return [
        floor_case(engine),
        linears_case(engine, "linears, 1 row", 1),
        linears_case(engine, "linears, 8 rows", 8),
        linears_case(engine, "linears, 256 rows", 256),
        step_case(engine, "1 row, context 256", [short]),
        step_case(engine, "8 nodes chain, context 256", [short], 8),
        step_case(engine, "8 nodes tree, context 256", [short], 8, TREE_PARENTS),
        text.verified_case("8 nodes verified, greedy", GREEDY),
        text.verified_case("8 nodes verified, sampled", SAMPLED),
        step_case(engine, "32 nodes chain, context 256", [short], 32),
        step_case(engine, "1 row, context 512", long_tables[:1]),
        step_case(engine, "8 requests, context 512", long_tables),
        step_case(engine, "8 requests × 4 nodes, context 512", long_tables, 4),
        step_case(engine, "chunk of 256, context 0", [filled_table(engine, 0)], 256),
        step_case(engine, "chunk of 256, context 512", long_tables[:1], 256),
    ]


def main() -> None:
    """Measure, print a table, write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--attention", nargs="+", default=["native"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, dict[str, dict[str, float]]] = {}
    for attention in options.attention:
        settings = EngineSettings(num_threads=options.threads, attention=attention, num_blocks=512)
        engine = Engine.load(options.model, settings)
        seconds = measure(build_cases(engine), options.rounds)
        ratios = {ratio.name: seconds[ratio.case] / seconds[ratio.base] for ratio in RATIOS}
        report[attention] = {"seconds": seconds, "ratios": ratios}
        print_report(attention, engine, seconds, ratios)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))


def print_report(attention: str, engine: Engine, seconds: dict[str, float], ratios: dict[str, float]) -> None:
    """One table of times, one of ratios against their limits."""
    print(
        f"\nattention {attention}, {engine.settings.dtype}, {engine.settings.num_threads} threads, {engine.row_plan}"
    )
    for name, value in seconds.items():
        print(f"  {name:<42} {value * 1e3:9.2f} ms")
    for ratio in RATIOS:
        limit = "" if ratio.limit is None else f"limit {ratio.limit:.2f} "
        verdict = "" if ratio.limit is None else ("holds" if ratios[ratio.name] <= ratio.limit else "MISSED")
        print(f"  {ratio.name:<56} {ratios[ratio.name]:6.2f} {limit}{verdict}")


if __name__ == "__main__":
    main()
