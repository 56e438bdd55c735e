"""Peers as real child processes: what their answers and times mean on our side."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.bench import child_peer
from tests.bench.child_peer import ChildPeer
from tests.bench.prompts import Prompt

PROMPT = Prompt("a", "code", "text", (5, 6, 7), 0)
COUNTS_ON = """
import sys
sys.path.insert(0, {folder!r})
from peer_protocol import stream_lines

def stream(prompt, max_tokens):
    print("a library that prints")
    yield from range(prompt[-1] + 1, prompt[-1] + 1 + max_tokens - {lacking})

stream_lines("counts", stream)
"""


@contextmanager
def counting_peer(work: Path, lacking: int = 0) -> Iterator[ChildPeer]:
    script = work / "peer.py"
    script.write_text(COUNTS_ON.format(folder=str(Path(child_peer.__file__).parent), lacking=lacking))
    with closing(ChildPeer("counts", [sys.executable, str(script)], largest_batch=1)) as peer:
        yield peer


def test_a_streaming_peer_tells_when_its_first_token_was_there(tmp_path: Path) -> None:
    with counting_peer(tmp_path) as peer:
        for count in (20, 1):
            answer = peer.timed(PROMPT, count)
            assert answer.token_ids == tuple(range(8, 8 + count))
            assert 0 < answer.first_s <= answer.whole_s
            assert answer.first_tokens == 1
        assert peer.measure([PROMPT], 4, "") > 0


def test_an_answer_of_fewer_tokens_than_asked_for_is_refused(tmp_path: Path) -> None:
    with counting_peer(tmp_path, lacking=1) as peer, pytest.raises(AssertionError, match="answered"):
        peer.timed(PROMPT, 4)
