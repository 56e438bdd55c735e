"""Prompt files: JSON lines with `turns`, `messages` or `prompt`, and perhaps `id` and `class`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from core.errors import InvalidArgument
from outrider import Message


@dataclass(frozen=True, slots=True)
class PromptCase:
    """One prompt: `messages` for the chat template, or `text` as it is."""

    case_id: str
    class_name: str
    messages: tuple[Message, ...] = ()
    text: str | None = None


def load_prompts(path: Path, limit: int | None = None, classes: Sequence[str] = ()) -> list[PromptCase]:
    """The file's prompts, those of `classes` if given, at most `limit`, every class in its turn.

    Of several turns only the first is asked. Raises InvalidArgument naming file and line.
    """
    cases: list[PromptCase] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            cases.append(_case(line, f"{path.name}:{number}"))
    wanted = [case for case in cases if not classes or case.class_name in classes]
    if not wanted:
        raise InvalidArgument("prompts", f"{path} holds no prompt of {', '.join(classes) or 'any class'}")
    return _in_turn(wanted)[:limit]


def _case(line: str, where: str) -> PromptCase:
    try:
        row: Any = json.loads(line)  # Any: checked below
    except ValueError as error:
        raise InvalidArgument("prompts", f"{where}: no JSON: {error}") from error
    if not isinstance(row, Mapping):
        raise InvalidArgument("prompts", f"{where}: no object")
    case_id, class_name = str(row.get("id", where)), str(row.get("class", "all"))
    prompt, turns, messages = row.get("prompt"), row.get("turns"), row.get("messages")
    if isinstance(prompt, str):
        return PromptCase(case_id, class_name, text=prompt)
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return PromptCase(case_id, class_name, messages=({"role": "user", "content": turns[0]},))
    if isinstance(messages, list) and messages:
        checked = tuple(_message(message, where) for message in messages)
        return PromptCase(case_id, class_name, messages=checked)
    raise InvalidArgument("prompts", f"{where}: needs turns, messages or prompt")


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise InvalidArgument("prompts", f"{where}: a message needs role and content")
    return {"role": str(message["role"]), "content": str(message["content"])}


def _in_turn(cases: Iterable[PromptCase]) -> list[PromptCase]:
    by_class: dict[str, list[PromptCase]] = {}
    for case in cases:
        by_class.setdefault(case.class_name, []).append(case)
    return [case for group in zip_longest(*by_class.values()) for case in group if case is not None]
