"""Beam search as its definition says it, over every continuation of every hypothesis, all computed afresh each time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.records import SamplingParams
from decode.sampling.arithmetic import Float32
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import NothingToDraw, processed_logits

LogitsOf = Callable[[tuple[int, ...]], Float32]
"""Raw logits [vocabulary] behind the prompt and these tokens."""


@dataclass(frozen=True, slots=True)
class NaiveAnswer:
    """The best hypothesis, and all that were kept in the end, the best first."""

    token_ids: tuple[int, ...]
    score: float
    kept: tuple[tuple[float, tuple[int, ...]], ...]


def log_probs_after(
    logits_of: LogitsOf, sampling: SamplingParams, prompt: Sequence[int], ids: tuple[int, ...]
) -> list[float]:
    """After the pipeline, past `ids`; all -inf where it leaves nothing."""
    raw = logits_of(ids)
    try:
        row = processed_logits(raw, sampling, TokenHistory(prompt), ids)
    except NothingToDraw:
        return [-math.inf] * raw.size
    values: list[float] = torch.log_softmax(torch.from_numpy(row).double(), 0).tolist()
    return values


def ends_by_id(sampling: SamplingParams, ids: tuple[int, ...]) -> bool:
    """Whether the last token is one that ends an answer of this length."""
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else sampling.eos_token_ids)}
    return ids[-1] in ends and len(ids) > sampling.min_tokens


def naive_beam_search(
    logits_of: LogitsOf, sampling: SamplingParams, prompt: Sequence[int], longest: int
) -> NaiveAnswer:
    """No stop strings."""
    width, penalty = sampling.beam_width, sampling.length_penalty
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, longest + 1):
        ranking = []
        for beam, (total, ids) in enumerate(running):
            for token_id, value in enumerate(log_probs_after(logits_of, sampling, prompt, ids)):
                if value > -math.inf:
                    ranking.append((-(total + value), beam, token_id, (*ids, token_id)))
        ranking.sort()
        running = []
        for rank, (negative, _, _, ids) in enumerate(ranking):
            if length == longest or ends_by_id(sampling, ids):
                if rank < width:
                    kept.append((-negative / math.pow(length, penalty), ids))
            elif len(running) < width:
                running.append((-negative, ids))
        kept = sorted(kept, key=lambda entry: -entry[0])[:width]
        if not running or (
            len(kept) == width and _enough(sampling, running[0][0], kept[-1][0], length, longest)
        ):
            break
    score, token_ids = kept[0]
    return NaiveAnswer(token_ids, score, tuple(kept))


def _enough(sampling: SamplingParams, best: float, worst: float, length: int, longest: int) -> bool:
    if sampling.early_stopping is True:
        return True
    reach = length
    if sampling.early_stopping == "never" and sampling.length_penalty > 0:
        reach = longest
    return best / math.pow(reach, sampling.length_penalty) <= worst


def table_of_logits(vocabulary: int, seed: int, spread: float = 1.5) -> LogitsOf:
    """A made-up target: the logits are a function of the last two tokens and the length. Some tie exactly."""

    def logits_of(ids: tuple[int, ...]) -> Float32:
        generator = np.random.default_rng([seed, len(ids), *(token_id + 1 for token_id in ids[-2:])])
        row: Float32 = np.round(generator.normal(0.0, spread, vocabulary), 1).astype(np.float32)
        return row

    return logits_of
