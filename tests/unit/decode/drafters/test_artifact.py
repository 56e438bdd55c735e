"""Drafts that do not fit are refused by file and field."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.errors import FailedPrecondition, InvalidArgument
from decode.drafters.artifact import (
    ArtifactManifest,
    read_manifest,
    read_tensors,
    require_target,
    write_artifact,
)

MANIFEST = ArtifactManifest(
    1, "eagle3", "r", "t", (2, 5), {"hidden_dim": 8}, {"epochs": 2}, {"all": [0.5, 0.25]}
)
SHAPES = {"fc.weight": (4, 3), "norm.weight": (4,)}


def tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(4 * 3).float()[: 4 * (len(shape) * 2 - 1)].view(shape)
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_artifact(tmp_path, MANIFEST, tensors())
    return tmp_path


def test_what_was_written_comes_back(folder: Path) -> None:
    assert read_manifest(folder) == MANIFEST
    found = read_tensors(folder, SHAPES)
    assert found.keys() == SHAPES.keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
    require_target(folder, MANIFEST, "r", "t")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("revision", "tokenizer", "named"), [("x", "t", "target_revision"), ("r", "x", "tokenizer")]
)
def test_another_target_is_refused_by_what_differs(
    folder: Path, revision: str, tokenizer: str, named: str
) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        require_target(folder, MANIFEST, revision, tokenizer)
    assert refused.value.field == f"artifact.{named}"


def test_tensors_must_be_those_that_are_wanted(folder: Path) -> None:
    path = folder / "model.safetensors"
    for changed, told in (
        ({"fc.weight": torch.zeros(4, 3)}, "norm.weight is missing"),
        ({**tensors(), "more": torch.zeros(1)}, "more belongs to nothing"),
        ({**tensors(), "norm.weight": torch.zeros(5)}, "norm.weight is"),
    ):
        save_file(changed, path)
        with pytest.raises(InvalidArgument, match=told):
            read_tensors(folder, SHAPES)
    for damage in (path.read_bytes()[:-2], b"\x80\x04\x95pickle", b""):
        path.write_bytes(damage)
        with pytest.raises(InvalidArgument, match=r"model\.safetensors cannot be read"):
            read_tensors(folder, SHAPES)


def test_a_manifest_is_whole_or_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    del values["kind"]
    for text, told in (
        (json.dumps(values), "kind missing"),
        (json.dumps({**values, "kind": "x", "odd": 1}), "odd unknown"),
        (json.dumps({**values, "kind": "x", "format": 2}), "format 2"),
        ("[]", "not an object"),
        ("[" * 100_000, "no manifest"),
        ("{", "no manifest"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=told):
            read_manifest(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "1"),
        ("kind", ["eagle3"]),
        ("target_revision", None),
        ("tokenizer", 5),
        ("hidden_layers", [1.5]),
        ("hidden_layers", "12"),
        ("shape", [8]),
        ("recipe", "none"),
        ("acceptance", [0.5]),
        ("acceptance", {"all": []}),
        ("acceptance", {"all": ["x"]}),
        ("acceptance", {"all": [float("nan")]}),
        ("acceptance", {"all": [1.5]}),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(folder: Path, name: str, value: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(InvalidArgument, match=rf"manifest\.json is no manifest of a draft: {name} is"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.full((4, 3), torch.nan), "no finite"),
        (torch.full((4, 3), torch.inf), "no finite"),
        (torch.zeros(4, 3, dtype=torch.int8), "int8"),
        (torch.zeros(4, 3).to(torch.float8_e4m3fn), "float8"),
        (torch.zeros(4, 3, dtype=torch.complex64), "complex64"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_tensor(
    folder: Path, tensor: torch.Tensor, said: str
) -> None:
    save_file({**tensors(), "fc.weight": tensor}, folder / "model.safetensors")
    with pytest.raises(InvalidArgument, match=rf"model\.safetensors: tensor fc\.weight holds .*{said}"):
        read_tensors(folder, SHAPES)


def test_ids_that_are_no_whole_numbers_are_refused(folder: Path) -> None:
    save_file({"d2t": torch.tensor([0.5, 1.5])}, folder / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"tensor d2t holds .*no ids"):
        read_tensors(folder, {"d2t": (2,)})


def test_one_that_was_killed_while_it_was_written_again_is_no_artifact(folder: Path) -> None:
    """Not the old manifest beside new weights."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(OSError):
        write_artifact(folder, MANIFEST, tensors())
    with pytest.raises(InvalidArgument, match="no manifest"):
        read_manifest(folder)
