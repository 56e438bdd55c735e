"""What a draft's distance from its target says of how often the two may agree."""

import math

import numpy as np
import pytest

from decode.sampling.arithmetic import Float64
from decode.sampling.noise import noise_key, race
from tests.bench.coupling import coupling_of, mean_coupling, shared_noise_match


def pair_of(seed: int, disagreement: float) -> tuple[Float64, Float64]:
    """Two distributions over 40 ids, a third of which only one of them allows."""
    source = np.random.default_rng(seed)
    logits = source.normal(size=40)
    target = np.exp(2.0 * logits)
    draft = np.exp(2.0 * (logits + disagreement * source.normal(size=40)))
    target[:6] = 0.0
    draft[6:12] = 0.0
    return target / target.sum(), draft / draft.sum()


def test_total_variation_and_bound_of_a_pair_counted_by_hand() -> None:
    coupling = coupling_of(np.array([0.5, 0.5, 0.0]), np.array([0.3, 0.5, 0.2]))
    assert coupling.total_variation == pytest.approx(0.2)
    assert coupling.best == pytest.approx(0.8)
    assert coupling.bound == pytest.approx(0.8 / 1.2)


def test_equal_distributions_always_agree_and_disjoint_ones_never() -> None:
    probs = np.array([0.5, 0.25, 0.25, 0.0])
    same, apart = coupling_of(probs, probs), coupling_of(probs, np.array([0.0, 0.0, 0.0, 1.0]))
    assert (same.total_variation, same.best, same.bound) == (0.0, 1.0, 1.0)
    assert same.shared_noise == pytest.approx(1.0)
    assert (apart.total_variation, apart.best, apart.shared_noise, apart.bound) == (1.0, 0.0, 0.0, 0.0)


def test_shared_noise_is_the_best_coupling_of_two_tokens() -> None:
    assert shared_noise_match(np.array([0.7, 0.3]), np.array([0.4, 0.6])) == pytest.approx(0.7)


@pytest.mark.parametrize("disagreement", [0.0, 0.5, 2.0])
def test_shared_noise_agrees_as_often_as_races_of_the_same_noise_do(disagreement: float) -> None:
    target, draft = pair_of(3, disagreement)
    num_draws = 6000
    keys = [noise_key(seed, 0, 5) for seed in range(num_draws)]
    agreed = sum(race(target, key) == race(draft, key) for key in keys) / num_draws
    expected = shared_noise_match(target, draft)
    assert agreed == pytest.approx(expected, abs=4 * math.sqrt(0.25 / num_draws))


def test_shared_noise_lies_between_the_bound_and_the_best() -> None:
    for seed in range(50):
        coupling = coupling_of(*pair_of(seed, 0.1 * (seed % 20)))
        assert coupling.bound <= coupling.shared_noise <= coupling.best


def test_means_are_of_each_figure_by_itself() -> None:
    near = coupling_of(np.array([0.5, 0.5]), np.array([0.5, 0.5]))
    far = coupling_of(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    mean = mean_coupling([near, far])
    assert (mean.total_variation, mean.best, mean.bound) == (0.5, 0.5, 0.5)
    assert mean.bound != (1 - mean.total_variation) / (1 + mean.total_variation)


def test_no_positions_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no position"):
        mean_coupling([])
