"""Rejection over trees: the emitted token has the target's distribution, by enumeration of everything drawn."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import SamplingParams
from decode.draft import Draft, VerifyItem
from decode.sampling.draft_noise import DraftDraw, draw_children
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream, noise_key, race, uniform
from decode.verification.rejection import Decision, Trial, try_children
from decode.verification.verify import verify
from tests.support.rejection_oracle import Child, Outcome, Source, outcome, possible_children

VOCABULARY = 4
NODES = {
    "one child": (Source(0, 1, "distinct"),),
    "two without replacement": (Source(0, 2, "distinct"),),
    "all without replacement": (Source(0, 4, "distinct"),),
    "three with replacement": (Source(0, 3, "repeated"),),
    "two drafters": (Source(0, 1, "distinct"), Source(1, 1, "distinct")),
    "two drafters without replacement": (Source(0, 2, "distinct"), Source(1, 2, "distinct")),
    "one drafter again behind another": (
        Source(0, 1, "repeated"),
        Source(1, 2, "distinct"),
        Source(0, 1, "repeated"),
    ),
    "likeliest two": (Source(0, 2, "top"),),
    "likeliest first, then sampled": (Source(1, 1, "top"), Source(0, 2, "distinct")),
    "sampled, then likeliest": (Source(0, 2, "repeated"), Source(1, 2, "top")),
}


def distribution(generator: np.random.Generator, support: int) -> list[float]:
    """Float32 values that sum to 1, as handed over; some tokens have no mass."""
    weights = generator.random(VOCABULARY) ** 2
    weights[generator.permutation(VOCABULARY)[support:]] = 0.0
    rounded = (weights / weights.sum()).astype(np.float32).astype(np.float64)
    return [float(value) for value in rounded / rounded.sum()]


def trials_of(children: Sequence[Child]) -> list[Trial]:
    """Each draw with replacement is a source of its own."""
    return [
        Trial(
            row=index + 1,
            token_id=child.token_id,
            source=child.group if child.distinct else 100 + index,
            draft_probs=np.array(child.draft_probs, np.float32),
        )
        for index, child in enumerate(children)
    ]


def decide(target: Sequence[float], trials: Sequence[Trial], uniforms: Sequence[float]) -> Decision:
    return try_children(np.array(target), trials, True, lambda trial: uniforms[trial])


def outcome_of_the_code(target: Sequence[float], trials: Sequence[Trial]) -> Outcome:
    """The exact law of `try_children`: each trial's acceptance threshold is found by bisection."""
    accepted, reached = [], 1.0
    for index in range(len(trials)):

        def is_accepted(value: float, index: int = index) -> bool:
            uniforms = [1.0] * index + [value] + [1.0] * (len(trials) - index)
            decision = decide(target, trials, uniforms)
            return decision.accepted is not None and decision.accepted.row == index + 1

        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if is_accepted(middle) else (low, middle)
        accepted.append(reached * low)
        reached *= 1.0 - low
    remaining = decide(target, trials, [1.0] * len(trials)).remaining
    return Outcome(tuple(accepted), reached, [float(value) for value in remaining])


@pytest.mark.parametrize("sources", NODES.values(), ids=NODES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_the_emitted_token_has_the_targets_distribution_exactly(
    sources: tuple[Source, ...], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    target = distribution(generator, 4 - seed % 2)
    drafts = [distribution(generator, 4 - seed), distribution(generator, 3)]
    emitted = np.zeros(VOCABULARY)
    total = 0.0
    for probability, children in possible_children(sources, drafts):
        law = outcome_of_the_code(target, trials_of(children))
        expected = outcome(target, children)
        assert law.accepted == pytest.approx(expected.accepted, abs=1e-6)
        for child, accepted in zip(children, law.accepted, strict=True):
            emitted[child.token_id] += probability * accepted
        emitted += probability * law.rejected * np.array(law.remaining)
        total += probability
    assert total == pytest.approx(1.0, abs=1e-9)
    assert emitted == pytest.approx(target, abs=2e-6)


@pytest.mark.parametrize("fault", ["sorted", "merged", "stopped"])
def test_the_enumeration_sees_a_drafter_that_looks_at_its_tokens(fault: str) -> None:
    """By how much the first two tokens' probabilities move is written down, so that the test can fail."""
    target, draft = [0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.3, 0.3]
    kind = Source(0, 2, "repeated" if fault == "merged" else "distinct")
    emitted = np.zeros(VOCABULARY)
    for probability, children in possible_children((kind,), [draft]):
        kept = list(children)
        if fault == "sorted":
            kept.sort(key=lambda child: child.token_id)
        elif fault == "merged" and kept[0].token_id == kept[1].token_id:
            kept.pop()
        elif fault == "stopped":
            kept = [child for child in kept if draft[child.token_id] > 0.25]
        law = outcome(target, kept)
        for child, accepted in zip(kept, law.accepted, strict=True):
            emitted[child.token_id] += probability * accepted
        emitted += probability * law.rejected * np.array(law.remaining)
    assert emitted.sum() == pytest.approx(1.0)
    assert np.abs(emitted - target).max() > 0.004


def test_equal_siblings_keep_their_multiplicity_each_with_its_own_d() -> None:
    target = [0.1, 0.2, 0.7, 0.0]
    first, second = [0.9, 0.1, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]
    trials = trials_of([Child(0, first, 0, False), Child(0, second, 1, False)])
    law = outcome_of_the_code(target, trials)
    rest = [0.0, 0.1 / 0.8, 0.7 / 0.8, 0.0]
    assert law.accepted == pytest.approx([0.1 / 0.9, 0.0], abs=1e-6)
    above = np.maximum(np.array(rest) - second, 0.0)
    assert law.remaining == pytest.approx(list(above / above.sum()), abs=1e-6)


def test_siblings_without_replacement_stop_where_d_has_no_mass_left() -> None:
    draft = np.array([0.5, 0.5, 0.0, 0.0], np.float32)
    trials = [Trial(row, token_id, 0, draft) for row, token_id in ((1, 0), (2, 1), (3, 0))]
    decision = decide([0.2, 0.0, 0.8, 0.0], trials, [1.0, 1.0, 0.0])
    assert decision.accepted is None
    assert decision.num_tried == 2
    assert decision.remaining.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_a_child_with_a_broken_row_is_not_tried_and_the_others_are() -> None:
    good = np.array([0.25, 0.25, 0.5, 0.0], np.float32)
    bad = good.copy()
    bad[3] = np.nan
    decision = decide([0.0, 0.5, 0.5, 0.0], [Trial(1, 1, 0, bad), Trial(2, 2, 1, good)], [0.0, 0.5])
    assert decision.accepted is not None
    assert (decision.accepted.row, decision.num_tried) == (2, 1)


SAMPLING = SamplingParams(temperature=0.9, top_k=8, frequency_penalty=0.4)
TABLE = torch.randn(12, 12, generator=torch.Generator().manual_seed(4))
"""What follows a token, for the target; drafters see it halved."""


def plain_walk(item: VerifyItem, logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """(accepted rows, tokens) by the oracle, with the noise that verification takes."""
    draft, rows, tokens = item.draft, list[int](), list[int]()
    while True:
        row = rows[-1] if rows else 0
        target = penalised_probs(logits[row], item.history, tokens)
        position = item.position + len(tokens)
        nodes = [node for node, parent in enumerate(draft.parents) if parent == row]
        children = []
        for node in nodes:
            assert draft.draft_probs is not None
            probs = draft.draft_probs[node].double()
            group = draft.sources[node] if draft.sources else node
            children.append(
                Child(draft.token_ids[node], (probs / probs.sum()).tolist(), group, draft.without_replacement)
            )
        law = outcome(target, children)
        reached, accepted = 1.0, None
        for index, (node, mass) in enumerate(zip(nodes, law.accepted, strict=True)):
            value = uniform(noise_key(item.seed, item.choice, position, Stream.ACCEPT), index)
            if mass > 0.0 and value < mass / reached:
                accepted = node
                break
            reached -= mass
        if accepted is None:
            stream = Stream.RESIDUAL if nodes else Stream.BONUS
            key = noise_key(item.seed, item.choice, position, stream)
            return rows, [*tokens, race(np.array(law.remaining), key)]
        rows.append(accepted + 1)
        tokens.append(draft.token_ids[accepted])


def penalised_probs(logits: torch.Tensor, history: TokenHistory, path: Sequence[int]) -> list[float]:
    scores = logits.double().clone()
    for token_id in (*history.output_ids, *path):
        scores[token_id] -= 0.4
    scores[scores.topk(8).values.min() > scores] = -torch.inf
    probs: list[float] = (scores / 0.9).softmax(0).tolist()
    return probs


@pytest.mark.parametrize("without_replacement", [True, False])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**53 - 1), widths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_a_walk_over_any_tree_is_that_of_the_plain_rules(
    without_replacement: bool, seed: int, widths: list[int]
) -> None:
    history = TokenHistory([3, 5], [5])
    draft = grown_tree(seed, widths, history, without_replacement)
    item = VerifyItem(SAMPLING, seed, 0, history, 3, 0, draft, "rejection")
    logits = TABLE[[history.token_ids[-1], *draft.token_ids]]
    (verdict,) = verify([item], logits)
    assert (list(verdict.accepted_rows), list(verdict.token_ids)) == plain_walk(item, logits)


def grown_tree(seed: int, widths: Sequence[int], history: TokenHistory, without_replacement: bool) -> Draft:
    """Row r gets widths[r] children as long as it exists, drawn from the halved table."""
    token_ids: list[int] = []
    parents: list[int] = []
    rows: list[torch.Tensor] = []
    paths: list[tuple[int, ...]] = [()]
    for row, width in enumerate(widths):
        if row >= len(paths):
            break
        path = paths[row]
        last = path[-1] if path else history.token_ids[-1]
        lanes = [0] if without_replacement else list(range(width))
        draws = [
            DraftDraw(SAMPLING, seed, 0, 3 + len(path), "rejection", history, path, lane) for lane in lanes
        ]
        logits = (TABLE[last] * 0.5).expand(len(lanes), -1)
        for children in draw_children(draws, logits, [width if without_replacement else 1] * len(lanes)):
            assert children is not None
            assert children.draft_probs is not None
            for token_id in children.token_ids:
                token_ids.append(token_id)
                parents.append(row)
                rows.append(children.draft_probs)
                paths.append((*path, token_id))
    sources = (0,) * len(token_ids) if without_replacement else ()
    return Draft(tuple(token_ids), tuple(parents), torch.stack(rows), (), (), without_replacement, sources)
