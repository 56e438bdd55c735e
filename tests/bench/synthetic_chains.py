"""Draws chains from a toy target and draft through the project's own drafting and verification.

Both are Markov chains over a few tokens: the distribution at a position depends on the token before, so every
exact distribution can be written down. Nothing here calls the sampling code for what it should give.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft, VerifyItem
from decode.sampling.draft_noise import DraftDraw, draw_draft
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream, noise_key
from decode.verification import distributions, rejection
from decode.verification.verify import verify
from tests.bench.goodness_of_fit import FitTest, fit

VOCABULARY = 7
SAMPLING = SamplingParams(temperature=0.8, top_k=5)
ROOT = 0
BATCH = 4000
Counts = NDArray[np.int64]
Probs = NDArray[np.float64]
Fault = Literal[
    "untruncated_draft_probs", "residual_not_clamped", "noise_reused_in_accept", "noise_reused_in_residual"
]
FAULTS: tuple[Fault, ...] = (
    "untruncated_draft_probs",
    "residual_not_clamped",
    "noise_reused_in_accept",
    "noise_reused_in_residual",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`num_chains` chains of `draft_length`; `one_hot`: the draft is the draft model's argmax, not a sample."""

    verification: VerificationMode
    draft_length: int
    num_chains: int
    one_hot: bool = False

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.verification}{' one-hot' if self.one_hot else ''} K={self.draft_length}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`drafted` [chains, K]; `emitted` [chains, K + 1], of which row c holds `accepted[c]` + 1 tokens."""

    drafted: Counts
    emitted: Counts
    accepted: Counts


def toy_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits [vocabulary, vocabulary]: row v is what follows token v. Rejection-heavy.

    The draft likes token 0 too much, so its rejection is common, and the noise of token 0 matters.
    """
    generator = torch.Generator().manual_seed(20)
    target = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    draft = 0.5 * target + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    draft[:, 0] += 1.5
    return target, draft


def exact_probs(logits: torch.Tensor, *, truncated: bool = True) -> Probs:
    """[vocabulary, vocabulary]: softmax(logits / temperature) over the top_k, row by row, in float64."""
    scaled = logits.to(torch.float64).numpy() / SAMPLING.temperature
    if truncated:
        smallest_kept = np.sort(scaled, axis=1)[:, -SAMPLING.top_k][:, None]
        scaled = np.where(scaled >= smallest_kept, scaled, -np.inf)
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs: Probs = weights / weights.sum(axis=1, keepdims=True)
    return probs


def run(scenario: Scenario, fault: Fault | None = None) -> Outcome:
    """Draw and verify all chains; chain c has seed c."""
    parts = []
    with _planted(fault):
        for first in range(0, scenario.num_chains, BATCH):
            seeds = range(first, min(first + BATCH, scenario.num_chains))
            parts.append(_run_batch(scenario, seeds, fault))
    return Outcome(*(np.concatenate([getattr(part, name) for part in parts]) for name in Outcome.__slots__))


@contextmanager
def _planted(fault: Fault | None) -> Iterator[None]:
    """The rejection module with one mistake."""

    def not_clamped(target_probs: Probs, draft_probs: Probs | None, token_id: int) -> Probs:
        assert draft_probs is not None
        return np.abs(target_probs - draft_probs)

    def reusing(stream: Stream) -> Callable[[int, int, int, Stream], int]:
        return lambda seed, choice, position, wanted: noise_key(
            seed, choice, position, Stream.DRAFT if wanted == stream else wanted
        )

    match fault:
        case "residual_not_clamped":
            with patch.object(rejection, "residual_probs", not_clamped):
                yield
        case "noise_reused_in_accept":
            with patch.object(distributions, "noise_key", reusing(Stream.ACCEPT)):
                yield
        case "noise_reused_in_residual":
            with patch.object(rejection, "noise_key", reusing(Stream.RESIDUAL)):
                yield
        case _:
            yield


def _run_batch(scenario: Scenario, seeds: range, fault: Fault | None) -> Outcome:
    target, draft_logits = toy_logits()
    history = TokenHistory([ROOT])
    length = scenario.draft_length
    drafted, draft_probs = _draft(scenario, seeds, history, draft_logits)
    if fault == "untruncated_draft_probs":
        before = np.concatenate([np.full((len(seeds), 1), ROOT), drafted[:, :-1]], axis=1)
        draft_probs = torch.from_numpy(exact_probs(draft_logits, truncated=False)[before]).float()
    rows = np.concatenate([np.full((len(seeds), 1), ROOT), drafted], axis=1)
    parents = tuple(range(length))
    items = []
    for index, (seed, chain) in enumerate(zip(seeds, drafted.tolist(), strict=True)):
        probs = None if draft_probs is None else draft_probs[index]
        draft = Draft(tuple(chain), parents, probs)
        items.append(
            VerifyItem(SAMPLING, seed, 0, history, 1, index * (length + 1), draft, scenario.verification)
        )
    verdicts = verify(items, target[torch.from_numpy(rows.reshape(-1))])
    emitted = np.zeros((len(seeds), length + 1), np.int64)
    accepted = np.array([len(verdict.accepted_rows) for verdict in verdicts])
    for index, verdict in enumerate(verdicts):
        emitted[index, : len(verdict.token_ids)] = verdict.token_ids
    return Outcome(drafted, emitted, accepted)


def _draft(
    scenario: Scenario, seeds: range, history: TokenHistory, draft_logits: torch.Tensor
) -> tuple[Counts, torch.Tensor | None]:
    """Drafted tokens [seeds, K] and, for sampled rejection drafts, their draft_probs [seeds, K, vocabulary]."""
    drafted = np.zeros((len(seeds), scenario.draft_length), np.int64)
    last = np.full(len(seeds), ROOT)
    probs: list[torch.Tensor] = []
    for depth in range(scenario.draft_length):
        rows = draft_logits[torch.from_numpy(last)]
        if scenario.one_hot:
            last = rows.argmax(dim=1).numpy()
        else:
            draws = [
                DraftDraw(SAMPLING, seed, 0, 1 + depth, scenario.verification, history, tuple(path))
                for seed, path in zip(seeds, drafted[:, :depth].tolist(), strict=True)
            ]
            drawn = [token for token in draw_draft(draws, rows) if token is not None]
            last = np.array([token.token_id for token in drawn])
            probs.extend(token.draft_probs for token in drawn if token.draft_probs is not None)
        drafted[:, depth] = last
    if not probs:
        return drafted, None
    return drafted, torch.stack(probs).reshape(scenario.draft_length, len(seeds), VOCABULARY).transpose(0, 1)


def judge(scenario: Scenario, outcome: Outcome) -> list[FitTest]:
    """Every exact claim about the outcome, position by position."""
    target, draft = toy_logits()
    target_probs, draft_probs = exact_probs(target), exact_probs(draft)
    if scenario.one_hot:
        draft_probs = np.eye(VOCABULARY)[draft.argmax(dim=1).numpy()]
    kept = _kept_mass(scenario.verification, target_probs, draft_probs)
    tests = []
    before = np.full(scenario.num_chains, ROOT)
    for depth in range(scenario.draft_length + 1):
        here = outcome.accepted >= depth
        tests += _judge_depth(scenario, outcome, depth, (before, here), (target_probs, draft_probs, kept))
        before = outcome.emitted[:, depth]
    return tests


def _judge_depth(
    scenario: Scenario,
    outcome: Outcome,
    depth: int,
    position: tuple[Counts, NDArray[np.bool_]],
    exact: tuple[Probs, Probs, Probs],
) -> list[FitTest]:
    """`position`: the token before, and which chains emit at this depth. `exact`: target, draft, kept mass."""
    (before, here), (target_probs, draft_probs, kept) = position, exact
    name, emitted = f"{scenario.name} position {depth + 1}", outcome.emitted[:, depth]
    if depth == scenario.draft_length:
        return [fit(f"{name} bonus", tabulate(before[here], emitted[here]), target_probs)]
    drafted, accepted = outcome.drafted[:, depth], outcome.accepted > depth
    replaced = here & ~accepted
    rate = kept.sum(axis=1)
    residual = target_probs - kept
    tests = [
        fit(f"{name} emitted", tabulate(before[here], emitted[here]), target_probs),
        fit(f"{name} drafted", tabulate(before[here], drafted[here]), draft_probs),
        fit(
            f"{name} acceptance rate",
            tabulate(before[here], accepted[here].astype(np.int64), 2),
            np.stack([1 - rate, rate], axis=1),
        ),
        fit(f"{name} accepted", tabulate(before[accepted], emitted[accepted]), normalised(kept)),
        fit(f"{name} residual", tabulate(before[replaced], emitted[replaced]), normalised(residual)),
    ]
    if scenario.verification == "rejection" and not scenario.one_hot:
        cases = before[replaced] * VOCABULARY + drafted[replaced]
        counts = tabulate(cases, emitted[replaced], groups=VOCABULARY**2)
        expected = np.repeat(normalised(residual), VOCABULARY, axis=0)
        tests.append(fit(f"{name} residual, whichever draft was rejected", counts, expected))
    return tests


def _kept_mass(verification: VerificationMode, target_probs: Probs, draft_probs: Probs) -> Probs:
    """P(token v is drafted and kept), by the token before.

    Rejection: min(t, d). Shared noise: both races are won by v if E(u) ≥ E(v) · max(t(u)/t(v), d(u)/d(v)) for
    every u, which has the probability 1 / Σ_u max(t(u)/t(v), d(u)/d(v)) as E is Exp(1).
    """
    if verification == "rejection":
        return np.minimum(target_probs, draft_probs)
    kept = np.zeros_like(target_probs)
    for row, (target, draft) in enumerate(zip(target_probs, draft_probs, strict=True)):
        for token in np.flatnonzero((target > 0) & (draft > 0)):
            kept[row, token] = 1.0 / np.maximum(target / target[token], draft / draft[token]).sum()
    return kept


def normalised(mass: Probs) -> Probs:
    """Each row divided by its sum; rows without mass stay 0."""
    clipped = np.where(mass > 1e-12, mass, 0.0)
    total = clipped.sum(axis=1, keepdims=True)
    probs: Probs = np.divide(clipped, total, out=np.zeros_like(clipped), where=total > 0)
    return probs


def tabulate(
    groups_of: Counts, outcomes: Counts, num_outcomes: int = VOCABULARY, groups: int = VOCABULARY
) -> Counts:
    """[groups, num_outcomes]: how often each outcome was seen in each group."""
    table = np.zeros((groups, num_outcomes), np.int64)
    np.add.at(table, (groups_of, outcomes), 1)
    return table
