"""What a draft out of a large corpus takes: the whole of `RestDrafter.propose`, warm and cold.

    python -m tests.bench.corpus_lookup --corpus CORPUS [--lookups N] [--json FILE]

Contexts end as texts of the corpus do (`held`), with a pair of tokens that it holds most often, such as newline and
indentation, behind random ones (`frequent`: the longest search, the most occurrences) or behind itself (`repeated`), or
with random tokens, which hardly ever follow each other there (`absent`). Each is drafted for as a chain of default
length and as the largest tree that a request may ask for:

    warm      the same corpus all the time, each context once before
    opened    a corpus opened anew for every draft: its first one
    evicted   so, and its files had been dropped from the system's cache: opening reads them from the disk (whose host
              may have a cache of its own). A tenth of the drafts, for opening takes its time, which is printed

A draft during which another process took the core is measured again: what it took says how busy the machine is.
The exit status is 1 where a 99th percentile is above 2 ms.
"""

import argparse
import json
import os
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from core.drafter_settings import RestSettings
from core.records import SamplingParams
from core.settings import DecodeSettings
from decode.drafters.corpus import Manifest, read_manifest, separator_of
from decode.drafters.protocol import DraftBudget, DraftRequest
from decode.drafters.rest import RestDrafter
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable

LIMIT_S = 2e-3
CONTEXT = 64
"""Tokens of a context; the drafter looks at the last eight."""
TRIES = 8
FREQUENT = 64
"""So many of the most frequent pairs are taken, as counted in the first tokens of each segment."""
COUNTED = 2**21
Context = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a draft may hold."""

    name: str
    length: int
    width: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One draft. `faults`: reads from disk that it waited for; `preempted`: another process had the core meanwhile."""

    seconds: float
    nodes: int
    faults: int
    preempted: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """Drafts of one kind. `nodes`, `faults` and `open_s` are means of a draft; `disturbed`: those measured again."""

    state: str
    contexts: str
    shape: str
    lookups: int
    median_s: float
    p99_s: float
    largest_s: float
    nodes: float
    faults: float
    open_s: float
    disturbed: int


def main() -> None:
    """Prints the figures; the exit status says whether the limit holds."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--corpus", type=Path, required=True)
    options.add_argument("--lookups", type=int, default=1000, help="Of each kind; a tenth of it evicted.")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    manifest = read_manifest(given.corpus)
    print(f"{manifest.num_tokens:,} tokens in {len(manifest.segments)} segments")
    bench = Bench(given.corpus, manifest)
    rows: list[Figures] = []
    for contexts, texts in contexts_of(given.corpus, manifest, given.lookups).items():
        for shape in bench.shapes:
            rows += bench.measure(contexts, texts, shape)
    for row in rows:
        print(
            f"{row.state:8} {row.contexts:9} {row.shape:6} median {1e3 * row.median_s:7.3f} ms,"
            f" p99 {1e3 * row.p99_s:7.3f}, largest {1e3 * row.largest_s:7.3f};"
            f" {row.nodes:4.1f} nodes, {row.faults:4.1f} reads from disk, opened in {row.open_s:.3f} s,"
            f" {row.disturbed} again"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    raise SystemExit(any(row.p99_s > LIMIT_S for row in rows))


class Bench:
    """One corpus, opened as often as is asked."""

    def __init__(self, corpus: Path, manifest: Manifest) -> None:
        self._corpus = corpus
        self._manifest = manifest
        self._settings = RestSettings(corpus=str(corpus))
        self._max_nodes = DecodeSettings().max_tree_nodes
        needs = self._open().needs
        self.shapes = (
            Shape("chain", needs.default_draft_length, needs.default_draft_width),
            Shape("tree", needs.max_draft_length, needs.max_draft_width),
        )

    def measure(self, contexts: str, texts: Sequence[Context], shape: Shape) -> list[Figures]:
        """In every state."""
        return [
            self._warm(contexts, texts, shape),
            self._timed("opened", contexts, texts, shape, self._open),
            self._timed("evicted", contexts, texts[: -(-len(texts) // 10)], shape, self._open_evicted),
        ]

    def _warm(self, contexts: str, texts: Sequence[Context], shape: Shape) -> Figures:
        drafter = self._open()
        for text in texts:
            self._draft(drafter, text, shape)
        return self._timed("warm", contexts, texts, shape, lambda: drafter)

    def _timed(
        self,
        state: str,
        contexts: str,
        texts: Sequence[Context],
        shape: Shape,
        opened: Callable[[], RestDrafter],
    ) -> Figures:
        drafts: list[Timing] = []
        disturbed, opens_s = 0, 0.0
        for text in texts:
            for _ in range(TRIES):
                started_s = time.perf_counter()
                drafter = opened()
                opened_s = time.perf_counter() - started_s
                timing = self._draft(drafter, text, shape)
                del drafter
                if not timing.preempted:
                    break
                disturbed += 1
            drafts.append(timing)
            opens_s += opened_s
        seconds = sorted(timing.seconds for timing in drafts)
        count = len(drafts)
        return Figures(
            state=state,
            contexts=contexts,
            shape=shape.name,
            lookups=count,
            median_s=statistics.median(seconds),
            p99_s=seconds[min(count - 1, int(0.99 * count))],
            largest_s=seconds[-1],
            nodes=sum(timing.nodes for timing in drafts) / count,
            faults=sum(timing.faults for timing in drafts) / count,
            open_s=opens_s / count,
            disturbed=disturbed,
        )

    def _draft(self, drafter: RestDrafter, text: Context, shape: Shape) -> Timing:
        budget = DraftBudget(request_of(text, shape.width), shape.length, self._max_nodes)
        before = resource.getrusage(resource.RUSAGE_THREAD)
        started_s = time.perf_counter()
        (draft,) = drafter.propose([budget])
        took_s = time.perf_counter() - started_s
        after = resource.getrusage(resource.RUSAGE_THREAD)
        return Timing(
            took_s,
            len(draft.token_ids),
            after.ru_majflt - before.ru_majflt,
            after.ru_nivcsw > before.ru_nivcsw,
        )

    def _open(self) -> RestDrafter:
        num_token_ids = separator_of(self._manifest.token_bytes)
        return RestDrafter(self._settings, self._manifest.vocabulary, num_token_ids)

    def _open_evicted(self) -> RestDrafter:
        """What is mapped is not dropped: earlier drafters must be gone."""
        for path in self._corpus.glob("segment-*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self._open()


def contexts_of(corpus: Path, manifest: Manifest, lookups: int) -> dict[str, list[Context]]:
    """`lookups` contexts of each kind."""
    rng = random.Random(7)
    segments = [
        np.memmap(corpus / f"{entry.name}.tokens", f">u{manifest.token_bytes}", "r")
        for entry in manifest.segments
    ]
    held, common, seen = [], Counter[Context](), set[int]()
    for _ in range(lookups):
        segment = rng.choices(segments, [len(ids) for ids in segments])[0]
        end = rng.randrange(min(CONTEXT, len(segment)), len(segment) + 1)
        held.append(_without_separators(segment[max(0, end - CONTEXT) : end].tolist(), manifest))
    for segment in segments:
        start = np.asarray(segment[:COUNTED], dtype=np.int64)
        joined, counts = np.unique(start[:-1] << 32 | start[1:], return_counts=True)
        for place in np.argsort(counts)[-2 * FREQUENT :].tolist():
            common[int(joined[place]) >> 32, int(joined[place]) & 0xFFFFFFFF] += int(counts[place])
        seen.update(np.unique(start).tolist())
    separator = separator_of(manifest.token_bytes)
    ids = sorted(seen - {separator})
    absent = [tuple(rng.choices(ids, k=CONTEXT)) for _ in range(lookups)]
    frequent = [pair for pair, _ in common.most_common(2 * FREQUENT) if separator not in pair][:FREQUENT]
    mixed = [(*rng.choices(ids, k=CONTEXT - 2), *frequent[n % len(frequent)]) for n in range(lookups)]
    runs = [frequent[n % len(frequent)] * (CONTEXT // 2) for n in range(lookups)]
    return {"held": held, "frequent": mixed, "repeated": runs, "absent": absent}


def _without_separators(ids: list[int], manifest: Manifest) -> Context:
    return tuple(token_id for token_id in ids if token_id != separator_of(manifest.token_bytes))


def request_of(token_ids: Context, width: int) -> DraftRequest:
    """A choice at the end of its prompt."""
    return DraftRequest(
        key=1,
        history=TokenHistory(token_ids),
        sampling=SamplingParams(),
        seed=0,
        choice=0,
        verification="invariant",
        hidden=lambda start, end: torch.empty(0),
        draft_width=width,
        table=BlockTable,
    )


if __name__ == "__main__":
    main()
