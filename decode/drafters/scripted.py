"""Test drafters that propose what a script says, right or wrong, in any tree. Never for production.

The script is a file of JSON lines, read again whenever it changes:

    {"prompt_digest": hex SHA-256 of the prompt's ids as little-endian int32, "seed": int,
     "temperature": float, "choice": int (0 if absent), "answer": [ids]}

`scripted-right` proposes the recorded answer, `scripted-wrong` ids that are not it, `scripted-tree` random
trees of both with siblings in any order, `scripted-hidden` recorded ids while checking the hidden planes that
it is handed. Every random choice is a hash of (seed, choice, position), so that runs repeat.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.drafter_settings import ScriptedSettings
from core.prefix_hash import prompt_digest
from decode.draft import NO_DRAFT, Draft
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation

HIDDEN_LAYERS = (0, 1)
"""What `scripted-hidden` asks for: every model has these."""

_AnswerKey = tuple[str, int, float, int]


class Script:
    """The recorded answers, shared by the scripted drafters of a worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._answers: dict[_AnswerKey, tuple[int, ...]] = {}

    def answer(self, request: DraftRequest) -> tuple[int, ...]:
        """The recorded answer of a request; empty where there is none."""
        self._refresh()
        digest = prompt_digest(request.history.prompt_ids).hex()
        temperature = round(request.sampling.temperature, 6)
        return self._answers.get((digest, request.seed, temperature, request.choice), ())

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        for line in self._path.read_text().splitlines():
            entry = json.loads(line)
            key = (
                str(entry["prompt_digest"]),
                int(entry["seed"]),
                round(float(entry["temperature"]), 6),
                int(entry.get("choice", 0)),
            )
            self._answers[key] = tuple(int(token_id) for token_id in entry["answer"])


@dataclass(slots=True)
class _State:
    answer: tuple[int, ...]
    planes: list[torch.Tensor] = field(default_factory=list)


class ScriptedDrafter:
    """What the four have in common. `vocab_size` bounds the wrong ids."""

    def __init__(self, mode: str, settings: ScriptedSettings, script: Script, vocab_size: int) -> None:
        self.name = f"scripted-{mode}"
        self._script = script
        self._vocab_size = vocab_size
        self._states: dict[int, _State] = {}
        wide = mode == "tree"
        self.needs = DrafterNeeds(
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(4, settings.max_draft_length),
            hidden_layers=HIDDEN_LAYERS if mode == "hidden" else (),
            max_draft_width=8 if wide else 1,
            default_draft_width=3 if wide else 1,
        )

    def start(self, request: DraftRequest) -> None:
        """Look the answer up."""
        self._states[request.key] = _State(self._script.answer(request))

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`: nothing is kept between proposals."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """See the module's docstring."""
        return [self._propose_one(budget, self._right(budget)) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def finish(self, request: DraftRequest) -> None:
        """Forget the choice."""
        self._states.pop(request.key, None)

    def check(self) -> None:
        """Called when idle: no state may be left."""
        if self._states:
            raise AssertionError(f"{self.name} keeps {len(self._states)} states of finished requests")

    def _right(self, budget: DraftBudget) -> tuple[int, ...]:
        answer = self._states[budget.request.key].answer
        done = budget.request.history.num_output
        return answer[done : done + min(budget.draft_length, budget.max_nodes)]

    def _propose_one(self, budget: DraftBudget, right: tuple[int, ...]) -> Draft:
        return Draft(right, tuple(range(len(right))))


class RightDrafter(ScriptedDrafter):
    """Proposes the recorded answer, else nothing."""

    def __init__(self, settings: ScriptedSettings, script: Script, vocab_size: int) -> None:
        super().__init__("right", settings, script, vocab_size)


class WrongDrafter(ScriptedDrafter):
    """Proposes a chain that leaves the recorded answer after a few tokens, or any ids where none is recorded."""

    def __init__(self, settings: ScriptedSettings, script: Script, vocab_size: int) -> None:
        super().__init__("wrong", settings, script, vocab_size)

    def _propose_one(self, budget: DraftBudget, right: tuple[int, ...]) -> Draft:
        depth = min(budget.draft_length, budget.max_nodes)
        noise = _noise(budget.request, self.name)
        right_tokens = noise[0] % 3 if right else 0
        chain = list(right[:right_tokens])
        while len(chain) < depth:
            avoided = right[len(chain)] if len(chain) < len(right) else None
            chain.append(_wrong_id(noise[1 + len(chain) % 30], avoided, self._vocab_size))
        return Draft(tuple(chain[:depth]), tuple(range(depth)))


class TreeDrafter(ScriptedDrafter):
    """Proposes a random tree in which the recorded path may lie anywhere among wrong siblings."""

    def __init__(self, settings: ScriptedSettings, script: Script, vocab_size: int) -> None:
        super().__init__("tree", settings, script, vocab_size)

    def _propose_one(self, budget: DraftBudget, right: tuple[int, ...]) -> Draft:
        noise = _noise(budget.request, self.name)
        width = max(1, budget.request.draft_width)
        token_ids: list[int] = []
        parents: list[int] = []
        row: int | None = 0
        for depth in range(min(budget.draft_length, budget.max_nodes)):
            pick = noise[depth % 32]
            parent = row if row is not None else max(0, len(token_ids) - pick % 2)
            if row is None and _depth_of(parents, parent) >= budget.draft_length:
                break
            next_right = right[depth] if depth < len(right) and row is not None else None
            siblings = [
                _wrong_id(pick * 7 + sibling * 131, next_right, self._vocab_size)
                for sibling in range(1 + pick % width)
            ]
            siblings = list(dict.fromkeys(siblings))
            if next_right is not None and pick % 4:
                siblings[pick % len(siblings)] = next_right
            row = None
            for token_id in siblings[: budget.max_nodes - len(token_ids)]:
                token_ids.append(token_id)
                parents.append(parent)
                if token_id == next_right:
                    row = len(token_ids)
        return Draft(tuple(token_ids), tuple(parents)) if token_ids else NO_DRAFT


class HiddenDrafter(ScriptedDrafter):
    """Proposes the recorded answer with a wrong end, and raises where a hidden plane is not the pool's."""

    def __init__(self, settings: ScriptedSettings, script: Script, vocab_size: int) -> None:
        super().__init__("hidden", settings, script, vocab_size)

    def start(self, request: DraftRequest) -> None:
        """Reads the planes of all computed positions, as a drafter with a state of its own would."""
        super().start(request)
        computed = len(request.history.token_ids) - 1
        planes = request.hidden(0, computed)
        _require(planes.shape[0] >= len(HIDDEN_LAYERS) and planes.shape[1] == computed, "planes at start")
        _require(bool(torch.isfinite(planes).all()), "finite planes at start")

    def observe(self, observations: Sequence[Observation]) -> None:
        """Compares the planes handed over with those that the pool holds for the same positions."""
        for observation in observations:
            rows = observation.hidden_rows
            computed = 1 + len(observation.accepted_rows)
            if rows is None or rows.shape[1] > computed:
                raise AssertionError("hidden rows missing, or more than were accepted")
            end = len(observation.request.history.token_ids) - 1
            planes = observation.request.hidden(end - rows.shape[1], end)
            _require(torch.equal(planes, rows), "planes of the accepted path")

    def _propose_one(self, budget: DraftBudget, right: tuple[int, ...]) -> Draft:
        if not right:
            return NO_DRAFT
        chain = list(right)
        noise = _noise(budget.request, self.name)
        if noise[0] % 2:
            chain[-1] = _wrong_id(noise[1], chain[-1], self._vocab_size)
        return Draft(tuple(chain), tuple(range(len(chain))))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"scripted-hidden: {what} are wrong")


def _depth_of(parents: Sequence[int], row: int) -> int:
    depth = 0
    while row:
        row = parents[row - 1]
        depth += 1
    return depth


def _noise(request: DraftRequest, name: str) -> bytes:
    """32 bytes that depend on the request's seed, choice and position only."""
    text = f"{name}:{request.seed}:{request.choice}:{len(request.history.token_ids)}"
    return hashlib.sha256(text.encode()).digest()


def _wrong_id(noise: int, avoided: int | None, vocab_size: int) -> int:
    candidate = (noise * 2654435761 + 12345) % vocab_size
    return (candidate + 1) % vocab_size if candidate == avoided else candidate
