"""The sampling pipeline of one row, plainly: the oracle of the native kernel, and the fallback without a compiler.

Order (DESIGN §5): repetition penalty (prompt, output, draft path) → presence and frequency penalty (output,
draft path) → logit bias → bad words → min_tokens → temperature → top-k → top-p → min-p. The grammar's mask, between
min_tokens and temperature, is in the rows already (`masking.py`). Float32 up to the temperature, then double; nothing
depends on other rows.

With x the processed logits, m the largest and T the temperature: weight w(v) = exp((x(v) - m) · (1/T)).
top-p keeps the shortest prefix, in the order (logit descending, id ascending), whose running sum of w
reaches top_p · Z; Z is the sum over what top-k kept (in that order), or over all ids (`lane_sum`) without top-k.
min-p keeps w(v) ≥ min_p. The weights are not renormalised between the stages: only their ratios matter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from core.records import SamplingParams
from decode.sampling.arithmetic import (
    Float32,
    Float64,
    Int64,
    descending_order,
    exp_weights,
    lane_sum,
    natural_log,
)
from decode.sampling.history import TokenHistory
from decode.sampling.noise import race


class NothingToDraw(Exception):
    """No token is left; the message names the constraint."""


NOT_FINITE = "logits are not finite"
BAD_WORDS = "bad_words leave no token to draw"
MIN_TOKENS = "min_tokens leaves no token to draw"


@dataclass(frozen=True, slots=True)
class Survivors:
    """What may be drawn: ids ascending and their unnormalised weights."""

    token_ids: Int64
    weights: Float64


def processed_logits(
    raw: Float32, sampling: SamplingParams, history: TokenHistory, path: Sequence[int] = ()
) -> Float32:
    """`raw` [vocabulary] after penalties, bias and bans, past the draft tokens `path`. Raises NothingToDraw."""
    if not bool(np.all(raw <= np.finfo(np.float32).max)):
        raise NothingToDraw(NOT_FINITE)
    row = raw.copy()
    _penalise(row, sampling, history, path)
    for token_id, bias in sampling.logit_bias.items():
        if 0 <= token_id < row.size:
            row[token_id] += np.float32(bias)
    if not bool(np.all(row <= np.finfo(np.float32).max)) or row.max() == -np.inf:
        raise NothingToDraw(NOT_FINITE)
    _ban(row, banned_by_words(sampling, [*history.token_ids, *path]))
    if row.max() == -np.inf:
        raise NothingToDraw(BAD_WORDS)
    if history.num_output + len(path) < sampling.min_tokens:
        _ban(row, (*sampling.eos_token_ids, *sampling.stop_token_ids))
    if row.max() == -np.inf:
        raise NothingToDraw(MIN_TOKENS)
    return row


def _penalise(row: Float32, sampling: SamplingParams, history: TokenHistory, path: Sequence[int]) -> None:
    repetition, presence, frequency = (
        np.float32(value)
        for value in (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    )
    if repetition == 1.0 and presence == 0.0 and frequency == 0.0:
        return
    counts = dict(history.output_counts)
    for token_id in path:
        counts[token_id] = counts.get(token_id, 0) + 1
    for token_id in {*history.prompt_ids, *counts}:
        if not 0 <= token_id < row.size:
            continue
        value = row[token_id]
        if repetition != 1.0:
            value = value / repetition if value > 0 else value * repetition
        if times := counts.get(token_id, 0):
            value = value - frequency * np.float32(times)
            value = value - presence
        row[token_id] = value


def banned_by_words(sampling: SamplingParams, token_ids: Sequence[int]) -> list[int]:
    """Last ids of the bad words whose other ids end `token_ids`."""
    banned = []
    for word in sampling.bad_word_ids:
        before = list(word[:-1])
        if word and (not before or list(token_ids[-len(before) :]) == before):
            banned.append(word[-1])
    return banned


def _ban(row: Float32, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if 0 <= token_id < row.size:
            row[token_id] = -np.inf


def survivors(row: Float32, sampling: SamplingParams) -> Survivors:
    """Temperature, top-k, top-p and min-p on processed logits; greedy leaves one id."""
    if sampling.greedy:
        return Survivors(np.array([int(np.argmax(row))], dtype=np.int64), np.ones(1))
    exponents = (row.astype(np.float64) - float(row.max())) * (1.0 / sampling.temperature)
    weights = exp_weights(exponents)
    kept = descending_order(row)
    truncated = 0 < sampling.top_k < row.size
    if truncated:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        running = np.cumsum(weights[kept])
        total = float(running[-1]) if truncated else lane_sum(weights)
        kept = kept[: int(np.searchsorted(running, sampling.top_p * total)) + 1]
    kept = np.sort(kept[weights[kept] >= sampling.min_p])
    return Survivors(kept, weights[kept])


def draw(row: Float32, sampling: SamplingParams, key: int) -> int:
    """The token that the noise `key` draws from processed logits."""
    left = survivors(row, sampling)
    return race(left.weights, key, left.token_ids)


def target_probs(row: Float32, sampling: SamplingParams) -> Float64:
    """[vocabulary] float64: the distribution that `draw` draws from."""
    left = survivors(row, sampling)
    untruncated = not (
        sampling.greedy or 0 < sampling.top_k < row.size or sampling.top_p < 1.0 or sampling.min_p > 0.0
    )
    total = lane_sum(left.weights) if untruncated else float(np.cumsum(left.weights)[-1])
    probs = np.zeros(row.size)
    probs[left.token_ids] = left.weights / total
    return probs


def raw_logprobs(raw: Float32, token_id: int, num_best: int) -> list[tuple[int, float]]:
    """The target's log-softmax before any processing: of `token_id`, then of the best, in order."""
    exponents = raw.astype(np.float64) - float(raw.max())
    log_total = float(natural_log(np.array([lane_sum(exp_weights(exponents))]))[0])
    best = [int(index) for index in descending_order(raw)[:num_best] if raw[index] > -np.inf]
    return [(index, float(exponents[index]) - log_total) for index in (token_id, *best)]
