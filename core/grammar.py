"""Grammars that an answer must follow, over the tokens of one vocabulary: JSON schema, regular expression, EBNF.

`check_size` is cheap and comes first; `check_grammar` compiles without a vocabulary, as a router does; a
`GrammarCompiler` compiles for one, as a decode worker does. Compiling takes milliseconds, with a bad will seconds:
both belong on a `core/grammar_thread.py`. What a grammar may cost is bounded before (bytes, nesting) and while it is
compiled or followed (`_LIMITS`): beyond them it is refused, or the answer ends with an error.

JSON schemas are draft 2020-12, and a keyword that cannot be enforced is refused; white space is free unless the schema
says `"x-guidance": {"whitespace_flexible": false}`. Regular expressions match the whole answer, in the syntax of
Rust's `regex`, without look-around. EBNF: `core/ebnf.py`.

Third party: llguidance, used here only (docs/adr/0007-grammar-library.md).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.ebnf import lark_of
from core.errors import FailedPrecondition, InvalidArgument
from core.records import Grammar
from core.tokenizer import Tokenizer

MAX_NESTING = 64
"""Brackets inside one another, of a regular expression; a JSON schema may nest twice as deep."""

MAX_COMPILED = 32
"""Grammars that a compiler keeps, and as many refusals."""

FIELD = "sampling.grammar"
"""What is named where one is refused."""

_MAX_MESSAGE_CHARACTERS = 200
_BRACKETS = re.compile(r"\\.|[\[({]|[\])}]", re.DOTALL)
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=4_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Masks of ordinary grammars take under 1 ms, those of the worst ones that we found some 70 ms; 100 MB of lexer states.
A schema of 200 fields with patterns and formats stays under a tenth of each."""

Result = TypeVar("Result")
Kept = TypeVar("Kept")


def check_size(grammar: Grammar, max_bytes: int) -> None:
    """Raises InvalidArgument for an empty or too large one. Reads nothing else of it."""
    size = len(grammar.text.encode())
    if size == 0:
        raise InvalidArgument(FIELD, f"the {grammar.kind} is empty")
    if size > max_bytes:
        raise InvalidArgument(FIELD, f"{size} bytes of {grammar.kind} exceed the limit of {max_bytes}")


def check_grammar(grammar: Grammar) -> None:
    """Raises InvalidArgument, with the library's reason, for what no vocabulary could follow."""
    source = _source_of(grammar)
    failed, messages = _guarded(
        lambda: LLMatcher.validate_grammar_with_warnings(source, None, limits=_LIMITS)
    )
    if failed:
        raise InvalidArgument(FIELD, readable("; ".join(messages)))


def readable(message: str) -> str:
    """A library's message on one line, without control characters, cut short."""
    line = " ".join(message.split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else line[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


class GrammarMatcher:
    """One place in a grammar. Moves by whole tokens; end-of-sequence ids are the caller's business."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> int:
        """Go on over `token_ids`; how many of them, up to the first that does not fit."""
        taken = 0
        for token_id in token_ids:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token_id]):
                break
            taken += 1
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Go back over the last tokens consumed."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def bitmask(self) -> bytes:
        """Bit i of byte j: whether token 8 j + i may come next; end-of-sequence bits mean nothing."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return not self.error and (self._matcher.is_stopped() or self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why this matcher can go no further, not even back; empty: it can."""
        return readable(self._matcher.get_error()) if self._matcher.is_error() else ""


class CompiledGrammar:
    """A grammar for one vocabulary.

    The library's copies of a matcher share the states that they build and the bounds on them, and where one meets a
    bound all are broken. So an answer's matcher is compiled for it alone; those behind drafts are copies.
    """

    def __init__(self, compile_one: Callable[[], LLMatcher], num_token_ids: int) -> None:
        self._compile_one = compile_one
        self._drafts = compile_one()
        self.num_token_ids = num_token_ids
        self.worn_out = False
        """Whether drafts met a bound: to be compiled anew for the next request."""

    def matcher(self) -> GrammarMatcher:
        """A new one at the beginning, sharing nothing. Compiles: off the engine thread."""
        return GrammarMatcher(self._compile_one())

    def draft_matcher(self) -> GrammarMatcher:
        """A new one at the beginning; others can break it."""
        return GrammarMatcher(self._drafts.deep_copy())

    def wear_out(self) -> None:
        """A draft matcher is broken, so all of them may be."""
        self.worn_out = True


class GrammarCompiler:
    """One for a vocabulary; from one thread at a time. Keeps the latest `MAX_COMPILED` grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidArgument for a bad grammar, FailedPrecondition for a vocabulary that none can be held to."""
        digest = grammar.digest
        if digest in self._refused:
            raise InvalidArgument(FIELD, self._refused[digest])
        compiled = self._compiled.get(digest)
        if compiled is None or compiled.worn_out:
            try:
                compiled = self._compile(grammar)
            except InvalidArgument as refusal:
                _keep(self._refused, digest, refusal.message.removeprefix(f"{FIELD}: "))
                raise
        _keep(self._compiled, digest, compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        source, tokens = _source_of(grammar), self._token_table()
        compiled = CompiledGrammar(
            lambda: _guarded(lambda: LLMatcher(tokens, source, log_level=0, limits=_LIMITS)),
            self._tokenizer.vocab_size,
        )
        _check_first_mask(compiled.draft_matcher())
        return compiled

    def _token_table(self) -> LLTokenizer:
        """The library's own view of the vocabulary; takes about a second, once."""
        if self._tokens is None:
            description, ends = self._tokenizer.to_json(), list(self._tokenizer.eos_token_ids)
            try:
                self._tokens = _guarded(
                    lambda: LLTokenizer(description, n_vocab=self._tokenizer.vocab_size, eos_token=ends)
                )
            except Exception as error:  # boundary: the library raises whatever it likes for a vocabulary
                raise FailedPrecondition(
                    FIELD, f"answers of this model cannot be constrained: {readable(str(error))}"
                ) from error
        return self._tokens


def _keep(known: OrderedDict[bytes, Kept], digest: bytes, value: Kept) -> None:
    """As the latest of `MAX_COMPILED`."""
    known[digest] = value
    known.move_to_end(digest)
    if len(known) > MAX_COMPILED:
        known.popitem(last=False)


def _check_first_mask(matcher: GrammarMatcher) -> None:
    """What is built lazily is built here, not in a step: a regular expression too large for its bounds ends here."""
    if not matcher.error:
        _guarded(matcher.bitmask)
    if matcher.error:
        raise InvalidArgument(FIELD, matcher.error)


def _source_of(grammar: Grammar) -> str:
    """The grammar in the library's words. Raises InvalidArgument."""
    if grammar.kind == "ebnf":
        return LLMatcher.grammar_from_lark(lark_of(grammar.text))
    if grammar.kind == "regex":
        _check_nesting(grammar.text, "the regular expression")
        return LLMatcher.grammar_from_regex(grammar.text)
    _check_schema(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text)
    except ValueError as error:
        raise InvalidArgument(FIELD, readable(str(error))) from error


def _check_nesting(pattern: str, what: str) -> None:
    depth = deepest = 0
    for match in _BRACKETS.finditer(pattern):
        sign = match.group()
        depth += 1 if sign in "[({" else -1 if sign in "])}" else 0
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise InvalidArgument(FIELD, f"{what} nests {deepest} deep; at most {MAX_NESTING}")


def _check_schema(text: str) -> None:
    """JSON, an object or a truth value, nested no deeper than native recursion can take."""
    try:
        schema: Any = json.loads(text)  # Any: it may be anything
    except ValueError as error:
        raise InvalidArgument(FIELD, readable(f"the JSON schema is not JSON: {error}")) from error
    except RecursionError:
        raise InvalidArgument(FIELD, f"the JSON schema nests more than {2 * MAX_NESTING} deep") from None
    if not isinstance(schema, dict | bool):
        raise InvalidArgument(FIELD, "a JSON schema is an object, or true or false")
    for key, value, depth in _parts(schema):
        if depth > 2 * MAX_NESTING:
            raise InvalidArgument(FIELD, f"the JSON schema nests more than {2 * MAX_NESTING} deep")
        if key == "pattern" and isinstance(value, str):
            _check_nesting(value, "a pattern of the JSON schema")
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                _check_nesting(pattern, "a pattern of the JSON schema")


def _parts(schema: object) -> Iterator[tuple[str, object, int]]:
    """Every value with its key ("" in a list) and how deep it lies, the outermost first."""
    waiting: list[tuple[str, object, int]] = [("", schema, 1)]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if isinstance(value, dict):
            waiting.extend((str(name), inner, depth + 1) for name, inner in value.items())
        elif isinstance(value, list):
            waiting.extend(("", inner, depth + 1) for inner in value)


def _guarded(call: Callable[[], Result]) -> Result:
    """A panic of the library is no Exception in Python; make it an InvalidArgument."""
    try:
        return call()
    except BaseException as error:  # boundary: see above; everything else passes
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidArgument(FIELD, "the grammar library fails on it") from error
