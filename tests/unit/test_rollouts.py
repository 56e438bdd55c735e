"""Rollouts: the same number gives the same conversation, in any batch and after any interruption."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.artifact import read_manifest
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model
from training import rollout_store
from training.excluded import ExcludedPrompts
from training.heads import read_head
from training.rollout_store import Recipe, Rollout, RolloutStore, shards
from training.rollouts import ChatFrame, RolloutRun, blocks_needed
from training.seeds import CLASSES, OPENINGS, opening

RECIPE = Recipe("tiny", "r", "t", 300, 3, 24, 20, CLASSES, (0.0, 0.0, 0.8))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def rollouts(model: Path, batch: int, count: int, done: frozenset[int] = frozenset()) -> dict[int, Rollout]:
    settings = EngineSettings(
        dtype="float32",
        num_threads=1,
        num_blocks=blocks_needed(RECIPE.user_tokens, RECIPE.answer_tokens, batch, 16, longest_frame=96),
    )
    engine = Engine.load(model, settings)
    run = RolloutRun(
        engine, Tokenizer.from_directory(model), RECIPE, batch, done.__contains__, lambda text: False
    )
    found: dict[int, Rollout] = {}
    try:
        while not all(number in found for number in range(count) if number not in done):
            found |= {rollout.number: rollout for rollout in run.step()}
        run.close()
        assert engine.kv.stats().used == 0
        engine.kv.check()
    finally:
        engine.close()
    return {number: rollout for number, rollout in found.items() if number < count}


def test_a_number_gives_the_same_rollout_alone_and_in_a_batch(model: Path) -> None:
    alone = rollouts(model, 1, 12)
    together = rollouts(model, 5, 12)
    assert alone == together
    assert rollouts(model, 3, 12, done=frozenset({0, 4, 5})) == {
        number: rollout for number, rollout in alone.items() if number not in {0, 4, 5}
    }


def test_a_rollout_is_template_opening_user_turn_and_answer(model: Path) -> None:
    frame = ChatFrame.of(Tokenizer.from_directory(model))
    tokenizer = Tokenizer.from_directory(model)
    assert tokenizer.decode(frame.head) == "<user>"
    assert tokenizer.decode(frame.tail) == "\n<assistant>"
    for number, rollout in rollouts(model, 4, 9).items():
        class_name, words = opening(number)
        start = len(frame.head)
        assert rollout.class_name == class_name
        assert rollout.token_ids[:start] == frame.head
        text = tokenizer.decode(rollout.token_ids[start : rollout.answer_start])
        assert text.startswith(words)
        assert rollout.token_ids[: rollout.answer_start][-len(frame.tail) :] == frame.tail
        answer = rollout.token_ids[rollout.answer_start :]
        assert 1 <= len(answer) <= RECIPE.answer_tokens
        assert not frame.end_ids & set(answer[:-1])
        assert len(answer) == RECIPE.answer_tokens or answer[-1] in frame.end_ids


def test_every_class_occurs_and_every_opening(model: Path) -> None:
    seen = {opening(number) for number in range(len(CLASSES) * 8)}
    assert seen == {(name, words) for name, known in OPENINGS.items() for words in known}


def some(number: int, start: int = 0) -> Rollout:
    return Rollout(number, "code", 0.8, 3, tuple(range(start, start + 10)))


def test_what_is_stored_comes_back_and_a_run_goes_on(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, RECIPE)
    assert store.add(some(5))
    assert not store.add(some(5, 20)), "a number twice"
    assert not store.add(some(6)), "a text twice"
    assert store.add(some(7, 40))
    assert list(store) == []
    store.flush()
    again = RolloutStore(tmp_path, RECIPE)
    assert list(again) == [some(5), some(7, 40)]
    assert again.numbers == {5, 7}
    assert again.num_answer_tokens == 14
    assert not again.add(some(9, 40))
    assert again.add(some(9, 60))
    again.flush()
    assert len(shards(tmp_path)) == 2
    assert [rollout.number for rollout in RolloutStore(tmp_path, RECIPE)] == [5, 7, 9]


def test_a_shard_is_written_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_store, "SHARD_TOKENS", 20)
    store = RolloutStore(tmp_path, RECIPE)
    for number in range(5):
        store.add(some(number, 10 * number))
    assert [rollout.number for rollout in store] == [0, 1, 2, 3]


def test_another_recipe_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, RECIPE)
    store.add(some(1))
    store.flush()
    with pytest.raises(InvalidArgument) as refused:
        RolloutStore(tmp_path, dataclasses.replace(RECIPE, seed=4))
    assert refused.value.field == "rollouts.seed"
    (shard,) = shards(tmp_path)
    whole = shard.read_bytes()
    for damage in (whole[:-3], b"", np.zeros(64, np.uint8).tobytes()):
        shard.write_bytes(damage)
        with pytest.raises(InvalidArgument, match=shard.name):
            RolloutStore(tmp_path, RECIPE)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"recipe\.json"):
        RolloutStore(tmp_path, RECIPE)


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="holds no rollouts"):
        RolloutStore(tmp_path, RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_kept_prompts_are_known_in_any_spacing_and_by_a_long_part(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(
        '{"turns": ["Which river flows through the town of Basel?"]}\n\n{"prompt": "Who wrote it?"}\n'
    )
    excluded = ExcludedPrompts.of_files([path])
    assert excluded("which  river flows\nthrough the town of BASEL?")
    assert excluded("river flows through the town of Basel")
    assert excluded("Tell me: Which river flows through the town of Basel? And why?")
    assert excluded("Who wrote it?")
    assert not excluded("Who wrote it? Nobody knows")
    assert not excluded("Which river")
    for line in ('{"text": 1}', "x", '{"turns": 5}', "[]"):
        path.write_text(line)
        with pytest.raises(InvalidArgument, match=r"kept\.jsonl, line 1"):
            ExcludedPrompts.of_files([path])


def test_rollouts_by_the_command_line_go_on_where_they_were(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts"
    command = [
        "train",
        "rollouts",
        "--model",
        str(model),
        "--out",
        str(out),
        "--batch",
        "4",
        "--threads",
        "1",
    ]
    command += ["--user-tokens", "12", "--answer-tokens", "16", "--json"]
    sizes = []
    for tokens in ("40", "40", "120"):
        done = CliRunner().invoke(app, [*command, "--tokens", tokens])
        assert done.exit_code == 0, done.stderr
        sizes.append(json.loads(done.stdout)["answer_tokens"])
    assert 40 <= sizes[0] == sizes[1] < 120 <= sizes[2]
    refused = CliRunner().invoke(app, [*command, "--seed", "9"])
    assert refused.exit_code == 2
    assert "rollouts.seed" in refused.stderr


def test_a_head_is_trained_on_rollouts_and_becomes_an_artifact(model: Path, tmp_path: Path) -> None:
    rollouts, out = tmp_path / "rollouts", tmp_path / "head"
    command = ["train", "rollouts", "--model", str(model), "--out", str(rollouts), "--batch", "8"]
    command += ["--user-tokens", "12", "--answer-tokens", "16", "--tokens", "700", "--threads", "1"]
    assert CliRunner().invoke(app, command).exit_code == 0
    command = ["train", "eagle3", "--model", str(model), "--rollouts", str(rollouts), "--out", str(out)]
    command += ["--draft-vocab", "128", "--epochs", "2", "--depth", "2", "--threads", "1", "--json"]
    command += ["--features", str(tmp_path / "features"), "--layers", "0,2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert 1.0 <= report["all"]["acceptance_length"] <= 3.0
    manifest = read_manifest(out)
    assert (manifest.kind, manifest.hidden_layers) == ("eagle3", (0, 2))
    assert manifest.acceptance["all"] == [round(rate, 4) for rate in report["all"]["rates"]]
    assert len(manifest.rank_acceptance) == 2
    head, _ = read_head(out)
    assert (head.kind, head.depth) == ("eagle3", 2)
    refused = CliRunner().invoke(app, [*command, "--depth", "3"])
    assert refused.exit_code == 2
    assert "another head" in refused.stderr
