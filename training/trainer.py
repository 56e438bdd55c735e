"""Training a head: batches in order, the learning rate, checkpoints that a killed run goes on from exactly.

Any `DraftHead`. Loss: the head's at each depth, weighed as it says.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.errors import InvalidArgument
from core.whole_file import written_whole
from training.batch import Batch, TargetHead, common_start, make_batch, trained_tokens
from training.curve import CURVE, Curve
from training.features import FeatureCache, Features
from training.head import DraftHead
from training.judge import judge
from training.loss import reduced_precision

_CHECKPOINT: Final = "checkpoint.safetensors"
_HEAD_PREFIX, _OPTIMISER_PREFIX = "head.", "optimiser."
_LENGTHS_SORTED_OVER: Final = 8
"""Batches whose rollouts are sorted by length among each other: neighbours are padded less."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast.

    Training ends after `epochs` or, where given, `tokens` answer tokens seen, whichever comes first. `batch`: rollouts
    a step; `max_tokens`: longer ones are cut. For the first `shallow_share` of it heads that learn deep drafts from
    their own output learn those of depth 1 only, which is several times as fast. Every `save_steps` steps there is a
    checkpoint and a point of the curve. Raises InvalidArgument for a rate or a share that is none.
    """

    epochs: int = 2
    tokens: int | None = None
    batch: int = 8
    learning_rate: float = 1e-3
    warm_up_steps: int = 50
    clip_norm: float = 0.5
    max_tokens: int = 514
    shallow_share: float = 0.0
    save_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise InvalidArgument("learning_rate", f"must be above 0, got {self.learning_rate}")
        if not 0 <= self.shallow_share <= 1:
            raise InvalidArgument("shallow_share", f"must be 0 to 1, got {self.shallow_share}")


@dataclass(slots=True)
class Progress:
    """Where a run is: `part` and `batch` are those that come next; `tokens` answer tokens were seen."""

    step: int = 0
    epoch: int = 0
    part: int = 0
    batch: int = 0
    tokens: int = 0


class Trainer:
    """Steps a head over features. `folder` holds the checkpoint; an existing one is gone on from.

    Which batch is when depends on plan and rollouts only, so a run that was stopped, or killed after a checkpoint, ends
    with the weights of one that was not. `curve.jsonl` beside the checkpoint has a line for each step, and the
    acceptance on `watched` rollouts at the start and at each checkpoint.
    """

    def __init__(
        self,
        head: DraftHead,
        target: TargetHead,
        features: FeatureCache,
        plan: TrainingPlan,
        folder: Path,
        watched: Sequence[Features] = (),
        start: str = "",
    ) -> None:
        """`start`: digest of the weights that `head` was given; "" where they are fresh.

        Raises InvalidArgument where there is nothing to train on, or the checkpoint is of another plan or head.
        """
        self.head = head
        self.progress = Progress()
        self.total_tokens = _total_tokens(plan, features)
        if not self.total_tokens:
            raise InvalidArgument("rollouts", "none of them has an answer that is long enough to train on")
        self._target = target
        self._features = features
        self._first = common_start(features.rollouts)
        self._plan = plan
        self._folder = folder
        self._watched = watched
        self._start = start
        groups = [{"params": trained, "share": share} for share, trained in head.learning_rates()]
        self._optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / _CHECKPOINT).exists():
            self._load()
        self._curve = Curve(folder / CURVE, self.progress.step)

    @property
    def done(self) -> bool:
        """Whether the plan's end is reached."""
        return self.progress.epoch >= self._plan.epochs or self.progress.tokens >= self.total_tokens

    def run(self, stop: Callable[[], bool], report: Callable[[Progress, list[float]], None]) -> None:
        """Train to the end of the plan, or until `stop` says so; then checkpoint.

        Raises InvalidArgument where loss or weights are no numbers any more; the last checkpoint stays.
        """
        self.head.train()
        if self.progress.step == 0:
            self._watch()
        while not self.done:
            for found in islice(self._batches(), self.progress.batch, None):
                losses = self._step(make_batch(found, self._plan.max_tokens, self._first))
                self.progress.batch += 1
                self.progress.tokens += sum(
                    trained_tokens(features.rollout, self._plan.max_tokens) for features in found
                )
                self._note(losses)
                report(self.progress, losses)
                if stop() or self.done:
                    self.save()
                    return
                if self.progress.step % self._plan.save_steps == 0:
                    self.save()
            self._next_part()
        self.save()

    def save(self) -> None:
        """Write weights, optimiser and progress in one file, so that they always belong together.

        Raises InvalidArgument where weights are no numbers: the checkpoint before stays.
        """
        if not all(bool(torch.isfinite(weights).all()) for weights in self.head.parameters()):
            raise self._diverged("weights of", self.progress.step)
        tensors = {
            _HEAD_PREFIX + name: tensor.detach().contiguous()
            for name, tensor in self.head.state_dict().items()
        }
        for index, entry in self._optimiser.state_dict()["state"].items():
            tensors |= {f"{_OPTIMISER_PREFIX}{index}.{name}": value for name, value in entry.items()}
        about = {"made_by": json.dumps(self._made_by()), "progress": json.dumps(asdict(self.progress))}
        with written_whole(self._folder / _CHECKPOINT) as beside:
            save_file(tensors, beside, about)

    def _load(self) -> None:
        path = self._folder / _CHECKPOINT
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            made_by, progress = dict(json.loads(about["made_by"])), Progress(**json.loads(about["progress"]))
        except Exception as error:  # boundary: the library raises its own error for a bad file
            raise InvalidArgument("out", f"{path} is no checkpoint: {error}") from error
        for name, ours in self._made_by().items():
            if made_by.get(name, "") != ours:
                raise InvalidArgument("out", f"{path} was made by another {name}; take another folder")
        state = self._optimiser.state_dict()
        try:
            self.head.load_state_dict(_under(_HEAD_PREFIX, tensors))
            state["state"] = _moments(_under(_OPTIMISER_PREFIX, tensors))
            self._optimiser.load_state_dict(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise InvalidArgument("out", f"{path} is no checkpoint of this head: {error}") from error
        self.progress = progress

    def _made_by(self) -> dict[str, Any]:
        """What a checkpoint has to agree with, by what a message calls it."""
        digest = hashlib.blake2b(digest_size=16)
        for rollout in self._features.rollouts:
            digest.update(rollout.digest())
        head = self.head
        return {
            "plan": asdict(self._plan),
            "head": [head.kind, head.depth, dict(head.sizes())],
            "set of rollouts": digest.hexdigest(),
            "target": self._features.revision,
            "choice of layers": list(self._features.layers),
            "start": self._start,
        }

    def _batches(self) -> Iterator[list[Features]]:
        """The rollouts of the file that is due, in batches of similar lengths; which comes when is drawn each epoch."""
        plan = self._plan
        epoch, part = self.progress.epoch, self.progress.part
        order = np.random.default_rng((plan.seed, epoch)).permutation(self._features.num_parts)
        found = [
            features
            for features in self._features.read(int(order[part]))
            if trained_tokens(features.rollout, plan.max_tokens)
        ]
        random = np.random.default_rng((plan.seed, epoch, part))
        shuffled = [found[index] for index in random.permutation(len(found))]
        batches: list[list[Features]] = []
        width = plan.batch * _LENGTHS_SORTED_OVER
        for first in range(0, len(shuffled), width):
            window = sorted(
                shuffled[first : first + width], key=lambda features: len(features.rollout.token_ids)
            )
            batches += [window[start : start + plan.batch] for start in range(0, len(window), plan.batch)]
        for index in random.permutation(len(batches)):
            yield batches[index]

    def _next_part(self) -> None:
        self.progress.part += 1
        self.progress.batch = 0
        if self.progress.part == self._features.num_parts:
            self.progress.part = 0
            self.progress.epoch += 1

    def _step(self, batch: Batch) -> list[float]:
        for group in self._optimiser.param_groups:
            group["lr"] = group["share"] * self._learning_rate()
        with reduced_precision():
            losses = self._losses(batch)
        weighed = (self.head.loss_weight(place) * loss for place, loss in enumerate(losses))
        total = sum(weighed, torch.zeros(()))
        if not math.isfinite(float(total.detach())):
            raise self._diverged("loss of", self.progress.step + 1)
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._plan.clip_norm)
        self._optimiser.step()
        self.progress.step += 1
        return [float(loss.detach()) for loss in losses]

    @staticmethod
    def _diverged(what: str, step: int) -> InvalidArgument:
        return InvalidArgument(
            "learning_rate", f"{what} step {step}: no numbers any more; take a lower rate, in another folder"
        )

    def _losses(self, batch: Batch) -> list[Tensor]:
        shallow = self._share < self._plan.shallow_share
        return (self.head.shallow_losses if shallow else self.head.losses)(batch, self._target)

    @property
    def _share(self) -> float:
        """Of the tokens of the whole plan, what was seen."""
        return min(1.0, self.progress.tokens / max(1, self.total_tokens))

    def _learning_rate(self) -> float:
        """Linear warm-up over steps, then half a cosine down to a tenth over the tokens of the whole plan."""
        plan, step = self._plan, self.progress.step
        warm = min(1.0, (step + 1) / max(1, plan.warm_up_steps))
        return plan.learning_rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * self._share)))

    def _note(self, losses: list[float]) -> None:
        """Lines of the curve."""
        progress = self.progress
        line = {"step": progress.step, "epoch": progress.epoch, "tokens": progress.tokens}
        rate = self._optimiser.param_groups[0]["lr"]
        self._curve.add({**line, "learning_rate": rate, "losses": [round(loss, 5) for loss in losses]})
        if progress.step % self._plan.save_steps == 0 or self.done:
            self._watch()

    def _watch(self) -> None:
        """A line of the curve: what the head reaches on the watched rollouts."""
        if not self._watched:
            return
        judged = judge(self.head, self._target, self._watched)["all"]
        self._curve.add(
            {
                "step": self.progress.step,
                "tokens": self.progress.tokens,
                "acceptance_length": round(judged.acceptance_length, 4),
                "rates": [round(rate, 4) for rate in judged.rates],
            }
        )
        self.head.train()


def _total_tokens(plan: TrainingPlan, features: FeatureCache) -> int:
    of_epoch = sum(trained_tokens(rollout, plan.max_tokens) for rollout in features.rollouts)
    total = plan.epochs * of_epoch
    return total if plan.tokens is None else min(total, plan.tokens)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, field = name.partition(".")
        found.setdefault(int(index), {})[field] = tensor
    return found
