"""EBNF as clients write it: what is understood, what is refused by its line."""

import re

import pytest

from core.ebnf import MAX_DEPTH, lark_of
from core.errors import InvalidArgument
from tests.support.byte_grammar import accepts

EXPRESSION = """
# sums and products
root   ::= term (("+" | "-") term)*
term   ::= factor ("*" factor)*
factor ::= [0-9]+ | "(" root ")"
"""
JSON_LIKE = r"""
root   ::= value "\n"?
value  ::= object | array | string | [0-9]{1,4} | "true" | 'null'
object ::= "{" (pair ("," pair)*)? "}"
pair   ::= string ":" value
array  ::= "[" (value ("," value)*)? "]"
string ::= "\"" [^"\\\n]* "\""
"""
ACCEPTED = [
    ('root ::= "a" | "b" root', "bba"),
    ('root ::= "a"* "b"+ "c"?', "aabbb"),
    ('root ::= ("ab"){2,3}', "ababab"),
    ('root ::= "a"{3}', "aaa"),
    ('root ::= "a"{2,}', "aaaaa"),
    ('root ::= "a"{0} "b"', "b"),
    ('root ::= "x" |', ""),
    ("root ::= [^a-c] .", "d\n"),
    (r"root ::= [\]\\\-^a-] [-x]", "--"),
    (r"root ::= 'it''s' ", "its"),
    (r'root ::= "\x41\u00e9\U0001F600\t\""', 'Aé😀\t"'),
    ('root ::= a\n  "c"\na ::= "b"', "bc"),
    (EXPRESSION, "1+(2*33-4)*(5)"),
    (JSON_LIKE, '{"a":[1,true,{}],"b":"x y"}\n'),
]
DENIED = [
    ('root ::= "a" | "b" root', "bb"),
    ('root ::= ("ab"){2,3}', "ab"),
    ('root ::= "a"{2,}', "a"),
    ("root ::= [^a-c] .", "a\n"),
    (EXPRESSION, "1+(2*33"),
    (EXPRESSION, "1+*2"),
    (JSON_LIKE, '{"a":[1,}'),
]


@pytest.mark.parametrize(("grammar", "answer"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_an_answer_of_the_language_follows_the_grammar(grammar: str, answer: str) -> None:
    assert accepts("ebnf", grammar, answer)


@pytest.mark.parametrize(("grammar", "answer"), DENIED, ids=range(len(DENIED)))
def test_another_answer_does_not(grammar: str, answer: str) -> None:
    assert not accepts("ebnf", grammar, answer)


@pytest.mark.parametrize("text", ["", "a", "ab", "abb", "b", "aab", "aabbab", "c"])
def test_a_grammar_without_recursion_is_the_regular_expression_that_it_spells(text: str) -> None:
    grammar = 'root ::= pair* tail?\npair ::= "a" | "a" "b"\ntail ::= "b"{2}'
    assert accepts("ebnf", grammar, text) == bool(re.fullmatch("(a|ab)*(bb)?", text))


BAD: list[tuple[str, str]] = [
    ("", "'root'"),
    ('a ::= "b"', "'root'"),
    ('root ::= "a"\nb ::= ;', "line 2"),
    ("root = 'a'", "line 1"),
    ("root ::= missing", "'missing'"),
    ('root ::= "a"\nroot ::= "b"', "line 2"),
    ('root ::= ("a"', "line 1"),
    ('root ::= "a")', "line 1"),
    ('root ::= "a', "line 1"),
    ('root ::= "a"{3,2}', "{3,2}"),
    ('root ::= "a"{5000}', "{5000}"),
    ('root ::= "a"**', "repeats"),
    ('root ::= * "a"', "line 1"),
    ("root ::= []", "empty class"),
    ("root ::= [z-a]", "goes down"),
    (r'root ::= "\q"', "\\q"),
    (r'root ::= "\ud800"', "no character"),
    ("root ::= " + "(" * (MAX_DEPTH + 1) + '"a"' + ")" * (MAX_DEPTH + 1), "groups"),
    ("\n".join(f'r{number} ::= "a"' for number in range(1100)), "rules"),
]


@pytest.mark.parametrize(("grammar", "told"), BAD, ids=range(len(BAD)))
def test_what_is_no_grammar_is_refused_with_its_place(grammar: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        lark_of(grammar)
    assert caught.value.field == "sampling.grammar"
    assert told in caught.value.message


def test_rules_that_nothing_leads_to_do_no_harm() -> None:
    assert accepts("ebnf", 'root ::= "a"\nlost ::= lost "b"', "a")
