"""The corpus on disk and what is proposed out of it: what occurs is found, and nothing else."""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.clock import FakeClock
from core.drafter_settings import RestSettings
from core.errors import InvalidArgument
from decode.drafters import corpus as corpus_module
from decode.drafters.corpus import Corpus, CorpusWriter, read_manifest, sort_suffixes
from decode.drafters.protocol import DraftBudget
from decode.drafters.rest import RETRY_S, RestDrafter
from decode.drafters.trie import heaviest
from tests.unit.decode.drafters.test_ngram import request_of

VOCABULARY = "digest"
Documents = Sequence[Sequence[int]]


def build(directory: Path, documents: Documents, vocab_size: int = 100) -> Path:
    with CorpusWriter(directory, VOCABULARY, vocab_size, lambda line: None) as writer:
        for document in documents:
            writer.add(document)
        writer.close()
    return directory


def drafter(directory: Path, num_token_ids: int = 100, **values: int) -> RestDrafter:
    return RestDrafter(RestSettings(corpus=str(directory), **values), VOCABULARY, num_token_ids)


def propose(rest: RestDrafter, tokens: Sequence[int], depth: int = 4, width: int = 1, max_nodes: int = 64):  # type: ignore[no-untyped-def]
    request = request_of(tokens, width)
    rest.start(request)
    return rest.propose([DraftBudget(request, depth, max_nodes)])[0]


def expected(
    documents: Documents, tokens: Sequence[int], low: int, high: int, depth: int
) -> set[tuple[int, ...]]:
    """By looking at every place."""
    for length in range(min(high, len(tokens)), low - 1, -1):
        run = list(tokens[-length:])
        found = {
            tuple(document[start + length : start + length + depth])
            for document in documents
            for start in range(len(document) - length + 1)
            if list(document[start : start + length]) == run
        }
        if found:
            return found
    return set()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.sampled_from([100, 2**16]),
    st.sampled_from([4, 64]),
)
def test_it_finds_what_a_search_of_every_place_finds(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    tokens: list[int],
    vocab_size: int,
    segment_tokens: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "SEGMENT_TOKENS", segment_tokens)
        folder = build(tmp_path_factory.mktemp("corpus"), documents, vocab_size)
    held = [
        document[start : start + segment_tokens - 1]
        for document in documents
        for start in range(0, len(document), segment_tokens - 1)
    ]
    texts = Corpus(folder, VOCABULARY).continuations(tokens, 2, 8, 3, 10**6)
    ended = {tuple(token for token in text[: _end(text)]) for text in texts}
    assert ended == expected(held, tokens, 2, 8, 3)


def _end(text: Sequence[int]) -> int:
    return next((place for place, token in enumerate(text) if token > 3), len(text))


@pytest.mark.parametrize("token_bytes", [2, 4])
def test_suffixes_are_in_order_of_their_first_eight_ids(token_bytes: int) -> None:
    ids = np.random.default_rng(1).integers(0, 3, 200)
    order = sort_suffixes(ids, token_bytes)
    assert sorted(order.tolist()) == list(range(200))
    padded = [*ids.tolist(), *[9] * 8]
    keys = [(padded[start : start + 8], start) for start in order.tolist()]
    assert keys == sorted(keys)


def test_the_continuation_seen_most_often_is_proposed(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [7, 1, 2, 3, 5, 6]]))
    assert propose(rest, [9, 2, 3]).token_ids == (5, 6)


def test_a_tree_holds_the_heaviest_nodes_and_no_more_than_asked(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [7, 1, 2, 3, 5, 6], [1, 2, 8]]))
    draft = propose(rest, [1, 2], width=2)
    assert draft.token_ids == (3, 5, 8, 4, 6)
    assert draft.parents == (0, 1, 0, 1, 2)
    assert propose(rest, [1, 2], width=2, max_nodes=2).token_ids == (3, 5)
    assert max(propose(rest, [1, 2], depth=1, width=2).depths()) == 1


def test_nothing_is_proposed_where_the_corpus_does_not_hold_the_end(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3]]))
    for tokens in ([5, 6], [3], [1], [2, 3]):
        assert propose(rest, tokens).token_ids == ()
    assert propose(rest, [1, 2], depth=0).token_ids == ()


def test_a_draft_ends_where_its_document_ends_or_the_vocabulary_does(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3], [4, 5, 90, 6]]), num_token_ids=50)
    assert propose(rest, [1, 2]).token_ids == (3,)
    assert propose(rest, [4, 5]).token_ids == ()


def test_equal_weights_are_in_the_order_seen() -> None:
    assert heaviest([(5, 6), (4, 6)], 2, 8, 10).token_ids == (5, 4, 6, 6)


def opened(rest: RestDrafter) -> None:
    """Notices a change, and waits until it was looked at."""
    rest.start(request_of([1], 1))
    while any(thread.name == "corpus" for thread in threading.enumerate()):
        time.sleep(0.001)


def test_text_that_is_added_is_seen_once_it_is_open(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3]]))
    assert propose(rest, [7, 8]).token_ids == ()
    build(tmp_path, [[7, 8, 9]])
    opened(rest)
    assert propose(rest, [7, 8]).token_ids == (9,)
    assert propose(rest, [1, 2]).token_ids == (3,)
    assert len(read_manifest(tmp_path).segments) == 2


def test_requests_do_not_wait_for_a_slow_disk_and_only_one_looks_at_a_change(tmp_path: Path) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3]]))
    manifest = tmp_path / "manifest.json"
    build(tmp_path, [[7, 8, 9]])
    content = manifest.read_text()
    manifest.unlink()
    os.mkfifo(manifest)  # whoever reads it waits for us
    assert propose(rest, [1, 2]).token_ids == (3,)
    assert propose(rest, [7, 8]).token_ids == ()
    assert [thread.name for thread in threading.enumerate()].count("corpus") == 1
    (tmp_path / "regular").write_text(content)
    manifest.write_text(content)
    (tmp_path / "regular").replace(manifest)
    opened(rest)
    assert propose(rest, [7, 8]).token_ids == (9,)


def test_what_is_open_already_is_not_read_again(tmp_path: Path) -> None:
    build(tmp_path, [[1, 2, 3]])
    before = Corpus(tmp_path, VOCABULARY)
    build(tmp_path, [[7, 8, 9]])
    after = Corpus(tmp_path, VOCABULARY, before)
    assert after.continuations([7, 8], 2, 8, 1, 10) == [(9,)]
    assert [entry for entry in after.by_entry if after.by_entry[entry] is before.by_entry.get(entry)] == list(
        before.by_entry
    )


def test_a_change_for_the_worse_leaves_the_earlier_corpus_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest = drafter(build(tmp_path, [[1, 2, 3]]))
    (tmp_path / "manifest.json").write_text("{}")
    for _ in range(3):
        opened(rest)
    assert caplog.text.count("the earlier one goes on") == 1
    assert propose(rest, [1, 2]).token_ids == (3,)
    build(tmp_path / "other", [[1, 2, 4]])
    for path in (tmp_path / "other").iterdir():
        path.replace(tmp_path / path.name)
    opened(rest)
    assert propose(rest, [1, 2]).token_ids == (4,), "mended"


def test_a_change_whose_files_come_late_is_looked_at_again(tmp_path: Path) -> None:
    clock = FakeClock()
    build(tmp_path / "corpus", [[1, 2, 3]])
    rest = RestDrafter(RestSettings(corpus=str(tmp_path / "corpus")), VOCABULARY, 100, clock)
    build(tmp_path / "corpus", [[7, 8, 9]])
    last = tmp_path / "corpus" / f"{read_manifest(tmp_path / 'corpus').segments[-1].name}.order"
    last.rename(tmp_path / "late")
    opened(rest)
    (tmp_path / "late").rename(last)
    opened(rest)
    assert propose(rest, [7, 8]).token_ids == ()
    clock.advance(RETRY_S)
    opened(rest)
    assert propose(rest, [7, 8]).token_ids == (9,)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    build(tmp_path, [[1, 2, 3]])
    before = sorted(path.name for path in tmp_path.iterdir())
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError),
        CorpusWriter(tmp_path, VOCABULARY, 100, lambda line: None) as writer,
    ):
        patch.setattr(corpus_module, "SEGMENT_TOKENS", 4)
        writer.add(range(20))
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_will_not_do_is_refused_by_its_file(tmp_path: Path) -> None:
    folder = build(tmp_path / "corpus", [[1, 2, 3]])
    with pytest.raises(InvalidArgument, match="another tokenizer"):
        Corpus(folder, "other")
    with pytest.raises(InvalidArgument, match="another tokenizer"):
        CorpusWriter(folder, "other", 100, lambda line: None)
    with pytest.raises(InvalidArgument, match="corpus build"):
        Corpus(tmp_path / "nowhere", VOCABULARY)
    with (
        pytest.raises(InvalidArgument, match="no text"),
        CorpusWriter(tmp_path / "empty", VOCABULARY, 100, lambda line: None) as writer,
    ):
        writer.close()
    (tokens,) = folder.glob("*.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(InvalidArgument, match=tokens.name):
        Corpus(folder, VOCABULARY)
    manifest = json.loads((folder / "manifest.json").read_text())
    for damage in ({"format": 2}, {"token_bytes": 3}, {"segments": [{"name": "../x"}]}, {"segments": 5}):
        (folder / "manifest.json").write_text(json.dumps(manifest | damage))
        with pytest.raises(InvalidArgument, match=r"manifest\.json"):
            Corpus(folder, VOCABULARY)
