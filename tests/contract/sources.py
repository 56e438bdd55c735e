"""The project's own source files, and what they import and call: what the contract tests look at."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "engine", "prefill", "decode", "router", "cluster", "training")
CLIENT = ROOT / "client"
GENERATED_SUFFIXES = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
TEXT_SUFFIXES = {".py", ".cpp", ".h", ".proto", ".md", ".toml", ".jsonl", ".yaml", ".yml", ".json", ".sh", ""}
SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", "build", "dist", "results", ".hypothesis"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full dotted name, and where the import stands."""

    module: str
    line: int


def relative(path: Path) -> str:
    """The path as it is written in a message."""
    return path.relative_to(ROOT).as_posix()


def is_generated(path: Path) -> bool:
    """Whether protoc wrote the file."""
    return path.name.endswith(GENERATED_SUFFIXES)


@cache
def package_files() -> tuple[Path, ...]:
    """Python files of the server's packages and of the client, without generated ones."""
    roots = [ROOT / name for name in PACKAGES] + [CLIENT / "outrider"]
    found = (path for root in roots for path in root.rglob("*.py"))
    return tuple(sorted(path for path in found if not is_generated(path)))


@cache
def python_files() -> tuple[Path, ...]:
    """Package files and tests."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    return tuple(sorted({*package_files(), *tests}))


@cache
def text_files() -> tuple[Path, ...]:
    """Every text file of the project that a person reads or writes."""
    return tuple(sorted(_walk(ROOT)))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        hidden_cache = path.name.startswith(".") and path.name.endswith("_cache")
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not hidden_cache and not path.name.endswith(".egg-info"):
                yield from _walk(path)
        elif path.suffix in TEXT_SUFFIXES and path.name not in SKIPPED_FOLDERS and not path.is_symlink():
            yield path


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, at any depth, type-checking blocks included."""
    found: list[Import] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [Import(name, node.lineno) for name in _from_names(path, node)]
    return tuple(found)


def _from_names(path: Path, node: ast.ImportFrom) -> list[str]:
    if node.level == 0:
        base = node.module or ""
    else:
        root = CLIENT if path.is_relative_to(CLIENT) else ROOT
        package = path.parent.relative_to(root).parts
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def dotted_uses(path: Path) -> Iterator[tuple[str, int]]:
    """Every dotted name that a file reads, such as `time.monotonic`, with aliases of imports resolved."""
    aliases = _aliases(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node)
            if name is not None:
                head, _, rest = name.partition(".")
                resolved = aliases.get(head, head)
                yield (f"{resolved}.{rest}" if rest else resolved), node.lineno


def _aliases(path: Path) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname is not None}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return aliases


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def belongs_to(module: str, package: str) -> bool:
    """Whether `module` is `package` or lies inside it."""
    return module == package or module.startswith(package + ".")
