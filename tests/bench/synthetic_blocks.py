"""Block verification of the toy's chains, by itself and over whole answers, against plain enumeration of the chains.

With p(x_1 … x_i) of `decode.verification.block`: P(a chain begins so and so much of it is accepted) = d(x_1 … x_i) · p,
and what is drawn behind it follows max(0, p · t - d). An answer of several steps drafts and judges again the positions
that a step gave up.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from core.records import VerificationMode
from decode.draft import Draft, VerifyItem
from decode.sampling.draft_noise import DraftDraw, draw_draft
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from tests.bench.goodness_of_fit import FitTest, fit
from tests.bench.synthetic_chains import (
    ROOT,
    SAMPLING,
    VOCABULARY,
    Counts,
    Outcome,
    Probs,
    Scenario,
    exact_probs,
    normalised,
    tabulate,
    toy_logits,
)

ANSWER_TOKENS = 3
ANSWER_DRAFT = 2
BATCH = 4000


def judge_blocks(scenario: Scenario, outcome: Outcome) -> list[FitTest]:
    """Every exact claim about chains that were judged as a whole, by the beginning that was accepted."""
    target_probs, name = exact_probs(toy_logits()[0]), scenario.name
    length = scenario.draft_length
    kept, law = _law(scenario)
    tests = [
        fit(
            f"{name} number accepted",
            np.bincount(outcome.accepted, minlength=length + 1)[None],
            -np.diff([*(mass.sum() for mass in kept), 0.0])[None],
        )
    ]
    prefixes = np.zeros(len(outcome.accepted), np.int64)
    for depth in range(length + 1):
        here, ends = outcome.accepted >= depth, outcome.accepted == depth
        emitted, groups = outcome.emitted[:, depth], VOCABULARY**depth
        before = prefixes % VOCABULARY if depth else np.full_like(prefixes, ROOT)
        tests.append(
            fit(f"{name} position {depth + 1} emitted", tabulate(before[here], emitted[here]), target_probs)
        )
        if depth:
            seen = np.bincount(prefixes[here], minlength=groups)[None]
            tests.append(fit(f"{name} position {depth} accepted", seen, normalised(kept[depth][None])))
        tests.append(
            fit(
                f"{name} position {depth + 1} {'bonus' if depth == length else 'residual'}",
                tabulate(prefixes[ends], emitted[ends], groups=groups),
                normalised(law[depth]),
            )
        )
        prefixes = prefixes * VOCABULARY + emitted
    return tests


def _law(scenario: Scenario) -> tuple[list[Probs], list[Probs]]:
    """By depth i: d · p [beginnings], and what is drawn behind each [beginnings, vocabulary], unnormalised."""
    target, draft = toy_logits()
    target_probs, draft_probs = exact_probs(target), exact_probs(draft)
    if scenario.one_hot:
        draft_probs = np.eye(VOCABULARY)[draft.argmax(dim=1).numpy()]
    kept, law = [], []
    for depth in range(scenario.draft_length + 1):
        mass, drawn = np.zeros(VOCABULARY**depth), np.zeros((VOCABULARY**depth, VOCABULARY))
        for index, tokens in enumerate(product(range(VOCABULARY), repeat=depth)):
            drafted = accepted = 1.0
            for before, token_id in zip((ROOT, *tokens), tokens, strict=False):
                draft_prob = draft_probs[before, token_id]
                drafted *= draft_prob
                if draft_prob > 0.0:
                    accepted = min(1.0, accepted * target_probs[before, token_id] / draft_prob)
            last = tokens[-1] if tokens else ROOT
            mass[index] = drafted * accepted
            drawn[index] = np.maximum(0.0, accepted * target_probs[last] - draft_probs[last])
            if depth == scenario.draft_length:
                drawn[index] = target_probs[last]
        kept.append(mass)
        law.append(drawn)
    return kept, law


@dataclass(frozen=True, slots=True)
class AnswerScenario:
    """Answers of ANSWER_TOKENS tokens, each in as many steps as it takes."""

    verification: VerificationMode
    num_answers: int

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.verification} answers K={ANSWER_DRAFT}"


def run_answers(scenario: AnswerScenario) -> Counts:
    """[answers, ANSWER_TOKENS] tokens; answer i has seed i."""
    parts = []
    for first in range(0, scenario.num_answers, BATCH):
        seeds = range(first, min(first + BATCH, scenario.num_answers))
        histories = [TokenHistory([ROOT]) for _ in seeds]
        open_answers = list(range(len(seeds)))
        while open_answers:
            _step(scenario, seeds, histories, open_answers)
            open_answers = [index for index in open_answers if histories[index].num_output < ANSWER_TOKENS]
        parts.append(np.array([history.output_ids[:ANSWER_TOKENS] for history in histories]))
    return np.concatenate(parts)


def _step(
    scenario: AnswerScenario, seeds: range, histories: list[TokenHistory], open_answers: list[int]
) -> None:
    target, draft_logits = toy_logits()
    chains: list[list[int]] = [[] for _ in open_answers]
    probs: list[torch.Tensor] = []
    rows = torch.tensor([histories[index].token_ids[-1] for index in open_answers])
    rows_by_depth = [rows]
    for _ in range(ANSWER_DRAFT):
        draws = []
        for index, chain in zip(open_answers, chains, strict=True):
            history = histories[index]
            position = len(history.token_ids) + len(chain)
            draws.append(
                DraftDraw(SAMPLING, seeds[index], 0, position, scenario.verification, history, tuple(chain))
            )
        drawn = [token for token in draw_draft(draws, draft_logits[rows_by_depth[-1]]) if token]
        probs.append(torch.stack([token.draft_probs for token in drawn if token.draft_probs is not None]))
        for chain, token in zip(chains, drawn, strict=True):
            chain.append(token.token_id)
        rows_by_depth.append(torch.tensor([chain[-1] for chain in chains]))
    draft_probs = torch.stack(probs, dim=1)
    items = []
    for row, (index, chain) in enumerate(zip(open_answers, chains, strict=True)):
        history = histories[index]
        draft = Draft(tuple(chain), tuple(range(ANSWER_DRAFT)), draft_probs[row])
        start, position = row * (ANSWER_DRAFT + 1), len(history.token_ids)
        items.append(
            VerifyItem(SAMPLING, seeds[index], 0, history, position, start, draft, scenario.verification)
        )
    logits = target[torch.stack(rows_by_depth, dim=1).reshape(-1)]
    for index, verdict in zip(open_answers, verify(items, logits), strict=True):
        histories[index].extend(verdict.token_ids)


def judge_answers(scenario: AnswerScenario, tokens: Counts) -> list[FitTest]:
    """The joint distribution of all tokens."""
    target_probs = exact_probs(toy_logits()[0])
    joint = np.ones(1)
    last = np.array([ROOT])
    for _ in range(ANSWER_TOKENS):
        joint = (joint[:, None] * target_probs[last]).reshape(-1)
        last = np.tile(np.arange(VOCABULARY), len(last))
    cells = tokens @ VOCABULARY ** np.arange(ANSWER_TOKENS - 1, -1, -1)
    counts = np.bincount(cells, minlength=VOCABULARY**ANSWER_TOKENS)[None]
    return [fit(f"{scenario.name} joint", counts, joint[None])]
