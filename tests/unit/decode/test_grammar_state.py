"""What may come next under a grammar, at the answer's end and behind draft tokens."""

import json
import random
from collections.abc import Sequence

import pytest

from core.clock import FakeClock, SystemClock
from core.errors import InvalidArgument
from core.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher
from core.records import Grammar, GrammarKind, SamplingParams
from decode.grammar_state import NOTHING_LEFT, GrammarState
from decode.sampling.history import TokenHistory
from tests.support.byte_grammar import END, byte_tokenizer, compiled, next_ids

CLOCK = SystemClock()
GREEDY = SamplingParams(eos_token_ids=(END,))
WIDTH = 260
"""Of the logits: wider than the vocabulary, as a padded head's are."""

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "k": {"enum": ["a", "ab", "b"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["k", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
EXPRESSION = 'root ::= term ("+" term)*\nterm ::= [0-9]{1,2} | "(" root ")"'
GRAMMARS: dict[str, tuple[GrammarKind, str]] = {
    "schema": ("json_schema", SCHEMA),
    "regex": ("regex", "(ab|a[b-d]{1,3}|[x-z]+)*;"),
    "ebnf": ("ebnf", EXPRESSION),
}


def state_of(kind: GrammarKind, text: str, answer: bytes = b"", **sampling: object) -> GrammarState:
    params = SamplingParams(eos_token_ids=(END,), **sampling)  # type: ignore[arg-type]
    return GrammarState(compiled(kind, text), TokenHistory([1, 2], answer), params, WIDTH, CLOCK)


def ids_of(state: GrammarState, path: Sequence[int] = ()) -> set[int]:
    mask = state.mask(path)
    assert mask is not None
    assert mask.shape == (WIDTH,)
    return set(mask.nonzero().flatten().tolist())


@pytest.mark.parametrize(("kind", "text"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_masks_of_a_tree_equal_those_of_matchers_built_anew(kind: GrammarKind, text: str) -> None:
    generator = random.Random(5)
    history = TokenHistory([1, 2])
    state = GrammarState(compiled(kind, text), history, GREEDY, WIDTH, CLOCK)
    for _ in range(12):
        answer = list(history.output_ids)
        paths: list[tuple[int, ...]] = [()]
        for _ in range(10):
            path = generator.choice(paths)
            expected = next_ids(kind, text, [*answer, *path])
            assert ids_of(state, path) == expected
            token_id = generator.choice(sorted(expected - {END}) or [ord("?")])
            paths.append((*path, token_id))
            if token_id not in expected:
                assert state.mask(paths[-1]) is None
                paths.pop()
        generator.shuffle(paths)
        for path in paths:
            assert ids_of(state, path) == next_ids(kind, text, [*answer, *path])
        history.extend(generator.choice(paths)[: generator.randrange(1, 5)])


@pytest.mark.parametrize(("kind", "text"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_a_state_begun_behind_tokens_equals_one_that_went_along(kind: GrammarKind, text: str) -> None:
    generator = random.Random(9)
    history = TokenHistory([1, 2])
    state = GrammarState(compiled(kind, text), history, GREEDY, WIDTH, CLOCK)
    for _ in range(16):
        allowed = ids_of(state)
        assert allowed == ids_of(state_of(kind, text, bytes(history.output_ids)))
        if allowed == {END}:
            break
        history.extend([generator.choice(sorted(allowed - {END}))])


def test_a_path_that_leaves_the_grammar_has_no_mask_and_does_no_harm() -> None:
    state = state_of("regex", "abc")
    assert state.mask(b"b") is None
    assert state.mask(b"bc") is None
    assert state.mask(b"abx") is None
    assert ids_of(state, b"ab") == {ord("c")}
    assert ids_of(state) == {ord("a")}


def test_behind_the_end_there_is_only_the_end() -> None:
    state = state_of("regex", "ab?")
    assert ids_of(state, (ord("a"), END)) == {END}
    assert state.mask((ord("a"), END, ord("b"))) is None, "nor behind a path over it"
    assert state.mask((END,)) is None, "before an a nothing ends"
    history = TokenHistory([1], b"a")
    ended = GrammarState(compiled("regex", "ab?"), history, GREEDY, WIDTH, CLOCK)
    history.extend([END])
    assert ids_of(ended) == {END}


def test_an_id_that_ends_answers_is_never_text() -> None:
    assert ids_of(state_of("regex", r"[\x00-b]")) == set(range(1, ord("b") + 1))


@pytest.mark.parametrize(
    ("answer", "min_tokens", "expected"),
    [
        (b"a", 0, {ord("b"), END}),
        (b"a", 1, {ord("b"), END}),
        (b"a", 2, {ord("b")}),
        (b"ab", 9, {END}),
    ],
)
def test_min_tokens_bans_the_end_unless_nothing_else_fits(
    answer: bytes, min_tokens: int, expected: set[int]
) -> None:
    assert ids_of(state_of("regex", "ab?", answer, min_tokens=min_tokens)) == expected
    assert ids_of(state_of("regex", "ab?", min_tokens=min_tokens), answer) == expected


def test_min_tokens_gives_way_where_bad_words_take_the_rest() -> None:
    word = (ord("a"), ord("b"))
    assert ids_of(state_of("regex", "ab?", b"a", min_tokens=5, bad_word_ids=(word,))) == {ord("b"), END}
    assert ids_of(state_of("regex", "ab?c?", b"a", min_tokens=5, bad_word_ids=(word,))) == {
        ord("b"),
        ord("c"),
    }


def test_a_stop_id_that_the_grammar_wants_counts_as_an_end() -> None:
    state = state_of("regex", "a[bc]", b"a", min_tokens=5, stop_token_ids=(ord("b"),))
    assert ids_of(state) == {ord("c")}
    assert ids_of(state_of("regex", "ab", b"a", min_tokens=5, stop_token_ids=(ord("b"),))) == {ord("b")}


def test_tokens_that_do_not_follow_the_grammar_are_no_beginning() -> None:
    with pytest.raises(InvalidArgument) as caught:
        state_of("regex", "abc", b"ax")
    assert caught.value.field == "sampling.grammar"


def test_a_grammar_that_leads_nowhere_is_refused_before_anything_is_drawn() -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.grammar"):
        state_of("regex", "a[^\\x00-\\U0010FFFF]")


def test_what_leaves_nothing_says_so() -> None:
    state = state_of("regex", "ab")
    assert state.mask(b"b") is None
    assert "grammar" in state.fault
    assert NOTHING_LEFT.startswith("the grammar")


COSTLY = "(([a-z]{1,90}x|[a-m]{1,800}y|[c-z]{2,700}){1,500}){1,9}"
"""Meets the library's bounds after some tokens, sooner where drafts are looked behind."""


def walked(
    generator: random.Random, state: GrammarState, history: TokenHistory, num_drafts: int
) -> list[set[int]]:
    """What may come next, token by token, to the first that nothing may follow; paths are looked behind meanwhile."""
    seen: list[set[int]] = []
    while len(seen) < 60:
        allowed = ids_of(state)
        seen.append(allowed)
        if not allowed - {END}:
            break
        for _ in range(num_drafts):
            path = [generator.choice(b"abcdwxyz") for _ in range(generator.randrange(1, 9))]
            state.mask(path)
        history.extend([min(allowed - {END}, key=lambda token_id: (token_id * 37 + len(seen) * 11) % 251)])
    return seen


def test_drafts_and_other_requests_that_meet_a_bound_do_not_show_in_an_answer() -> None:
    runs = []
    for num_drafts in (0, 12, 40, 0):
        history = TokenHistory([1, 2])
        state = GrammarState(compiled("regex", COSTLY), history, GREEDY, WIDTH, CLOCK)
        runs.append(walked(random.Random(num_drafts), state, history, num_drafts))
    assert runs[1:] == runs[:1] * 3


def test_drafts_that_break_their_matcher_end_drafting_only_and_the_grammar_is_compiled_anew() -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    grammar = Grammar("regex", COSTLY)
    history = TokenHistory([1, 2])
    first = compiler.compile(grammar)
    state = GrammarState(first, history, GREEDY, WIDTH, CLOCK)
    generator = random.Random(3)
    for _ in range(4000):
        path = [generator.choice(b"abcdefwxyz") for _ in range(generator.randrange(1, 30))]
        state.mask(path)
        if first.worn_out:
            break
    assert first.worn_out, "no bound was met"
    assert state.mask(b"klm") is None
    assert ids_of(state) == next_ids("regex", COSTLY, b"")
    assert compiler.compile(grammar) is not first


def test_masks_that_take_too_long_are_for_the_answer_only() -> None:
    clock = FakeClock()

    class _Slow(GrammarMatcher):
        def bitmask(self) -> bytes:
            clock.advance(0.03)
            return super().bitmask()

    class _SlowCompiled(CompiledGrammar):
        def draft_matcher(self) -> GrammarMatcher:
            return _Slow(self._compile_one())

    quick = compiled("regex", "[ab]{30}")
    slow = _SlowCompiled(quick._compile_one, quick.num_token_ids)
    history = TokenHistory([1, 2])
    state = GrammarState(slow, history, GREEDY, WIDTH, clock)
    looked = [state.mask((ord("a"),) * depth) is not None for depth in range(1, 9)]
    assert looked == [True, True, True, True, False, False, False, False]
    history.extend(b"ab")
    assert ids_of(state) == {ord("a"), ord("b")}
    assert state.mask(b"a") is None
