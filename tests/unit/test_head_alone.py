"""The distributions that the bench of drafts' distance measures are those that drafts and answers are drawn from."""

import json
import math
from pathlib import Path

import pytest

from core.errors import InvalidArgument
from core.records import SamplingParams
from decode.replay import continue_prompt, drafts_along, request_over
from decode.sampling.history import TokenHistory
from tests.bench.coupling import mean_coupling
from tests.bench.head_alone import HeadAlone
from tests.bench.prompts import Prompt
from tests.support.tiny_heads import make_tiny_head
from tests.support.tiny_model import make_tiny_model

PROMPT = Prompt("one", "chat", "", (72, 101, 108, 108, 111), seed=1)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=24)
SEEDS = range(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is surer of some tokens than of others, as its settings in `serve.toml` host a head for it."""
    folder = tmp_path_factory.mktemp("alone")
    model = make_tiny_model(folder / "target", vocab=300, logit_scale=0.1)
    head = make_tiny_head(folder / "head", model, "eagle")
    (folder / "serve.toml").write_text(
        "[engine]\ndtype = 'float32'\nnum_threads = 1\nnum_blocks = 64\n"
        f"[decode_worker.drafters.eagle]\nartifact = {json.dumps(str(head))}\n"
    )
    return model


@pytest.fixture(scope="module")
def alone(model: Path) -> HeadAlone:
    return HeadAlone.load(model, "eagle", model.parent / "serve.toml")


def matches_of_invariant_drafts(alone: HeadAlone, answer: list[int], seed: int) -> int:
    """Tokens of a known answer that invariant mode drafts right, each behind the true ones before it."""
    engine, known = alone.target.engine, iter(answer)
    table = engine.kv.open()
    try:
        token_ids = continue_prompt(
            engine, table, PROMPT.token_ids, lambda logits: next(known), len(answer), frozenset()
        )
        history = TokenHistory(PROMPT.token_ids, answer[:1])
        request = request_over(engine, table, history, SAMPLING, seed, "invariant")
        drafts = drafts_along(alone.drafter, request, token_ids)
        pairs = zip(answer[1:], drafts, strict=True)
        return sum(draft.token_ids == (token_id,) for token_id, draft in pairs)
    finally:
        engine.kv.close(table)


def test_drafts_of_shared_noise_are_right_as_often_as_the_measured_distributions_say(
    alone: HeadAlone,
) -> None:
    couplings, matches = [], 0
    for seed in SEEDS:
        answer, found = alone.answer(PROMPT, SAMPLING, seed)
        assert len(found) == len(answer) - 1
        couplings += found
        matches += matches_of_invariant_drafts(alone, answer, seed)
    mean = mean_coupling(couplings)
    assert 0.1 < mean.bound < mean.shared_noise < mean.best < 0.95, "distributions that say something"
    margin = 4 * math.sqrt(0.25 / len(couplings))
    assert matches / len(couplings) == pytest.approx(mean.shared_noise, abs=margin)


def test_an_answer_is_the_same_for_the_same_seed_and_leaves_nothing_behind(alone: HeadAlone) -> None:
    assert alone.answer(PROMPT, SAMPLING, 3) == alone.answer(PROMPT, SAMPLING, 3)
    assert alone.target.engine.kv.stats().used == 0
    alone.drafter.check()


def test_a_drafter_that_is_no_hosted_head_is_refused(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="ngram is no head"):
        HeadAlone.load(model, "ngram", model.parent / "serve.toml")
