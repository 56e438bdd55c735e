"""Templates render as in the field, and a hostile one cannot hurt."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from core.chat_template import MAX_OUTPUT_CHARACTERS, MAX_SOURCE_CHARACTERS, ChatTemplate
from core.clock import FakeClock
from core.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


HELLO = (Turn("user", "Hello"),)


def _render(source: str, messages: Sequence[Turn] = HELLO) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}, FakeClock()).render(messages)


def test_blocks_are_trimmed_and_the_generation_prompt_is_added() -> None:
    source = (
        "{% for message in messages %}\n"
        "  {% if true %}\n"
        "[{{ message['role'] }}] {{ message.content }}{{ eos_token }}\n"
        "  {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert _render(source) == "[user] Hello</s>\n>"


def test_filters_and_names_of_the_field_are_there() -> None:
    assert _render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert _render("{{ strftime_now('%Y') }}") == "2023"
    assert _render("{{ tools is none }} {{ unknown is defined }}") == "True False"
    assert _render("{% generation %}x{{ 1 + 1 }}{% endgeneration %}") == "x2"
    assert _render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert (
        _render(
            "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
        )
        == "3"
    )
    assert _render("{{ 'a' ~ 1 ~ ('b' if messages else 'c') }}") == "a1b"


def test_text_of_messages_is_not_read_as_template() -> None:
    assert (
        _render("{{ messages[0].content }}", [Turn("user", "{{ 7 * 7 }}{% raw %}")]) == "{{ 7 * 7 }}{% raw %}"
    )


def test_a_template_may_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999999999) %}{% endfor %}",
        "{% set x = range(999) | list %}"
        "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [0] * 10 ** 11 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ messages[0].content.replace('x', messages[0].content) }}",
        "{{ messages[0].content | replace('x', messages[0].content) }}",
        "{{ messages[0].content.join(messages[0].content) }}",
        "{{ messages[0].content | join(messages[0].content) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(5000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
@pytest.mark.timeout(30)
def test_a_template_that_would_run_or_grow_for_ever_is_stopped(source: str) -> None:
    with pytest.raises(InvalidArgument):
        _render(source, [Turn("user", "x" * 10_000)])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = _render(source)
    except InvalidArgument:
        return
    assert "class" not in text
    assert "/" not in text


def test_a_template_that_is_none_is_refused_at_load() -> None:
    with pytest.raises(FailedPrecondition, match="chat_template"):
        _render("{% for %}")
    with pytest.raises(FailedPrecondition, match="chat_template"):
        _render("x" * (MAX_SOURCE_CHARACTERS + 1))


def test_long_chats_within_the_limits_render() -> None:
    long = [Turn("user", "x" * 1000)] * 2000
    assert (
        len(_render("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}", long)) == 2_012_000
    )
    assert MAX_OUTPUT_CHARACTERS > 2_012_000 - 6
