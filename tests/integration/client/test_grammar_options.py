"""The client's keywords for what an answer must follow."""

import json

import pytest

from outrider import Client, InvalidArgumentError
from outrider.requests import GenerateOptions
from tests.integration.client.scripted_server import ScriptedServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (GenerateOptions(json_schema=SCHEMA), "json_schema", json.dumps(SCHEMA)),
        (GenerateOptions(json_schema='{"type": "null"}'), "json_schema", '{"type": "null"}'),
        (GenerateOptions(regex="[a-z]+"), "regex", "[a-z]+"),
        (GenerateOptions(ebnf='root ::= "a"'), "ebnf", 'root ::= "a"'),
    ],
)
def test_a_grammar_is_sent_as_given(
    server: ScriptedServer, options: GenerateOptions, kind: str, text: str
) -> None:
    with Client(server.address) as client:
        client.generate("answer", **options)
    sampling = server.router.requests[-1].sampling
    assert sampling.WhichOneof("grammar") == kind
    assert getattr(sampling, kind) == text


def test_no_grammar_is_sent_where_none_is_given(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.generate("answer", regex=None, json_schema=None)
    assert server.router.requests[-1].sampling.WhichOneof("grammar") is None


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"json_schema": {"x": object()}},
        {"json_schema": 3},
        {"regex": 3},
        {"ebnf": "\ud800"},
    ],
)
def test_what_is_no_grammar_is_refused_before_sending(
    server: ScriptedServer, options: dict[str, object]
) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.generate("answer", **options)  # type: ignore[arg-type]
    assert caught.value.field == "sampling.grammar"
    assert server.router.requests == []
