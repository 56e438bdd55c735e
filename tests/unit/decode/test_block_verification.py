"""Block verification: exact by enumeration of chains, coins and draws, and never fewer tokens than token by token."""

from itertools import product

import numpy as np
import pytest
import torch

from core.records import SamplingParams
from decode.draft import Draft, Verdict, VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float64
from decode.sampling.history import TokenHistory
from decode.verification import block
from decode.verification.verify import verify

VOCABULARY = 3
LENGTH = 3
ROOT = 0
SAMPLING = SamplingParams(temperature=1.0)


class Toy:
    """A target and a draft in which the token before decides what may follow. [token before, token]."""

    def __init__(self, seed: int, one_hot: bool = False) -> None:
        generator = np.random.default_rng(seed)
        self.target = _probs(generator.normal(size=(VOCABULARY, VOCABULARY)) * 1.5)
        draft = self.target**0.5 * _probs(generator.normal(size=(VOCABULARY, VOCABULARY)) * 1.2)
        draft /= draft.sum(axis=1, keepdims=True)
        if one_hot:
            draft = np.eye(VOCABULARY)[draft.argmax(axis=1)]
        self.draft = draft.astype(np.float32).astype(np.float64)
        self.draft /= self.draft.sum(axis=1, keepdims=True)

    def chain_prob(self, chain: tuple[int, ...]) -> float:
        """That this chain is drafted."""
        steps = zip((ROOT, *chain), chain, strict=False)
        return float(np.prod([self.draft[before, token_id] for before, token_id in steps]))

    def item(self, chain: tuple[int, ...], deterministic: bool) -> VerifyItem:
        """The chain as a drafter hands it over."""
        rows = torch.from_numpy(self.draft[[ROOT, *chain[:-1]]]).float()
        draft = Draft(chain, tuple(range(len(chain))), None if deterministic else rows)
        return VerifyItem(SAMPLING, 1, 0, TokenHistory([ROOT]), 1, 0, draft, "block")

    def logits(self, chain: tuple[int, ...]) -> torch.Tensor:
        """[K + 1, vocabulary]."""
        return torch.from_numpy(np.log(self.target[[ROOT, *chain]])).float()


def _probs(scores: Float64) -> Float64:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    probs: Float64 = weights / weights.sum(axis=1, keepdims=True)
    return probs


class Coins:
    """Stands in for the noise: u_i as told, 1 elsewhere, and keeps what the last draw was made from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[int, float] = {}
        self.weights: Float64 = np.zeros(0)
        monkeypatch.setattr(
            block, "accept_uniform", lambda item, position, trial: self.values.get(trial, 1.0)
        )
        monkeypatch.setattr(sampler, "earliest", self._draw)

    def _draw(self, weights: Float64, key: int, wanted: int = 1) -> list[int]:
        self.weights = weights / weights.sum()
        return [int(np.argmax(weights))]


def judge(
    toy: Toy, chain: tuple[int, ...], coins: Coins, deterministic: bool
) -> tuple[list[float], list[Float64]]:
    """P(N = i) for this chain, and what is drawn from behind its first i tokens, found by bisecting every coin."""
    item, logits = toy.item(chain, deterministic), toy.logits(chain)

    def accepted(values: dict[int, float]) -> int:
        coins.values = values
        (verdict,) = verify([item], logits)
        assert verdict.token_ids[:-1] == chain[: len(verdict.accepted_rows)]
        return len(verdict.accepted_rows)

    stops = [1.0]
    for length in range(1, len(chain) + 1):
        low, high = 0.0, 1.0
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (middle, high) if accepted({length: middle}) == length else (low, middle)
        stops.append(low)
    weights = []
    for length in range(len(chain) + 1):
        accepted({length: 0.0})
        weights.append(coins.weights)
    later = np.cumprod([1.0, *(1.0 - stop for stop in stops[:0:-1])])[::-1]
    return [stop * left for stop, left in zip(stops, later, strict=True)], weights


@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_four_tokens_have_the_targets_joint_distribution_exactly(
    seed: int, one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, coins = Toy(seed, one_hot), Coins(monkeypatch)
    joint = np.zeros((VOCABULARY,) * (LENGTH + 1))
    for chain in product(range(VOCABULARY), repeat=LENGTH):
        chain_prob = toy.chain_prob(chain)
        if chain_prob == 0.0:
            continue
        lengths, weights = judge(toy, chain, coins, deterministic=one_hot)
        assert sum(lengths) == pytest.approx(1.0, abs=1e-9)
        for length, (prob, drawn) in enumerate(zip(lengths, weights, strict=True)):
            for token_id, mass in enumerate(drawn):
                going_on = continued(toy, (*chain[:length], token_id))
                joint[(*chain[:length], token_id)] += chain_prob * prob * mass * going_on
    assert joint == pytest.approx(continued(toy, ()), abs=1e-6)


def continued(toy: Toy, prefix: tuple[int, ...]) -> Float64:
    """The target's joint distribution of what is left of the four tokens behind `prefix`."""
    left = LENGTH + 1 - len(prefix)
    joint = np.zeros((VOCABULARY,) * left)
    for rest in product(range(VOCABULARY), repeat=left):
        tokens = (ROOT, *prefix, *rest)
        steps = zip(tokens[len(prefix) :], rest, strict=False)
        joint[rest] = np.prod([toy.target[before, token_id] for before, token_id in steps])
    return joint


@pytest.mark.parametrize("seed", range(4))
def test_blocks_accept_at_least_as_much_as_tokens_and_as_the_paper_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, coins = Toy(seed), Coins(monkeypatch)
    by_block = by_token = by_paper = 0.0
    for chain in product(range(VOCABULARY), repeat=LENGTH):
        lengths, _ = judge(toy, chain, coins, deterministic=False)
        by_block += toy.chain_prob(chain) * float(np.dot(lengths, range(LENGTH + 1)))
        kept = alone = 1.0
        for before, token_id in zip((ROOT, *chain), chain, strict=False):
            ratio = toy.target[before, token_id] / toy.draft[before, token_id]
            kept, alone = min(1.0, kept * ratio), alone * min(1.0, ratio)
            by_paper += toy.chain_prob(chain) * kept
            by_token += toy.chain_prob(chain) * alone
    assert by_block == pytest.approx(by_paper, abs=1e-6)
    assert by_block > by_token + 1e-3


def verdict_of(
    draft: Draft, logits: torch.Tensor, sampling: SamplingParams = SAMPLING, seed: int = 1
) -> Verdict:
    item = VerifyItem(sampling, seed, 0, TokenHistory([ROOT]), 1, 0, draft, "block")
    return verify([item], logits)[0]


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    toy = Toy(2)
    for seed in range(200):
        chain = tuple(np.random.default_rng(seed).integers(0, VOCABULARY, LENGTH).tolist())
        logits = toy.logits(chain)
        draft = Draft(chain, (0, 1, 2), logits[:-1].softmax(1))
        assert len(verdict_of(draft, logits, seed=seed).accepted_rows) == LENGTH


def test_a_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="chains only"):
        verdict_of(Draft((1, 2), (0, 0)), torch.zeros(3, VOCABULARY))


def test_a_position_that_leaves_nothing_to_draw_ends_the_answer_with_the_chain_before_it() -> None:
    """Bad words ban everything behind token 1; the chain up to there is judged as one that ends there."""
    sampling = SamplingParams(
        temperature=1.0, bad_word_ids=tuple((1, token_id) for token_id in range(VOCABULARY))
    )
    logits = torch.full((3, VOCABULARY), -20.0)
    logits[:, 1] = 20.0
    verdict = verdict_of(Draft((1, 1), (0, 1)), logits, sampling)
    assert (verdict.accepted_rows, verdict.token_ids) == ((1,), (1,))
    assert verdict.error == "bad_words leave no token to draw"


def test_a_token_without_any_chance_is_never_accepted() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]] * 3)
    draft = Draft((1, 2), (0, 1), torch.tensor([[0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]))
    for seed in range(100):
        verdict = verdict_of(draft, logits, seed=seed)
        assert verdict.accepted_rows == ()
        assert verdict.token_ids[0] in (0, 2)
