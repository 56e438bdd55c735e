"""Trees of the draft model: every node is drawn on its own path, and the cache stays warm whatever is accepted."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.records import VerificationMode
from decode.control.tree_shape import TreeShape
from decode.draft import NO_DRAFT, Draft
from decode.drafters.draft_model import LAG
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.drafting import cut_draft
from decode.sampling.draft_noise import DraftDraw, DrawnChildren, draw_children
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.support.draft_model_stand import (
    ENGINE,
    HOT,
    begin,
    draft_request,
    load_draft_model,
    ranked_children,
    rows_to,
    settle,
)
from tests.support.tiny_model import make_tiny_model

SHAPES = (
    TreeShape((3, 2, 0, 1, 1, 0, 2, 0, 0, 0)),
    TreeShape((2, 0, 3, 0, 0, 0)),
    TreeShape.chain(4),
    TreeShape((4, 0, 0, 0, 0)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    """Evaluates whole paths, one at a time, with nothing cached."""
    return Engine.load(model, ENGINE)


def children_at(oracle: Engine, request: DraftRequest, path: Sequence[int], width: int) -> DrawnChildren:
    """The children that are drawn behind the history and `path`."""
    token_ids = [*request.history.token_ids, *path]
    table = oracle.kv.open()
    oracle.kv.reserve(table, len(token_ids))
    logits = oracle.step([SequenceStep(table, 0, token_ids, logit_rows="last")]).logits
    oracle.kv.close(table)
    draw = DraftDraw(
        request.sampling,
        request.seed,
        request.choice,
        len(token_ids),
        request.verification,
        request.history,
        tuple(path),
    )
    (drawn,) = draw_children([draw], logits, [width])
    assert drawn is not None
    return drawn


def path_of(draft: Draft, row: int) -> list[int]:
    return [draft.token_ids[row - 1] for row in rows_to(draft, row)]


def require_drawn(oracle: Engine, request: DraftRequest, draft: Draft, width: int) -> None:
    """Every node's children are the first ones of those drawn on its path."""
    for row, rows in ranked_children(draft).items():
        drawn = children_at(oracle, request, path_of(draft, row), width)
        assert tuple(draft.token_ids[child - 1] for child in rows) == drawn.token_ids[: len(rows)]
        if draft.draft_probs is not None:
            assert drawn.draft_probs is not None
            for child in rows:
                assert torch.allclose(draft.draft_probs[child - 1], drawn.draft_probs, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, HOT])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_of_a_given_shape_has_that_shape_and_its_ranks(
    model: Path, oracle: Engine, shape: TreeShape, temperature: float
) -> None:
    drafter, counted = load_draft_model(model)
    request = begin(drafter, draft_request(range(1, 30), temperature))
    lag = len(request.history.token_ids) - drafter.cached_tokens(request)
    counted.reset()
    (draft,) = drafter.propose_shapes([DraftBudget(request, 8, 16)], [shape])
    assert draft.parents == shape.parents()
    assert counted.forwards == shape.depth, "one forward a level"
    assert counted.rows == lag + shape.num_parents - 1, "leaves are not evaluated"
    require_drawn(oracle, request, draft, max(shape.counts))


@pytest.mark.parametrize("temperature", [0.0, HOT])
def test_a_wide_tree_holds_the_best_paths(model: Path, oracle: Engine, temperature: float) -> None:
    drafter, _ = load_draft_model(model)
    request = begin(drafter, draft_request(range(1, 30), temperature, width=3))
    (draft,) = drafter.propose([DraftBudget(request, 3, 7)])
    require_drawn(oracle, request, draft, 3)
    scored: list[tuple[float, tuple[int, ...]]] = []
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(3):
        level = []
        for score, path in beam:
            drawn = children_at(oracle, request, path, 3)
            level += [
                (score + added, (*path, token_id))
                for token_id, added in zip(drawn.token_ids, drawn.scores, strict=True)
            ]
        scored += level
        beam = sorted(level, reverse=True)[:3]
    best = {path for _, path in sorted(scored, reverse=True)[:7]}
    assert {tuple(path_of(draft, row)) for row in range(1, 8)} == best


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_where_probabilities_decide_the_shape_hangs_on_the_budget_alone(
    model: Path, oracle: Engine, verification: VerificationMode
) -> None:
    drafter, _ = load_draft_model(model)
    shapes = set()
    for number in range(6):
        request = begin(drafter, draft_request(range(1 + number, 30), HOT, 3, verification))
        (draft,) = drafter.propose([DraftBudget(request, 3, 8)])
        require_drawn(oracle, request, draft, 3)
        assert draft.without_replacement
        assert draft.draft_probs is not None
        assert draft.draft_probs.shape == (8, 300)
        shapes.add(draft.parents)
    assert len(shapes) == 1


@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_the_cache_follows_whatever_path_is_accepted(model: Path, verification: VerificationMode) -> None:
    drafter, _ = load_draft_model(model)
    generator = random.Random(5)
    worn = begin(drafter, draft_request(range(1, 20), HOT, 3, verification))
    for number in range(24):
        (draft,) = drafter.propose([DraftBudget(worn, 1 + number % 4, 2 + number % 9)])
        settle(drafter, worn, draft, rows_to(draft, generator.randrange(len(draft.token_ids) + 1)))
        assert drafter.cached_tokens(worn) == len(worn.history.token_ids) - LAG
        drafter._kv.check()
    fresh = begin(drafter, draft_request(worn.history.token_ids, HOT, 3, verification))
    of_worn, of_fresh = drafter.propose([DraftBudget(worn, 4, 12), DraftBudget(fresh, 4, 12)])
    assert (of_worn.token_ids, of_worn.parents) == (of_fresh.token_ids, of_fresh.parents)
    for request in (worn, fresh):
        drafter.finish(request)
    drafter.check()


def test_a_tree_that_was_cut_or_grafted_into_another_leaves_the_cache_right(model: Path) -> None:
    drafter, _ = load_draft_model(model)
    request = begin(drafter, draft_request(range(1, 20), HOT, 3))
    (draft,) = drafter.propose([DraftBudget(request, 3, 9)])
    settle(drafter, request, cut_draft(draft, 1, 2), (1,))
    assert drafter.cached_tokens(request) == len(request.history.token_ids) - LAG
    (draft,) = drafter.propose([DraftBudget(request, 3, 9)])
    foreign = next(token_id for token_id in range(200, 256) if token_id not in draft.token_ids)
    request.history.extend((foreign, 7, 9))
    drafter.observe([Observation(request, draft, (), (foreign, 7, 9))])
    assert drafter.cached_tokens(request) == len(request.history.token_ids) - LAG - 1, "one token to make up"
    fresh = begin(drafter, draft_request(request.history.token_ids, HOT, 3))
    drafts = drafter.propose([DraftBudget(request, 3, 9), DraftBudget(fresh, 3, 9)])
    assert drafts[0].token_ids == drafts[1].token_ids


def test_trees_and_chains_of_one_batch_equal_themselves_alone(model: Path) -> None:
    drafter, _ = load_draft_model(model)
    kinds: tuple[tuple[int, VerificationMode], ...] = ((1, "invariant"), (3, "invariant"), (2, "rejection"))
    requests = [
        begin(drafter, draft_request(range(n, n + 20), HOT, *kind)) for n, kind in enumerate(kinds, 1)
    ]
    together = drafter.propose([DraftBudget(request, 3, 8) for request in requests])
    for request, draft in zip(requests, together, strict=True):
        alone = begin(
            drafter,
            draft_request(request.history.token_ids, HOT, request.draft_width, request.verification),
        )
        (expected,) = drafter.propose([DraftBudget(alone, 3, 8)])
        assert (draft.token_ids, draft.parents) == (expected.token_ids, expected.parents)


def test_without_room_for_its_rows_a_tree_is_no_draft(model: Path) -> None:
    drafter, _ = load_draft_model(model, num_blocks=8)
    request = begin(drafter, draft_request([1] * 120, HOT, 8))
    assert drafter.propose([DraftBudget(request, 8, 64)])[0] == NO_DRAFT
    (small,) = drafter.propose([DraftBudget(request, 1, 8)])
    assert len(small.token_ids) == 8
    drafter.finish(request)
    drafter.check()
