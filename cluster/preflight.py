"""What can be seen of settings before anything starts: files that they name and that are not there."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from core.errors import InvalidArgument
from core.settings import ServeSettings
from router.policy import load_policies

_PATHS = ("artifact", "corpus", "plan")
"""Fields of a drafter's settings that hold a path."""


def require_files(settings: ServeSettings) -> None:
    """Of a deployment on this machine. Raises InvalidArgument naming the field."""
    drafters = settings.decode_worker.drafters
    for field, path in _named(drafters, "decode_worker.drafters"):
        if not Path(path).expanduser().exists():
            raise InvalidArgument(field, f"{path} is not there")
    load_policies(settings.router.policy_file)


def _named(section: BaseModel, prefix: str) -> Iterator[tuple[str, str]]:
    """Every path under a section, with the name of its field."""
    for name, value in section:
        values = value.items() if isinstance(value, dict) else ((None, value),)
        for key, one in values:
            field = f"{prefix}.{name}" if key is None else f"{prefix}.{name}.{key}"
            if isinstance(one, BaseModel):
                yield from _named(one, field)
            elif name in _PATHS and isinstance(one, str):
                yield field, one
