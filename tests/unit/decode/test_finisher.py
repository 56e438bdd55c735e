"""Ends of an answer and its text (CASES B01, B02, B12)."""

import copy
from collections.abc import Sequence
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import FinishReason, SamplingParams
from decode.finisher import Finisher

STOP_ID = 300
EOS_ID = 301


class ByteText:
    """Token id = byte; ids from 256 on make no text. Holds nothing back."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id < 256)

    def flush(self) -> str:
        return ""

    def fork(self) -> Self:
        return copy.copy(self)


class HalfText(ByteText):
    """Holds every second character back, as incomplete UTF-8 is held."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held + super().push(token_ids)
        keep = len(text) // 2 * 2
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held + "\ufffd" if held else ""


def finisher(limit: int = 100, detokenizer: ByteText | None = None, **sampling: object) -> Finisher:
    params = SamplingParams(max_tokens=limit, eos_token_ids=(EOS_ID,), **sampling)  # type: ignore[arg-type]
    return Finisher(params, limit, detokenizer or ByteText())


def run(
    subject: Finisher, bursts: Sequence[Sequence[int]]
) -> tuple[list[int], str, FinishReason | None, str]:
    """Ids, text, reason and stop string after feeding bursts until the end."""
    ids: list[int] = []
    text = ""
    for burst in bursts:
        cut = subject.push(burst)
        kept = list(burst[: cut.num_tokens])
        ids += kept
        if cut.text is not None:
            text += cut.text
        else:
            text += subject.text_of(kept[: cut.num_text_tokens], cut.finish is not None)
        if cut.finish is not None:
            return ids, text, cut.finish, cut.stop_string
    return ids, text, None, ""


@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_string_completed_anywhere_in_a_burst_cuts_ids_and_text_there(position: int) -> None:
    text = "." * (position - 1) + "!" + "x" * (8 - position)
    ids, seen, reason, stop = run(finisher(stop=("!",)), [text.encode()])
    assert ids == list(text[:position].encode())
    assert (seen, reason, stop) == ("." * (position - 1), FinishReason.STOP, "!")


@pytest.mark.parametrize("split", range(1, 11))
def test_a_stop_string_straddling_bursts_is_found_and_never_shown(split: int) -> None:
    text = b"ab zeta eta cd"
    ids, seen, reason, _ = run(finisher(stop=(" zeta eta",)), [text[:split], text[split:]])
    assert (ids, seen, reason) == (list(b"ab zeta eta"), "ab", FinishReason.STOP)


def test_held_text_is_released_when_the_match_fails() -> None:
    ids, seen, reason, _ = run(
        finisher(limit=14, stop=(" zeta eta theta",)), [b"a zeta", b" eta io", b"ta.."]
    )
    assert (seen, reason, len(ids)) == ("a zeta eta iot", FinishReason.LENGTH, 14)


def test_held_text_is_flushed_once_at_the_length_limit() -> None:
    ids, seen, reason, _ = run(finisher(limit=6, stop=(" zeta",)), [b"a zet", b"xyz"])
    assert (seen, reason, len(ids)) == ("a zetx", FinishReason.LENGTH, 6)
    ids, seen, reason, _ = run(finisher(limit=5, stop=(" zeta",)), [b"a zet"])
    assert (seen, reason) == ("a zet", FinishReason.LENGTH)


def test_of_two_stop_strings_the_one_that_ends_first_counts() -> None:
    assert run(finisher(stop=("ab", "abc")), [b"xabc"])[1:] == ("x", FinishReason.STOP, "ab")
    assert run(finisher(stop=("abc", "b")), [b"xabc"])[1:] == ("xa", FinishReason.STOP, "b")
    assert run(finisher(stop=("bc", "abc")), [b"xabc"])[1:] == ("x", FinishReason.STOP, "abc")


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_first_event_in_token_order_wins_between_stop_id_and_length(max_tokens: int) -> None:
    burst = [10, 11, STOP_ID, 20, 21, 22]
    ids, _, reason, _ = run(finisher(limit=max_tokens, stop_token_ids=(STOP_ID,)), [burst])
    if max_tokens >= 3:
        assert (ids, reason) == ([10, 11, STOP_ID], FinishReason.STOP)
    else:
        assert (ids, reason) == (burst[:max_tokens], FinishReason.LENGTH)


def test_end_of_sequence_ends_unless_ignored_and_makes_no_text() -> None:
    assert run(finisher(), [[65, EOS_ID, 66]])[:3] == ([65, EOS_ID], "A", FinishReason.STOP)
    assert run(finisher(limit=3, ignore_eos=True), [[65, EOS_ID, 66]])[1:3] == ("AB", FinishReason.LENGTH)


@pytest.mark.parametrize("min_tokens", range(5))
def test_nothing_but_length_ends_before_min_tokens(min_tokens: int) -> None:
    ids, *_ = run(finisher(min_tokens=min_tokens), [[65, EOS_ID], [EOS_ID, EOS_ID, EOS_ID, EOS_ID]])
    assert len(ids) == max(2, min_tokens + 1)
    ids, text, _, _ = run(finisher(min_tokens=min_tokens, stop=("a",)), [b"bababababa"])
    assert len(ids) == 2 * max(1, -(-min_tokens // 2))
    assert text == "ba" * (len(ids) // 2 - 1) + "b"


def test_incomplete_characters_are_held_and_flushed_once() -> None:
    assert run(finisher(limit=5, detokenizer=HalfText()), [b"abc", b"de"])[1] == "abcde\ufffd"
    assert run(finisher(limit=5, detokenizer=HalfText(), stop=("zz",)), [b"abc", b"de"])[1] == "abcde\ufffd"


@settings(deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    limit=st.integers(1, 30),
    min_tokens=st.integers(0, 10),
)
def test_grouping_into_bursts_changes_nothing(
    text: str, stops: list[str], cuts: list[int], limit: int, min_tokens: int
) -> None:
    ids = text.encode()
    grouped: list[bytes] = []
    position = 0
    for size in cuts:
        grouped.append(ids[position : position + size])
        position += size
    grouped.append(ids[position:])
    at_least = min(min_tokens, limit)
    one_by_one = run(finisher(limit, stop=tuple(stops), min_tokens=at_least), [bytes([byte]) for byte in ids])
    bursts = [burst for burst in grouped if burst]
    assert run(finisher(limit, stop=tuple(stops), min_tokens=at_least), bursts) == one_by_one


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1),
)
def test_shown_text_is_what_stands_before_the_stop_string_that_ends_first(
    text: str, stops: list[str]
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    _, seen, reason, _ = run(finisher(stop=tuple(stops)), [text.encode()])
    if ends:
        assert (seen, reason) == (text[: min(ends)[1]], FinishReason.STOP)
    else:
        assert text.startswith(seen)
        assert reason is None
