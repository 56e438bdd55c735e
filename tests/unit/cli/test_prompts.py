"""Prompt files of every form are read; a bad line is named."""

from pathlib import Path

import pytest

from cluster.cli.bench_run import Arm, parse_arms
from cluster.cli.prompts import PromptCase, load_prompts
from core.errors import InvalidArgument


def _file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_turns_messages_and_prompts_are_read(tmp_path: Path) -> None:
    path = _file(
        tmp_path / "p.jsonl",
        '{"id": "one", "class": "code", "turns": ["first", "second"]}',
        "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        '{"prompt": "as it is", "class": "rag"}',
    )
    assert load_prompts(path) == [
        PromptCase("one", "code", messages=({"role": "user", "content": "first"},)),
        PromptCase(
            "p.jsonl:3",
            "all",
            messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
        ),
        PromptCase("p.jsonl:4", "rag", text="as it is"),
    ]


def test_a_limit_takes_every_class_in_its_turn(tmp_path: Path) -> None:
    lines = [
        f'{{"id": "{name}{number}", "class": "{name}", "prompt": "x"}}' for name in "abc" for number in (1, 2)
    ]
    path = _file(tmp_path / "p.jsonl", *lines)
    assert [case.case_id for case in load_prompts(path, limit=4)] == ["a1", "b1", "c1", "a2"]
    assert [case.case_id for case in load_prompts(path, classes=["b"])] == ["b1", "b2"]
    with pytest.raises(InvalidArgument):
        load_prompts(path, classes=["d"])


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"turns": []}', '{"turns": [1]}', '{"messages": [{"role": "user"}]}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path / "p.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(InvalidArgument, match="p.jsonl:2"):  # noqa: RUF043 (a dot is a dot here)
        load_prompts(path)


def test_arms_name_a_drafter_and_perhaps_its_draft() -> None:
    assert parse_arms("none, ngram,ngram:8,ngram:4x2") == (
        Arm("none", "none"),
        Arm("ngram", "ngram"),
        Arm("ngram:8", "ngram", 8),
        Arm("ngram:4x2", "ngram", 4, 2),
    )


@pytest.mark.parametrize("text", ["", "none,none", "ngram:", "ngram:x2", "ngram:-1", "n gram"])
def test_other_arms_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="drafters"):
        parse_arms(text)
