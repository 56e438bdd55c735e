"""Guessing changes how many forwards a draft takes, never the draft."""

from pathlib import Path

import pytest
import torch

from core.drafter_settings import NgramSettings, RecursiveSettings
from core.records import VerificationMode
from decode.drafters.protocol import DraftBudget
from decode.drafters.recursive import RecursiveDrafter
from tests.support.draft_model_stand import HOT, begin, draft_request, load_draft_model, rows_to, settle
from tests.support.tiny_model import make_tiny_model

SETTINGS = RecursiveSettings(guess_length=6, ngram=NgramSettings(min_match=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300)


@pytest.mark.parametrize("temperature", [0.0, 4.0, HOT])
@pytest.mark.parametrize("verification", ["invariant", "rejection"])
def test_the_draft_is_the_draft_models_own_in_fewer_forwards(
    model: Path, temperature: float, verification: VerificationMode
) -> None:
    base, plain_count = load_draft_model(model)
    guessed_base, guessed_count = load_draft_model(model)
    recursive = RecursiveDrafter(guessed_base, SETTINGS)
    prompt = [5, 6, 7, 8] * 4 + [5, 6]
    plain = begin(base, draft_request(prompt, temperature, verification=verification))
    guessed = begin(recursive, draft_request(prompt, temperature, verification=verification))
    plain_count.reset()
    guessed_count.reset()
    for number in range(30):
        depth = 1 + number % 6
        (expected,) = base.propose([DraftBudget(plain, depth, depth)])
        (draft,) = recursive.propose([DraftBudget(guessed, depth, depth)])
        assert (draft.token_ids, draft.parents) == (expected.token_ids, expected.parents)
        assert (draft.draft_probs is None) == (expected.draft_probs is None)
        if draft.draft_probs is not None and expected.draft_probs is not None:
            assert torch.equal(draft.draft_probs, expected.draft_probs)
        rows = rows_to(draft, (depth, 0, 1 + number % depth)[number % 3])
        settle(base, plain, expected, rows)
        settle(recursive, guessed, draft, rows)
        assert base.cached_tokens(plain) == guessed_base.cached_tokens(guessed)
    assert guessed_count.forwards <= plain_count.forwards
    if temperature < HOT:
        assert guessed_count.forwards < plain_count.forwards
    recursive.finish(guessed)
    recursive.check()
    guessed_base.check()


def test_a_right_guess_takes_one_forward_and_a_wrong_one_no_more_than_without(model: Path) -> None:
    base, count = load_draft_model(model)
    request = begin(base, draft_request(range(1, 30), HOT))
    budget = DraftBudget(request, 5, 5)
    (expected,) = base.propose([budget])
    settle(base, request, expected)
    (expected,) = base.propose([budget])
    for right in range(6):
        wrong = [299 if token_id != 299 else 298 for token_id in expected.token_ids[right:]]
        count.reset()
        (draft,) = base.propose_guessed([budget], [[*expected.token_ids[:right], *wrong]])
        assert draft.token_ids == expected.token_ids
        assert count.forwards == max(1, 5 - right)
    base.finish(request)


def test_ids_that_the_draft_model_does_not_know_are_not_guessed(model: Path) -> None:
    base, _ = load_draft_model(model)
    request = begin(base, draft_request(range(1, 30), HOT))
    (expected,) = base.propose([DraftBudget(request, 4, 4)])
    (draft,) = base.propose_guessed([DraftBudget(request, 4, 4)], [[100_000, 1, 2]])
    assert draft.token_ids == expected.token_ids
