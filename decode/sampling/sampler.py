"""The one door to drawing: the native kernel where it was built, else the reference. Both give the same tokens."""

from collections.abc import Sequence

import torch

from decode.sampling import native, reference
from decode.sampling.arithmetic import Float64
from decode.sampling.native import Children, LogprobRequest, Walk
from decode.sampling.noise import earliest as reference_earliest
from decode.sampling.step_items import DrawItem

__all__ = [
    "Children",
    "LogprobRequest",
    "Walk",
    "as_rows",
    "children",
    "earliest",
    "logprobs",
    "probs",
    "walk",
]


def as_rows(logits: torch.Tensor) -> torch.Tensor:
    """`logits` [rows, vocabulary] as the kernel reads it: float32, contiguous, on the CPU. No copy where it is so."""
    return logits.detach().to(device="cpu", dtype=torch.float32).contiguous()


def walk(draws: Sequence[DrawItem], logits: torch.Tensor) -> list[Walk]:
    """Draw at each root, follow the child that holds the token, until none does. Row-independent."""
    if not draws:
        return []
    library = native.kernels()
    return reference.walk(draws, logits) if library is None else native.walk(library, draws, logits)


def probs(draw: DrawItem, logits: torch.Tensor) -> Float64 | str:
    """[vocabulary] float64 summing to 1: what is drawn from at the draw's row, past its path; or the error."""
    library = native.kernels()
    return reference.probs(draw, logits) if library is None else native.probs(library, draw, logits)


def earliest(weights: Float64, key: int, wanted: int = 1) -> list[int]:
    """Up to `wanted` ids drawn without replacement from unnormalised weights; fewer where fewer are positive."""
    library = native.kernels()
    if library is None:
        return reference_earliest(weights, key, wanted)
    return native.earliest(library, weights, key, wanted)


def children(draws: Sequence[DrawItem], widths: Sequence[int], logits: torch.Tensor) -> list[Children | None]:
    """Up to widths[i] distinct children of draw i's row, past its path; None where nothing can be drawn.

    Greedy: the largest logits, scored by their log-softmax. Else the largest of log d + gumbel, d being what
    the draw's pipeline leaves and the noise that of its stream, scored by the log-softmax of that sum.
    """
    if not draws:
        return []
    library = native.kernels()
    if library is None:
        return reference.children(draws, widths, logits)
    return native.children(library, draws, widths, logits)


def logprobs(requests: Sequence[LogprobRequest], logits: torch.Tensor) -> list[list[tuple[int, float]]]:
    """For each request the chosen (id, logprob), then the best by (logit descending, id ascending)."""
    if not requests:
        return []
    library = native.kernels()
    return (
        reference.logprobs(requests, logits)
        if library is None
        else native.logprobs(library, requests, logits)
    )
