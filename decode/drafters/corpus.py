"""A corpus of token ids on disk, and where every run of tokens occurs in it: what the drafter `rest` looks up.

A corpus is a folder: `manifest.json` and, for each segment, `NAME.tokens` (ids, big-endian, documents apart by a
separator) and `NAME.order` (where each suffix starts, uint32, sorted by its first `SORTED_TOKENS` ids). Big-endian ids
compare as bytes, so a lookup is a bisection over a memory map. Segments are never changed: adding text adds some.
"""

import json
import mmap
import os
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InvalidArgument
from core.whole_file import written_whole

FORMAT = 1
SORTED_TOKENS = 8
"""A match can be so long: suffixes are in order of so many ids."""
SEGMENT_TOKENS = 2**24
"""Tokens of a segment at most: sorting one takes some 0.9 GiB."""
_READ_BYTES = 2**22
_FIELD = "corpus"
_MANIFEST = "manifest.json"

Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment in the manifest. `num_tokens` counts separators, `num_suffixes` does not."""

    name: str
    num_tokens: int
    num_suffixes: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a corpus is. `vocabulary`: digest of the tokenizer that its ids are of."""

    format: int
    vocabulary: str
    token_bytes: int
    segments: tuple[SegmentEntry, ...]

    @property
    def num_tokens(self) -> int:
        """Over all segments, separators included."""
        return sum(segment.num_tokens for segment in self.segments)


def separator_of(token_bytes: int) -> int:
    """The id between documents: the largest that fits, which no vocabulary may reach."""
    return int(2 ** (8 * token_bytes) - 1)


class CorpusWriter:
    """Adds documents to a corpus, segment by segment; `close` makes them seen. Use as a context manager.

    Leaving with an exception changes nothing: files of a segment that no manifest names are removed.
    """

    def __init__(
        self, directory: Path, vocabulary: str, vocab_size: int, progress: Callable[[str], None]
    ) -> None:
        """Opens `directory`, or makes it. Raises InvalidArgument where it holds another tokenizer's corpus."""
        self._directory = directory
        self._progress = progress
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / _MANIFEST).exists():
            self._manifest = read_manifest(directory)
            if self._manifest.vocabulary != vocabulary:
                raise InvalidArgument(_FIELD, f"{directory} was built with another tokenizer")
        else:
            token_bytes = 2 if vocab_size < separator_of(2) else 4
            self._manifest = Manifest(FORMAT, vocabulary, token_bytes, ())
        self._separator = separator_of(self._manifest.token_bytes)
        self._documents: list[Ids] = []
        self._num_pending = 0
        self._fresh: list[SegmentEntry] = []

    def add(self, token_ids: Sequence[int]) -> None:
        """One document."""
        document = np.asarray(token_ids, dtype=np.int64)
        for start in range(0, len(document), SEGMENT_TOKENS - 1):
            part = np.append(document[start : start + SEGMENT_TOKENS - 1], self._separator)
            if self._num_pending + len(part) > SEGMENT_TOKENS:
                self._flush()
            self._documents.append(part)
            self._num_pending += len(part)

    def close(self) -> Manifest:
        """Write what is pending, then the manifest, at once."""
        self._flush()
        segments = (*self._manifest.segments, *self._fresh)
        if not segments:
            raise InvalidArgument(_FIELD, "there is no text to build it from")
        manifest = Manifest(FORMAT, self._manifest.vocabulary, self._manifest.token_bytes, segments)
        with written_whole(self._directory / _MANIFEST) as path:
            path.write_text(json.dumps(asdict(manifest), indent=1))
        self._fresh = []
        return manifest

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for entry in self._fresh:
            for path in _paths(self._directory, entry.name):
                path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._documents:
            return
        ids = np.concatenate(self._documents)
        num_documents = len(self._documents)
        self._documents, self._num_pending = [], 0
        self._progress(f"sorting {len(ids):,} tokens")
        order = sort_suffixes(ids, self._manifest.token_bytes)
        entry = SegmentEntry(f"segment-{secrets.token_hex(6)}", len(ids), len(order), num_documents)
        self._fresh.append(entry)
        tokens_path, order_path = _paths(self._directory, entry.name)
        ids.astype(f">u{self._manifest.token_bytes}").tofile(tokens_path)
        order.astype("<u4").tofile(order_path)


def sort_suffixes(ids: Ids, token_bytes: int) -> Ids:
    """Starts of all suffixes but those at separators, in order of their first SORTED_TOKENS ids.

    Equal ones keep their order, the earliest first.
    """
    separator = separator_of(token_bytes)
    per_key = 8 // token_bytes
    padded = np.append(ids, np.full(SORTED_TOKENS, separator)).astype(np.uint64)
    keys: list[Ids] = []
    for first in range(0, SORTED_TOKENS, per_key):
        key = np.zeros(len(ids), dtype=np.uint64)
        for offset in range(first, first + per_key):
            key <<= np.uint64(8 * token_bytes)
            key |= padded[offset : offset + len(ids)]
        keys.append(key)
    order = np.lexsort(keys[::-1])
    kept: Ids = order[ids[order] != separator].astype(np.uint32)
    return kept


class _Segment:
    """One memory-mapped segment."""

    def __init__(self, directory: Path, entry: SegmentEntry, token_bytes: int, in_background: bool) -> None:
        tokens_path, order_path = _paths(directory, entry.name)
        self._token_bytes = token_bytes
        self._tokens = _map(tokens_path, entry.num_tokens * token_bytes, in_background)
        self._order = memoryview(_map(order_path, entry.num_suffixes * 4, in_background)).cast("I")

    def holds(self, run: bytes) -> bool:
        """Whether `run` occurs."""
        prefix = self._prefix(len(run))
        low = bisect_left(self._order, run, key=prefix)
        return low < len(self._order) and prefix(self._order[low]) == run

    def range_of(self, run: bytes) -> tuple[int, int]:
        """Which suffixes, in order, begin with `run`."""
        prefix = self._prefix(len(run))
        low = bisect_left(self._order, run, key=prefix)
        return low, bisect_right(self._order, run, lo=low, key=prefix)

    def _prefix(self, size: int) -> Callable[[int], bytes]:
        """The first `size` bytes of the suffix that starts at a token."""
        tokens, width = self._tokens, self._token_bytes
        return lambda start: tokens[start * width : start * width + size]

    def continuation(self, place: int, skipped: int, num_tokens: int) -> tuple[int, ...]:
        """Ids behind the first `skipped` ones of the suffix at `place`; fewer at the end of the segment."""
        start = (self._order[place] + skipped) * self._token_bytes
        data = self._tokens[start : start + num_tokens * self._token_bytes]
        return tuple(np.frombuffer(data, dtype=f">u{self._token_bytes}").tolist())


class Corpus:
    """A corpus open for lookups. Immutable: text that is added later is seen by opening it again."""

    def __init__(self, directory: Path, vocabulary: str, before: "Corpus | None" = None) -> None:
        """`before`: the same corpus opened earlier, whose segments are not read again; other threads run meanwhile.

        Raises InvalidArgument naming the file that is missing, damaged, or of another tokenizer.
        """
        self.manifest = read_manifest(directory)
        if self.manifest.vocabulary != vocabulary:
            raise InvalidArgument(_FIELD, f"{directory} was built with another tokenizer than the target's")
        self._encoding = f">u{self.manifest.token_bytes}"
        known: Mapping[SegmentEntry, _Segment] = {} if before is None else before.by_entry
        self.by_entry: Mapping[SegmentEntry, _Segment] = {
            entry: known.get(entry)
            or _Segment(directory, entry, self.manifest.token_bytes, in_background=before is not None)
            for entry in self.manifest.segments
        }
        self._segments = tuple(self.by_entry.values())

    def continuations(
        self, token_ids: Sequence[int], min_match: int, max_match: int, depth: int, most: int
    ) -> list[tuple[int, ...]]:
        """What followed the longest run of last tokens that occurs: up to `depth` ids each, at most `most`.

        The run has `min_match` to `max_match` (≤ SORTED_TOKENS) ids. Of more occurrences an even spread is taken.
        """
        lengths = range(min_match, min(max_match, len(token_ids)) + 1)
        # whatever occurs does so with its own end, so that the lengths that occur come first
        occurring = bisect_left(lengths, True, key=lambda length: not self._holds(token_ids, length))
        if occurring == 0:
            return []
        length = lengths[occurring - 1]
        run = self._run(token_ids, length)
        ranges = [segment.range_of(run) for segment in self._segments]
        stride = max(1, -(-sum(high - low for low, high in ranges) // most))
        found: list[tuple[int, ...]] = []
        for segment, (low, high) in zip(self._segments, ranges, strict=True):
            found += [segment.continuation(place, length, depth) for place in range(low, high, stride)]
        return found[:most]

    def _holds(self, token_ids: Sequence[int], length: int) -> bool:
        run = self._run(token_ids, length)
        return any(segment.holds(run) for segment in self._segments)

    def _run(self, token_ids: Sequence[int], length: int) -> bytes:
        return np.asarray(token_ids[-length:]).astype(self._encoding).tobytes()


def read_manifest(directory: Path) -> Manifest:
    """Raises InvalidArgument naming the file."""
    path = directory / _MANIFEST
    try:
        values = json.loads(path.read_text())
        segments = tuple(SegmentEntry(**entry) for entry in values.pop("segments"))
        manifest = Manifest(**values, segments=segments)
        whole = all(
            isinstance(number, int) and number > 0
            for entry in segments
            for number in (entry.num_tokens, entry.num_suffixes, entry.num_documents)
        )
        named = all(entry.name == Path(entry.name).name for entry in segments)
    except OSError as error:
        raise InvalidArgument(
            _FIELD, f"{path}: {error.strerror}; `outrider corpus build` makes one"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(_FIELD, f"{path} is no manifest of a corpus: {error}") from error
    if manifest.format != FORMAT or manifest.token_bytes not in (2, 4) or not (whole and named):
        raise InvalidArgument(_FIELD, f"{path} is of another format, or damaged; build it again")
    return manifest


def modified_ns(directory: Path) -> int:
    """When the corpus was last added to; 0 where it cannot be told."""
    try:
        return (directory / _MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def documents_of(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of files, those that are no UTF-8 left out."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.tokens", directory / f"{name}.order"


def _map(path: Path, num_bytes: int, in_background: bool) -> mmap.mmap:
    """Read whole beforehand: a lookup touches a page in a hundred places, and from disk each takes milliseconds.

    Python holds its lock while it maps; in the background the file is therefore read first, and mapped page by page.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise InvalidArgument(_FIELD, f"{path} has {size} bytes, the manifest says {num_bytes}")
            if in_background:
                buffer = bytearray(_READ_BYTES)
                while file.readinto(buffer):
                    pass
            flags = mmap.MAP_SHARED if in_background else mmap.MAP_SHARED | mmap.MAP_POPULATE
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise InvalidArgument(_FIELD, f"{path}: {error}") from error
