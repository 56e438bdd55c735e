"""What a step answers, what it refuses, and that a refused step touches nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.block_table import BlockTable
from engine.doctor import made_up_tokens
from engine.engine import Engine
from engine.step_batch import SequenceStep
from engine.step_rows import StepRefused

Change = Callable[[Engine, BlockTable], SequenceStep]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from tests.support.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("step"))
    return Engine.load(
        model,
        EngineSettings(dtype="float32", num_blocks=32, num_threads=1, max_context=64, hidden_layers=(1,)),
    )


@pytest.fixture
def table(engine: Engine) -> BlockTable:
    """Ten committed tokens and room for six more."""
    table = engine.kv.open()
    engine.kv.reserve(table, 16)
    engine.step([SequenceStep(table, 0, made_up_tokens(10, 256, seed=1), logit_rows="none")])
    engine.kv.commit(table, 10)
    engine.kv.reserve(table, 16)
    return table


def snapshot(engine: Engine) -> list[Tensor]:
    assert engine.kv.hidden is not None
    return [plane.clone() for plane in (engine.kv.keys, engine.kv.values, engine.kv.hidden)]


REFUSED: dict[str, tuple[str, Change]] = {
    "more rows than slots": ("slots", lambda engine, table: SequenceStep(table, 10, [1] * 7)),
    "a hole before the rows": ("committed", lambda engine, table: SequenceStep(table, 11, [1])),
    "committed tokens overwritten": ("committed", lambda engine, table: SequenceStep(table, 9, [1])),
    "no rows": ("no rows", lambda engine, table: SequenceStep(table, 10, [])),
    "a token beyond the vocabulary": ("token id", lambda engine, table: SequenceStep(table, 10, [256])),
    "a negative token": ("token id", lambda engine, table: SequenceStep(table, 10, [-1])),
    "a parent behind its row": ("parent", lambda engine, table: SequenceStep(table, 10, [1, 2], [0, 1])),
    "too few parents": ("parents", lambda engine, table: SequenceStep(table, 10, [1, 2], [0])),
    "only auxiliary rows": ("auxiliary", lambda engine, table: SequenceStep(table, 10, [1], num_auxiliary=1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_step_says_why_and_touches_nothing(engine: Engine, table: BlockTable, name: str) -> None:
    reason, change = REFUSED[name]
    other = engine.kv.open()
    engine.kv.reserve(other, 4)
    before = snapshot(engine)
    with pytest.raises(StepRefused, match=reason):
        engine.step([SequenceStep(other, 0, [1, 2]), change(engine, table)])
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))
    engine.kv.close(other)
    engine.kv.close(table)


def test_a_step_beyond_the_context_is_refused(engine: Engine) -> None:
    table = engine.kv.open()
    engine.kv.reserve(table, 80)
    engine.step([SequenceStep(table, 0, [1] * 64, logit_rows="none")])
    engine.kv.commit(table, 64)
    engine.kv.reserve(table, 65)
    with pytest.raises(StepRefused, match="context of 64"):
        engine.step([SequenceStep(table, 64, [1])])
    engine.kv.close(table)


def test_a_wide_tree_may_have_more_rows_than_the_context_has_room(engine: Engine) -> None:
    table = engine.kv.open()
    engine.kv.reserve(table, 80)
    engine.step([SequenceStep(table, 0, [1] * 62, logit_rows="none")])
    engine.kv.commit(table, 62)
    engine.kv.reserve(table, 66)
    logits = engine.step([SequenceStep(table, 62, [1, 2, 3, 4], [0, 0, 0, 0])]).logits
    assert logits.shape == (4, 256)
    engine.kv.close(table)


def test_a_closed_table_is_refused(engine: Engine, table: BlockTable) -> None:
    engine.kv.close(table)
    with pytest.raises(StepRefused, match="closed"):
        engine.step([SequenceStep(table, 0, [1])])


def test_one_table_twice_is_refused(engine: Engine, table: BlockTable) -> None:
    with pytest.raises(StepRefused, match="share one table"):
        engine.step([SequenceStep(table, 10, [1]), SequenceStep(table, 10, [2])])
    engine.kv.close(table)


def test_logits_come_for_the_wanted_rows_only(engine: Engine, table: BlockTable) -> None:
    whole = engine.step([SequenceStep(table, 10, [5, 6, 7])])
    last = engine.step([SequenceStep(table, 10, [5, 6, 7], logit_rows="last")])
    none = engine.step([SequenceStep(table, 10, [5, 6, 7], logit_rows="none")])
    assert whole.logits.shape == (3, 256)
    assert torch.equal(last.logits, whole.logits[2:])
    assert none.logits.shape == (0, 256)
    engine.kv.close(table)


def test_logits_rows_of_mixed_sequences_are_found_by_their_start(engine: Engine, table: BlockTable) -> None:
    other = engine.kv.open()
    engine.kv.reserve(other, 4)
    steps = [
        SequenceStep(other, 0, [9, 8], logit_rows="last"),
        SequenceStep(table, 10, [5, 6, 7], logit_rows="all"),
    ]
    together = engine.step(steps)
    assert together.logits_start == (0, 1)
    assert torch.equal(together.logits[:1], engine.step(steps[:1]).logits)
    assert torch.equal(together.logits[1:], engine.step(steps[1:]).logits)
    engine.kv.close(other)
    engine.kv.close(table)


@pytest.mark.parametrize("parents", [None, [0, 0, 0, 1, 1, 2]], ids=["chain", "tree"])
def test_rows_grown_level_by_level_are_those_of_one_step(
    engine: Engine, table: BlockTable, parents: list[int] | None
) -> None:
    token_ids = [5, 6, 7, 8, 9, 50]
    at_once = engine.step([SequenceStep(table, 10, token_ids, parents)]).logits
    grown = []
    for written, rows in ((0, 1), (1, 3), (3, 6)):
        up_to = None if parents is None else parents[:rows]
        step = SequenceStep(table, 10, token_ids[:rows], up_to, num_written=written)
        grown.append(engine.step([step]).logits)
    assert torch.equal(torch.cat(grown), at_once)
    engine.kv.close(table)


def test_a_step_whose_rows_are_all_written_is_refused(engine: Engine, table: BlockTable) -> None:
    with pytest.raises(StepRefused, match="none would be evaluated"):
        engine.step([SequenceStep(table, 10, [5, 6], num_written=2)])
    engine.kv.close(table)


def test_auxiliary_rows_do_not_change_the_others(engine: Engine, table: BlockTable) -> None:
    plain = engine.step([SequenceStep(table, 10, [5, 6, 7])])
    beside = engine.step([SequenceStep(table, 10, [5, 6, 7, 50, 51], [0, 0, 1, 0, 3], num_auxiliary=2)])
    assert torch.equal(beside.logits[:3], plain.logits)
    engine.kv.close(table)


def test_the_last_hidden_rows_give_the_logits(engine: Engine, table: BlockTable) -> None:
    result = engine.step([SequenceStep(table, 10, [5, 6, 7])], want_last_hidden=True)
    assert result.last_hidden is not None
    assert result.last_hidden.shape == (3, 64)
    again = result.last_hidden.float() @ engine.weights.embedding.float().T
    assert torch.allclose(again, result.logits, atol=1e-4)
    engine.kv.close(table)


def test_an_early_exit_is_the_model_cut_short(tmp_path: Path) -> None:
    from tests.support.tiny_model import make_tiny_model

    whole = Engine.load(
        make_tiny_model(tmp_path / "m"), EngineSettings(dtype="float32", num_blocks=16, num_threads=1)
    )
    table = whole.kv.open()
    whole.kv.reserve(table, 8)
    full = whole.step([SequenceStep(table, 0, [1, 2, 3])]).logits
    assert torch.equal(whole.step([SequenceStep(table, 0, [1, 2, 3])], exit_layer=3).logits, full)
    early = whole.step([SequenceStep(table, 0, [1, 2, 3])], exit_layer=2)
    assert not torch.equal(early.logits, full)
    with pytest.raises(ValueError, match="exit_layer"):
        whole.step([SequenceStep(table, 0, [1])], exit_layer=4)


def test_settings_that_do_not_fit_the_model_are_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"engine\.hidden_layers"):
        Engine.load(tiny_model, EngineSettings(hidden_layers=(3,)))
    with pytest.raises(InvalidArgument, match=r"engine\.max_context"):
        Engine.load(tiny_model, EngineSettings(max_context=4096))


def test_the_numerics_class_names_what_decides_the_bits(tiny_model: Path) -> None:
    first = Engine.load(tiny_model, EngineSettings(num_blocks=8, num_threads=1)).numerics
    same = Engine.load(tiny_model, EngineSettings(num_blocks=16, num_threads=1)).numerics
    other = Engine.load(tiny_model, EngineSettings(num_blocks=8, num_threads=1, attention="torch")).numerics
    wide = Engine.load(tiny_model, EngineSettings(num_blocks=8, num_threads=1, dtype="float32")).numerics
    assert first.digest() == same.digest()
    assert len({first.digest(), other.digest(), wide.digest()}) == 3


def test_warm_up_leaves_no_blocks_taken(engine: Engine) -> None:
    before = engine.kv.stats()
    engine.warm_up()
    assert engine.kv.stats() == before
