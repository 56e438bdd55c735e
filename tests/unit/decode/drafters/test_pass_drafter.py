"""`pass` is another name for a configured drafter's chains, on pipelined targets only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.drafter_settings import DraftersSettings, DraftModelSettings, NgramSettings
from core.errors import InvalidArgument
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.drafters.ngram import NgramDrafter
from decode.drafters.pass_drafter import PassDrafter
from decode.drafters.protocol import DraftBudget, Observation
from decode.drafters.registry import build_drafters
from decode.self_check import Composed
from engine.engine import Engine
from engine.pipeline import PipelinedEngine
from engine.pipeline_channel import QueueChannel
from tests.support.draft_model_stand import draft_request
from tests.support.tiny_model import make_tiny_model

SETTINGS = EngineSettings(dtype="float32", num_threads=1, num_blocks=16, max_context=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pipelined(model: Path) -> Iterator[PipelinedEngine]:
    """The first stage alone: nothing here takes a step."""
    ours, _ = QueueChannel.pair()
    engine = PipelinedEngine.load_first(model, SETTINGS, ours, 1, SystemClock())
    yield engine
    engine.close()


def test_a_whole_target_does_not_host_it(model: Path) -> None:
    hosted = build_drafters(DraftersSettings(), Engine.load(model, SETTINGS), Tokenizer.from_directory(model))
    assert "pass" not in hosted


def test_a_pipelined_target_hosts_it_with_the_drafter_that_the_settings_name(
    model: Path, pipelined: PipelinedEngine
) -> None:
    tokenizer = Tokenizer.from_directory(model)
    hosted = build_drafters(DraftersSettings(), pipelined, tokenizer)
    drafter = hosted["pass"]
    assert isinstance(drafter, PassDrafter)
    assert drafter.inner is hosted["ngram"]
    assert drafter.name == "pass"
    settings = DraftersSettings(
        pass_drafter="draft_model", draft_model=DraftModelSettings(model=str(model), draft_width=4)
    )
    hosted = build_drafters(settings, pipelined, tokenizer)
    other = hosted["pass"]
    assert isinstance(other, PassDrafter)
    assert other.inner is hosted["draft_model"]
    assert (other.needs.max_draft_width, other.needs.default_draft_width) == (1, 1)
    assert other.needs.max_draft_length == hosted["draft_model"].needs.max_draft_length


def test_a_pipelined_target_is_refused_where_that_drafter_is_not_hosted(
    model: Path, pipelined: PipelinedEngine
) -> None:
    with pytest.raises(InvalidArgument, match="'eagle3' is not configured") as refused:
        build_drafters(DraftersSettings(pass_drafter="eagle3"), pipelined, Tokenizer.from_directory(model))
    assert refused.value.field == "decode_worker.drafters.pass_drafter"


def test_it_proposes_what_the_other_one_does_and_leaves_nothing_behind() -> None:
    inner = NgramDrafter(NgramSettings(min_match=1))
    drafter = PassDrafter(inner)
    requests = [draft_request([1, 2, 3, 1, 2]), draft_request([1, 2, 3, 1, 2])]
    inner.start(requests[0])
    drafter.start(requests[1])
    budgets = [DraftBudget(request, 3, 3) for request in requests]
    (plain,), (ahead,) = inner.propose(budgets[:1]), drafter.propose(budgets[1:])
    assert plain == ahead
    assert ahead.token_ids == (3, 1, 2)
    requests[1].history.extend((3,))
    drafter.observe([Observation(requests[1], ahead, (1,), (3,))])
    inner.finish(requests[0])
    with pytest.raises(AssertionError, match="1 indexes"):
        drafter.check()
    drafter.finish(requests[1])
    drafter.check()
    assert drafter.parts == (inner,)
    assert isinstance(drafter, Composed)
