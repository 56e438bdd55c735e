"""What the target thinks while it says a rollout: captured planes and final hidden states, cached on disk.

A file holds the features of some rollouts: `final` [tokens, hidden_dim] (final-normed) and `plane.L` [tokens,
hidden_dim] for each captured layer L in bfloat16, and `best_ids` [tokens] int32. They are recomputed from the rollouts
whenever they are missing; a head reads the files of another one that captured its layers too.
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
from engine.step_batch import LogitRows, SequenceStep
from training.rollout_store import Rollout

CHUNK_ROWS = 256
SHARD_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class Features:
    """Of one rollout.

    planes: Tensor  # [tokens, captured layers, hidden_dim]
    final: Tensor  # [tokens, hidden_dim]: from row t follows how token t + 1 is distributed
    best_ids: Tensor  # [tokens] int64: the target's best token t + 1; in the user turn of a greedy rollout the next one
    """

    rollout: Rollout
    planes: Tensor
    final: Tensor
    best_ids: Tensor


def compute(engine: Engine, rollout: Rollout) -> Features:
    """One pass of the target over a rollout; the engine keeps the hidden layers that are wanted.

    The best tokens of a greedy answer are that answer itself. Only for a sampled one the whole vocabulary is
    multiplied, here and once, so that no training step has to: it would cost more than a head.
    """
    kv = engine.kv
    greedy = not rollout.temperature
    num_tokens = len(rollout.token_ids)
    table = kv.open()
    try:
        final: list[Tensor] = []
        best_ids: list[Tensor] = []
        for start in range(0, num_tokens, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, num_tokens)
            kv.reserve(table, end)
            logit_rows: LogitRows = "none" if greedy else "all"
            rows = SequenceStep(table, start, rollout.token_ids[start:end], logit_rows=logit_rows)
            result = engine.step([rows], want_last_hidden=True)
            assert result.last_hidden is not None
            final.append(result.last_hidden)
            best_ids.append(result.logits.argmax(dim=-1))
            kv.commit(table, end)
        planes = kv.read_hidden(table, 0, num_tokens).transpose(0, 1).contiguous()
    finally:
        kv.close(table)
    next_ids = torch.tensor([*rollout.token_ids[1:], 0])
    return Features(rollout, planes, torch.cat(final), next_ids if greedy else torch.cat(best_ids))


class FeatureCache:
    """Features of a list of rollouts under `directory`, in their order; `prepare` computes what is missing."""

    def __init__(
        self, directory: Path, rollouts: Sequence[Rollout], revision: str, layers: tuple[int, ...]
    ) -> None:
        """`revision`: the target's; another one's files are not read. `layers`: the planes wanted, ascending."""
        self.rollouts = rollouts
        self.revision = revision
        self.layers = layers
        self._directory = directory / revision[:16]
        self._parts = _parts(rollouts)

    def prepare(
        self, engine: Engine, progress: Callable[[int], None], stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Compute the missing files; whether all are there. The engine keeps the wanted layers.

        `progress` is told the tokens done; `stop`, asked before every rollout, ends it behind the last whole file.
        """
        for number, part in enumerate(self._parts):
            if self._find(number) is None:
                path = self._path(number)
                path.parent.mkdir(parents=True, exist_ok=True)
                found: list[Features] = []
                for index in part:
                    if stop():
                        return False
                    found.append(compute(engine, self.rollouts[index]))
                with written_whole(path) as beside:
                    save_file(_tensors(found, self.layers), beside)
            progress(sum(len(self.rollouts[index].token_ids) for index in part))
        return True

    @property
    def num_parts(self) -> int:
        """Files."""
        return len(self._parts)

    def read(self, number: int) -> Iterator[Features]:
        """The features of one file's rollouts."""
        part = [self.rollouts[index] for index in self._parts[number]]
        num_tokens = sum(len(rollout.token_ids) for rollout in part)
        path = self._find(number) or self._path(number)
        try:
            with safe_open(path, framework="pt") as file:
                final, best_ids = file.get_tensor("final"), file.get_tensor("best_ids").long()
                captured = [file.get_tensor(f"plane.{layer}") for layer in self.layers]
        except Exception as error:  # boundary: the library raises its own error for a bad file
            raise InvalidArgument("features", f"{path} cannot be read: {error}; delete it") from error
        sizes = {len(tensor) for tensor in (final, best_ids, *captured)}
        if sizes != {num_tokens}:
            raise InvalidArgument("features", f"{path} has {sizes} tokens, not {num_tokens}; delete it")
        planes = (
            torch.stack(captured, dim=1) if captured else final.new_empty((num_tokens, 0, final.shape[1]))
        )
        start = 0
        for rollout in part:
            rows = slice(start, start + len(rollout.token_ids))
            start = rows.stop
            yield Features(rollout, planes[rows], final[rows], best_ids[rows])

    def _path(self, number: int) -> Path:
        """Where this cache writes."""
        digest = b"".join(self.rollouts[index].digest() for index in self._parts[number])
        return self._directory / f"features-{_short(digest)}" / f"{_layers_name(self.layers)}.safetensors"

    def _find(self, number: int) -> Path | None:
        """The first file of those rollouts that holds the layers wanted."""
        for path in sorted(self._path(number).parent.glob("*.safetensors")):
            if {*_layers_name(self.layers).split("-")} <= {*path.stem.split("-")}:
                return path
        return None


def _layers_name(layers: tuple[int, ...]) -> str:
    return "-".join(["final", *map(str, layers)])


def _tensors(found: Sequence[Features], layers: tuple[int, ...]) -> dict[str, Tensor]:
    planes = torch.cat([features.planes for features in found]).to(torch.bfloat16)
    tensors = {f"plane.{layer}": planes[:, index].contiguous() for index, layer in enumerate(layers)}
    return tensors | {
        "final": torch.cat([features.final for features in found]).to(torch.bfloat16),
        "best_ids": torch.cat([features.best_ids for features in found]).to(torch.int32),
    }


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
