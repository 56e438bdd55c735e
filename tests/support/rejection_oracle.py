"""What rejection verification must do, written down plainly and apart from the code that does it.

Everything is enumerated: every set of children that drafters can draw at a node, with its probability, and what
becomes of each. Distributions are lists of floats over a small vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Distribution = Sequence[float]


@dataclass(frozen=True, slots=True)
class Source:
    """What one drafter proposes at a node from its own distribution.

    `distinct`: `count` draws without replacement; `repeated`: with; `top`: its `count` likeliest, not sampled.
    """

    drafter: int
    count: int
    kind: Literal["distinct", "repeated", "top"]


@dataclass(frozen=True, slots=True)
class Child:
    """One proposed token, the distribution that its drafter began with, and the group of draws it is of."""

    token_id: int
    draft_probs: Distribution
    group: int
    distinct: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """P(the i-th child is accepted), P(none is), and the distribution that is drawn from then."""

    accepted: tuple[float, ...]
    rejected: float
    remaining: Distribution


def possible_children(
    sources: Sequence[Source], drafts: Sequence[Distribution]
) -> Iterator[tuple[float, tuple[Child, ...]]]:
    """Every (probability, children of a node), the sources one behind another."""
    parts = [list(_draws(source, group, drafts[source.drafter])) for group, source in enumerate(sources)]
    for combination in product(*parts):
        probability = 1.0
        children: list[Child] = []
        for part_probability, part in combination:
            probability *= part_probability
            children += part
        if probability > 0.0:
            yield probability, tuple(children)


def _draws(source: Source, group: int, draft: Distribution) -> Iterator[tuple[float, list[Child]]]:
    vocabulary = range(len(draft))
    if source.kind == "top":
        best = sorted(vocabulary, key=lambda token_id: (-draft[token_id], token_id))[: source.count]
        yield 1.0, [Child(token_id, one_hot(token_id, len(draft)), group, True) for token_id in best]
        return
    support = [token_id for token_id in vocabulary if draft[token_id] > 0.0]
    count = min(source.count, len(support)) if source.kind == "distinct" else source.count
    for tokens in product(support, repeat=count):
        probability, left = 1.0, 1.0
        for index, token_id in enumerate(tokens):
            if source.kind == "distinct":
                if token_id in tokens[:index]:
                    probability = 0.0
                    break
                probability *= draft[token_id] / left
                left -= draft[token_id]
            else:
                probability *= draft[token_id]
        yield probability, [Child(token_id, draft, group, source.kind == "distinct") for token_id in tokens]


def outcome(target: Distribution, children: Sequence[Child]) -> Outcome:
    """The children tried in order on the target's distribution."""
    rest = list(target)
    reached = 1.0
    accepted: list[float] = []
    gone: dict[int, set[int]] = {}
    for child in children:
        taken = gone.setdefault(child.group, set()) if child.distinct else set()
        draft = [0.0 if token_id in taken else p for token_id, p in enumerate(child.draft_probs)]
        taken.add(child.token_id)
        if sum(draft) < 1e-12:
            accepted.append(0.0)
            continue
        draft = [p / sum(draft) for p in draft]
        keep = min(1.0, rest[child.token_id] / draft[child.token_id])
        accepted.append(reached * keep)
        reached *= 1.0 - keep
        above = [max(0.0, t - d) for t, d in zip(rest, draft, strict=True)]
        if sum(above) > 1e-12:
            rest = [mass / sum(above) for mass in above]
    return Outcome(tuple(accepted), reached, rest)


def one_hot(token_id: int, vocabulary: int) -> list[float]:
    """All mass on one token."""
    return [1.0 if other == token_id else 0.0 for other in range(vocabulary)]
