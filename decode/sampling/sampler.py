"""The one door to drawing: the native kernel where it was built, else the reference. Both give the same tokens."""

from collections.abc import Sequence

import torch

from decode.sampling import native, reference
from decode.sampling.arithmetic import Float64
from decode.sampling.native import LogprobRequest, Walk
from decode.sampling.noise import race as reference_race
from decode.sampling.step_items import DrawItem

__all__ = ["LogprobRequest", "Walk", "as_rows", "logprobs", "probs", "race", "walk"]


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


def race(weights: Float64, key: int) -> int:
    """The id drawn from unnormalised weights; the caller has seen that one is positive."""
    library = native.kernels()
    return reference_race(weights, key) if library is None else native.race(library, weights, key)


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
