"""Models made of others on this machine: NAME@VARIANT, in `<cache>/models/NAME@VARIANT`, with weights of their own."""

import re
from pathlib import Path
from typing import Final

from core.errors import FailedPrecondition, InvalidArgument

VARIANTS: Final = {"medusa2": "outrider train medusa2 --model {base} --rollouts ROLLOUTS --out RUN"}
"""The command that makes each of them."""

_BASE: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")


def variant_directory(model: str, variant: str, cache_dir: Path) -> Path:
    """Where a variant of `model` (alias, directory or hub id) lies, built or not. Raises InvalidArgument."""
    base = Path(model).name
    if not _BASE.fullmatch(base):
        raise InvalidArgument("model", f"{model!r} gives no name that a variant could be kept under")
    return cache_dir / "models" / f"{base}@{variant}"


def find_variant(name: str, cache_dir: Path) -> Path:
    """The directory of NAME@VARIANT.

    Raises InvalidArgument for a variant that there is not, FailedPrecondition for one that has not been built.
    """
    base, _, variant = name.partition("@")
    if variant not in VARIANTS or not _BASE.fullmatch(base):
        known = ", ".join(f"NAME@{known}" for known in VARIANTS)
        raise InvalidArgument("model", f"{name!r} is no variant; there is {known}")
    directory = variant_directory(base, variant, cache_dir)
    if not _is_built(directory):
        mend = VARIANTS[variant].format(base=base)
        raise FailedPrecondition("model", f"{name} has not been built; `{mend}` builds it in {directory}")
    return directory


def built_variants(cache_dir: Path) -> list[Path]:
    """The directories of all variants that were built, by name."""
    found = (cache_dir / "models").glob("*@*")
    return sorted(path for path in found if not path.name.startswith(".") and _is_built(path))


def _is_built(directory: Path) -> bool:
    return (directory / "config.json").is_file()
