"""Rollouts on disk: token ids, two bytes each where the vocabulary allows, in shards; and the recipe beside them.

A folder holds `recipe.json` and `shard-NNNNN.safetensors`, each with `tokens` [tokens] and `index` [rollouts, 5] int64:
number, class, temperature in hundredths, tokens before the answer, tokens in all.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from core.errors import InvalidArgument
from core.whole_file import written_whole

_RECIPE = "recipe.json"
_COLUMNS = 5
SHARD_TOKENS = 200_000
"""So many tokens are lost at most when a run is killed."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes the rollouts what they are: the same recipe gives the same rollouts, number by number.

    `tokenizer` and `model_revision` are digests. Lengths in tokens.
    """

    model: str
    model_revision: str
    tokenizer: str
    vocab_size: int
    seed: int
    user_tokens: int
    answer_tokens: int
    classes: tuple[str, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A conversation of one turn: ids of template, user turn and answer; the answer starts at `answer_start`."""

    number: int
    class_name: str
    temperature: float
    answer_start: int
    token_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """Equal for rollouts of the same text."""
        return hashlib.blake2b(np.asarray(self.token_ids, "<i4").tobytes(), digest_size=16).digest()


class RolloutStore:
    """Appends to a folder and reads from it. Not for two writers at once."""

    def __init__(self, directory: Path, recipe: Recipe) -> None:
        """Opens or makes `directory`. Raises InvalidArgument naming what of the recipe differs, or a damaged file."""
        self._directory = directory
        self.recipe = recipe
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _RECIPE
        if path.exists():
            _require_same(read_recipe(directory), recipe, path)
        elif any(directory.iterdir()):
            raise InvalidArgument(
                "out", f"{directory} is not empty and holds no rollouts; take another folder"
            )
        else:
            with written_whole(path) as beside:
                beside.write_text(json.dumps(asdict(recipe), indent=1))
        self.numbers: set[int] = set()
        self._digests: set[bytes] = set()
        self.num_answer_tokens = 0
        self._pending: list[Rollout] = []
        self._pending_tokens = 0
        for rollout in self:
            self._note(rollout)
        numbers = [path.stem.partition("-")[2] for path in shards(directory)]
        self._next_shard = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def add(self, rollout: Rollout) -> bool:
        """Keep it, on disk now or with a later one; False where its number or its text is known already."""
        if rollout.number in self.numbers or rollout.digest() in self._digests:
            return False
        self._note(rollout)
        self._pending.append(rollout)
        self._pending_tokens += len(rollout.token_ids)
        if self._pending_tokens >= SHARD_TOKENS:
            self.flush()
        return True

    def flush(self) -> None:
        """Write what is pending as a shard, whole or not at all."""
        if not self._pending:
            return
        narrow = self.recipe.vocab_size <= 2**16
        tokens = np.concatenate([np.asarray(rollout.token_ids) for rollout in self._pending])
        index = np.array([self._row(rollout) for rollout in self._pending], dtype=np.int64)
        path = self._directory / f"shard-{self._next_shard:05d}.safetensors"
        with written_whole(path) as beside:
            save_file({"tokens": tokens.astype(np.uint16 if narrow else np.uint32), "index": index}, beside)
        self._next_shard += 1
        self._pending, self._pending_tokens = [], 0

    def __iter__(self) -> Iterator[Rollout]:
        """All that are on disk, in the order in which they ended."""
        for path in shards(self._directory):
            yield from _read_shard(path, self.recipe)

    def _note(self, rollout: Rollout) -> None:
        self.numbers.add(rollout.number)
        self._digests.add(rollout.digest())
        self.num_answer_tokens += len(rollout.token_ids) - rollout.answer_start

    def _row(self, rollout: Rollout) -> tuple[int, ...]:
        class_id = self.recipe.classes.index(rollout.class_name)
        hundredths = round(100 * rollout.temperature)
        return rollout.number, class_id, hundredths, rollout.answer_start, len(rollout.token_ids)


def shards(directory: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(directory.glob("shard-*.safetensors"))


def read_recipe(directory: Path) -> Recipe:
    """Raises InvalidArgument naming the file."""
    path = directory / _RECIPE
    try:
        values = json.loads(path.read_text())
        values["classes"] = tuple(values["classes"])
        values["temperatures"] = tuple(values["temperatures"])
        return Recipe(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgument("rollouts", f"{path} is no recipe: {error}") from error


def _read_shard(path: Path, recipe: Recipe) -> Iterator[Rollout]:
    try:
        tensors = load_file(path)
        tokens, index = tensors["tokens"], tensors["index"]
        sizes = index[:, 4]
        sound = (
            index.shape[1] == _COLUMNS
            and sizes.sum() == len(tokens)
            and bool((index >= 0).all() and (index[:, 3] <= sizes).all())
            and int(index[:, 1].max(initial=0)) < len(recipe.classes)
            and int(tokens.max(initial=0)) < recipe.vocab_size
        )
    except Exception as error:  # boundary: the library raises its own error for a bad file
        raise InvalidArgument("rollouts", f"{path} cannot be read: {error}") from error
    if not sound:
        raise InvalidArgument("rollouts", f"{path} is damaged: its index does not fit its tokens")
    start = 0
    for number, class_id, hundredths, answer_start, size in index.tolist():
        ids = tuple(tokens[start : start + size].tolist())
        start += size
        yield Rollout(number, recipe.classes[class_id], hundredths / 100, answer_start, ids)


def _require_same(known: Recipe, wanted: Recipe, path: Path) -> None:
    for field in fields(Recipe)[1:]:  # not the name: the revision tells models apart
        ours, theirs = getattr(wanted, field.name), getattr(known, field.name)
        if ours != theirs:
            raise InvalidArgument(
                f"rollouts.{field.name}",
                f"{path} was made with {theirs!r}, not {ours!r}; take another folder",
            )
