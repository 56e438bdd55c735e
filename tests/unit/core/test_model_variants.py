"""NAME@VARIANT is what was built here under that name, or one clear refusal."""

from pathlib import Path

import pytest

from core.errors import FailedPrecondition, InvalidArgument
from core.model_store import list_models, resolve_model
from core.model_variants import variant_directory


def built(cache: Path, name: str = "tiny") -> Path:
    directory = variant_directory(name, "medusa2", cache)
    directory.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json"):
        (directory / file).write_text("{}")
    (directory / "model.safetensors").write_bytes(b"12345")
    return directory


def test_a_variant_that_was_built_is_found_and_listed(tmp_path: Path) -> None:
    directory = built(tmp_path, "some/where/tiny")
    (directory.parent / f".{directory.name}.lock").touch()
    (directory.parent / "half@medusa2").mkdir()
    assert directory.name == "tiny@medusa2"
    assert resolve_model("tiny@medusa2", tmp_path) == directory
    (found,) = [model for model in list_models(tmp_path) if "@" in model.alias]
    assert (found.alias, found.directory, found.size_bytes) == ("tiny@medusa2", directory, 5)


def test_one_that_was_not_built_is_refused_with_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(
        FailedPrecondition, match="outrider train medusa2 --model smollm2-135m-instruct"
    ) as refused:
        resolve_model("smollm2-135m-instruct@medusa2", tmp_path)
    assert refused.value.field == "model"
    assert str(tmp_path / "models" / "smollm2-135m-instruct@medusa2") in refused.value.message


@pytest.mark.parametrize(
    "name",
    [
        "tiny@other",
        "@medusa2",
        "tiny@",
        "../tiny@medusa2",
        "a/b@medusa2",
        "..@medusa2",
        "tiny@medusa2@medusa2",
        "tiny@medusa2/..",
        "tiny\0@medusa2",
        "tiny\n@medusa2",
        f"{'a' * 300}@medusa2",
    ],
)
def test_what_is_no_variant_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="NAME@medusa2"):
        resolve_model(name, tmp_path)


def test_a_model_without_a_name_gives_none_to_its_variant(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no name"):
        variant_directory("/", "medusa2", tmp_path)


@pytest.mark.parametrize("name", ["~nobody-of-that-name", "a" * 300, "a/" * 3000, "\0"])
def test_what_can_be_no_path_is_no_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is no alias"):
        resolve_model(name, tmp_path)
