"""Draws trees of several drafters from the toy of `synthetic_chains`, and holds them against plain enumeration.

Every tree has the children of its sources below the root, and again below the root's first child: what is drafted on
depends on a place, never on a token. All exact distributions come from `tests.support.rejection_oracle`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from decode.draft import Draft, VerifyItem
from decode.sampling.draft_noise import DraftDraw, draw_children
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from tests.bench.goodness_of_fit import FitTest, fit
from tests.bench.synthetic_chains import (
    ROOT,
    SAMPLING,
    VOCABULARY,
    Counts,
    Probs,
    exact_probs,
    normalised,
    tabulate,
    toy_logits,
)
from tests.support.rejection_oracle import Source, outcome, possible_children

BATCH = 4000
NONE = -1
"""In place of a token or row that there is not."""

TreeFault = Literal["siblings_sorted_by_score", "stop_looks_at_the_token", "equal_siblings_merged"]
TREE_FAULTS: tuple[TreeFault, ...] = (
    "siblings_sorted_by_score",
    "stop_looks_at_the_token",
    "equal_siblings_merged",
)
STOP_BELOW = 0.2


@dataclass(frozen=True, slots=True)
class TreeScenario:
    """`num_trees` trees whose nodes get the children of all `sources`, in their order."""

    name: str
    sources: tuple[Source, ...]
    num_trees: int

    @property
    def width(self) -> int:
        """Children of a node."""
        return sum(source.count for source in self.sources)


def tree_scenarios(num_trees: int) -> list[TreeScenario]:
    """With and without replacement, several drafters, and sampled beside deterministic ones."""
    shapes = {
        "without replacement": (Source(0, 3, "distinct"),),
        "with replacement": (Source(0, 2, "repeated"),),
        "several drafters": (Source(0, 1, "repeated"), Source(1, 1, "repeated")),
        "several drafters without replacement": (Source(1, 2, "distinct"), Source(0, 2, "distinct")),
        "mixed with one-hot": (Source(0, 1, "top"), Source(1, 2, "distinct")),
    }
    return [TreeScenario(f"tree {name}", sources, num_trees) for name, sources in shapes.items()]


def fault_scenario(fault: TreeFault, num_trees: int) -> TreeScenario:
    """Where a fault would show."""
    kind: Literal["distinct", "repeated"] = "repeated" if fault == "equal_siblings_merged" else "distinct"
    return TreeScenario(f"tree {fault}", (Source(0, 3, kind),), num_trees)


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """What each tree gave, NONE where there was nothing.

    `children` [trees, 2, width]: tokens below the root and below its first child. `accepted` [trees, 2]: which
    child was accepted there, from 0. `emitted` [trees, 3].
    """

    children: Counts
    accepted: Counts
    emitted: Counts


def draft_logits() -> list[torch.Tensor]:
    """[vocabulary, vocabulary] of each drafter: that of the chains, and a flatter one that errs elsewhere."""
    target, first = toy_logits()
    second = 0.3 * target + 0.8 * torch.randn(target.shape, generator=torch.Generator().manual_seed(21))
    return [first, second]


def run_trees(scenario: TreeScenario, fault: TreeFault | None = None) -> TreeOutcome:
    """Draw and verify all trees; tree i has seed i."""
    parts = [
        _run_batch(scenario, range(first, min(first + BATCH, scenario.num_trees)), fault)
        for first in range(0, scenario.num_trees, BATCH)
    ]
    names = ("children", "accepted", "emitted")
    return TreeOutcome(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _run_batch(scenario: TreeScenario, seeds: range, fault: TreeFault | None) -> TreeOutcome:
    target, _ = toy_logits()
    history = TokenHistory([ROOT])
    below_root = _Level(scenario, seeds, history, [()] * len(seeds))
    first = below_root.tokens[:, 0].tolist()
    below_first = _Level(scenario, seeds, history, [(token_id,) for token_id in first])
    items: list[VerifyItem] = []
    rows: list[int] = []
    kept_children: list[list[int]] = []
    for index, seed in enumerate(seeds):
        draft, kept = _draft(scenario, (below_root, below_first), index, fault)
        items.append(VerifyItem(SAMPLING, seed, 0, history, 1, len(rows), draft, "rejection"))
        rows += [ROOT, *draft.token_ids]
        kept_children.append(kept)
    outcome_of = TreeOutcome(
        np.stack([below_root.tokens, below_first.tokens], axis=1),
        np.full((len(seeds), 2), NONE),
        np.full((len(seeds), 3), NONE),
    )
    for index, verdict in enumerate(verify(items, target[torch.tensor(rows)])):
        outcome_of.emitted[index, : len(verdict.token_ids)] = verdict.token_ids
        for depth, row in enumerate(verdict.accepted_rows):
            outcome_of.accepted[index, depth] = kept_children[index][row - 1]
    return outcome_of


class _Level:
    """The children of one node of each tree, source behind source.

    `tokens` [trees, width]; `probs` [trees, width, vocabulary], the d of each.
    """

    def __init__(
        self, scenario: TreeScenario, seeds: range, history: TokenHistory, paths: Sequence[tuple[int, ...]]
    ) -> None:
        last = torch.tensor([path[-1] if path else ROOT for path in paths])
        tokens, probs = [], []
        for number, source in enumerate(scenario.sources):
            logits = draft_logits()[source.drafter][last]
            if source.kind == "top":
                best = logits.sort(dim=1, descending=True, stable=True).indices[:, : source.count]
                tokens.append(best.numpy())
                probs.append(torch.nn.functional.one_hot(best, VOCABULARY).float())
                continue
            repeats = source.count if source.kind == "repeated" else 1
            for repeat in range(repeats):
                draws = [
                    DraftDraw(
                        SAMPLING, seed, 0, 1 + len(path), "rejection", history, path, 10 * number + repeat
                    )
                    for seed, path in zip(seeds, paths, strict=True)
                ]
                width = source.count // repeats
                drawn = [found for found in draw_children(draws, logits, [width] * len(draws)) if found]
                tokens.append(np.array([children.token_ids for children in drawn]))
                rows = torch.stack([found.draft_probs for found in drawn if found.draft_probs is not None])
                probs.append(rows[:, None].expand(-1, width, -1))
        self.tokens: Counts = np.concatenate(tokens, axis=1)
        self.probs = torch.cat(probs, dim=1)


def _draft(
    scenario: TreeScenario, levels: tuple[_Level, _Level], index: int, fault: TreeFault | None
) -> tuple[Draft, list[int]]:
    """The tree, and which child of its node each of its nodes is."""
    sources: list[int] = []
    for number, source in enumerate(scenario.sources):
        for repeat in range(source.count):
            sources.append(10 * number + (repeat if source.kind == "repeated" else 0))
    order = [_kept_order(level, index, fault) for level in levels]
    if 0 not in order[0]:
        order[1] = []
    kept = [*order[0], *order[1]]
    first_row = order[0].index(0) + 1 if order[1] else 0
    tokens = [level.tokens[index, order[depth]] for depth, level in enumerate(levels)]
    probs = [level.probs[index, torch.tensor(order[depth]).long()] for depth, level in enumerate(levels)]
    draft = Draft(
        token_ids=tuple(np.concatenate(tokens).tolist()),
        parents=(0,) * len(order[0]) + (first_row,) * len(order[1]),
        draft_probs=torch.cat(probs),
        without_replacement=True,
        sources=tuple(sources[child] for child in kept),
    )
    return draft, kept


def _kept_order(level: _Level, index: int, fault: TreeFault | None) -> list[int]:
    """Which children of a node are handed over, in which order: all, as drawn, but for the fault."""
    tokens = level.tokens[index].tolist()
    order = list(range(len(tokens)))
    if fault is None:
        return order
    scores = [float(level.probs[index, child, tokens[child]]) for child in order]
    match fault:
        case "siblings_sorted_by_score":
            return sorted(order, key=lambda child: -scores[child])
        case "stop_looks_at_the_token":
            return [child for child in order if scores[child] >= STOP_BELOW]
        case "equal_siblings_merged":
            return [child for child in order if tokens.index(tokens[child]) == child]


def judge_trees(scenario: TreeScenario, seen: TreeOutcome) -> list[FitTest]:
    """Every exact claim about the outcome, position by position."""
    target_probs = exact_probs(toy_logits()[0])
    everywhere = np.ones(scenario.num_trees, bool)
    at_root = np.full(scenario.num_trees, ROOT)
    tests = _judge_node(scenario, seen, 0, (at_root, everywhere))
    first = seen.accepted[:, 0] == 0
    tests += _judge_node(scenario, seen, 1, (seen.emitted[:, 0], first))
    leaves = {2: (seen.accepted[:, 0] > 0), 3: (seen.accepted[:, 1] != NONE)}
    for position, here in leaves.items():
        before, emitted = seen.emitted[here, position - 2], seen.emitted[here, position - 1]
        tests.append(
            fit(f"{scenario.name} position {position} bonus", tabulate(before, emitted), target_probs)
        )
    return tests


def _judge_node(
    scenario: TreeScenario, seen: TreeOutcome, depth: int, position: tuple[Counts, NDArray[np.bool_]]
) -> list[FitTest]:
    """`position`: the token before, and which trees stand at a node with children at this depth."""
    before, here = position
    name, num_children = f"{scenario.name} position {depth + 1}", scenario.width
    emitted, accepted, children = seen.emitted[:, depth], seen.accepted[:, depth], seen.children[:, depth]
    law = _law(scenario)
    replaced = here & (accepted == NONE)
    tests = [
        fit(f"{name} emitted", tabulate(before[here], emitted[here]), exact_probs(toy_logits()[0])),
        fit(
            f"{name} accepted child",
            tabulate(before[here], accepted[here] % (num_children + 1), num_children + 1),
            np.concatenate([law.accepted.sum(axis=2), law.residual.sum(axis=1, keepdims=True)], axis=1),
        ),
        fit(
            f"{name} residual",
            tabulate(before[replaced], emitted[replaced]),
            normalised(law.residual),
        ),
    ]
    for child in range(num_children):
        tests.append(
            fit(
                f"{name} child {child} drafted",
                tabulate(before[here], children[here, child]),
                law.drafted[:, child],
            )
        )
        taken = here & (accepted == child)
        tests.append(
            fit(
                f"{name} child {child} accepted",
                tabulate(before[taken], emitted[taken]),
                normalised(law.accepted[:, child]),
            )
        )
    return tests


@dataclass(frozen=True, slots=True)
class _Law:
    """By the token before. `drafted`, `accepted` [before, child, token]; `residual` [before, token]. Joint masses."""

    drafted: Probs
    accepted: Probs
    residual: Probs


def _law(scenario: TreeScenario) -> _Law:
    target_probs = exact_probs(toy_logits()[0])
    draft_probs = [exact_probs(logits) for logits in draft_logits()]
    shape = (VOCABULARY, scenario.width, VOCABULARY)
    law = _Law(np.zeros(shape), np.zeros(shape), np.zeros((VOCABULARY, VOCABULARY)))
    for before in range(VOCABULARY):
        drafts = [probs[before].tolist() for probs in draft_probs]
        for probability, children in possible_children(scenario.sources, drafts):
            found = outcome(target_probs[before].tolist(), children)
            for index, child in enumerate(children):
                law.drafted[before, index, child.token_id] += probability
                law.accepted[before, index, child.token_id] += probability * found.accepted[index]
            law.residual[before] += probability * found.rejected * np.array(found.remaining)
    return law
