"""Two stages and their neighbours: who gives way lets others in, and what fails is the affair of whoever failed."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import NgramSettings
from core.errors import InvalidArgument
from core.records import SamplingParams
from core.tokenizer import Tokenizer
from decode.drafters.ngram import NgramDrafter
from engine.engine import Engine
from tests.integration.decode.conftest import VOCAB, prompt_of
from tests.support.loop_stand import LOOP_ENGINE, KnowingDrafter, LoopStand, SplitLoop, split_engine

SAMPLED = SamplingParams(temperature=12.0, top_p=0.95, max_tokens=40, seed=7)


def test_blocks_of_the_only_running_answer_that_gives_way_let_another_one_in(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer
) -> None:
    prompts = [prompt_of(30, 1), prompt_of(45, 2), prompt_of(40, 3)]
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    with split_engine(tiny_model, LOOP_ENGINE.model_copy(update={"num_blocks": 8})) as (engine, _):
        stand = LoopStand(engine, [KnowingDrafter()], tokenizer)
        behind = stand.ask(prompts[0], SAMPLED, "none")
        while len(behind.ids) < 30:
            assert stand.turn()
        behind.reader.blocked = True
        grows = stand.ask(prompts[1], SAMPLED, "none")
        while not grows.ids:
            assert stand.turn()
        waits = stand.ask(prompts[2], replace(SAMPLED, max_tokens=5), "none")
        while stand.turn():
            pass
        assert stand.metrics.totals()["outrider.preemptions"] == 1
        assert waits.ids == known[2].ids[:5]
        behind.reader.blocked = False
        stand.run()
        assert [behind.ids, grows.ids] == [asked.ids for asked in known[:2]]


@pytest.mark.parametrize("name", ["ngram", "pass"])
@pytest.mark.parametrize("split", [False, True])
def test_a_request_whose_choice_fails_costs_no_neighbour_its_drafter(
    tiny_model: Path,
    plain_loop: LoopStand,
    split_loop: SplitLoop,
    tokenizer: Tokenizer,
    name: str,
    split: bool,
) -> None:
    prompts, pair = [prompt_of(30, 1), prompt_of(40, 2)], replace(SAMPLED, n=2)
    steady, whole = (
        plain_loop.answer(prompts[0], SAMPLED, "none"),
        plain_loop.answer(prompts[1], pair, "none"),
    )
    first, second = whole.token_ids[0], whole.token_ids[1]
    last = next(token_id for token_id in second[8:] if token_id not in first and second.count(token_id) == 1)
    nothing_behind_it = replace(pair, bad_word_ids=tuple((last, token_id) for token_id in range(VOCAB)))
    stand = split_loop.stand
    if not split:
        ours = NgramDrafter(NgramSettings(min_match=1))
        named = NgramDrafter(NgramSettings(min_match=1))
        named.name = "pass"
        stand = LoopStand(Engine.load(tiny_model, LOOP_ENGINE), [ours, named], tokenizer)
    neighbour = stand.ask(prompts[0], SAMPLED, name)
    failing = stand.ask(prompts[1], nothing_behind_it, name)
    stand.run()
    assert isinstance(failing.error, InvalidArgument)
    assert failing.token_ids[1] == second[: second.index(last) + 1]
    assert failing.token_ids[0] == first[: len(failing.token_ids[0])]
    assert (neighbour.ids, neighbour.error) == (steady.ids, None)
    assert neighbour.report is not None
    assert neighbour.report.fallback_reason == ""


def test_a_drafter_without_drafts_is_known_as_one_beside_those_that_are_ahead(
    plain_loop: LoopStand, split_loop: SplitLoop
) -> None:
    prompts, long = [prompt_of(30, 1), prompt_of(40, 2)], replace(SAMPLED, max_tokens=100)
    known = [plain_loop.answer(prompt, long, "none") for prompt in prompts]
    split_loop.learn(known[0])
    ahead = split_loop.stand.ask(prompts[0], long)
    silent = split_loop.stand.ask(prompts[1], long, "other", draft_length=None)
    while not ahead.ended:
        split_loop.stand.turn()
    assert split_loop.stepper.guesses.held > 10
    assert 4 < len(silent.ids) < 50
    kinds = split_loop.stepper._drafting._pace._controller._kinds
    assert kinds["other", "chat", 1].offered.value < 0.7
    split_loop.stand.run()
    assert [ahead.ids, silent.ids] == [asked.ids for asked in known]
