"""Composed drafters are built of hosted ones; what is missing is named."""

from pathlib import Path

import pytest

from core.drafter_settings import DraftersSettings
from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.protocol import Drafter
from decode.drafters.registry import build_drafters
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


def build(model: Path, **settings: object) -> dict[str, Drafter]:
    engine = Engine.load(model, EngineSettings(dtype="float32", num_threads=1, num_blocks=16))
    return build_drafters(DraftersSettings.model_validate(settings), engine, Tokenizer.from_directory(model))


PLAIN = {"none", "ngram", "cache", "lookahead"}
"""What is there without being configured."""


def test_all_of_them_are_hosted_beside_their_members(model: Path) -> None:
    hosted = build(
        model,
        draft_model={"model": str(model)},
        sequoia={},
        recursive={},
        specinfer={"members": ["ngram", "recursive"]},
    )
    assert set(hosted) == {*PLAIN, "draft_model", "sequoia", "recursive", "specinfer"}
    assert all(drafter.name == name for name, drafter in hosted.items())
    assert hosted["specinfer"].needs.max_draft_length == 16
    assert hosted["sequoia"].needs.max_draft_width == 8


def test_none_is_there_unless_configured(model: Path) -> None:
    assert set(build(model)) == PLAIN


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequoia": {}}, r"drafters\.sequoia\.base.*'draft_model'"),
        ({"sequoia": {"base": "ngram"}}, r"drafters\.sequoia\.base.*given shape"),
        ({"recursive": {}}, r"drafters\.draft_model"),
        ({"specinfer": {"members": ["ngram", "rest"]}}, r"drafters\.specinfer\.members.*'rest'"),
        ({"specinfer": {"members": ["ngram", "specinfer"]}}, r"drafters\.specinfer\.members.*'specinfer'"),
        ({"specinfer": {"members": ["ngram", "ngram"]}}, r"drafters\.specinfer\.members.*both"),
    ],
)
def test_a_member_that_is_missing_or_twice_there_is_refused_naming_the_setting(
    model: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        build(model, **settings)


@pytest.mark.parametrize("pair", [("draft_model", "recursive"), ("sequoia", "draft_model")])
def test_two_members_may_not_share_one_drafters_state(model: Path, pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="both draft with draft_model"):
        build(
            model,
            draft_model={"model": str(model)},
            sequoia={},
            recursive={},
            specinfer={"members": pair},
        )
