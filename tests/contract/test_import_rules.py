"""Imports run down only, siblings meet on the wire, and some processes stay light."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.sources import CLIENT, PACKAGES, ROOT, belongs_to, imports_of, package_files, relative

MAY_IMPORT: dict[str, frozenset[str]] = {
    "cluster": frozenset({"router", "prefill", "decode", "training", "engine", "core", "outrider"}),
    "router": frozenset({"core", "outrider"}),
    "prefill": frozenset({"engine", "core", "outrider"}),
    "decode": frozenset({"engine", "core", "outrider"}),
    "training": frozenset({"engine", "core", "outrider", "decode"}),
    "engine": frozenset({"core", "outrider"}),
    "core": frozenset({"outrider"}),
    "outrider": frozenset(),
}
OURS = frozenset(MAY_IMPORT)
WITHOUT_TORCH = ("router", "core", "outrider")


def _package_of(path: Path) -> str:
    root = CLIENT if path.is_relative_to(CLIENT) else ROOT
    return path.relative_to(root).parts[0]


def test_imports_run_down_only() -> None:
    broken = [
        f"{relative(path)}:{item.line} imports {item.module}"
        for path in package_files()
        for item in imports_of(path)
        if (target := item.module.split(".")[0]) in OURS
        and target != (package := _package_of(path))
        and target not in MAY_IMPORT[package]
    ]
    assert not broken, "\n".join(broken)


def test_training_takes_nothing_of_decode_but_drafters() -> None:
    broken = [
        f"{relative(path)}:{item.line} imports {item.module}"
        for path in package_files()
        if _package_of(path) == "training"
        for item in imports_of(path)
        if belongs_to(item.module, "decode") and not belongs_to(item.module, "decode.drafters")
        if item.module != "decode"
    ]
    assert not broken, "\n".join(broken)


def test_lower_parts_of_the_server_use_only_the_stubs_of_the_client() -> None:
    broken = [
        f"{relative(path)}:{item.line} imports {item.module}"
        for path in package_files()
        if _package_of(path) not in {"cluster", "outrider"}
        for item in imports_of(path)
        if belongs_to(item.module, "outrider") and not belongs_to(item.module, "outrider.v1")
        if item.module != "outrider"
    ]
    assert not broken, "\n".join(broken)


def _modules(package: str) -> list[str]:
    root = CLIENT if package == "outrider" else ROOT
    names: list[str] = []
    for path in sorted((root / package).rglob("*.py")):
        if path.name != "__main__.py":
            parts = path.relative_to(root).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


LOADED_HEAVY = """
import importlib, json, sys
heavy = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for top in json.loads(sys.argv[2]):
        if top in sys.modules:
            heavy.setdefault(top, name)
print(json.dumps(heavy))
"""


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_light_package_loads_neither_torch_nor_ray(package: str) -> None:
    arguments = [json.dumps(_modules(package)), json.dumps(["torch", "ray", "transformers"])]
    done = subprocess.run(
        [sys.executable, "-c", LOADED_HEAVY, *arguments],
        capture_output=True, text=True, timeout=120, cwd=ROOT.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}, "module that brought it in, by what it brought in"


def test_engine_is_not_reached_by_the_router_or_core() -> None:
    assert "engine" not in MAY_IMPORT["router"] | MAY_IMPORT["core"]


def test_every_package_of_the_server_is_named_here() -> None:
    assert {*PACKAGES, "outrider"} == OURS


def test_proto_folder_is_no_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))
    spec = importlib.util.find_spec("proto")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "proto")
