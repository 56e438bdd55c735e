"""Starting up shows what the largest step needs (CASES S08) and leaves nothing behind."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.settings import EngineSettings
from decode.pace import Pace
from decode.warm_up import warm_up
from engine.engine import Engine
from engine.step_batch import SequenceStep, StepResult
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize(("num_blocks", "largest"), [(64, 200), (8, 64)])
def test_the_largest_step_is_tried_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, largest: int
) -> None:
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=num_blocks)
    engine = Engine.load(make_tiny_model(tmp_path / "model"), settings)
    rows: list[int] = []
    real_step = engine.step

    def step(sequences: Sequence[SequenceStep]) -> StepResult:
        result = real_step(sequences)
        rows.append(result.logits.shape[0])
        return result

    monkeypatch.setattr(engine, "step", step)
    warm_up(engine, Pace(200), SystemClock(), 200)
    assert max(rows) == rows[-1] == largest
    engine.kv.check()
    stats = engine.kv.stats()
    assert (stats.used, stats.cached) == (0, 0)
