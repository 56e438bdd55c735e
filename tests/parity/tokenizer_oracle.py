"""Our tokenizer against transformers on the same files: `python -m tests.parity.tokenizer_oracle --prompts FILE`.

For each prompt: ids of every turn as plain text, the chat template's text of the whole conversation, its ids,
and the decoded text. Prints the counts and every difference; exits 1 if there is one.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from core.environment import cache_directory
from core.model_store import resolve_model
from core.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and where the two differed."""

    prompts: int
    texts: int
    tokens: int
    differences: tuple[str, ...]


def conversation(turns: Sequence[str]) -> list[Turn]:
    """The turns as a chat, with short answers between them."""
    messages: list[Turn] = []
    for index, text in enumerate(turns):
        if index:
            messages.append(Turn("assistant", f"Answer {index}."))
        messages.append(Turn("user", text))
    return messages


def compare(directory: Path, prompts: Sequence[tuple[str, Sequence[str]]]) -> Comparison:
    """Compares over (id, turns)."""
    ours = Tokenizer.from_directory(directory)
    theirs = AutoTokenizer.from_pretrained(directory)
    texts = tokens = 0
    differences: list[str] = []
    for name, turns in prompts:
        for what, mine, reference in _pairs(ours, theirs, turns):
            texts += 1
            tokens += len(mine) if isinstance(mine, list) else 0
            if mine != reference:
                differences.append(f"{name}: {what}: {mine!r} is not {reference!r}")
    return Comparison(len(prompts), texts, tokens, tuple(differences))


def _pairs(ours: Tokenizer, theirs: Any, turns: Sequence[str]) -> Iterator[tuple[str, object, object]]:
    for text in turns:
        ids = ours.encode(text)
        yield "ids of a turn", ids, theirs(text)["input_ids"]
        yield "decoded turn", ours.decode(ids), theirs.decode(ids, skip_special_tokens=True)
        yield "streamed turn", _streamed(ours, ids), theirs.decode(ids, skip_special_tokens=True)
    messages = conversation(turns)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    rendered = ours.apply_chat_template(messages)
    yield (
        "chat text",
        rendered,
        theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True),
    )
    reference = theirs.apply_chat_template(
        plain, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    yield "chat ids", ours.encode(rendered), reference


def _streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()])


def read_prompts(path: Path) -> list[tuple[str, Sequence[str]]]:
    """(id, turns) of each line of a prompt file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(str(row.get("id", number)), row["turns"]) for number, row in enumerate(rows)]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with id and turns")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    directory = resolve_model(arguments.model, cache_directory(), lambda line: print(line, file=sys.stderr))
    found = compare(directory, read_prompts(arguments.prompts))
    print(f"{found.prompts} prompts, {found.texts} comparisons, {found.tokens} ids: ", end="")
    print(f"{len(found.differences)} differences")
    print(*found.differences, sep="\n", end="")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
