"""Training an EAGLE-3 head: data in batches, the loss over all depths, checkpoints that a killed run goes on from.

Loss: cross-entropy against the target's whole distribution over the draft vocabulary, where the target's own best
token is in it and the token belongs to the answer; depth j counts `DEPTH_DECAY` ** j.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from core.errors import InvalidArgument
from core.whole_file import written_whole
from training.eagle3 import Eagle3Head
from training.features import FeatureCache, Features
from training.rollout_store import Rollout

DEPTH_DECAY: Final = 0.8
_WEIGHTS, _OPTIMISER, _PROGRESS = "weights.safetensors", "optimiser.safetensors", "progress.json"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast. `max_positions`: longer rollouts are cut; `batch`: rollouts a step."""

    epochs: int = 2
    batch: int = 8
    depth: int = 5
    learning_rate: float = 1e-3
    warm_up_steps: int = 50
    clip_norm: float = 0.5
    max_positions: int = 512
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """Where a run is: `part` and `batch` are those that come next."""

    step: int = 0
    epoch: int = 0
    part: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's embedding and output matrix as the trainer needs them.

    embedding: Tensor  # [vocabulary, hidden_dim]; output: Tensor  # [vocabulary, hidden_dim]
    """

    embedding: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rollouts. positions = longest - 2; everything about position t is as in `Eagle3Head.unroll`.

    planes: Tensor  # [batch, positions, num_planes · hidden_dim]
    embedded: Tensor  # [batch, positions, hidden_dim]
    final: Tensor  # [batch, positions, hidden_dim] of tokens t + 1: from it follows how t + 2 is distributed
    counted: Tensor  # [batch, positions] bool: token t + 2 is of the answer
    """

    planes: Tensor
    embedded: Tensor
    final: Tensor
    counted: Tensor


def draft_vocabulary(rollouts: Sequence[Rollout], size: int) -> list[int]:
    """The `size` ids that occur most in rollouts, ascending; rarer ones fill up in order of id."""
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        counts.update(rollout.token_ids)
    chosen = [token_id for token_id, _ in counts.most_common(size)]
    known = set(chosen)
    filler = (token_id for token_id in range(size + len(known)) if token_id not in known)
    while len(chosen) < size:
        chosen.append(next(filler))
    return sorted(chosen)


def make_batch(found: Sequence[Features], target: TargetHead, max_positions: int) -> Batch:
    """Pads the features of rollouts to one length."""
    lengths = [min(len(features.rollout.token_ids), max_positions + 2) - 2 for features in found]
    longest = max(lengths)
    hidden_dim = target.embedding.shape[1]
    planes_dim = found[0].planes.shape[1] * hidden_dim
    planes = torch.zeros(len(found), longest, planes_dim)
    embedded = torch.zeros(len(found), longest, hidden_dim)
    final = torch.zeros(len(found), longest, hidden_dim)
    counted = torch.zeros(len(found), longest, dtype=torch.bool)
    for row, (features, length) in enumerate(zip(found, lengths, strict=True)):
        ids = torch.tensor(features.rollout.token_ids[1 : length + 1])
        planes[row, :length] = features.planes[:length].flatten(1).float()
        embedded[row, :length] = target.embedding[ids].float()
        final[row, :length] = features.final[1 : length + 1].float()
        counted[row, max(0, features.rollout.answer_start - 2) : length] = True
    return Batch(planes, embedded, final, counted)


def losses_of(head: Eagle3Head, batch: Batch, output: Tensor, depth: int) -> list[Tensor]:
    """Mean loss at each depth. output: Tensor  # [vocabulary, hidden_dim]"""
    wanted, known = _wanted(head, batch, output)
    found: list[Tensor] = []
    for step, logits in enumerate(head.unroll(batch.planes, batch.embedded, depth)):
        counted = batch.counted & known
        counted[:, :step] = False
        rows = functional.log_softmax(logits[counted].float(), dim=-1)
        found.append(-(wanted[counted] * rows).sum(-1).mean() if len(rows) else rows.sum())
    return found


def _wanted(head: Eagle3Head, batch: Batch, output: Tensor) -> tuple[Tensor, Tensor]:
    """The target's distribution over draft ids, and where its best token is one: no gradients."""
    with torch.no_grad():
        target_ids = head.target_ids
        logits = batch.final @ output.float().T
        best = logits.argmax(dim=-1)
        reduced = logits[..., target_ids]
        known = reduced.amax(dim=-1) == logits.gather(-1, best[..., None])[..., 0]
        return torch.softmax(reduced, dim=-1), known


class Trainer:
    """Steps a head over features. `folder` holds the checkpoint; an existing one is gone on from."""

    def __init__(
        self, head: Eagle3Head, target: TargetHead, features: FeatureCache, plan: TrainingPlan, folder: Path
    ) -> None:
        """Raises InvalidArgument where the folder's checkpoint is of another plan or head."""
        self.head = head
        self.progress = Progress()
        self._target = target
        self._features = features
        self._plan = plan
        self._folder = folder
        self._optimiser = torch.optim.AdamW(head.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95))
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / _PROGRESS).exists():
            self._load()

    def run(
        self, total_steps: int, stop: Callable[[], bool], report: Callable[[Progress, list[float]], None]
    ) -> None:
        """Train until the plan's epochs are over, `total_steps` are done or `stop` says so; then checkpoint."""
        self.head.train()
        try:
            while self.progress.epoch < self._plan.epochs and self.progress.step < total_steps:
                for found in islice(self._batches(), self.progress.batch, None):
                    losses = self._step(
                        make_batch(found, self._target, self._plan.max_positions), total_steps
                    )
                    self.progress.batch += 1
                    report(self.progress, losses)
                    if stop() or self.progress.step >= total_steps:
                        return
                self._next_part()
        finally:
            self.save()

    def save(self) -> None:
        """Write weights, optimiser and progress; the progress last, so that they belong together."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.head.state_dict().items()}
        state = self._optimiser.state_dict()["state"]
        moments = {
            f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()
        }
        with written_whole(self._folder / _WEIGHTS) as path:
            save_file(tensors, path)
        if moments:
            with written_whole(self._folder / _OPTIMISER) as path:
                save_file(moments, path)
        values = {"plan": asdict(self._plan), "progress": asdict(self.progress)}
        with written_whole(self._folder / _PROGRESS) as path:
            path.write_text(json.dumps(values))

    def _load(self) -> None:
        path = self._folder / _PROGRESS
        try:
            values = json.loads(path.read_text())
            if values["plan"] != asdict(self._plan):
                raise InvalidArgument("plan", f"{path} was made by another plan; take another folder")
            self.head.load_state_dict(load_file(self._folder / _WEIGHTS))
            state = self._optimiser.state_dict()
            if (self._folder / _OPTIMISER).exists():
                state["state"] = _moments(load_file(self._folder / _OPTIMISER))
                self._optimiser.load_state_dict(state)
            self.progress = Progress(**values["progress"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise InvalidArgument(
                "out", f"{self._folder} holds no checkpoint of this head: {error}"
            ) from error

    def _batches(self) -> Iterator[list[Features]]:
        """The rollouts of the shard that is due, shuffled; which shard comes when is shuffled by epoch too."""
        epoch, part = self.progress.epoch, self.progress.part
        generator = np.random.default_rng((self._plan.seed, epoch))
        order = generator.permutation(self._features.num_parts)
        found = [f for f in self._features.read(int(order[part])) if len(f.rollout.token_ids) > 3]
        shuffled = np.random.default_rng((self._plan.seed, epoch, part)).permutation(len(found))
        for start in range(0, len(found), self._plan.batch):
            yield [found[index] for index in shuffled[start : start + self._plan.batch]]

    def _next_part(self) -> None:
        self.progress.part += 1
        self.progress.batch = 0
        if self.progress.part == self._features.num_parts:
            self.progress.part = 0
            self.progress.epoch += 1

    def _step(self, batch: Batch, total_steps: int) -> list[float]:
        plan = self._plan
        rate = plan.learning_rate * _schedule(self.progress.step, plan.warm_up_steps, total_steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = losses_of(self.head, batch, self._target.output, plan.depth)
        total = sum((DEPTH_DECAY**step * loss for step, loss in enumerate(losses)), torch.zeros(()))
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), plan.clip_norm)
        self._optimiser.step()
        self.progress.step += 1
        return [float(loss.detach()) for loss in losses]


def _schedule(step: int, warm_up_steps: int, total_steps: int) -> float:
    """Linear warm-up, then a half cosine to a tenth."""
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    share = min(1.0, (step - warm_up_steps) / max(1, total_steps - warm_up_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * share))


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, field = name.partition(".")
        found.setdefault(int(index), {})[field] = tensor
    return found
