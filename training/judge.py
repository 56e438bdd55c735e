"""How much of a head's drafts the target accepts, measured on rollouts that it was not trained on, greedily.

The head drafts behind every place of an answer, reading the true tokens as its own: as long as all drafted so far were
accepted, that is what it reads when it serves. Only greedy rollouts are judged: there the target's best token is the
next one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from training.batch import TargetHead, make_batch
from training.features import Features
from training.head import DraftHead
from training.loss import reduced_precision
from training.rollout_store import Rollout

RANKS: Final = 8
"""Best tokens of each depth that are looked at: as wide as a tree of a served draft may be."""


@dataclass(slots=True)
class Judgement:
    """Chains drafted, and by depth how many had all tokens accepted so far, then the one at that depth as well.

    `ranks[depth][rank]`: places where the target's token was the draft's best but `rank` at that depth, whatever was
    accepted before: what a tree gains by a node.
    """

    chains: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Acceptance at each depth, given that all before were accepted."""
        return [
            accepted / offered if offered else 0.0
            for accepted, offered in zip(self.accepted, self.offered, strict=True)
        ]

    @property
    def rank_rates(self) -> list[list[float]]:
        """Share of places by depth and rank."""
        return [[count / self.chains if self.chains else 0.0 for count in row] for row in self.ranks]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step: those accepted of the chain, and one of the target."""
        return 1 + sum(self.accepted) / self.chains if self.chains else 0.0


def judge(head: DraftHead, target: TargetHead, found: Iterable[Features]) -> dict[str, Judgement]:
    """By class, and over all as `all`. Leaves the head in `eval`."""
    judged: dict[str, Judgement] = {"all": _empty(head.depth)}
    head.eval()
    with torch.no_grad(), reduced_precision():
        for features in found:
            if not is_judged(features.rollout, head.depth):
                continue
            one = _judge_one(head, target, features)
            _add(judged["all"], one)
            _add(judged.setdefault(features.rollout.class_name, _empty(head.depth)), one)
    return judged


def is_judged(rollout: Rollout, depth: int) -> bool:
    """Whether drafts of `depth` can be judged in it: a greedy one with room behind its answer's first token."""
    return not rollout.temperature and 0 < rollout.answer_start < len(rollout.token_ids) - depth


def _judge_one(head: DraftHead, target: TargetHead, features: Features) -> Judgement:
    """The root of the first chain is the first token of the answer, as it is when an answer is served."""
    depth = head.depth
    num_tokens = len(features.rollout.token_ids)
    starts = torch.arange(features.rollout.answer_start - 1, num_tokens - 1 - depth)
    judged = _empty(depth)
    batch = make_batch([features], num_tokens)
    ids = head.draft_ids(batch, target, (torch.zeros_like(starts), starts), min(RANKS, len(head.target_ids)))
    truth = batch.token_ids[0][starts[:, None] + 2 + torch.arange(depth)]
    right = ids == truth[:, :, None]
    alive = torch.ones(len(starts), dtype=torch.bool)
    judged.chains = len(starts)
    for step in range(depth):
        judged.offered[step] = int(alive.sum())
        alive = alive & right[:, step, 0]
        judged.accepted[step] = int(alive.sum())
        hits = right[:, step].sum(dim=0).tolist()
        judged.ranks[step] = hits + [0] * (RANKS - len(hits))
    return judged


def _empty(depth: int) -> Judgement:
    return Judgement(0, [0] * depth, [0] * depth, [[0] * RANKS for _ in range(depth)])


def _add(total: Judgement, one: Judgement) -> None:
    total.chains += one.chains
    total.offered = _sums(total.offered, one.offered)
    total.accepted = _sums(total.accepted, one.accepted)
    total.ranks = [_sums(ours, theirs) for ours, theirs in zip(total.ranks, one.ranks, strict=True)]


def _sums(ours: list[int], theirs: list[int]) -> list[int]:
    return [a + b for a, b in zip(ours, theirs, strict=True)]
