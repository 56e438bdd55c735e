"""Features of made-up rollouts, in which there is something to learn; no model is run."""

from collections.abc import Iterator

import torch

from training.batch import TargetHead
from training.features import FeatureCache, Features
from training.rollout_store import Rollout

HIDDEN = 32
IDS = tuple(range(5, 85, 2))
"""What the rollouts are made of, and what may be drafted."""
VOCAB = 90


def target_of(seed: int = 1) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    )


def made_up(number: int, length: int, target: TargetHead, temperature: float = 0.0) -> Features:
    """Random tokens and states; the best tokens are what the states say."""
    generator = torch.Generator().manual_seed(number)
    ids = tuple(IDS[int(torch.randint(len(IDS), (1,), generator=generator))] for _ in range(length))
    planes, final = (torch.randn(length, *size, HIDDEN, generator=generator) for size in ((3,), ()))
    best_ids = (final @ target.output.T).argmax(-1)
    return Features(Rollout(number, "code", temperature, 4, ids), planes, final, best_ids)


def followable(number: int, target: TargetHead, length: int = 14) -> Features:
    """A greedy rollout that counts through `IDS` from somewhere: every state says the next token for sure."""
    first = 7 * number
    ids = tuple(IDS[(first + place) % len(IDS)] for place in range(length + 1))
    tokens = torch.tensor(ids)
    final = 2 * target.output[tokens[1:]]
    planes = torch.stack([final, target.output[tokens[:-1]], torch.roll(final, -1, 0)], 1)
    return Features(Rollout(number, "code", 0.0, 4, ids[:-1]), planes, final, tokens[1:])


class CacheInMemory(FeatureCache):
    """`found` by file."""

    def __init__(self, found: list[list[Features]]) -> None:
        self.rollouts = [features.rollout for part in found for features in part]
        self.revision, self.layers = "made up", (0, 1, 2)
        self._found = found

    @property
    def num_parts(self) -> int:
        return len(self._found)

    def read(self, number: int) -> Iterator[Features]:
        return iter(self._found[number])


def followable_cache(target: TargetHead) -> CacheInMemory:
    """Two files of four rollouts each."""
    return CacheInMemory(
        [[followable(number, target) for number in numbers] for numbers in (range(4), range(4, 8))]
    )
