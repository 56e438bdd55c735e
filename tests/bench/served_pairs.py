"""Two-token continuations through the served system, against the target's exact joint distribution.

The target is loaded in this process, its first two draws are enumerated: all pairs that top-k leaves. Each
request has its own seed. The prompt repeats itself, so that a drafter has something to propose.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from engine.engine import Engine
from engine.step_batch import SequenceStep
from outrider import AsyncClient
from outrider.results import Verification
from tests.bench.goodness_of_fit import FitTest, fit

TEMPERATURE = 1.0
TOP_K = 6
MAX_TOKENS = 8
"""More than the two that are judged: short answers are not drafted for."""
DRAFT_LENGTH = 2
"""Asked for, so that drafts are tried whether they pay or not."""
PROMPT = "red green blue red green blue red green yellow red green"
FIRST_SEED = 10_000_000
PROGRESS_EVERY = 1000


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """`model` is the directory of what `address` serves."""

    address: str
    model: Path
    num_pairs: int
    drafter: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class PairTable:
    """`first` [k] token ids, `second` [k, k] the ids that may follow each, `probs` [k, k] of the pairs."""

    first: list[int]
    second: list[list[int]]
    probs: np.ndarray[tuple[int, int], np.dtype[np.float64]]


def served_tests(plan: ServedPlan, report: Callable[[str], None]) -> list[FitTest]:
    """Pairs of both verifications, and of plain decoding."""
    prompt_ids = _encode(plan.model)
    table = enumerate_pairs(plan.model, prompt_ids)
    tests = []
    arms: list[tuple[str, Verification]] = [
        ("none", "invariant"),
        (plan.drafter, "invariant"),
        (plan.drafter, "rejection"),
    ]
    for arm, (drafter, verification) in enumerate(arms):
        first_seed = FIRST_SEED + (plan.num_pairs if verification == "rejection" else 0)
        name = f"served {drafter} {verification}"

        def progress(done: int, name: str = name) -> None:
            if done % PROGRESS_EVERY == 0 or done == plan.num_pairs:
                report(f"{name}: {done} of {plan.num_pairs}")

        pairs, accepted = asyncio.run(_draw(plan, prompt_ids, drafter, verification, first_seed, progress))
        tests += judge_pairs(name, pairs, table)
        report(f"{name}: {len(pairs)} continuations, {accepted} draft tokens accepted")
        if arm > 0 and accepted == 0:
            tests.append(FitTest(f"{name}: no draft was accepted, so nothing was tested", len(pairs), 0.0))
    return tests


def judge_pairs(name: str, pairs: list[tuple[int, int]], table: PairTable) -> list[FitTest]:
    """First token, and pairs jointly. A pair outside the table gives p = 0."""
    counts = np.zeros(table.probs.shape, np.int64)
    for first, second in pairs:
        if first not in table.first or second not in table.second[table.first.index(first)]:
            return [FitTest(f"{name}: ({first}, {second}) cannot be drawn", len(pairs), 0.0)]
        row = table.first.index(first)
        counts[row, table.second[row].index(second)] += 1
    return [
        fit(f"{name} first token", counts.sum(axis=1)[None], table.probs.sum(axis=1)[None]),
        fit(f"{name} pair", counts.reshape(1, -1), table.probs.reshape(1, -1)),
    ]


def _encode(model: Path) -> list[int]:
    return list(Tokenizer.from_directory(model).encode(PROMPT))


def enumerate_pairs(model: Path, prompt_ids: list[int]) -> PairTable:
    """The prompt in one chunk, then the k likeliest first tokens as k leaves of one tree."""
    engine = Engine.load(model, EngineSettings(num_threads=1, num_blocks=64))
    table = engine.kv.open()
    try:
        root, num_before = prompt_ids[-1], len(prompt_ids) - 1
        engine.kv.reserve(table, num_before)
        engine.step([SequenceStep(table, 0, prompt_ids[:-1], logit_rows="none")])
        engine.kv.commit(table, num_before)
        engine.kv.reserve(table, num_before + 1)
        (row,) = engine.step([SequenceStep(table, num_before, [root])]).logits
        first, first_probs = _truncated(row)
        engine.kv.reserve(table, num_before + 1 + TOP_K)
        tree = SequenceStep(table, num_before, [root, *first], parents=(0, *(0,) * TOP_K))
        children = [_truncated(child) for child in engine.step([tree]).logits[1:]]
    finally:
        engine.kv.close(table)
        engine.close()
    probs = first_probs[:, None] * np.stack([child_probs for _, child_probs in children])
    return PairTable(first, [ids for ids, _ in children], probs)


def _truncated(row: torch.Tensor) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Ids and probabilities of the top k, ties to the lowest id."""
    logits = row.to(torch.float64).numpy() / TEMPERATURE
    kept = np.lexsort((np.arange(logits.size), -logits))[:TOP_K]
    weights = np.exp(logits[kept] - logits[kept].max())
    return kept.tolist(), weights / weights.sum()


async def _draw(
    plan: ServedPlan,
    prompt_ids: list[int],
    drafter: str,
    verification: Verification,
    first_seed: int,
    progress: Callable[[int], None],
) -> tuple[list[tuple[int, int]], int]:
    """The pairs, and how many draft tokens were accepted in all."""
    slots = asyncio.Semaphore(plan.concurrency)
    num_done = 0
    async with AsyncClient(plan.address, timeout_s=120.0) as client, asyncio.TaskGroup() as group:

        async def one(seed: int) -> tuple[tuple[int, int], int]:
            async with slots:
                result = await client.generate(
                    prompt_ids,
                    max_tokens=MAX_TOKENS,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    seed=seed,
                    ignore_eos=True,
                    drafter=drafter,
                    draft_length=None if drafter == "none" else DRAFT_LENGTH,
                    verification=verification,
                )
            nonlocal num_done
            num_done += 1
            progress(num_done)
            first, second = result.token_ids[:2]
            return (first, second), result.speculation.accepted_tokens

        tasks = [group.create_task(one(first_seed + index)) for index in range(plan.num_pairs)]
    answers = [task.result() for task in tasks]
    return [pair for pair, _ in answers], sum(accepted for _, accepted in answers)
