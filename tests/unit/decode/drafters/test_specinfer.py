"""Several drafters, one tree: who is asked for how much, who hears what, and who is left out."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.drafter_settings import NgramSettings
from core.records import VerificationMode
from decode.draft import NO_DRAFT, Draft
from decode.drafters.draft_model import LAG
from decode.drafters.ngram import NgramDrafter
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.specinfer import SpecInferDrafter, union_of_needs
from tests.support.draft_model_stand import HOT, begin, draft_request, load_draft_model, rows_to, settle
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


class Fixed(NoneDrafter):
    """Proposes one draft, cut to nothing; keeps what it is told; raises in one of its calls if asked to."""

    needs = DrafterNeeds(
        max_draft_length=4, default_draft_length=3, max_draft_width=2, hidden_layers=(1,), bytes_per_token=8
    )

    def __init__(self, name: str, draft: Draft = NO_DRAFT, broken: str = "", rows: int = 0) -> None:
        self.name = name
        self.draft = draft
        self.broken = broken
        self.rows = rows
        self.live: dict[int, DraftRequest] = {}
        self.asked: list[DraftBudget] = []
        self.told: list[Observation] = []

    def _maybe(self, where: str) -> None:
        if where == self.broken:
            raise RuntimeError(f"broken in {where}")

    def start(self, request: DraftRequest) -> None:
        self._maybe("start")
        assert request.key not in self.live
        self.live[request.key] = request

    def rebuild(self, request: DraftRequest) -> None:
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        self._maybe("prefill")
        done = min(self.rows, max_rows)
        self.rows -= done
        return done

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        self._maybe("propose")
        self.asked += budgets
        assert all(budget.request is self.live[budget.request.key] for budget in budgets)
        return [self.draft for _ in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._maybe("observe")
        self.told += observations

    def finish(self, request: DraftRequest) -> None:
        self.live.pop(request.key, None)
        self._maybe("finish")


def test_equal_tokens_are_merged_and_each_member_hears_of_its_own_nodes() -> None:
    left = Fixed("left", Draft((1, 2, 3), (0, 1, 2)))
    right = Fixed("right", Draft((1, 4), (0, 1)))
    specinfer = SpecInferDrafter([left, right])
    request = begin(specinfer, draft_request(range(9), HOT, width=2))
    (draft,) = specinfer.propose([DraftBudget(request, 3, 6)])
    assert (draft.token_ids, draft.parents) == ((1, 2, 3, 4), (0, 1, 2, 1))
    planes = torch.ones(1, 3, 2)
    request.history.extend((1, 4, 7))
    specinfer.observe([Observation(request, draft, (1, 4), (1, 4, 7), planes)])
    assert [(told.draft, told.accepted_rows) for told in left.told] == [(left.draft, (1,))]
    assert [(told.draft, told.accepted_rows) for told in right.told] == [(right.draft, (1, 2))]
    for told in (*left.told, *right.told):
        assert told.token_ids == (1, 4, 7)
        assert told.hidden_rows is planes
        assert told.request.key == request.key
        assert told.request.history is request.history


def test_a_step_without_a_draft_is_told_as_one() -> None:
    member = Fixed("member", Draft((1,), (0,)))
    specinfer = SpecInferDrafter([member, Fixed("other")])
    request = begin(specinfer, draft_request(range(9), HOT))
    settle(specinfer, request, specinfer.propose([DraftBudget(request, 3, 6)])[0], (1,))
    settle(specinfer, request, NO_DRAFT)
    assert [told.draft for told in member.told] == [member.draft, NO_DRAFT]


def test_the_budget_is_shared_and_what_one_leaves_goes_to_the_next() -> None:
    members = [Fixed("one", Draft((1,), (0,))), Fixed("two"), Fixed("three")]
    specinfer = SpecInferDrafter(members)
    request = begin(specinfer, draft_request(range(9), HOT, width=7))
    specinfer.propose([DraftBudget(request, 6, 9)])
    assert [member.asked[0].max_nodes for member in members] == [3, 4, 8]
    assert [member.asked[0].draft_length for member in members] == [4, 4, 4], "their own longest"
    assert [member.asked[0].request.draft_width for member in members] == [2, 2, 2]
    specinfer.propose([DraftBudget(request, 1, 1)])
    assert [len(member.asked) for member in members] == [1, 1, 2], (
        "a share of less than a node is not asked for"
    )


def test_their_draws_are_kept_apart() -> None:
    members = [Fixed(name) for name in "abc"]
    specinfer = SpecInferDrafter(members)
    begin(specinfer, draft_request(range(9), HOT))
    lanes = [next(iter(member.live.values())).draft_lane for member in members]
    assert lanes == [0, 1, 2]


@pytest.mark.parametrize("verification", ["rejection", "block", "invariant", "typical"])
@pytest.mark.parametrize("temperature", [0.0, HOT])
def test_equal_siblings_stay_apart_only_where_each_is_tried_by_its_own_probabilities(
    verification: VerificationMode, temperature: float
) -> None:
    members = [Fixed("left", Draft((1,), (0,))), Fixed("right", Draft((1,), (0,)))]
    specinfer = SpecInferDrafter(members)
    request = begin(specinfer, draft_request(range(9), temperature, 2, verification))
    (draft,) = specinfer.propose([DraftBudget(request, 2, 4)])
    apart = temperature > 0 and verification in ("rejection", "block")
    assert draft.token_ids == ((1, 1) if apart else (1,))


@pytest.mark.parametrize("where", ["start", "prefill", "propose", "observe", "finish"])
def test_a_member_that_raises_is_left_out_of_its_choices_and_counted(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Fixed("broken", Draft((9,), (0,)), where, rows=5)
    good = Fixed("good", Draft((1,), (0,)), rows=5)
    specinfer = SpecInferDrafter([broken, good])
    request = draft_request(range(9), HOT)
    specinfer.start(request)
    assert specinfer.prefill(8) == {"start": 5, "prefill": 5}.get(where, 8)
    drafts = [specinfer.propose([DraftBudget(request, 2, 4)])[0] for _ in range(2)]
    gone = where in ("start", "prefill", "propose")
    assert [draft.token_ids for draft in drafts] == [(1,) if gone else (9, 1)] * 2
    for _ in range(2):
        settle(specinfer, request, drafts[1], (len(drafts[1].token_ids),))
    assert [told.accepted_rows for told in good.told] == [(1,), ()]
    assert specinfer.propose([DraftBudget(request, 2, 4)])[0].token_ids == (
        (9, 1) if where == "finish" else (1,)
    )
    specinfer.finish(request)
    assert specinfer.failures == ({} if where == "finish" else {"broken": 1})
    assert "broken" in caplog.text
    assert not broken.live
    assert not good.live
    specinfer.check()


def test_a_lost_member_does_not_move_the_auxiliary_rows_of_the_next() -> None:
    broken = Fixed("broken", Draft((9,), (0,), auxiliary_token_ids=(20,), auxiliary_parents=(0,)), "observe")
    good = Fixed("good", Draft((1,), (0,), auxiliary_token_ids=(30, 31), auxiliary_parents=(0, 1)))
    specinfer = SpecInferDrafter([broken, good])
    request = begin(specinfer, draft_request(range(9), HOT))
    (draft,) = specinfer.propose([DraftBudget(request, 2, 8)])
    assert draft.auxiliary_token_ids == (20, 30, 31)
    logits = torch.tensor([[20.0], [30.0], [31.0]])
    request.history.extend((1, 5))
    specinfer.observe([Observation(request, draft, (2,), (1, 5), None, logits)])
    (told,) = good.told
    assert told.auxiliary_logits is not None
    assert told.auxiliary_logits.tolist() == [[30.0], [31.0]]
    assert told.accepted_rows == (1,)


def test_without_members_left_it_drafts_nothing() -> None:
    specinfer = SpecInferDrafter([Fixed("one", broken="start"), Fixed("two", broken="start")])
    request = begin(specinfer, draft_request(range(9), HOT))
    assert specinfer.propose([DraftBudget(request, 2, 4)])[0] == NO_DRAFT
    settle(specinfer, request, NO_DRAFT)
    specinfer.finish(request)
    specinfer.check()


def test_its_needs_are_those_of_all_members() -> None:
    small = Fixed.needs
    large = replace(
        small, max_draft_length=9, default_draft_length=2, hidden_layers=(1, 5), largest_position=40
    )
    assert union_of_needs([small, large, replace(small, largest_position=70)]) == DrafterNeeds(
        max_draft_length=9,
        default_draft_length=3,
        hidden_layers=(1, 5),
        bytes_per_token=24,
        largest_position=40,
        max_draft_width=6,
        default_draft_width=3,
    )


@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_the_draft_models_cache_stays_warm_beside_another_member(
    model: Path, verification: VerificationMode
) -> None:
    base, _ = load_draft_model(model)
    specinfer = SpecInferDrafter([NgramDrafter(NgramSettings(min_match=1)), base])
    request = begin(specinfer, draft_request([5, 6, 7, 8] * 5, HOT, 4, verification))
    generator = random.Random(2)
    for _ in range(20):
        (draft,) = specinfer.propose([DraftBudget(request, 3, 12)])
        behind = settle(
            specinfer, request, draft, rows_to(draft, generator.randrange(len(draft.token_ids) + 1))
        )
        lag = len(request.history.token_ids) - base.cached_tokens(request)
        assert LAG <= lag <= max(LAG, len(behind.token_ids))
        base._kv.check()
    specinfer.finish(request)
    specinfer.check()
    base.check()
