"""Chat templates as models ship them, rendered in a sandbox with bounded steps and size.

A template comes from a model directory, so it is foreign code: it runs in Jinja's immutable sandbox, and
every loop turn, call and string operation is counted against a budget.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.clock import Clock
from core.errors import FailedPrecondition, InvalidArgument

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_STEPS = 400_000
MAX_OUTPUT_CHARACTERS = 32 * 2**20
FIELD = "chat.messages"

_TEXT_METHODS = {
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "startswith",
    "endswith", "find", "rfind", "index", "count", "upper", "lower", "title", "capitalize", "replace", "join",
    "removeprefix", "removesuffix", "isdigit", "isalpha", "isspace", "isupper", "islower",
}  # fmt: skip
_REMOVED_FILTERS = ("center", "format", "indent", "wordwrap", "urlize", "xmlattr", "slice", "batch", "random")
"""They can grow text or lists without bound, or are not the same each time."""

_STEP = "_outrider_step"
_CONCAT = "_outrider_concat"


class Message(Protocol):
    """One turn of a chat, as the template sees it. The wire's ChatMessage is one."""

    @property
    def role(self) -> str:
        """Who speaks: system, user or assistant."""
        ...

    @property
    def content(self) -> str:
        """What is said."""
        ...


class BudgetExceeded(TemplateError):
    """The template took too many steps or wrote too much."""


class _Budget:
    """Steps and characters left to one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def step(self, count: int = 1) -> str:
        self.steps -= count
        if self.steps < 0:
            raise BudgetExceeded(f"the chat template took more than {MAX_STEPS} steps")
        return ""

    def concat(self, *parts: object) -> str:
        self.step()
        return _checked_length("".join(str(part) for part in parts))


def _checked_length(text: str) -> str:
    if len(text) > MAX_OUTPUT_CHARACTERS:
        raise BudgetExceeded(f"the chat template wrote more than {MAX_OUTPUT_CHARACTERS} characters")
    return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with `+`, `*`, `%` and `**` bounded and every call counted."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A counted operation; repetition and powers are refused before they grow."""
        _step_of(context)()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _checked_repeat(len(sequence), count)
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise BudgetExceeded("the chat template raises to a power above 64")
        if operator == "%" and isinstance(left, str):
            raise BudgetExceeded("the chat template formats with %")
        result = super().call_binop(context, operator, left, right)
        return _checked_length(result) if isinstance(result, str) else result

    def call(__self, __context: Context, __object: Any, *args: Any, **kwargs: Any) -> Any:
        """A counted call. Of the methods of text, those that templates use and that cannot grow it much."""
        _step_of(__context)()
        owner = getattr(__object, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, __object.__name__, args)
        return super().call(__context, __object, *args, **kwargs)


def _check_text_method(owner: str, name: str, arguments: Sequence[object]) -> None:
    if name not in _TEXT_METHODS:
        raise BudgetExceeded(f"the chat template calls the text method {name}")
    if name == "replace":
        _check_replace(owner, *arguments[1:2])
    if name == "join":
        _check_join(owner, *arguments)


def _check_replace(text: str, new: object = "") -> None:
    if (len(text) + 1) * len(str(new)) > MAX_OUTPUT_CHARACTERS:
        raise BudgetExceeded("the chat template replaces by too much text")


def _check_join(separator: str, parts: object = ()) -> None:
    if isinstance(parts, Sized) and len(parts) * len(separator) > MAX_OUTPUT_CHARACTERS:
        raise BudgetExceeded("the chat template joins with too much text")


def _replace(text: object, old: str, new: str, count: int = -1) -> str:
    _check_replace(str(text), new)
    return str(text).replace(old, new, count)


def _join_filter(parts: Iterable[object], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        parts = [part.get(attribute, "") if isinstance(part, Mapping) else "" for part in parts]
    texts = [str(part) for part in parts]
    _check_join(separator, texts)
    return _checked_length(separator.join(texts))


def _checked_repeat(length: int, count: int) -> None:
    if length * count > MAX_OUTPUT_CHARACTERS:
        raise BudgetExceeded("the chat template repeats a sequence too often")


def _step_of(context: Context) -> Callable[..., object]:
    step: Callable[..., object] = context.parent[_STEP]
    return step


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template with the special tokens that it names. Thread-safe after construction."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        """Compiles. Raises FailedPrecondition if `source` is too long or no template."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise FailedPrecondition("chat_template", f"is longer than {MAX_SOURCE_CHARACTERS} characters")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], cache_size=0
        )
        for name in _REMOVED_FILTERS:
            del environment.filters[name]
        environment.filters.update({"tojson": _to_json, "replace": _replace, "join": _join_filter})
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: _strftime(clock, form)
        try:
            self._template = environment.from_string(_counted(environment, source))
        except TemplateError as error:
            raise FailedPrecondition("chat_template", str(error)) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises InvalidArgument where the template refuses them or its budget ends."""
        budget = _Budget()
        turns = [{"role": message.role, "content": message.content} for message in messages]
        variables: dict[str, object] = {
            **self._special_tokens,
            "messages": turns,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": lambda *bounds: _bounded_range(budget, *bounds),
            _STEP: budget.step,
            _CONCAT: budget.concat,
        }
        try:
            return _join(self._template.generate(variables))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidArgument(FIELD, f"the chat template refuses them: {error}") from error
        except RecursionError as error:
            raise InvalidArgument(FIELD, "the chat template recurses too deep") from error


def _join(pieces: Iterable[str]) -> str:
    total = 0
    collected: list[str] = []
    for piece in pieces:
        total += len(piece)
        if total > MAX_OUTPUT_CHARACTERS:
            raise BudgetExceeded(f"the chat template wrote more than {MAX_OUTPUT_CHARACTERS} characters")
        collected.append(piece)
    return "".join(collected)


def _counted(environment: _Environment, source: str) -> nodes.Template:
    """The parsed template with a step counted in each loop turn, and `~` bounded."""
    template = environment.parse(source)
    for loop in template.find_all(nodes.For):
        loop.body.insert(0, nodes.Output([_call(_STEP, [], loop.lineno)], lineno=loop.lineno))
    _replace_concats(template)
    template.set_environment(environment)
    return template


def _replace_concats(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_without_concat(item) for item in value])
        else:
            setattr(node, name, _without_concat(value))


def _without_concat(value: object) -> object:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concats(value)
    return _call(_CONCAT, value.nodes, value.lineno) if isinstance(value, nodes.Concat) else value


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), arguments, [], None, None, lineno=line)


def _bounded_range(budget: _Budget, *bounds: int) -> range:
    numbers = range(*bounds)
    budget.step(len(numbers))
    return numbers


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime(clock: Clock, form: str) -> str:
    return datetime.fromtimestamp(clock.unix_ms() / 1000, tz=UTC).strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the field renders it: without HTML escapes, text as it is."""
    if indent is not None and not 0 <= indent <= 16:
        raise BudgetExceeded("the chat template indents by more than 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
