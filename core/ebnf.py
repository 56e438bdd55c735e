"""Context-free grammars in EBNF, as clients write them, put into the words of the grammar library (Lark).

    root   ::= object "\\n"?                      # a comment
    object ::= "{" pair ("," pair)* "}"
    pair   ::= [a-z]+ ":" (object | [0-9]{1,3})

An answer starts at the rule `root`. Literals stand in double or single quotes, classes in brackets, `.` is any
character; both take \\n \\r \\t \\xHH \\uHHHH \\UHHHHHHHH and a backslash before a sign of the notation. Repetition is
* + ? {m} {m,} {m,n}. Line ends mean nothing: a rule ends where the next one begins.

A rule that does not lead back to itself is a regular language and becomes one terminal, which the library matches as
a regular expression. The others become rules over terminals; there the library reads greedily, so where one terminal
may go on it does not end: it may allow less than the grammar does, never more.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from core.errors import InvalidArgument

START = "root"
MAX_DEPTH = 64
MAX_REPEATS = 1000
MAX_RULES = 1024
_FIELD = "sampling.grammar"

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<characters>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<times>\{[ ]*[0-9]{1,6}[ ]*(?:,[ ]*(?:[0-9]{1,6})?[ ]*)?\})
    |(?P<sign>[|()*+?.])
    """,
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_SPELT = {"n": "\n", "r": "\r", "t": "\t"}
_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    line: int


@dataclass(frozen=True, slots=True)
class _Terminal:
    """A literal or a class, in Lark."""

    lark: str


@dataclass(frozen=True, slots=True)
class _Group:
    alternatives: "_Alternatives"


@dataclass(frozen=True, slots=True)
class _Repeated:
    item: "_Item"
    least: int
    most: int | None


_Item = _Reference | _Terminal | _Group | _Repeated
_Alternatives = tuple[tuple[_Item, ...], ...]


def lark_of(text: str) -> str:
    """The same language in Lark. Raises InvalidArgument naming `sampling.grammar` and the line."""
    rules = _Parser(_tokens(text)).rules()
    if START not in rules:
        raise InvalidArgument(_FIELD, f"has no rule {START!r}, where the answer starts")
    references = {name: _references(alternatives) for name, alternatives in rules.items()}
    for name, found in references.items():
        for reference in found:
            if reference.name not in rules:
                raise _error(reference.line, f"{name!r} refers to {reference.name!r}, which is no rule")
    by_name = {name: {reference.name for reference in found} for name, found in references.items()}
    regular, used = _regular(by_name), _reachable(by_name)
    names = {
        name: f"T{number}" if name in regular else "start" if name == START else f"r{number}"
        for number, name in enumerate(rules)
    }
    lines = [f"start: {names[START]}"] if START in regular else []
    lines += [
        f"{names[name]}: {_spell(alternatives, names)}"
        for name, alternatives in rules.items()
        if name in used
    ]
    return "\n".join(lines) + "\n"


def _error(line: int, message: str) -> InvalidArgument:
    return InvalidArgument(_FIELD, f"line {line}: {message}")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(line, f"{text[position : position + 12]!r} is not EBNF")
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, match.group(), line))
        line += match.group().count("\n")
        position = match.end()
    tokens.append(_Token("end", "the end", line))
    return tokens


class _Parser:
    """Recursive descent, at most MAX_DEPTH deep."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def rules(self) -> dict[str, _Alternatives]:
        """Every rule by its name, in order."""
        rules: dict[str, _Alternatives] = {}
        while self._now.kind != "end":
            name = self._take("name", "a rule's name")
            self._take("define", f"::= behind {name.text!r}")
            if name.text in rules:
                raise _error(name.line, f"the rule {name.text!r} is there already")
            if len(rules) == MAX_RULES:
                raise _error(name.line, f"more than {MAX_RULES} rules")
            rules[name.text] = self._alternatives(0)
        return rules

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str, wanted: str) -> _Token:
        token = self._now
        if token.kind != kind:
            raise _error(token.line, f"{wanted} expected, found {token.text[:24]!r}")
        self._at += 1
        return token

    def _is_sign(self, text: str) -> bool:
        return self._now.kind == "sign" and self._now.text == text

    def _alternatives(self, depth: int) -> _Alternatives:
        found = [self._sequence(depth)]
        while self._is_sign("|"):
            self._at += 1
            found.append(self._sequence(depth))
        return tuple(found)

    def _sequence(self, depth: int) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item))
        return tuple(items)

    def _item(self, depth: int) -> _Item | None:
        token = self._now
        if token.kind == "name" and self._tokens[self._at + 1].kind != "define":
            self._at += 1
            return _Reference(token.text, token.line)
        if token.kind in ("literal", "characters"):
            self._at += 1
            spell = _spell_literal if token.kind == "literal" else _spell_class
            return _Terminal(spell(token))
        if self._is_sign("."):
            self._at += 1
            return _Terminal("/(?s:.)/")
        if not self._is_sign("("):
            return None
        if depth == MAX_DEPTH:
            raise _error(token.line, f"more than {MAX_DEPTH} groups inside one another")
        self._at += 1
        group = _Group(self._alternatives(depth + 1))
        if not self._is_sign(")"):
            raise _error(self._now.line, f") expected, found {self._now.text[:24]!r}")
        self._at += 1
        return group

    def _repeated(self, item: _Item) -> _Item:
        token = self._now
        if token.kind == "sign" and token.text in _BOUNDS:
            least, most = _BOUNDS[token.text]
        elif token.kind == "times":
            low, comma, high = token.text[1:-1].partition(",")
            least = int(low)
            most = least if not comma else int(high) if high.strip() else None
        else:
            return item
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise _error(token.line, f"{token.text} must go up, to {MAX_REPEATS} at most")
        self._at += 1
        if self._now.kind == "times" or (self._now.kind == "sign" and self._now.text in _BOUNDS):
            raise _error(self._now.line, f"{self._now.text!r} repeats a repetition; put it in parentheses")
        return _Repeated(item, least, most)


def _characters(token: _Token, inner: str) -> list[tuple[str, bool]]:
    """The characters of a literal or class, and whether each was written with a backslash."""
    found: list[tuple[str, bool]] = []
    for match in _CHARACTER.finditer(inner):
        code = match.group(1) or match.group(2) or match.group(3)
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                raise _error(token.line, f"{match.group()} is no character")
            found.append((chr(number), True))
        elif match.group(4) is not None:
            spelt = match.group(4)
            if spelt not in _SPELT and spelt.isascii() and spelt.isalnum():
                raise _error(token.line, f"\\{spelt} means nothing here")
            found.append((_SPELT.get(spelt, spelt), True))
        else:
            found.append((match.group(5), False))
    return found


def _spell_literal(token: _Token) -> str:
    text = "".join(character for character, _ in _characters(token, token.text[1:-1]))
    return json.dumps(text).replace("\x7f", "\\u007f")


def _spell_class(token: _Token) -> str:
    characters = _characters(token, token.text[1:-1])
    negated = bool(characters) and characters[0] == ("^", False)
    characters = characters[negated:]
    if not characters:
        raise _error(token.line, "an empty class")
    parts: list[str] = []
    at = 0
    while at < len(characters):
        first = last = characters[at][0]
        if at + 2 < len(characters) and characters[at + 1] == ("-", False):
            last = characters[at + 2][0]
            at += 2
            if last < first:
                raise _error(token.line, f"the range {first!r} to {last!r} goes down")
        parts.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
        at += 1
    return f"/[{'^' * negated}{''.join(parts)}]/"


def _items(alternatives: _Alternatives) -> Iterator[_Item]:
    """Every item, those inside others included."""
    waiting: list[_Item] = [item for sequence in alternatives for item in sequence]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, _Group):
            waiting.extend(inner for sequence in item.alternatives for inner in sequence)
        elif isinstance(item, _Repeated):
            waiting.append(item.item)


def _references(alternatives: _Alternatives) -> list[_Reference]:
    return [item for item in _items(alternatives) if isinstance(item, _Reference)]


def _regular(references: Mapping[str, set[str]]) -> set[str]:
    """Rules that never lead into a circle."""
    waiting = {name: set(used) for name, used in references.items()}
    users: dict[str, list[str]] = {name: [] for name in references}
    for name, used in references.items():
        for other in used:
            users[other].append(name)
    ready = [name for name, used in waiting.items() if not used]
    regular: set[str] = set()
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    return regular


def _reachable(references: Mapping[str, set[str]]) -> set[str]:
    """Rules that an answer can come to."""
    found, waiting = {START}, [START]
    while waiting:
        fresh = references[waiting.pop()] - found
        found |= fresh
        waiting.extend(fresh)
    return found


def _spell(alternatives: _Alternatives, names: Mapping[str, str]) -> str:
    return " | ".join(
        " ".join(_spell_item(item, names) for item in sequence) or '""' for sequence in alternatives
    )


def _spell_item(item: _Item, names: Mapping[str, str]) -> str:
    if isinstance(item, _Reference):
        return names[item.name]
    if isinstance(item, _Terminal):
        return item.lark
    if isinstance(item, _Group):
        return f"({_spell(item.alternatives, names)})"
    if item.most == 0:
        return '""'
    inner = _spell_item(item.item, names)
    if (item.least, item.most) in _BOUNDS.values():
        return inner + next(sign for sign, bounds in _BOUNDS.items() if bounds == (item.least, item.most))
    return f"{inner}{{{item.least},{'' if item.most is None else item.most}}}"
