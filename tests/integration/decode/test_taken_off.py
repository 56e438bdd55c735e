"""A drafter that was taken off a request stays off it, whatever becomes of the request."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from core.records import SamplingParams
from core.settings import DecodeSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget
from engine.engine import Engine
from tests.integration.decode.conftest import prompt_of
from tests.support.loop_stand import LOOP_ENGINE, KnowingDrafter, LoopStand


class StallingDrafter(KnowingDrafter):
    """Takes longer than a drafter may, each time."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.asked: Counter[int] = Counter()
        self.stand: LoopStand | None = None

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """Nothing, late."""
        assert self.stand is not None
        self.asked.update(budget.request.key for budget in budgets)
        self.stand.clock.advance(6.0)
        return [Draft() for _ in budgets]


def test_a_drafter_that_stalled_is_not_asked_again_after_a_preemption(
    tiny_model: Path, tokenizer: Tokenizer
) -> None:
    engine = Engine.load(tiny_model, LOOP_ENGINE.model_copy(update={"num_blocks": 9}))
    slow = StallingDrafter()
    slow.stand = stand = LoopStand(engine, [slow], tokenizer, DecodeSettings(drafter_stall_s=5.0))
    sampling = SamplingParams(temperature=12.0, max_tokens=60, seed=3)
    asked = [stand.ask(prompt_of(40, number), sampling, "slow", 4) for number in range(3)]
    stand.run()
    assert all(one.ended and one.error is None for one in asked)
    assert stand.metrics.totals()["outrider.preemptions"] > 0
    assert slow.asked
    assert max(slow.asked.values()) == 1
