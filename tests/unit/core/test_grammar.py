"""What a grammar may be, and that a bad one costs an error, in little time, and nothing else."""

import json
import time

import pytest

from core.errors import InvalidArgument
from core.grammar import GrammarCompiler, check_grammar, check_size, readable
from core.records import Grammar, GrammarKind
from tests.support.byte_grammar import END, accepts, byte_tokenizer, next_ids

LONGEST_S = 3.0
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def nested_schema(depth: int) -> str:
    return '{"type":"array","items":' * depth + "true" + "}" * depth


def chained_schema(length: int) -> str:
    definitions: dict[str, object] = {
        f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{length}": {"type": "null"}}})


BAD: dict[str, tuple[GrammarKind, str]] = {
    "schema that is no JSON": ("json_schema", "{"),
    "schema that is a number": ("json_schema", "17"),
    "schema that is a list": ("json_schema", "[]"),
    "schema of an unknown type": ("json_schema", '{"type": "wish"}'),
    "schema with an unknown keyword": ("json_schema", '{"type": "array", "uniqueItems": true}'),
    "schema that nothing satisfies": ("json_schema", "false"),
    "schema whose bounds exclude all": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'),
    "schema that refers to nothing": ("json_schema", '{"$ref": "#/$defs/x"}'),
    "schema that refers to the network": ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "schema with a bad pattern": ("json_schema", '{"type": "string", "pattern": "("}'),
    "deep schema": ("json_schema", nested_schema(200)),
    "schema deeper than Python's own parser goes": ("json_schema", nested_schema(20_000)),
    "schema with a deep pattern": (
        "json_schema",
        json.dumps({"type": "string", "pattern": "(" * 99 + ")" * 99}),
    ),
    "regex that is none": ("regex", "("),
    "regex with a class that is none": ("regex", "[b-a]"),
    "regex with a look-ahead": ("regex", "(?=a)a"),
    "regex with a reference": ("regex", r"(a)\1"),
    "deep regex": ("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "deep regex of classes": ("regex", "[" * 10_000 + "a" + "]" * 10_000),
    "ebnf in another notation": ("ebnf", "start: /a/"),
    "deep ebnf": ("ebnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
}

HARSH: dict[str, tuple[GrammarKind, str]] = {
    "nested stars": ("regex", "((a*)*)*b"),
    "the classical exponential": ("regex", "(x+x+)+y"),
    "a subset construction of 2^40 states": ("regex", "(a|b)*a(a|b){40}"),
    "counted repetition of counted repetition": ("regex", "((a{1,100}){1,100}){1,100}"),
    "optional tokens of which all may be left out": ("regex", "(a|b?)" * 4000),
    "as many optional as wanted ones": ("regex", "a?" * 8000 + "a" * 8000),
    "many alternatives": ("regex", "|".join(f"{number:05d}" for number in range(9000))),
    "doubling terminals": (
        "ebnf",
        'root ::= r40\nr0 ::= "a" | "b"\n'
        + "\n".join(f"r{number} ::= r{number - 1} r{number - 1}" for number in range(1, 41)),
    ),
    "doubling rules": (
        "ebnf",
        'root ::= r40\nr0 ::= "a" | "(" root ")"\n'
        + "\n".join(f"r{number} ::= r{number - 1} r{number - 1}" for number in range(1, 41)),
    ),
    "an ambiguous grammar": ("ebnf", 'root ::= root root | "a" | "b"'),
    "a grammar without an end": ("ebnf", 'root ::= "a" root'),
    "a grammar that leads nowhere": ("ebnf", "root ::= root"),
    "a chain of references": ("json_schema", chained_schema(1500)),
    "many branches": ("json_schema", json.dumps({"anyOf": [{"const": str(n)} for n in range(3000)]})),
    "products of allOf": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"minLength": n}, {"maxLength": n + 9}]} for n in range(24)]}),
    ),
    "a huge count": ("json_schema", '{"type": "array", "minItems": 100000000, "items": {"type": "null"}}'),
}


@pytest.mark.parametrize(("kind", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_grammar_is_refused_by_name_with_a_short_reason(kind: GrammarKind, text: str) -> None:
    for check in (check_grammar, GrammarCompiler(byte_tokenizer()).compile):
        with pytest.raises(InvalidArgument) as caught:
            check(Grammar(kind, text))
        assert caught.value.field == "sampling.grammar"
        assert len(caught.value.message) < 300
        assert caught.value.message.isprintable()


@pytest.mark.parametrize(("kind", "text"), HARSH.values(), ids=HARSH.keys())
def test_a_harsh_grammar_is_judged_in_time_and_followed_or_ended_in_time(
    kind: GrammarKind, text: str
) -> None:
    started_s = time.process_time()
    try:
        check_grammar(Grammar(kind, text))
        matcher = GrammarCompiler(byte_tokenizer()).compile(Grammar(kind, text)).matcher()
    except InvalidArgument:
        assert time.process_time() - started_s < LONGEST_S
        return
    for token_id in (*b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", ord("x"), ord("[")):
        matcher.bitmask()
        matcher.consume([token_id])
        matcher.rollback(0)
        if matcher.error:
            break
    assert time.process_time() - started_s < LONGEST_S


def test_size_is_counted_in_bytes_before_anything_is_read() -> None:
    check_size(Grammar("regex", "é" * 50), 100)
    for text in ("", "é" * 51, "[" * 10 * 2**20):
        with pytest.raises(InvalidArgument) as caught:
            check_size(Grammar("regex", text), 100)
        assert caught.value.field == "sampling.grammar"


@pytest.mark.parametrize(
    ("answer", "follows"),
    [
        ('{"name":"Ann","age":7}', True),
        ('{ "name" : "é\\n" , "age" : 150 }', True),
        ('{"name":"Ann"}', False),
        ('{"name":"Ann","age":151}', False),
        ('{"name":"Ann","age":7,"x":1}', False),
        ('{"name":"Ann","age":7} ', False),
    ],
)
def test_a_json_schema_is_followed_to_the_letter(answer: str, follows: bool) -> None:
    assert accepts("json_schema", SCHEMA, answer) == follows


def test_a_regex_matches_the_whole_answer() -> None:
    assert accepts("regex", "[a-c]+", "abc")
    assert not accepts("regex", "[a-c]+", "abcd")
    assert not accepts("regex", "[a-c]+", "")


def test_a_complete_answer_may_end_and_nothing_else() -> None:
    assert next_ids("regex", "ab?", b"a") == {ord("b"), END}
    assert next_ids("regex", "ab?", b"ab") == {END}
    assert next_ids("json_schema", '{"const": 1}', b"1") == {END}


def test_a_matcher_goes_back_over_the_end() -> None:
    matcher = GrammarCompiler(byte_tokenizer()).compile(Grammar("regex", "ab?")).matcher()
    assert matcher.consume(b"ab") == 2
    ended = matcher.may_end
    assert ended
    assert matcher.consume(b"b") == 0
    matcher.rollback(1)
    assert matcher.consume(b"b") == 1
    matcher.rollback(2)
    ended = matcher.may_end
    assert not ended
    assert matcher.consume(b"ac") == 1
    assert not matcher.error


def test_matchers_of_one_grammar_do_not_see_each_other() -> None:
    compiled = GrammarCompiler(byte_tokenizer()).compile(Grammar("regex", "(ab)+"))
    first, second = compiled.matcher(), compiled.matcher()
    assert first.consume(b"aba") == 3
    assert second.consume(b"b") == 0
    assert second.consume(b"ab") == 2
    assert (first.may_end, second.may_end) == (False, True)


def test_compiled_grammars_are_kept_by_what_they_say() -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    assert compiler.compile(Grammar("regex", "a")) is compiler.compile(Grammar("regex", "a"))
    assert compiler.compile(Grammar("regex", "a")) is not compiler.compile(Grammar("regex", "b"))
    assert Grammar("regex", "a").digest != Grammar("ebnf", "a").digest


def test_a_refusal_is_kept_and_says_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    bad = Grammar("regex", "(")
    with pytest.raises(InvalidArgument) as first:
        compiler.compile(bad)
    monkeypatch.setattr(compiler, "_compile", None)
    with pytest.raises(InvalidArgument) as again:
        compiler.compile(bad)
    assert again.value.message == first.value.message


def test_a_message_is_one_short_printable_line() -> None:
    assert readable("a\n  b\tc") == "a b c"
    assert readable("a\x1b[31mb") == "a?[31mb"
    assert len(readable("x" * 5000)) == 200
