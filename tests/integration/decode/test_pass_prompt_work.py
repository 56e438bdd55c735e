"""A drafter that fails in its own prompt work while a burst is on its way costs nobody the answer."""

import pytest

from core.records import SamplingParams
from tests.integration.decode.conftest import prompt_of
from tests.support.loop_stand import LoopStand, SplitLoop

SAMPLED = SamplingParams(temperature=12.0, top_p=0.95, max_tokens=40, seed=7)


@pytest.mark.parametrize("raises", [True, False])
def test_prompt_work_that_raises_or_stalls_costs_nobody_the_answer(
    plain_loop: LoopStand, split_loop: SplitLoop, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    prompts = [prompt_of(30), prompt_of(41, 3)]
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    split_loop.learn(*known)
    stand = split_loop.stand
    calls = 0

    def prefill(max_rows: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= 3:
            if raises:
                raise RuntimeError("out of memory")
            stand.clock.advance(6.0)
        return 1

    monkeypatch.setattr(split_loop.drafter, "prefill", prefill)
    other = stand.ask(prompts[1], SAMPLED, "none")
    asked = stand.ask(prompts[0], SAMPLED)
    stand.run()
    assert calls >= 3
    assert (asked.error, other.error) == (None, None)
    assert [asked.ids, other.ids] == [one.ids for one in known]
