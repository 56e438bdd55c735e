"""The native kernel draws the tokens that the plain reference draws, whatever the parameters."""

import ctypes
import math
from ctypes import CDLL

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import SamplingParams
from decode.sampling import native, reference
from decode.sampling.arithmetic import exp_weights, natural_log
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream, earliest, gumbel, noise_key, race, uniform, uniforms
from decode.sampling.step_items import DrawItem


@pytest.fixture(scope="module")
def library() -> CDLL:
    loaded = native.kernels()
    if loaded is None:
        pytest.skip("no C++ compiler here: the reference serves alone")
    return loaded


def tied_logits(seed: int, rows: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Logits rounded to bf16, with many ties, some -inf and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    logits = logits.to(torch.bfloat16).to(torch.float32)
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.02] = -math.inf
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.05] = -0.0
    logits[:, 0] = 0.0
    return logits


@st.composite
def sampling_params(draw: st.DrawFn, vocabulary: int) -> SamplingParams:
    token_ids = st.integers(0, vocabulary - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 1e-2, 0.3, 0.8, 1.0, 2.0, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 50, 700, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.95, 0.5, 1e-3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 2.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.7])),
        logit_bias=draw(st.dictionaries(token_ids, st.sampled_from([-100.0, 3.5, 0.1]), max_size=4)),
        bad_word_ids=tuple(
            tuple(word) for word in draw(st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3))
        ),
        min_tokens=draw(st.sampled_from([0, 0, 4, 100])),
        eos_token_ids=(draw(token_ids),),
        stop_token_ids=(draw(token_ids),),
    )


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), seed=st.integers(0, 2**53 - 1), vocabulary=st.sampled_from([1, 3, 8, 17, 511, 513, 3001])
)
def test_the_kernel_walks_every_tree_as_the_reference_does(
    library: CDLL, data: st.DataObject, seed: int, vocabulary: int
) -> None:
    token_ids = st.integers(0, vocabulary - 1)
    params = data.draw(st.lists(sampling_params(vocabulary), min_size=1, max_size=3))
    nodes = data.draw(st.integers(0, 5))
    logits = tied_logits(seed % 2**31, nodes + 1, vocabulary, data.draw(st.sampled_from([0.01, 1.0, 4.0])))
    draws = []
    for choice, sampling in enumerate(params):
        history = TokenHistory(
            data.draw(st.lists(token_ids, min_size=1, max_size=6)), data.draw(st.lists(token_ids, max_size=6))
        )
        parents = tuple(data.draw(st.integers(0, node)) for node in range(nodes))
        guesses = tuple(data.draw(token_ids) for _ in range(nodes))
        path = tuple(data.draw(st.lists(token_ids, max_size=2)))
        position = len(history.token_ids) + len(path)
        draws.append(
            DrawItem(sampling, seed, choice, position, history, 0, Stream.SHARED, path, guesses, parents)
        )
    assert native.walk(library, draws, logits) == reference.walk(draws, logits)
    for draw in draws:
        expected, actual = reference.probs(draw, logits), native.probs(library, draw, logits)
        if isinstance(expected, str):
            assert actual == expected
        else:
            assert not isinstance(actual, str)
            assert np.array_equal(actual, expected)
            assert abs(expected.sum() - 1.0) < 1e-6
    widths = [data.draw(st.integers(0, 5)) for _ in draws]
    assert native.children(library, draws, widths, logits) == reference.children(draws, widths, logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.95, 0.0), (40, 0.9, 0.05)]
)
def test_the_kernel_draws_as_the_reference_over_a_real_vocabulary(
    library: CDLL, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = tied_logits(1, 4, 49152, 3.0)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    draws = [DrawItem(sampling, seed, 0, 9, TokenHistory([1]), seed % 4) for seed in range(8)]
    assert native.walk(library, draws, logits) == reference.walk(draws, logits)
    widths = [1 + seed for seed in range(8)]
    assert native.children(library, draws, widths, logits) == reference.children(draws, widths, logits)


def test_a_walk_follows_the_drawn_children_and_stops_where_none_holds_the_token(library: CDLL) -> None:
    logits = torch.full((4, 10), -5.0)
    for row, token_id in enumerate([7, 9, 3, 1]):
        logits[row, token_id] = 5.0
    history = TokenHistory([1, 2])
    draw = DrawItem(SamplingParams(), 0, 0, 2, history, 0, token_ids=(4, 7, 3), parents=(0, 0, 2))
    expected = native.Walk((2, 3), (7, 3, 1))
    assert native.walk(library, [draw], logits) == [expected] == reference.walk([draw], logits)


@given(
    seed=st.integers(0, 2**53 - 1),
    choice=st.integers(0, 15),
    position=st.integers(0, 2**31),
    stream=st.sampled_from(list(Stream)),
)
def test_both_implementations_hash_the_same_uniforms(
    library: CDLL, seed: int, choice: int, position: int, stream: Stream
) -> None:
    key = noise_key(seed, choice, position, stream)
    library.outrider_noise_key.restype = ctypes.c_uint64
    library.outrider_noise_key.argtypes = [ctypes.c_uint64] * 4
    assert library.outrider_noise_key(seed, choice, position, int(stream)) == key
    token_ids = np.array([0, 1, 2, 49151, 2**31], dtype=np.int64)
    native_uniforms = np.empty(5)
    library.outrider_uniforms.restype = None
    library.outrider_uniforms.argtypes = [
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    library.outrider_uniforms(key, token_ids.ctypes.data, 5, native_uniforms.ctypes.data)
    assert np.array_equal(native_uniforms, uniforms(key, token_ids))
    assert uniform(key, 2) == native_uniforms[2]


def test_the_noise_does_not_depend_on_which_other_tokens_are_asked() -> None:
    everything = gumbel(7, 0, 12, np.arange(1000, dtype=np.int64))
    few = gumbel(7, 0, 12, np.array([999, 3], dtype=np.int64))
    assert few.tolist() == [everything[999], everything[3]]


def test_keys_of_neighbouring_draws_differ() -> None:
    keys = {
        noise_key(seed, choice, position, stream)
        for seed in range(5)
        for choice in range(5)
        for position in range(50)
        for stream in Stream
    }
    assert len(keys) == 5 * 5 * 50 * 5


def test_uniforms_are_uniform_and_never_zero_or_one() -> None:
    values = uniforms(noise_key(1, 0, 0), np.arange(200_000, dtype=np.int64))
    assert values.min() > 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.003
    assert abs(values.var() - 1 / 12) < 0.001


def test_the_race_is_the_argmax_of_log_weights_plus_gumbel() -> None:
    token_ids = np.arange(500, dtype=np.int64)
    weights = np.random.default_rng(0).random(500)
    for position in range(50):
        expected = int(np.argmax(np.log(weights) + gumbel(3, 1, position, token_ids)))
        assert race(weights, noise_key(3, 1, position)) == expected


@pytest.mark.parametrize("wanted", [0, 1, 3, 600])
def test_draws_without_replacement_are_the_first_of_the_race(library: CDLL, wanted: int) -> None:
    weights = np.random.default_rng(1).random(500) ** 8
    weights[::7] = 0.0
    for position in range(30):
        key = noise_key(3, 1, position)
        noisy = np.log(np.maximum(weights, 1e-300)) + gumbel(3, 1, position, np.arange(500, dtype=np.int64))
        expected = [int(index) for index in np.argsort(-noisy) if weights[index] > 0.0][:wanted]
        assert earliest(weights, key, wanted) == expected
        assert native.earliest(library, weights, key, wanted) == expected


def test_own_exp_and_log_agree_with_the_libraries_to_the_last_few_bits() -> None:
    exponents = -np.geomspace(1e-12, 700.0, 20_000)
    assert np.max(np.abs(exp_weights(exponents) / np.exp(exponents) - 1.0)) < 1e-15 * 4
    assert exp_weights(np.array([0.0, -709.0, -np.inf])).tolist() == [1.0, 0.0, 0.0]
    values = np.concatenate([np.geomspace(1e-300, 1e300, 20_000), 1.0 - np.geomspace(1e-16, 0.5, 20_000)])
    logarithms = np.log(values)
    nonzero = logarithms != 0.0
    assert np.max(np.abs(natural_log(values)[nonzero] / logarithms[nonzero] - 1.0)) < 1e-15 * 4


def test_logprobs_of_the_kernel_are_those_of_the_reference_bit_for_bit(library: CDLL) -> None:
    logits = tied_logits(5, 6, 49152, 3.0)
    requests = [
        native.LogprobRequest(row, 17 * row, best)
        for row, best in zip(range(6), [0, 1, 2, 5, 20, 0], strict=True)
    ]
    assert native.logprobs(library, requests, logits) == reference.logprobs(requests, logits)
    expected = torch.log_softmax(logits[3].double(), dim=0)
    for token_id, logprob in reference.logprobs(requests, logits)[3]:
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-9)
