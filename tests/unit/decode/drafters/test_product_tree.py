"""The chosen nodes are the likeliest of all, parents first."""

import itertools
import math
import random

import pytest

from decode.draft import NO_DRAFT
from decode.drafters.product_tree import Level, best_shape


def random_scores(generator: random.Random, depth: int, width: int) -> list[list[float]]:
    rows = [[generator.random() + 0.01 for _ in range(width + generator.randrange(2))] for _ in range(depth)]
    return [sorted((math.log(value / sum(row)) for value in row), reverse=True) for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_the_likeliest_of_the_product(seed: int) -> None:
    generator = random.Random(seed)
    depth, width, max_nodes = generator.randint(1, 4), generator.randint(1, 4), generator.randint(1, 20)
    scores = random_scores(generator, depth, width)
    shape = best_shape(scores, max_nodes, -math.inf)
    every = sorted(
        (
            sum(row[rank] for row, rank in zip(scores, path, strict=False))
            for size in range(1, depth + 1)
            for path in itertools.product(*(range(len(row)) for row in scores[:size]))
        ),
        reverse=True,
    )
    found: list[float] = []
    for level, rank, parent in zip(shape.depths, shape.ranks, shape.parents, strict=True):
        assert parent <= len(found)
        assert level == (0 if parent == 0 else shape.depths[parent - 1] + 1)
        found.append(scores[level][rank] + (found[parent - 1] if parent else 0.0))
    assert found == pytest.approx(every[: len(found)])
    assert len(found) == min(max_nodes, len(every))
    assert len(set(zip(shape.parents, shape.ranks, strict=True))) == len(found)


def test_unlikely_nodes_are_left_out_and_width_one_is_a_chain() -> None:
    halves = [[math.log(0.5)], [math.log(0.5)], [math.log(0.5)]]
    assert best_shape(halves, 8, math.log(0.2)).parents == (0, 1)
    assert best_shape(halves, 8, -math.inf).parents == (0, 1, 2)
    assert best_shape(halves, 2, -math.inf).parents == (0, 1)
    assert best_shape(halves, 8, 0.0).parents == ()


def test_a_shape_is_filled_with_the_tokens_of_its_levels() -> None:
    levels = [Level((7, 8), (-0.1, -2.0)), Level((9, 5), (-0.2, -3.0))]
    draft = best_shape([level.scores for level in levels], 4, -math.inf).filled(levels)
    assert (draft.token_ids, draft.parents) == ((7, 9, 8, 9), (0, 1, 0, 3))
    assert draft.draft_probs is None
    assert best_shape([], 4, -math.inf).filled([]) is NO_DRAFT
