"""The only reader and writer of environment variables. Read once at process start, then handed on.

OUTRIDER_CACHE              where models and built kernels are kept
OUTRIDER_TOKEN              bearer token of the deployment
OUTRIDER_TICKET_KEYS        hex HMAC keys, comma-separated, the signing one first
OUTRIDER_CACHE_SALT_SECRET  hex secret that the router salts prefix hashes with
OUTRIDER_LOG_DIRECTORY      keeps the logs of a local deployment after its end
OTEL_EXPORTER_OTLP_ENDPOINT where spans and metrics go; absent: nowhere
"""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil


def _value(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    return value or None


def cache_directory() -> Path:
    """The user's cache folder of Outrider; not created here."""
    own = _value("OUTRIDER_CACHE")
    if own is not None:
        return Path(own).expanduser()
    base = _value("XDG_CACHE_HOME")
    return (Path(base) if base is not None else Path.home() / ".cache") / "outrider"


def otlp_endpoint() -> str | None:
    """The collector's address as OpenTelemetry names it, or None."""
    return _value("OTEL_EXPORTER_OTLP_ENDPOINT")


def bearer_token() -> str | None:
    """The deployment's bearer token, or None."""
    return _value("OUTRIDER_TOKEN")


def ticket_keys() -> tuple[str, ...]:
    """Hex HMAC keys for tickets, the signing one first; empty if none are set."""
    keys = (_value("OUTRIDER_TICKET_KEYS") or "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


def cache_salt_secret() -> str | None:
    """Hex secret for salting prefix hashes, or None."""
    return _value("OUTRIDER_CACHE_SALT_SECRET")


def compute_thread_variables(num_threads: int) -> dict[str, str]:
    """Variables that fix a process's compute threads. They must be set before torch is loaded.

    A thread that waits for the next parallel region spins briefly before it sleeps: waking it
    costs a third of a step, but several workers share the cores, and one that spins for long takes the time of
    another that computes. Huge pages under the weights make reading them faster. Few arenas keep memory small.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OPENBLAS_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": _value("GOMP_SPINCOUNT") or "10000",
        "THP_MEM_ALLOC_ENABLE": _value("THP_MEM_ALLOC_ENABLE") or "1",
        "GLIBC_TUNABLES": _value("GLIBC_TUNABLES") or "glibc.malloc.hugetlb=1",
        "MALLOC_ARENA_MAX": _value("MALLOC_ARENA_MAX") or "2",
        "TOKENIZERS_PARALLELISM": "false",
    }


def loopback_collectives() -> dict[str, str]:
    """Variables by which the sockets of `torch.distributed` between processes of one machine stay on it."""
    return {"GLOO_SOCKET_IFNAME": _value("GLOO_SOCKET_IFNAME") or "lo"}


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """A copy of this process's environment with `overrides`, for starting a child."""
    return {**os.environ, **overrides}


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets variables of this process, for libraries that can be told in no other way."""
    os.environ.update(variables)


def remove_secrets() -> None:
    """Takes the secrets out of this process's environment, so that no child inherits them."""
    for name in ("OUTRIDER_TOKEN", "OUTRIDER_TICKET_KEYS", "OUTRIDER_CACHE_SALT_SECRET"):
        os.environ.pop(name, None)


def log_directory() -> Path | None:
    """Where logs of a local deployment are kept after its end; None: they end with it."""
    own = _value("OUTRIDER_LOG_DIRECTORY")
    return None if own is None else Path(own).expanduser()


def resident_bytes() -> int:
    """Memory that this process holds in RAM now."""
    return int(psutil.Process().memory_info().rss)
