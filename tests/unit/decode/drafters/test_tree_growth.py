"""Trees that grow level by level: who goes on, what is proposed, and that no node loses its parent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode.draft import NO_DRAFT, Draft
from decode.drafters.tree_growth import TreeGrowth


def test_a_chain_takes_one_child_a_level() -> None:
    growth = TreeGrowth(depth=3, width=1, max_nodes=8, by_score=True)
    for token_id in (5, 6, 7):
        assert growth.children_wanted == 1
        growth.add(0, [token_id], [-0.5], None)
        going_on = growth.close_level()
        assert going_on == (token_id != 7)
    assert growth.draft() == Draft((5, 6, 7), (0, 1, 2), without_replacement=True)


def test_the_best_nodes_go_on_and_the_best_of_all_are_proposed() -> None:
    growth = TreeGrowth(depth=2, width=2, max_nodes=3, by_score=True)
    growth.add(0, [1, 2], [-0.1, -2.0], None)
    assert growth.close_level()
    growth.add(0, [3, 4], [-0.2, -0.3], None)
    growth.add(1, [5, 6], [-0.1, -0.2], None)
    assert not growth.close_level()
    draft = growth.draft()
    assert draft.token_ids == (1, 3, 4)
    assert draft.parents == (0, 1, 1)


def test_an_unlikely_path_goes_no_further() -> None:
    growth = TreeGrowth(depth=4, width=2, max_nodes=8, by_score=True, min_probability=0.5)
    growth.add(0, [1, 2], [-0.1, -3.0], None)
    assert growth.close_level()
    assert growth.path(growth.frontier[0]) == (1,)
    growth.add(0, [3, 4], [-0.9, -1.0], None)
    assert not growth.close_level()
    assert len(growth.draft().token_ids) == 4


def test_what_was_drawn_decides_nothing_where_rejection_judges_it() -> None:
    growth = TreeGrowth(depth=3, width=2, max_nodes=8, by_score=False, min_probability=0.9)
    probs = torch.full((8,), 0.125)
    growth.add(0, [1, 2], [-5.0, -0.1], probs)
    assert growth.close_level()
    assert growth.children_wanted == 1
    growth.add(0, [3], [-5.0], probs)
    growth.add(1, [4], [-5.0], probs)
    assert growth.close_level()
    draft = growth.draft()
    assert draft.token_ids == (1, 2, 3, 4)
    assert draft.parents == (0, 0, 1, 2)
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (4, 8)


def test_a_root_without_children_proposes_nothing() -> None:
    growth = TreeGrowth(depth=3, width=2, max_nodes=8, by_score=True)
    assert not growth.close_level()
    assert growth.draft() is NO_DRAFT


@pytest.mark.parametrize("by_score", [True, False])
@given(data=st.data())
def test_every_tree_keeps_depth_width_budget_and_parents(by_score: bool, data: st.DataObject) -> None:
    depth, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    max_nodes = data.draw(st.integers(1, 12))
    growth = TreeGrowth(depth, width, max_nodes, by_score)
    token_id = 0
    while True:
        for place in range(len(growth.frontier)):
            count = data.draw(st.integers(0, growth.children_wanted))
            scores = sorted((data.draw(st.floats(-3, -0.01)) for _ in range(count)), reverse=True)
            growth.add(place, range(token_id, token_id + count), scores, None)
            token_id += count
        assert growth.level < depth
        if not growth.close_level():
            break
        assert len(growth.frontier) <= width
    draft = growth.draft()
    assert len(draft.token_ids) <= max_nodes
    assert all(parent <= row for row, parent in enumerate(draft.parents))
    assert not draft.parents or max(draft.depths()) <= depth
