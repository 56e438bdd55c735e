"""Files and directories that appear complete or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place when the block ends, and is removed where it raises."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the lock file of a directory; the kernel releases it if this process dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as handle:
        flock(handle, LOCK_EX)
        yield


@contextmanager
def held_alone(directory: Path) -> Iterator[None]:
    """Holds `directory` until the block ends or this process dies. Raises BlockingIOError where it is held."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def staged(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory that becomes `target` if the body succeeds, and is removed if it does not. Inside `locked`.

    `replace`: a `target` that exists gives way to it; it is gone for a moment.
    """
    for stale in target.parent.glob(f".{target.name}.*/"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    retired = staging.with_name(f"{staging.name}.old")
    try:
        yield staging
        staging.chmod(0o755)
        if replace and target.exists():
            os.rename(target, retired)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
