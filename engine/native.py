"""Builds our C++ kernels once a machine and loads them.

The library is compiled with g++ for this CPU and kept in the user's cache folder under a digest of
sources, flags, compiler, torch, CPU and the place of torch's libgomp. It is linked against that libgomp,
so that the process has one OpenMP pool. A finished build appears by one rename; builders do not wait
for each other.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from core.environment import cache_directory

_KERNELS = Path(__file__).parent / "kernels"
_COMPILER = "g++"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_BUILD_TIMEOUT_S = 180.0


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The loaded library and the digest of all that its machine code depends on."""

    library: ctypes.CDLL
    digest: str


def cpu_flags() -> str:
    """The CPU's instruction set flags, sorted; the machine name where /proc/cpuinfo lacks them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return " ".join(sorted(value.split()))
    except OSError:
        pass
    return platform.machine()


@functools.lru_cache(maxsize=4)
def load_kernels(kernels: Path = _KERNELS) -> NativeKernels:
    """Build the sources of a folder if needed, and load. Raises NativeUnavailable."""
    sources = sorted(kernels.glob("*.cpp"))
    compiler = _compiler_version()
    digest = _digest(compiler, kernels)
    folder = cache_directory() / "kernels"
    target = folder / f"outrider-{digest[:32]}.so"
    if not target.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(sources, target)
        except OSError as error:
            raise NativeUnavailable(f"{folder}: {error}") from error
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"{target}: {error}") from error
    return NativeKernels(library, digest[:16])


def _compiler_version() -> str:
    try:
        answer = subprocess.run(
            [_COMPILER, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{_COMPILER} cannot be run: {error}") from error
    return answer.stdout.splitlines()[0] if answer.stdout else ""


def _digest(compiler: str, kernels: Path) -> str:
    digest = hashlib.sha256()
    parts = [compiler, " ".join(_FLAGS), torch.__version__, cpu_flags()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(kernels.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _openmp_library() -> Path | None:
    """The libgomp inside torch's own wheel."""
    folder = Path(torch.__file__).parent / "lib"
    return next(iter(sorted(folder.glob("libgomp*.so*"))), None)


def _build(sources: list[Path], target: Path) -> None:
    openmp = _openmp_library()
    link = ["-lgomp"] if openmp is None else [str(openmp), f"-Wl,-rpath,{openmp.parent}"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        objects: list[str] = []
        for source in sources:
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([_COMPILER, *_FLAGS, "-c", str(source), "-o", objects[-1]])
        built = Path(scratch) / "library.so"
        _run([_COMPILER, "-shared", *objects, *link, "-o", str(built)])
        os.replace(built, target)


def _run(command: list[str]) -> None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    if answer.returncode != 0:
        raise NativeUnavailable(f"{' '.join(command[:1])} failed: {answer.stderr.strip()[-2000:]}")
