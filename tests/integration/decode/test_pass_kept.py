"""Drafting ahead over two stages: what is kept is what plain decoding keeps, and drafters follow with their states."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.drafter_settings import DraftModelSettings, HeadSettings, NgramSettings, ScriptedSettings
from core.prefix_hash import extend_block_hashes
from core.records import SamplingParams
from core.tokenizer import Tokenizer
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.heads import load_head
from decode.drafters.ngram import NgramDrafter
from decode.drafters.pass_drafter import PassDrafter
from decode.drafters.protocol import Drafter
from decode.drafters.scripted import HiddenDrafter, Script
from decode.pass_step import PassStepper
from engine.engine import Engine
from engine.stage import Stage
from tests.integration.decode.conftest import prompt_of
from tests.support.loop_stand import LOOP_ENGINE, PREFIX_KEY, LoopStand, SplitLoop, split_engine
from tests.support.tiny_heads import make_tiny_head

SAMPLED = SamplingParams(temperature=12.0, top_p=0.95, max_tokens=40, seed=7)
SAMPLINGS = (
    SamplingParams(max_tokens=40, seed=7),
    SAMPLED,
    SamplingParams(max_tokens=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.5),
)


def held_planes(stand: LoopStand, token_ids: Sequence[int], last: Stage | None) -> list[Tensor]:
    """K, V and hidden planes of all full blocks of a sequence, which must be cached."""
    hashes = extend_block_hashes([], token_ids, LOOP_ENGINE.block_size, PREFIX_KEY)
    assert stand.kv.match(hashes) == len(hashes) > 1
    table = stand.kv.open(hashes)
    slots = stand.kv.slots(table, 0, table.num_tokens).long()
    assert stand.kv.hidden is not None
    keys, values = stand.kv.keys[:, slots], stand.kv.values[:, slots]
    if last is not None:
        keys = torch.cat([keys, last.kv.keys[:, slots]])
        values = torch.cat([values, last.kv.values[:, slots]])
    planes = [keys, values, stand.kv.hidden[:, slots].clone()]
    stand.kv.close(table)
    return planes


@pytest.mark.parametrize("wrong_every", [0, 1, 7, 12])
def test_what_is_kept_and_hashed_is_what_plain_decoding_leaves(
    plain_loop: LoopStand, split_loop: SplitLoop, wrong_every: int
) -> None:
    split_loop.drafter.wrong_every = wrong_every
    prompts = [prompt_of(37 + 16 * number, number) for number in range(3)]
    plain_loop.loop.drop_cached()
    known = [plain_loop.answer(prompt, SAMPLED, "none") for prompt in prompts]
    split_loop.learn(*known)
    for prompt in prompts:
        split_loop.stand.ask(prompt, SAMPLED, draft_length=1)
        split_loop.stand.turn()
        split_loop.stand.turn()
    split_loop.stand.run()
    assert split_loop.stand.kv.stats().cached == plain_loop.kv.stats().cached
    for prompt, asked in zip(prompts, known, strict=True):
        token_ids = [*prompt, *asked.ids[:-1]]
        ours = held_planes(split_loop.stand, token_ids, split_loop.last)
        theirs = held_planes(plain_loop, token_ids, None)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    guesses = split_loop.stepper.guesses
    assert (guesses.held > 0, guesses.failed > 0) == (wrong_every != 1, wrong_every != 0)


def real_drafters(tiny_model: Path, engine: Engine, tokenizer: Tokenizer, folder: Path) -> dict[str, Drafter]:
    """What `pass` may draft with."""
    artifact = make_tiny_head(folder / "eagle3", tiny_model, "eagle3")
    eagle = make_tiny_head(folder / "eagle", tiny_model, "eagle")
    return {
        "ngram": NgramDrafter(NgramSettings(min_match=1)),
        "draft_model": DraftModelDrafter.load(DraftModelSettings(model=str(tiny_model)), engine, tokenizer),
        "eagle3": load_head(
            "eagle3", HeadSettings(artifact=str(artifact), min_probability=0.0), engine, tokenizer
        ),
        "eagle": load_head(
            "eagle", HeadSettings(artifact=str(eagle), min_probability=0.0), engine, tokenizer
        ),
    }


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3", "eagle"])
@pytest.mark.parametrize("draft_length", [3, None])
def test_drafters_with_states_of_their_own_follow(
    tiny_model: Path,
    plain_loop: LoopStand,
    tokenizer: Tokenizer,
    tmp_path: Path,
    name: str,
    draft_length: int | None,
) -> None:
    prompts = [prompt_of(30 + 11 * number, number) for number in range(3)]
    known = [
        plain_loop.answer(prompt, sampling, "none")
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    with split_engine(tiny_model, LOOP_ENGINE) as (engine, _):
        drafter = PassDrafter(real_drafters(tiny_model, engine, tokenizer, tmp_path)[name])
        stand = LoopStand(engine, [drafter], tokenizer)
        answers = [
            stand.ask(prompt, sampling, draft_length=draft_length)
            for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
        ]
        stand.run()
        drafter.check()
        assert [answer.ids for answer in answers] == [asked.ids for asked in known]
        assert all(answer.report and answer.report.fallback_reason == "" for answer in answers)
        assert isinstance(stand.stepper, PassStepper)
        if draft_length is not None:
            assert stand.stepper.guesses.held + stand.stepper.guesses.failed > 5
        if name == "draft_model" and draft_length is not None:
            assert stand.stepper.guesses.held > 5, "it is the target itself"


def test_hidden_planes_are_those_of_the_accepted_path(
    tiny_model: Path, plain_loop: LoopStand, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = prompt_of(30)
    expected = plain_loop.answer(prompt, SAMPLED, "none")
    with split_engine(tiny_model, LOOP_ENGINE) as (engine, _):
        script = Script(tmp_path / "script.jsonl")
        drafter = HiddenDrafter(ScriptedSettings(script=str(tmp_path / "script.jsonl")), script, 256)
        drafter.name = "pass"
        stand = LoopStand(engine, [drafter], tokenizer)
        script.answer = lambda request: tuple(expected.ids)  # type: ignore[method-assign]
        answer = stand.answer(prompt, SAMPLED)
        assert answer.ids == expected.ids
        assert answer.report is not None
        assert answer.report.fallback_reason == ""
        assert answer.report.accepted_tokens > 10
