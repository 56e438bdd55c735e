"""The commands against a scripted router, and what they load."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from tests.integration.client.scripted_server import ScriptedServer
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A router of scripted answers."""
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{number}", "class": "chat", "turns": [f"question {number}"]} for number in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_help_needs_no_torch_and_no_ray() -> None:
    script = (
        "import sys\nfrom cluster.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "generate" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"outrider {version('outrider')}\n")


def test_a_corpus_of_nothing_is_refused_naming_folder_and_form(tmp_path: Path) -> None:
    texts, model = tmp_path / "texts", make_tiny_model(tmp_path / "model")
    texts.mkdir()
    (texts / "note.md").write_text("words")
    command = ["corpus", "build", str(texts), "--out", str(tmp_path / "corpus"), "--model", str(model)]
    done = CliRunner().invoke(app, [*command, "--glob", "*.py"])
    assert done.exit_code == 2
    assert f"{texts} holds no file that is named like *.py" in done.stderr
    assert not (tmp_path / "corpus").exists()


def test_generate_prints_the_answer_and_what_the_drafter_did(server: ScriptedServer) -> None:
    done = CliRunner().invoke(app, ["generate", "hi", "--address", server.address])
    assert done.exit_code == 0
    assert done.stdout == "Hello\n"
    assert "accepted 3 of 4 (75%)" in " ".join(done.stderr.split())
    (request,) = server.router.requests
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hi")]


def test_generate_passes_every_option_on(server: ScriptedServer) -> None:
    arguments = (
        "--raw --max-tokens 5 --temperature 0.5 --top-k 3 --seed 7 --stop a --stop b --drafter ngram "
        "--draft-length 4 --draft-width 2 --verification rejection --request-class code --tenant acme "
        "--idempotency-key k --ignore-eos --logprobs 2 --cache-salt s --timeout-s 60"
    )
    done = CliRunner().invoke(app, ["generate", "answer", "--address", server.address, *arguments.split()])
    assert done.exit_code == 0
    (request,) = server.router.requests
    sampling, speculation = request.sampling, request.speculation
    assert (request.text, request.request_class, request.cache_salt) == ("answer", "code", "s")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (5, 0.5, 3, 7)
    assert (list(sampling.stop), sampling.ignore_eos, sampling.logprobs) == (["a", "b"], True, 2)
    assert (speculation.drafter, speculation.draft_length, speculation.draft_width) == ("ngram", 4, 2)
    assert speculation.verification == 2
    assert server.router.metadata[0]["x-outrider-tenant"] == "acme"


def test_generate_says_that_an_answer_is_approximate(server: ScriptedServer) -> None:
    arguments = "generate typical --raw --verification typical --allow-approximate --address"
    done = CliRunner().invoke(app, [*arguments.split(), server.address])
    assert done.exit_code == 0
    assert "approximate: typical verification" in " ".join(done.stderr.split())
    (request,) = server.router.requests
    assert (request.speculation.verification, request.speculation.allow_approximate) == (4, True)


def test_generate_passes_on_how_to_search(server: ScriptedServer) -> None:
    arguments = "--raw --beam-width 4 --length-penalty 0.5 --early-stopping"
    for text in ("true", "False", "never"):
        command = ["generate", "answer", "--address", server.address, *arguments.split(), text]
        assert CliRunner().invoke(app, command).exit_code == 0
    sampling = [request.sampling for request in server.router.requests]
    assert [message.early_stopping for message in sampling] == [2, 1, 3]
    assert (sampling[0].beam_width, sampling[0].length_penalty) == (4, 0.5)
    done = CliRunner().invoke(app, ["generate", "x", "--early-stopping", "soon", "--address", server.address])
    assert done.exit_code == 2
    assert "early_stopping" in done.stderr


def test_generate_passes_a_grammar_on(server: ScriptedServer, tmp_path: Path) -> None:
    schema, ebnf, binary = tmp_path / "schema.json", tmp_path / "grammar.ebnf", tmp_path / "binary"
    schema.write_text('{"type": "null"}')
    ebnf.write_text('root ::= "é"', encoding="utf-8")
    binary.write_bytes(b"\xff")
    for option, value, kind, text in (
        ("--json-schema", str(schema), "json_schema", '{"type": "null"}'),
        ("--regex", "[a-z]+", "regex", "[a-z]+"),
        ("--ebnf", str(ebnf), "ebnf", 'root ::= "é"'),
    ):
        done = CliRunner().invoke(app, ["generate", "hi", "--address", server.address, option, value])
        assert done.exit_code == 0, done.stderr
        assert getattr(server.router.requests[-1].sampling, kind) == text
    asked = len(server.router.requests)
    for wrong in (["--ebnf", str(binary)], ["--ebnf", "missing"], ["--regex", "a", "--ebnf", str(ebnf)]):
        done = CliRunner().invoke(app, ["generate", "hi", "--address", server.address, *wrong])
        assert done.exit_code == 2
        assert "Traceback" not in done.stderr
    assert len(server.router.requests) == asked


def test_generate_as_json_prints_one_object(server: ScriptedServer) -> None:
    done = CliRunner().invoke(
        app, ["generate", "-", "--address", server.address, "--json"], input="from stdin"
    )
    values = json.loads(done.stdout)
    assert (values["text"], values["speculation"]["accepted_tokens"]) == ("Hello", 3)
    assert server.router.requests[0].chat.messages[0].content == "from stdin"


def test_generate_of_several_answers_numbers_them(server: ScriptedServer) -> None:
    done = CliRunner().invoke(app, ["generate", "two", "--raw", "-n", "2", "--address", server.address])
    assert done.stdout == "[0] a\n[1] bbb\n"


@pytest.mark.parametrize(("script", "code"), [("fail:INVALID_ARGUMENT", 2), ("fail:UNAVAILABLE", 1)])
def test_an_error_is_one_line_and_an_exit_status(server: ScriptedServer, script: str, code: int) -> None:
    done = CliRunner().invoke(app, ["generate", script, "--raw", "--address", server.address])
    assert done.exit_code == code
    assert script.removeprefix("fail:") in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_keeps_the_conversation_and_shows_acceptance(server: ScriptedServer) -> None:
    lines = "one\ntwo\n/reset\nthree\n/exit\n"
    done = CliRunner().invoke(app, ["chat", "--address", server.address, "--system", "be brief"], input=lines)
    assert done.exit_code == 0
    chats = [[turn.content for turn in request.chat.messages] for request in server.router.requests]
    assert chats == [["be brief", "one"], ["be brief", "one", "Hello", "two"], ["be brief", "three"]]
    assert done.stderr.count("accepted 3 of 4") == 3


def test_bench_asks_every_arm_in_turn_and_reports_ratios(server: ScriptedServer, prompts: Path) -> None:
    command = ["bench", "--prompts", str(prompts), "--address", server.address, "--json"]
    done = CliRunner().invoke(
        app, [*command, "--drafters", "none,ngram:4x2", "--concurrency", "1,2", "--rounds", "2"]
    )
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["concurrency"], row["arm"], row["prompts"]) for row in report["rows"]] == [
        (1, "none", 3), (1, "ngram:4x2", 3), (2, "none", 3), (2, "ngram:4x2", 3),
    ]  # fmt: skip
    assert all(
        row["ratio"] > 0 and row["equal_texts"] == row["compared_texts"] == 6 for row in report["rows"]
    )
    assert {total["arm"] for total in report["totals"]} == {"none", "ngram:4x2"}
    recorded = server.router.requests[2:]
    assert len(recorded) == 3 * 2 * 2 * 2
    first_four = [request.speculation.drafter for request in recorded[:4]]
    assert first_four == ["none", "ngram", "ngram", "none"]
    salts = {request.speculation.drafter: set() for request in recorded}  # type: dict[str, set[str]]
    for request in recorded:
        salts[request.speculation.drafter].add(request.cache_salt)
    assert not salts["none"] & salts["ngram"]


def test_bench_of_requests_that_fail_says_so(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fail:UNAVAILABLE"}')
    done = CliRunner().invoke(app, ["bench", "--prompts", str(path), "--address", server.address])
    assert done.exit_code == 1
    assert "UNAVAILABLE" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "x"],
        ["--drafters", "a,a"],
        ["--drafters", "none,bogus:4"],
        ["--cache-salt", "x"],
    ],
)
def test_bench_refuses_what_makes_no_plan(
    server: ScriptedServer, prompts: Path, arguments: list[str]
) -> None:
    command = ["bench", "--prompts", str(prompts), "--address", server.address, *arguments]
    assert CliRunner().invoke(app, command).exit_code == 2
    assert not server.router.requests


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["bench", "--prompts", "PROMPTS"]])
def test_where_nobody_answers_the_mend_is_told(command: list[str], prompts: Path) -> None:
    arguments = [str(prompts) if part == "PROMPTS" else part for part in command]
    done = CliRunner().invoke(app, [*arguments, "--address", "127.0.0.1:9"], input="hello\n")
    assert done.exit_code == 1
    assert "no server answers there" in done.stderr
    assert "outrider serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_cut_from_the_command_line(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", layers=3)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["models", "truncate", str(source), "--layers", "1", "--out", str(out)])
    assert done.exit_code == 0
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 1
    again = CliRunner().invoke(app, ["models", "truncate", str(source), "--layers", "1", "--out", str(out)])
    assert again.exit_code == 2
    assert "exists" in again.stderr


def test_models_are_listed_and_an_unknown_one_is_refused() -> None:
    assert "smollm2-135m-instruct" in CliRunner().invoke(app, ["models", "list"]).stdout
    assert CliRunner().invoke(app, ["models", "pull", "nothing"]).exit_code == 2


def test_doctor_reports_versions_machine_and_exactness(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    done = CliRunner().invoke(app, ["doctor", "--model", str(source), "--threads", "1", "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["torch"].startswith("2.13")
    assert report["machine"]["usable_cpus"] >= 1
    assert all(check["rows"] > 0 and check["differing"] == 0 for check in report["numerics"]["checks"])
