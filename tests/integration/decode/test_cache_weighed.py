"""Earlier answers to the same request, seed included, do not move the distribution where only that is promised."""

from collections import Counter
from pathlib import Path

import pytest

from core.drafter_settings import CacheSettings
from core.records import SamplingParams, VerificationMode
from core.tokenizer import Tokenizer
from decode.drafters.cache import CacheDrafter
from engine.engine import Engine
from tests.support.loop_stand import LOOP_ENGINE, LoopStand

SEEDS = 200
TWO_TOKENS = {7: 2000.0, 9: 1950.0}
"""All that can be drawn."""


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_same_seed_asked_again_follows_the_target_as_well(
    tiny_model: Path, tokenizer: Tokenizer, verification: VerificationMode
) -> None:
    engine = Engine.load(tiny_model, LOOP_ENGINE)
    cache = CacheDrafter(CacheSettings(min_answer_tokens=1, min_match=2), engine.config.vocab_size)
    stand = LoopStand(engine, [cache], tokenizer)
    drawn: dict[str, Counter[int]] = {name: Counter() for name in ("plain", "first", "second")}
    for seed in range(SEEDS):
        sampling = SamplingParams(max_tokens=6, seed=seed, temperature=50.0, logit_bias=TWO_TOKENS)
        for name, counts in drawn.items():
            drafter, length = ("none", None) if name == "plain" else ("cache", 4)
            asked = stand.ask([1 + seed, 2, 3, 4], sampling, drafter, length, verification=verification)
            stand.run()
            counts.update(asked.ids[1:])
    assert asked.report
    assert asked.report.drafter == "cache"
    assert asked.report.proposed_nodes > 0
    shares = {name: counts[9] / counts.total() for name, counts in drawn.items()}
    assert 0.1 < shares["plain"] < 0.4
    assert shares["first"] == pytest.approx(shares["plain"], abs=0.07)
    assert shares["second"] == pytest.approx(shares["plain"], abs=0.07), "a third where both take one noise"
