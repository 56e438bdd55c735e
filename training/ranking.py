"""The best ids of a whole vocabulary, without all its logits in memory."""

from typing import Final

import torch
from torch import Tensor

from training.batch import computing_dtype

_CHUNK_ROWS: Final = 256


def best_ids(hidden: Tensor, matrix: Tensor, count: int) -> Tensor:
    """Rows of `matrix` that say most, best first: [rows, count] int64. Without gradients.

    hidden: Tensor  # [rows, hidden_dim]; matrix: Tensor  # [vocabulary, hidden_dim]
    """
    dtype = computing_dtype()
    weights = matrix.to(dtype)
    found = torch.empty(len(hidden), count, dtype=torch.int64)
    for start in range(0, len(hidden), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        found[rows] = (hidden[rows].to(dtype) @ weights.T).topk(count, dim=-1).indices
    return found
