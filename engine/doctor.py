"""Does this machine hold the exactness that the whole project rests on? Asked of the loaded model itself.

The reference is plain decoding, one token a step. Chunks, trees and mixed batches must give the same
bits: logits, K, V and hidden planes. `outrider doctor` prints the report, `tests/parity` asserts it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.block_table import BlockTable
from engine.engine import Engine
from engine.kv_cache import PlaneKind
from engine.step_batch import SequenceStep

CHUNK_SIZES = (8, 64, 200)
TREES: dict[str, tuple[int, ...]] = {
    "binary": (0, 0, 0, 1, 1, 2, 2),
    "comb": (0, 0, 0, 2, 2, 4, 4, 6, 6),
    "wide": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "late branch": (0, 0, 1, 2, 3, 3, 5, 5),
}
"""Parents by row; row 0 is the root."""


@dataclass(frozen=True, slots=True)
class NumericsCheck:
    """One comparison with plain decoding: rows compared, and rows of which any bit differs."""

    name: str
    num_rows: int
    num_differing: int

    @property
    def holds(self) -> bool:
        """Whether every bit agrees, and there was something to compare."""
        return self.num_rows > 0 and self.num_differing == 0


@dataclass(frozen=True, slots=True)
class Trace:
    """What a sequence left behind: logits [tokens, vocab] and its planes [planes, tokens, width]."""

    logits: Tensor
    planes: Tensor


def numerics_report(
    engine: Engine, num_tokens: int = 208, progress: Callable[[str], None] = lambda line: None
) -> list[NumericsCheck]:
    """All checks on a made-up sequence; engine thread only. Needs about 5 · num_tokens free slots.

    `progress` is told what comes next.
    """
    token_ids = made_up_tokens(num_tokens, engine.config.vocab_size, seed=1)
    progress(f"plain decoding of {num_tokens} tokens")
    plain = run_chunks(engine, token_ids, 1)
    checks: list[NumericsCheck] = []
    for size in CHUNK_SIZES:
        if size <= num_tokens:
            progress(f"chunks of {size}")
            checks.append(difference(f"chunks of {size}", run_chunks(engine, token_ids, size), plain))
    for name, parents in TREES.items():
        progress(f"tree, {name}")
        checks.append(difference(f"tree, {name}", run_trees(engine, token_ids, parents), plain))
    progress("siblings and batches")
    checks.append(check_siblings(engine, token_ids[: num_tokens // 2]))
    checks.append(check_batch(engine, num_tokens))
    return checks


def made_up_tokens(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without meaning, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


def read_planes(engine: Engine, table: BlockTable) -> Tensor:
    """K, V and hidden planes of the committed tokens, as raw integers: [planes, tokens, largest width]."""
    layout = engine.kv.layout
    slots = engine.kv.slots(table, 0, table.num_tokens)
    planes = [
        engine.kv.read_plane(kind, layer, slots).flatten(1)
        for kind in (PlaneKind.KEY, PlaneKind.VALUE)
        for layer in range(layout.num_layers)
    ]
    planes += [engine.kv.read_plane(PlaneKind.HIDDEN, layer, slots) for layer in layout.hidden_layers]
    width = max(plane.shape[1] for plane in planes)
    padded = [torch.nn.functional.pad(plane, (0, width - plane.shape[1])) for plane in planes]
    return torch.stack(padded).cpu()


def run_chunks(engine: Engine, token_ids: Sequence[int], chunk_size: int) -> Trace:
    """Feed the tokens in chunks; `chunk_size` 1 is plain decoding."""
    table = engine.kv.open()
    try:
        logits = []
        for start in range(0, len(token_ids), chunk_size):
            chunk = token_ids[start : start + chunk_size]
            engine.kv.reserve(table, start + len(chunk))
            logits.append(engine.step([SequenceStep(table, start, chunk)]).logits)
            engine.kv.commit(table, start + len(chunk))
        return Trace(torch.cat(logits), read_planes(engine, table))
    finally:
        engine.kv.close(table)


def run_trees(engine: Engine, token_ids: Sequence[int], parents: Sequence[int]) -> Trace:
    """Feed the tokens by trees: the longest path to the last row holds the right tokens, the others wrong ones."""
    path = path_to(parents, len(parents) - 1)
    table = engine.kv.open()
    try:
        logits = []
        start = 0
        while start < len(token_ids):
            kept = path[: len(token_ids) - start]
            rows = [(31 * start + 17 * row) % engine.config.vocab_size for row in range(len(parents))]
            for depth, row in enumerate(kept):
                rows[row] = token_ids[start + depth]
            engine.kv.reserve(table, start + len(parents))
            logits.append(engine.step([SequenceStep(table, start, rows, parents)]).logits[kept])
            engine.kv.compact(table, start, kept)
            start += len(kept)
            engine.kv.commit(table, start)
        return Trace(torch.cat(logits), read_planes(engine, table))
    finally:
        engine.kv.close(table)


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def check_siblings(engine: Engine, prefix: Sequence[int]) -> NumericsCheck:
    """Every node of every tree, the branches not taken too, against plain decoding of its own path."""
    total = differing = 0
    table = engine.kv.open()
    try:
        engine.kv.reserve(table, len(prefix))
        engine.step([SequenceStep(table, 0, prefix, logit_rows="none")])
        engine.kv.commit(table, len(prefix))
        for seed, parents in enumerate(TREES.values()):
            tokens = made_up_tokens(len(parents), engine.config.vocab_size, seed + 10)
            engine.kv.reserve(table, len(prefix) + len(parents))
            logits = engine.step([SequenceStep(table, len(prefix), tokens, parents)]).logits
            for row in range(len(parents)):
                path = [tokens[member] for member in path_to(parents, row)]
                plain = _continue_plainly(engine, table, path)
                total += 1
                differing += count_differing(logits[row : row + 1], plain)
    finally:
        engine.kv.close(table)
    return NumericsCheck("every node of the trees", total, differing)


def _continue_plainly(engine: Engine, table: BlockTable, tokens: Sequence[int]) -> Tensor:
    """The logits row after plain decoding of `tokens` behind a copy of the table: [1, vocab]."""
    engine.kv.commit(table, table.num_tokens)
    fork = engine.kv.fork(table)
    try:
        for token in tokens:
            engine.kv.reserve(fork, fork.num_tokens + 1)
            result = engine.step([SequenceStep(fork, fork.num_tokens, [token])])
            engine.kv.commit(fork, fork.num_tokens + 1)
        return result.logits
    finally:
        engine.kv.close(fork)


def check_batch(engine: Engine, num_tokens: int) -> NumericsCheck:
    """Sequences of several lengths stepping together, by rows of various shapes, against each alone."""
    lengths = [num_tokens, num_tokens // 2 + 1, num_tokens // 3 + 2, 5]
    prompts = [
        made_up_tokens(length, engine.config.vocab_size, 20 + index) for index, length in enumerate(lengths)
    ]
    shares = [3, 1, 9, 2]
    together = _run_together(engine, prompts, shares)
    total = differing = 0
    for prompt, trace in zip(prompts, together, strict=True):
        check = difference("", trace, run_chunks(engine, prompt, 1))
        total += check.num_rows
        differing += check.num_differing
    return NumericsCheck("batches of mixed sequences", total, differing)


def _run_together(engine: Engine, prompts: Sequence[list[int]], shares: Sequence[int]) -> list[Trace]:
    """Feed all prompts at once, `shares[i]` rows of prompt i a step, until each is done."""
    tables = [engine.kv.open() for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    try:
        while True:
            batch = []
            for index, (table, prompt) in enumerate(zip(tables, prompts, strict=True)):
                chunk = prompt[table.num_tokens : table.num_tokens + shares[index]]
                if chunk:
                    engine.kv.reserve(table, table.num_tokens + len(chunk))
                    batch.append((index, SequenceStep(table, table.num_tokens, chunk)))
            if not batch:
                traces = zip(logits, tables, strict=True)
                return [Trace(torch.cat(rows), read_planes(engine, table)) for rows, table in traces]
            result = engine.step([sequence for _, sequence in batch])
            for (index, sequence), first in zip(batch, result.logits_start, strict=True):
                logits[index].append(result.logits[first : first + len(sequence.token_ids)])
                engine.kv.commit(tables[index], sequence.start + len(sequence.token_ids))
    finally:
        for table in tables:
            engine.kv.close(table)


def difference(name: str, trace: Trace, plain: Trace) -> NumericsCheck:
    """Logits rows, and (plane, token) rows, that differ from plain decoding."""
    num_rows = plain.logits.shape[0] + plain.planes.shape[0] * plain.planes.shape[1]
    differing = count_differing(trace.logits, plain.logits) + count_differing(
        trace.planes.flatten(0, 1), plain.planes.flatten(0, 1)
    )
    return NumericsCheck(name, num_rows, differing)


def count_differing(first: Tensor, second: Tensor) -> int:
    """Rows of two equally shaped [rows, width] tensors of which any bit differs."""
    whole = {2: torch.int16, 4: torch.int32}[first.element_size()]
    return int((first.contiguous().view(whole) != second.contiguous().view(whole)).any(dim=1).sum())
