"""Prompts that are kept for judging: no rollout may hold them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from core.errors import InvalidArgument

_SHORTEST = 24
"""Characters from which on a text that lies inside a kept prompt, or holds one, counts as that prompt."""


class ExcludedPrompts:
    """`excluded(text)`: whether it is one of the prompts, in any spacing and case, or shares a long part with one."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._prompts = tuple({_plain(prompt) for prompt in prompts} - {""})
        self._known = frozenset(self._prompts)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> "ExcludedPrompts":
        """JSON lines with `turns` or `prompt`. Raises InvalidArgument naming file and line."""
        prompts: list[str] = []
        for path in paths:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgument("exclude", f"{path}: {error}") from error
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    prompts += _turns(line, f"{path}, line {number}")
        return cls(prompts)

    def __call__(self, text: str) -> bool:
        plain = _plain(text)
        if plain in self._known:
            return True
        return any(
            (len(plain) >= _SHORTEST and plain in prompt) or (len(prompt) >= _SHORTEST and prompt in plain)
            for prompt in self._prompts
        )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _turns(line: str, place: str) -> list[str]:
    try:
        values = json.loads(line)
        turns = values["turns"] if "turns" in values else [values["prompt"]]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument("exclude", f"{place} needs turns or prompt") from error
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise InvalidArgument("exclude", f"{place}: turns must be a list of texts")
    return turns
