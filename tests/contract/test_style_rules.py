"""The measurable part of the style guide."""

import ast
import re
import subprocess
import sys

import pytest

from tests.contract.sources import ROOT, is_generated, python_files, relative, text_files, tree_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "manager.py", "misc.py"}
# Assembled, so that this file does not mention them itself.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
WORKPLACE = re.compile(
    "|".join([r"(?<![\w.])/wo" + r"rk/", r"/tm" + r"p/w/", r"\.libr" + "ary/", r"\.\./sha" + "red"])
)


def test_files_are_short() -> None:
    files = [path for path in text_files() if path.suffix in {".py", ".cpp", ".h"} and not is_generated(path)]
    lengths = {relative(path): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long_functions = {
        f"{relative(path)}:{node.name}": lines
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long_functions == {}


def test_no_file_has_a_vague_name() -> None:
    assert [relative(path) for path in python_files() if path.name in VAGUE_NAMES] == []


def test_broad_excepts_stand_at_marked_boundaries() -> None:
    unmarked = []
    for path in python_files():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.ExceptHandler)
                and _is_broad(node)
                and "boundary:" not in lines[node.lineno - 1]
            ):
                unmarked.append(f"{relative(path)}:{node.lineno}")
    assert unmarked == []


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{relative(path)}:{number} {line.strip()[:80]}"
        for path in text_files()
        if path.suffix in {".py", ".cpp", ".h", ".proto", ".md"} and not is_generated(path)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_no_file_names_a_path_of_one_workplace() -> None:
    found = [
        f"{relative(path)}:{number} {line.strip()[:80]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if WORKPLACE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_has_nothing_to_say(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
