"""Prompts for benches and suites: read from a file by path, and tokenised as the router would."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.environment import cache_directory
from core.model_store import resolve_model
from core.tokenizer import Tokenizer
from outrider.v1 import common_pb2

OWN_PROMPTS = Path(__file__).parents[1] / "prompts" / "classes.jsonl"
OWN_CODE_EDITS = Path(__file__).parents[1] / "prompts" / "code_edit.jsonl"
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its first user turn, rendered by the chat template, as token ids."""

    prompt_id: str
    prompt_class: str
    text: str
    token_ids: tuple[int, ...]
    seed: int


def model_directory(name: str = DEFAULT_MODEL) -> Path:
    """Where the model lies; pulled first, where it is not there yet."""
    return resolve_model(name, cache_directory(), print)


def read_prompts(path: Path, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON-lines file of {"id", "class", "turns"}; with `limit`, spread evenly over the file."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if limit is not None and limit < len(entries):
        entries = [entries[index * len(entries) // limit] for index in range(limit)]
    return [_prompt(number, entry, tokenizer) for number, entry in enumerate(entries)]


def _prompt(number: int, entry: dict[str, str | list[str]], tokenizer: Tokenizer) -> Prompt:
    text = entry["turns"][0]
    rendered = tokenizer.apply_chat_template([common_pb2.ChatMessage(role="user", content=text)])
    return Prompt(
        prompt_id=str(entry["id"]),
        prompt_class=str(entry["class"]),
        text=text,
        token_ids=tuple(tokenizer.encode(rendered)),
        seed=1_000_003 * (number + 1),
    )


def by_class(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each class, in the order of the file."""
    classes: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        classes.setdefault(prompt.prompt_class, []).append(prompt)
    return classes


def few_of_each(prompts: Sequence[Prompt], per_class: int | None) -> list[Prompt]:
    """The first `per_class` prompts of each class (None: all of them), class by class."""
    return [prompt for group in by_class(prompts).values() for prompt in group[:per_class]]
