"""How much of a head's drafts the target accepts, measured on rollouts that it was not trained on, greedily.

The head drafts a chain behind every position of an answer, reading the true tokens as its own: as long as all drafted
so far were accepted, that is what it reads when it serves. Only greedy rollouts are judged: there the target's best
token is the next one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from training.eagle3 import Eagle3Head
from training.features import Features
from training.trainer import TargetHead, make_batch


@dataclass(slots=True)
class Judgement:
    """Chains drafted, and by depth how many had all tokens accepted so far, then the one at that depth as well."""

    chains: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Acceptance at each depth, given that all before were accepted."""
        return [
            accepted / offered if offered else 0.0
            for accepted, offered in zip(self.accepted, self.offered, strict=True)
        ]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step: those accepted of the chain, and one of the target."""
        return 1 + sum(self.accepted) / self.chains if self.chains else 0.0


def judge(
    head: Eagle3Head, target: TargetHead, found: Iterable[Features], depth: int
) -> dict[str, Judgement]:
    """By class, and over all as `all`."""
    judged: dict[str, Judgement] = {"all": _empty(depth)}
    head.eval()
    with torch.inference_mode():
        for features in found:
            if features.rollout.temperature or len(features.rollout.token_ids) < depth + 3:
                continue
            one = _judge_one(head, target, features, depth)
            _add(judged["all"], one)
            _add(judged.setdefault(features.rollout.class_name, _empty(depth)), one)
    return judged


def _judge_one(head: Eagle3Head, target: TargetHead, features: Features, depth: int) -> Judgement:
    batch = make_batch([features], target, len(features.rollout.token_ids))
    next_ids = torch.tensor(features.rollout.token_ids[2:])
    positions = len(next_ids)
    right = [
        head.target_ids[logits[0].argmax(-1)] == next_ids
        for logits in head.unroll(batch.planes, batch.embedded, depth)
    ]
    first = int(batch.counted[0].int().argmax())
    starts = torch.arange(first, positions - depth + 1)
    alive = torch.ones(len(starts), dtype=torch.bool)
    judged = Judgement(chains=len(starts))
    for step in range(depth):
        judged.offered.append(int(alive.sum()))
        alive = alive & right[step][starts + step]
        judged.accepted.append(int(alive.sum()))
    return judged


def _empty(depth: int) -> Judgement:
    return Judgement(0, [0] * depth, [0] * depth)


def _add(total: Judgement, one: Judgement) -> None:
    total.chains += one.chains
    total.offered = [a + b for a, b in zip(total.offered, one.offered, strict=True)]
    total.accepted = [a + b for a, b in zip(total.accepted, one.accepted, strict=True)]
