"""What the target thinks while it says a rollout: captured planes and final hidden states, cached on disk.

A shard holds the rollouts of one shard of rollouts: `planes` [tokens, captured layers, hidden_dim], `final` [tokens,
hidden_dim] (final-normed) in bfloat16. They are recomputed from the rollouts whenever they are missing.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.errors import InvalidArgument
from core.whole_file import written_whole
from engine.engine import Engine
from engine.step_batch import SequenceStep
from training.rollout_store import Rollout

CHUNK_ROWS = 256
SHARD_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class Features:
    """Of one rollout. planes: Tensor  # [tokens, captured layers, hidden_dim]; final: Tensor  # [tokens, hidden_dim]"""

    rollout: Rollout
    planes: Tensor
    final: Tensor


def compute(engine: Engine, rollout: Rollout) -> Features:
    """One pass of the target over a rollout; the engine keeps the hidden layers that are wanted."""
    kv = engine.kv
    num_tokens = len(rollout.token_ids)
    table = kv.open()
    try:
        final: list[Tensor] = []
        for start in range(0, num_tokens, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, num_tokens)
            kv.reserve(table, end)
            rows = SequenceStep(table, start, rollout.token_ids[start:end], logit_rows="none")
            result = engine.step([rows], want_last_hidden=True)
            assert result.last_hidden is not None
            final.append(result.last_hidden)
            kv.commit(table, end)
        planes = kv.read_hidden(table, 0, num_tokens).transpose(0, 1).contiguous()
    finally:
        kv.close(table)
    return Features(rollout, planes, torch.cat(final))


class FeatureCache:
    """Features of a list of rollouts under `directory`, in their order; `prepare` computes what is missing."""

    def __init__(self, directory: Path, rollouts: Sequence[Rollout], key: str) -> None:
        """`key`: digest of target and layers; another one's files are not read."""
        self._directory = directory / key
        self._parts = _parts(rollouts)
        self._rollouts = rollouts

    def prepare(self, engine: Engine, progress: Callable[[int], None]) -> None:
        """Compute the missing shards; `progress` is told the tokens done."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(self._parts):
            path = self._path(number)
            if not path.exists():
                found = [compute(engine, self._rollouts[index]) for index in part]
                tensors = {
                    "planes": torch.cat([features.planes for features in found]).to(torch.bfloat16),
                    "final": torch.cat([features.final for features in found]).to(torch.bfloat16),
                }
                with written_whole(path) as beside:
                    save_file(tensors, beside)
            progress(sum(len(self._rollouts[index].token_ids) for index in part))

    @property
    def num_parts(self) -> int:
        """Shards."""
        return len(self._parts)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Rollouts of each shard."""
        return tuple(len(part) for part in self._parts)

    def read(self, number: int) -> Iterator[Features]:
        """The features of one shard's rollouts."""
        part = [self._rollouts[index] for index in self._parts[number]]
        num_tokens = sum(len(rollout.token_ids) for rollout in part)
        path = self._path(number)
        try:
            with safe_open(path, framework="pt") as file:
                planes, final = file.get_tensor("planes"), file.get_tensor("final")
        except Exception as error:  # boundary: the library raises its own error for a bad file
            raise InvalidArgument("features", f"{path} cannot be read: {error}; delete it") from error
        if len(planes) != num_tokens or len(final) != num_tokens:
            raise InvalidArgument("features", f"{path} has {len(planes)} tokens, not {num_tokens}; delete it")
        start = 0
        for rollout in part:
            end = start + len(rollout.token_ids)
            yield Features(rollout, planes[start:end], final[start:end])
            start = end

    def _path(self, number: int) -> Path:
        digest = b"".join(self._rollouts[index].digest() for index in self._parts[number])
        return self._directory / f"features-{number:05d}-{_short(digest)}.safetensors"


def _parts(rollouts: Sequence[Rollout]) -> list[list[int]]:
    parts: list[list[int]] = []
    size = SHARD_TOKENS
    for index, rollout in enumerate(rollouts):
        if size + len(rollout.token_ids) > SHARD_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(index)
        size += len(rollout.token_ids)
    return parts


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
