"""Which heads a deployment hosts without being told: those that ship for its target, and no others."""

from pathlib import Path

import pytest

from core.drafter_settings import DraftersSettings, HeadSettings, MedusaSettings
from core.errors import InvalidArgument
from decode.drafters.heads import head_settings
from decode.drafters.shipped_heads import heads_folder, shipped_heads, with_shipped
from engine.weights import open_model
from tests.support.tiny_heads import make_tiny_head
from tests.support.tiny_medusa import make_tiny_medusa
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target")


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "shipped" / "tiny"
    make_tiny_head(folder / "eagle3", model, "eagle3")
    make_tiny_head(folder / "mtp", make_tiny_model(tmp_path / "other", seed=4), "mtp")
    return tmp_path / "shipped"


def test_heads_of_the_target_are_hosted_and_those_of_others_are_not(model: Path, root: Path) -> None:
    revision = open_model(model).revision()
    assert shipped_heads(revision, root) == {"eagle3": root / "tiny" / "eagle3"}
    settings = with_shipped(DraftersSettings(), revision, root)
    assert settings.eagle3 == HeadSettings(artifact=str(root / "tiny" / "eagle3"))
    assert settings.mtp is None
    assert with_shipped(DraftersSettings(shipped=False), revision, root).eagle3 is None


def test_medusa_heads_ship_too(model: Path, root: Path) -> None:
    folder = make_tiny_medusa(root / "tiny" / "medusa", model)
    settings = with_shipped(DraftersSettings(), open_model(model).revision(), root)
    assert settings.medusa == MedusaSettings(artifact=str(folder))


def test_heads_in_the_models_own_directory_come_before_those_that_ship(model: Path, root: Path) -> None:
    revision = open_model(model).revision()
    make_tiny_medusa(root / "tiny" / "medusa", model)
    own = make_tiny_medusa(heads_folder(model) / "medusa", model)
    other = make_tiny_model(model.parent / "another", seed=9)
    make_tiny_head(heads_folder(model) / "eagle", other, "eagle")
    settings = with_shipped(DraftersSettings(), revision, root, model)
    assert settings.medusa == MedusaSettings(artifact=str(own))
    assert settings.eagle is None
    assert open_model(model).revision() == revision


def test_own_settings_keep_what_they_say(model: Path, root: Path) -> None:
    revision = open_model(model).revision()
    own = DraftersSettings(eagle3=HeadSettings(draft_length=3))
    found = with_shipped(own, revision, root).eagle3
    assert found == HeadSettings(draft_length=3, artifact=str(root / "tiny" / "eagle3"))
    named = DraftersSettings(eagle3=HeadSettings(artifact="/some/where"))
    assert with_shipped(named, revision, root).eagle3 == named.eagle3


def test_a_head_that_does_not_ship_is_named(model: Path, root: Path) -> None:
    with pytest.raises(InvalidArgument, match="name the folder") as refused:
        with_shipped(DraftersSettings(mtp=HeadSettings()), open_model(model).revision(), root)
    assert refused.value.field == "decode_worker.drafters.mtp.artifact"


@pytest.mark.parametrize("name", ["eagle3", "eagle3@", "@1", "ngram@2"])
def test_a_version_has_the_name_of_a_head(name: str) -> None:
    settings = DraftersSettings(versions={name: HeadSettings(artifact="/x")})
    with pytest.raises(InvalidArgument, match="NAME@VERSION"):
        head_settings(settings)


def test_versions_stand_beside_the_bare_name() -> None:
    settings = DraftersSettings(
        eagle3=HeadSettings(artifact="/a"), versions={"eagle3@2": HeadSettings(artifact="/b")}
    )
    assert list(head_settings(settings)) == ["eagle3", "eagle3@2"]
