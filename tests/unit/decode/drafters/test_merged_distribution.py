"""Under rejection a merged tree of sampled and certain drafts leaves the target's distribution as it is."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from core.records import SamplingParams
from decode.control.tree_shape import TreeShape
from decode.draft import Draft, VerifyItem
from decode.drafters.draft_tree import DraftTree, ShapeGrowth
from decode.drafters.merging import merge_drafts
from decode.sampling.draft_noise import DraftDraw, draw_children
from decode.sampling.history import TokenHistory
from decode.verification.verify import verify
from tests.bench.goodness_of_fit import fit, holm

VOCAB = 4
SAMPLING = SamplingParams(temperature=1.0)
HISTORY = TokenHistory([0])
SEEDS = 4000
CERTAIN = Draft((1, 2, 3), (0, 0, 1))
"""Two tokens at the root and one behind the first."""


def tables(seed: int) -> torch.Tensor:
    """Logits [1 + VOCAB, VOCAB]: at the root, and behind each token."""
    return 1.5 * torch.randn(1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, shape: TreeShape, seed: int, lane: int) -> Draft:
    """A tree as a model draws it whose logits hang on the last token of the path."""
    tree = DraftTree(0, ShapeGrowth(shape))
    while tree.open:
        paths = [node.path() for node in tree.open]
        rows = torch.stack([logits[path[-1] + 1 if path else 0] for path in paths])
        draws = [
            DraftDraw(SAMPLING, seed, 0, 1 + len(path), "rejection", HISTORY, path, lane) for path in paths
        ]
        tree.take(draw_children(draws, rows, tree.widths()), VOCAB)
    return tree.draft()


def emitted(
    target: torch.Tensor, drafts: Sequence[Sequence[Draft]], keep_equal: bool
) -> list[tuple[int, ...]]:
    """What is emitted with each seed's drafts."""
    items: list[VerifyItem] = []
    rows: list[torch.Tensor] = []
    for seed, members in enumerate(drafts):
        draft = merge_drafts(members, keep_equal=keep_equal)
        items.append(VerifyItem(SAMPLING, seed, 0, HISTORY, 1, len(rows), draft, "rejection"))
        rows.append(target[0])
        rows += [
            target[token_id + 1] if depth == 1 else target[0]
            for token_id, depth in zip(draft.token_ids, draft.depths(), strict=True)
        ]
    return [verdict.token_ids for verdict in verify(items, torch.stack(rows))]


def p_value(target: torch.Tensor, answers: Sequence[tuple[int, ...]]) -> float:
    """Of the first token, and of the second behind each first one that was accepted."""
    probs = target.double().softmax(1).numpy()
    first = np.bincount([answer[0] for answer in answers], minlength=VOCAB)
    second = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for answer in answers:
        if len(answer) > 1:
            second[answer[0], answer[1]] += 1
    assert second.sum() > SEEDS / 4
    return holm([fit("first", first[None], probs[:1]), fit("second", second, probs[1:])])[0].p_value


@pytest.mark.parametrize("shape", [TreeShape.chain(2), TreeShape((2, 1, 1, 0, 0))], ids=["chains", "trees"])
@pytest.mark.parametrize("certain", [False, True])
def test_the_text_has_the_distribution_of_the_target(shape: TreeShape, certain: bool) -> None:
    target, left, right = tables(1), tables(2), tables(3)
    drafts = [
        [
            *([CERTAIN] if certain else []),
            sample(left, shape, seed, 0),
            sample(right, TreeShape.chain(2), seed, 1),
        ]
        for seed in range(SEEDS)
    ]
    assert p_value(target, emitted(target, drafts, keep_equal=True)) > 1e-3


def test_a_merge_of_equal_siblings_would_be_seen() -> None:
    target, left, right = tables(1), tables(2), tables(3)
    chain = TreeShape.chain(2)
    drafts = [[sample(left, chain, seed, 0), sample(right, chain, seed, 1)] for seed in range(SEEDS)]
    assert p_value(target, emitted(target, drafts, keep_equal=False)) < 1e-3


def test_draws_of_one_lane_would_be_seen() -> None:
    target, left = tables(1), tables(2)
    chain = TreeShape.chain(2)
    drafts = [[sample(left, chain, seed, 0), sample(left, chain, seed, 0)] for seed in range(SEEDS)]
    assert p_value(target, emitted(target, drafts, keep_equal=True)) < 1e-3
