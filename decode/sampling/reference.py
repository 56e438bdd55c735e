"""Walks and draws in plain numpy: what the native kernel must equal, and what serves without a compiler."""

from collections.abc import Sequence

import numpy as np
import torch

from decode.sampling.arithmetic import (
    Float32,
    Float64,
    descending_order,
    exp_weights,
    lane_sum,
    natural_log,
)
from decode.sampling.native import Children, LogprobRequest, Walk
from decode.sampling.noise import earliest, exponentials, noise_key
from decode.sampling.pipeline import (
    NothingToDraw,
    draw,
    processed_logits,
    raw_logprobs,
    survivors,
    target_probs,
)
from decode.sampling.step_items import DrawItem


def _row(logits: torch.Tensor, index: int) -> Float32:
    row: Float32 = logits[index].numpy()
    return row


def walk(draws: Sequence[DrawItem], logits: torch.Tensor) -> list[Walk]:
    """See `native.walk`."""
    return [_walk_one(item, logits) for item in draws]


def _walk_one(item: DrawItem, logits: torch.Tensor) -> Walk:
    row = 0
    accepted: list[int] = []
    token_ids: list[int] = []
    path = list(item.path)
    while True:
        try:
            processed = processed_logits(
                _row(logits, item.logits_row + row), item.sampling, item.history, path
            )
        except NothingToDraw as error:
            return Walk(tuple(accepted), tuple(token_ids), str(error))
        key = noise_key(item.seed, item.choice, item.position + len(token_ids), item.stream)
        token_id = draw(processed, item.sampling, key)
        token_ids.append(token_id)
        child = _child_with(item, row, token_id)
        if child is None:
            return Walk(tuple(accepted), tuple(token_ids))
        row = child
        accepted.append(row)
        path.append(token_id)


def _child_with(item: DrawItem, row: int, token_id: int) -> int | None:
    for node, (drafted, parent) in enumerate(zip(item.token_ids, item.parents, strict=True)):
        if parent == row and drafted == token_id:
            return node + 1
    return None


def probs(item: DrawItem, logits: torch.Tensor) -> Float64 | str:
    """See `native.probs`."""
    try:
        processed = processed_logits(_row(logits, item.logits_row), item.sampling, item.history, item.path)
    except NothingToDraw as error:
        return str(error)
    return target_probs(processed, item.sampling)


def children(draws: Sequence[DrawItem], widths: Sequence[int], logits: torch.Tensor) -> list[Children | None]:
    """See `native.children`."""
    return [_children_of(item, width, logits) for item, width in zip(draws, widths, strict=True)]


def _children_of(item: DrawItem, width: int, logits: torch.Tensor) -> Children | None:
    try:
        row = processed_logits(_row(logits, item.logits_row), item.sampling, item.history, item.path)
    except NothingToDraw:
        return None
    if item.sampling.greedy:
        return _largest_children(row, width)
    left = survivors(row, item.sampling)
    key = noise_key(item.seed, item.choice, item.position, item.stream)
    present = left.weights > 0.0
    token_ids = left.token_ids[present]
    rates = np.zeros(row.size)
    with np.errstate(over="ignore"):
        rates[token_ids] = 1.0 / (exponentials(key, token_ids) / left.weights[present])
    weights = np.zeros(row.size)
    weights[left.token_ids] = left.weights
    drawn = earliest(weights, key, width)
    scores = natural_log(rates[drawn]) - natural_log(np.array([lane_sum(rates)]))
    return Children(tuple(drawn), tuple(scores.tolist()))


def _largest_children(row: Float32, width: int) -> Children:
    exponents = row.astype(np.float64) - float(row.max())
    best = [int(index) for index in descending_order(row)[:width] if row[index] > -np.inf]
    scores = exponents[best] - natural_log(np.array([lane_sum(exp_weights(exponents))]))
    return Children(tuple(best), tuple(scores.tolist()))


def logprobs(requests: Sequence[LogprobRequest], logits: torch.Tensor) -> list[list[tuple[int, float]]]:
    """See `native.logprobs`."""
    return [
        raw_logprobs(_row(logits, request.logits_row), request.token_id, request.num_best)
        for request in requests
    ]
