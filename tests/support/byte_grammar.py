"""Grammars over the tiny model's vocabulary, whose ids below 256 are bytes."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from core.grammar import CompiledGrammar, GrammarCompiler
from core.records import Grammar, GrammarKind
from core.tokenizer import Tokenizer
from tests.support.tiny_model import make_tiny_model

END = 0
"""The id that ends an answer."""


@cache
def byte_tokenizer(vocab: int = 256) -> Tokenizer:
    """Of a tiny model that is gone again."""
    with TemporaryDirectory() as folder:
        return Tokenizer.from_directory(make_tiny_model(Path(folder), layers=1, vocab=vocab))


@cache
def compiled(kind: GrammarKind, text: str, vocab: int = 256) -> CompiledGrammar:
    """For that vocabulary."""
    return _compiler(vocab).compile(Grammar(kind, text))


@cache
def _compiler(vocab: int) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(vocab))


def accepts(kind: GrammarKind, text: str, answer: str) -> bool:
    """Whether the whole of `answer` follows the grammar."""
    matcher = compiled(kind, text).matcher()
    ids = list(answer.encode())
    return matcher.consume(ids) == len(ids) and matcher.may_end


def next_ids(kind: GrammarKind, text: str, path: Iterable[int]) -> set[int]:
    """What may come behind `path`, by a matcher of its own; END where the answer may end."""
    matcher = compiled(kind, text).matcher()
    ids = list(path)
    assert matcher.consume(ids) == len(ids)
    bits = matcher.bitmask()
    allowed = {token_id for token_id in range(1, 256) if bits[token_id // 8] >> token_id % 8 & 1}
    return allowed | {END} if matcher.may_end else allowed
