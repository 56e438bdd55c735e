"""The draft model's cache follows the sequence exactly (CASES B17, B34, B38), and lacks of blocks are no errors."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.drafter_settings import DraftModelSettings
from core.errors import FailedPrecondition
from core.records import SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.draft_model import CATCH_UP_ROWS, LAG, DraftModelDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.engine import Engine
from tests.support.tiny_model import make_tiny_model

ENGINE = EngineSettings(dtype="float32", num_threads=1, num_blocks=64)
KEYS = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


def load(model: Path, draft: Path | None = None, **settings: object) -> DraftModelDrafter:
    target = Engine.load(model, ENGINE)
    chosen = DraftModelSettings(model=str(draft or model), **settings)
    return DraftModelDrafter.load(chosen, target, Tokenizer.from_directory(model))


def request_of(token_ids: Sequence[int], temperature: float = 0.0) -> DraftRequest:
    return DraftRequest(
        key=next(KEYS),
        history=TokenHistory(token_ids),
        sampling=SamplingParams(temperature=temperature, seed=1),
        seed=1,
        choice=0,
        verification="invariant",
        hidden=lambda start, end: torch.empty(0),
        draft_width=1,
        table=BlockTable,
    )


def settle(drafter: DraftModelDrafter, request: DraftRequest, draft: Draft, accepted: int) -> None:
    """Observe `accepted` tokens of a draft and one more, as the loop does."""
    token_ids = (*draft.token_ids[:accepted], 1 + accepted)
    request.history.extend(token_ids)
    drafter.observe([Observation(request, draft, tuple(range(1, accepted + 1)), token_ids)])


def prefill_all(drafter: DraftModelDrafter, rows: int = 16) -> None:
    while drafter.prefill(rows):
        pass


def test_its_cache_stays_at_a_constant_distance_whatever_is_accepted(model: Path) -> None:
    drafter = load(model)
    request = request_of(range(1, 40))
    drafter.start(request)
    prefill_all(drafter)
    generator = random.Random(3)
    for accepted in [0, 1, 2, 3, 4, *(generator.randrange(5) for _ in range(40))]:
        draft = drafter.propose([DraftBudget(request, 4, 4)])[0]
        assert len(draft.token_ids) == 4
        settle(drafter, request, draft, accepted)
        assert drafter.cached_tokens(request) == len(request.history.token_ids) - LAG
    drafter.finish(request)
    drafter.check()


def test_what_it_proposes_depends_on_the_tokens_only_and_not_on_what_was_rejected_before(model: Path) -> None:
    drafter = load(model)
    worn = request_of(range(1, 40), temperature=12.0)
    drafter.start(worn)
    prefill_all(drafter)
    for accepted in (0, 4, 2, 0, 3):
        draft = drafter.propose([DraftBudget(worn, 4, 4)])[0]
        settle(drafter, worn, draft, accepted)
    fresh = request_of(worn.history.token_ids, temperature=12.0)
    drafter.rebuild(fresh)
    prefill_all(drafter)
    proposals = drafter.propose([DraftBudget(worn, 4, 4), DraftBudget(fresh, 4, 4)])
    assert proposals[0].token_ids == proposals[1].token_ids


def test_requests_of_one_batch_equal_themselves_alone(model: Path) -> None:
    drafter = load(model)
    requests = [request_of(range(number, number + 20), temperature=12.0) for number in (1, 5, 9)]
    for request in requests:
        drafter.start(request)
    prefill_all(drafter)
    together = drafter.propose(
        [DraftBudget(r, depth, 8) for r, depth in zip(requests, (1, 4, 3), strict=True)]
    )
    assert [len(draft.token_ids) for draft in together] == [1, 4, 3]
    for request, draft in zip(requests, together, strict=True):
        alone = request_of(request.history.token_ids, temperature=12.0)
        drafter.start(alone)
        prefill_all(drafter)
        assert (
            drafter.propose([DraftBudget(alone, 4, 8)])[0].token_ids[: len(draft.token_ids)]
            == draft.token_ids
        )


@pytest.mark.parametrize("steps_without", [1, 5, 16, 17, 40])
def test_it_catches_up_after_steps_without_a_draft_and_keeps_to_the_rows_given(
    model: Path, steps_without: int
) -> None:
    drafter = load(model)
    request = request_of(range(1, 60), temperature=12.0)
    drafter.start(request)
    assert drafter.propose([DraftBudget(request, 4, 4)])[0].token_ids == ()
    assert drafter.prefill(10) == 10
    prefill_all(drafter)
    settle(drafter, request, drafter.propose([DraftBudget(request, 4, 4)])[0], 1)
    for _ in range(steps_without):
        settle(drafter, request, Draft(), 0)
    assert drafter.prefill(8) == (0 if steps_without <= CATCH_UP_ROWS else 8)
    prefill_all(drafter)
    draft = drafter.propose([DraftBudget(request, 4, 4)])[0]
    fresh = request_of(request.history.token_ids, temperature=12.0)
    drafter.rebuild(fresh)
    prefill_all(drafter)
    assert draft.token_ids == drafter.propose([DraftBudget(fresh, 4, 4)])[0].token_ids
    assert len(draft.token_ids) == 4
    settle(drafter, request, draft, 2)
    assert drafter.cached_tokens(request) == len(request.history.token_ids) - LAG


def test_without_blocks_it_proposes_nothing_and_others_go_on(model: Path) -> None:
    drafter = load(model, num_blocks=8)
    small, big = request_of(range(1, 20)), request_of([1] * 200)
    drafter.start(small)
    drafter.start(big)
    prefill_all(drafter, 64)
    drafts = drafter.propose([DraftBudget(big, 4, 4), DraftBudget(small, 4, 4)])
    assert drafts[0].token_ids == ()
    assert len(drafts[1].token_ids) == 4
    for request in (small, big):
        drafter.finish(request)
    drafter.check()


def test_rejection_gets_the_distribution_that_was_drawn_from(model: Path) -> None:
    drafter = load(model)
    request = request_of(range(1, 40), temperature=12.0)
    request.verification = "rejection"
    drafter.start(request)
    prefill_all(drafter)
    draft = drafter.propose([DraftBudget(request, 3, 3)])[0]
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (3, 300)
    assert torch.allclose(draft.draft_probs.sum(1), torch.ones(3), atol=1e-5)
    assert all(draft.draft_probs[node, token_id] > 0 for node, token_id in enumerate(draft.token_ids))


def test_a_larger_padded_vocabulary_works_and_its_extra_ids_are_never_drafted(
    model: Path, tmp_path: Path
) -> None:
    wider = make_tiny_model(tmp_path / "wider", vocab=400, seed=3)
    drafter = load(model, wider)
    request = request_of(range(1, 40), temperature=1000.0)
    drafter.start(request)
    prefill_all(drafter)
    for _ in range(30):
        draft = drafter.propose([DraftBudget(request, 8, 8)])[0]
        assert all(token_id < 300 for token_id in draft.token_ids)
        settle(drafter, request, draft, 0)


def test_another_tokenizer_is_refused_naming_the_first_token_that_differs(
    model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", vocab=300)
    description = json.loads((other / "tokenizer.json").read_text())
    by_id = {token_id: token for token, token_id in description["model"]["vocab"].items()}
    description["model"]["vocab"][by_id[70]], description["model"]["vocab"][by_id[71]] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(FailedPrecondition, match="token 70"):
        load(model, other)


def test_asked_again_before_anything_was_observed_it_says_the_same_and_goes_on(model: Path) -> None:
    drafter = load(model)
    request = request_of(range(1, 40), temperature=12.0)
    drafter.start(request)
    prefill_all(drafter)
    for accepted in (0, 3, 1, 3):
        first = drafter.propose([DraftBudget(request, 3, 3)])[0]
        second = drafter.propose([DraftBudget(request, 7, 7)])[0]
        assert second.token_ids[:3] == first.token_ids
        assert len(second.token_ids) == 7
        settle(drafter, request, first, accepted)
        assert drafter.cached_tokens(request) == len(request.history.token_ids) - LAG
    drafter.finish(request)
    drafter.check()
