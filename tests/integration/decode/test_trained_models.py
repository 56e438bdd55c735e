"""Models that training made: a draft model drafts, a Medusa-2 target serves its own heads; no text changes."""

from pathlib import Path

import pytest

from core.drafter_settings import DraftersSettings, DraftModelSettings
from core.model_store import resolve_model
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from decode.drafters.shipped_heads import with_shipped
from engine.weights import open_model
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import DecodeStand, decode_stand
from tests.support.tiny_rollouts import command, done, make_tiny_target

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=32),
    SamplingParams(temperature=12.0, seed=7, max_tokens=32),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and its rollouts."""
    return make_tiny_target(tmp_path_factory.mktemp("trained"))


async def accepted_of_equal_text(stand: DecodeStand, drafter: str) -> int:
    """Tokens accepted in answers that are those of plain decoding."""
    accepted = 0
    for sampling in SAMPLINGS:
        for length in (9, 33):
            plain = await stand.ask(prompt_of(length), sampling, SpeculationParams(drafter="none"))
            drafted = await stand.ask(prompt_of(length), sampling, SpeculationParams(drafter=drafter))
            assert (drafted.ids, drafted.text) == (plain.ids, plain.text)
            assert drafted.report is not None
            assert (drafted.report.drafter, drafted.report.fallback_reason) == (drafter, "")
            accepted += drafted.report.accepted_tokens
    await stand.idle()
    return accepted


async def test_a_trained_draft_model_is_accepted_and_changes_no_text(
    target: tuple[Path, Path], script: Path, tmp_path: Path
) -> None:
    model, rollouts = target
    line = f"train draft --model {model} --rollouts {rollouts} --out {tmp_path}/draft --layers 2 --epochs 1"
    done(f"{line} --threads 1 --features {tmp_path}/features")
    drafters = DraftersSettings(draft_model=DraftModelSettings(model=f"{tmp_path}/draft"))
    async with decode_stand(model, script, decode=DecodeSettings(drafters=drafters)) as stand:
        assert await accepted_of_equal_text(stand, "draft_model") > 0


async def test_a_medusa2_model_is_served_by_its_name_with_its_own_heads(
    target: tuple[Path, Path], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model, rollouts = target
    line = f"train medusa2 --model {model} --rollouts {rollouts} --out {tmp_path}/run --epochs 1 --threads 1"
    done(f"{line} --draft-vocab 300 --heads 2 --backbone-layers 2")
    directory = resolve_model("tiny@medusa2", tmp_path / "cache")
    assert "tiny@medusa2" in command("models list").stdout
    revision = open_model(directory).revision()
    assert revision != open_model(model).revision()
    drafters = with_shipped(DraftersSettings(), revision, model=directory)
    assert drafters.medusa is not None
    async with decode_stand(directory, script, decode=DecodeSettings(drafters=drafters)) as stand:
        assert await accepted_of_equal_text(stand, "medusa") > 0
