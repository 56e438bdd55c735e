"""Answers that must follow a grammar: the text of plain decoding under it, with every drafter, and its end."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import InvalidArgument
from core.records import Grammar, SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from tests.integration.decode.conftest import VOCAB, prompt_of
from tests.integration.decode.test_exact_text import DRAFTERS, TEMPERATURE, record, seen
from tests.integration.decode.test_kv_use import preemptions, small_pool
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Anna", "Bob", "Bo"]},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 5,
        },
        "ok": {"type": "boolean"},
    },
    "required": ["name", "ages", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
EXPRESSION = 'root ::= term (("+" | "*") term){2,6} "="\nterm ::= [0-9]{1,3} | "(" [a-c]{1,4} ")"'
NESTED = 'root ::= "<" (item | root){1,3} ">"\nitem ::= [a-z]{2} | "."'


def is_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "ages", "ok"]
        and value["name"] in {"Ann", "Anna", "Bob", "Bo"}
        and 2 <= len(value["ages"]) <= 5
        and all(type(age) is int and 0 <= age <= 999 for age in value["ages"])
        and type(value["ok"]) is bool
    )


def is_expression(text: str) -> bool:
    term = r"([0-9]{1,3}|\([a-c]{1,4}\))"
    return re.fullmatch(rf"{term}([+*]{term}){{2,6}}=", text) is not None


def is_regex(text: str) -> bool:
    return re.fullmatch(r"([a-f]{3,5} ){3,6}\.", text) is not None


GRAMMARS: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "json_schema": (Grammar("json_schema", json.dumps(SCHEMA)), is_schema),
    "regex": (Grammar("regex", r"([a-f]{3,5} ){3,6}\."), is_regex),
    "ebnf": (Grammar("ebnf", EXPRESSION), is_expression),
}
BOUND = SamplingParams(max_tokens=96, seed=7, eos_token_ids=(0,), grammar=GRAMMARS["json_schema"][0])
LONG = replace(BOUND, temperature=TEMPERATURE, grammar=Grammar("ebnf", 'root ::= ([0-9]{3} [,;]){10} "."'))


def ended(answer: Answer) -> None:
    """By its own end, of which the ids tell and the text does not."""
    assert answer.reasons[0] == "FINISH_REASON_STOP"
    assert answer.ids[-1] == 0
    assert bytes(answer.ids[:-1]).decode() == answer.text[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8, TEMPERATURE])
@pytest.mark.parametrize(("grammar", "follows"), GRAMMARS.values(), ids=GRAMMARS.keys())
async def test_every_drafter_gives_the_plain_answer_and_it_follows_the_grammar(
    stand: DecodeStand, grammar: Grammar, follows: Callable[[str], bool], temperature: float
) -> None:
    sampling = replace(BOUND, grammar=grammar, temperature=temperature)
    prompts = [prompt_of(20 + 9 * number, number) for number in range(2)]
    plain = [await record(stand, prompt, sampling) for prompt in prompts]
    for answer in plain:
        ended(answer)
        assert follows(answer.text[0]), answer.text[0]
    mixed = await asyncio.gather(
        *(stand.ask(prompt, sampling, speculation) for prompt in prompts for speculation in DRAFTERS)
    )
    for number, answer in enumerate(mixed):
        speculation = DRAFTERS[number % len(DRAFTERS)]
        assert seen(answer) == seen(plain[number // len(DRAFTERS)]), speculation
        assert answer.report is not None
        assert answer.report.fallback_reason == "", speculation
    accepted = sum(answer.report.accepted_tokens for answer in mixed if answer.report)
    assert accepted > 0


async def test_answers_with_and_without_a_grammar_share_a_batch(stand: DecodeStand) -> None:
    prompt = prompt_of(30)
    sampled = replace(BOUND, temperature=TEMPERATURE, logprobs=2)
    asked = [replace(sampled, grammar=grammar) for grammar, _ in GRAMMARS.values()]
    asked += [replace(sampled, grammar=None, max_tokens=40), replace(sampled, seed=8), LONG]
    alone = [await record(stand, prompt, sampling) for sampling in asked]
    together = await asyncio.gather(
        *(
            stand.ask(prompt, sampling, DRAFTERS[(2 * number + offset) % len(DRAFTERS)])
            for offset in range(2)
            for number, sampling in enumerate(asked)
        )
    )
    for number, answer in enumerate(together):
        assert seen(answer) == seen(alone[number % len(asked)])


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
async def test_rejection_verification_follows_the_grammar_too(stand: DecodeStand, temperature: float) -> None:
    prompt = prompt_of(30)
    for (grammar, follows), seed in zip(GRAMMARS.values(), (1, 2, 3), strict=True):
        sampling = replace(BOUND, grammar=grammar, temperature=temperature, seed=seed)
        await record(stand, prompt, sampling)
        for drafter in ("draft_model", "ngram", "eagle3", "scripted-tree", "scripted-wrong"):
            speculation = SpeculationParams(drafter=drafter, draft_length=4, verification="rejection")
            answer = await stand.ask(prompt, sampling, speculation)
            ended(answer)
            assert follows(answer.text[0]), (drafter, answer.text[0])
            assert answer.report is not None
            assert answer.report.fallback_reason == ""


@pytest.mark.parametrize("drafter", ["none", "draft_model", "scripted-tree", "eagle2"])
async def test_an_answer_goes_on_from_any_token_of_it(stand: DecodeStand, drafter: str) -> None:
    prompt = prompt_of(30)
    sampling = replace(BOUND, temperature=TEMPERATURE)
    whole = await record(stand, prompt, sampling)
    for cut in range(1, len(whole.ids), 5):
        committed = whole.ids[:cut]
        answer = await stand.ask(
            prompt, sampling, SpeculationParams(drafter=drafter), committed={0: committed}
        )
        assert [*committed, *answer.ids] == whole.ids
        assert answer.reasons == whole.reasons


async def test_a_beginning_that_does_not_follow_the_grammar_is_refused(stand: DecodeStand) -> None:
    request = stand.request(prompt_of(20), BOUND, committed={0: list(b'{"nome"')})
    refused = await stand.answer(request)
    assert isinstance(refused.error, InvalidArgument)
    assert refused.error.field == "sampling.grammar"
    assert refused.token_ids == {}


async def test_preempted_answers_equal_those_that_ran_alone(
    tiny_model: Path, script: Path, all_drafters: DecodeSettings
) -> None:
    prompts = [prompt_of(30 + number, number) for number in range(6)]
    drafters = ("none", "ngram", "scripted-right", "draft_model", "scripted-tree", "eagle3")
    async with decode_stand(tiny_model, script, engine=small_pool(10), decode=all_drafters) as stand:
        alone = [await record(stand, prompt, LONG) for prompt in prompts]
        before = preemptions(stand)
        answers = await asyncio.gather(
            *(
                stand.ask(prompt, LONG, SpeculationParams(drafter=drafter))
                for prompt, drafter in zip(prompts, drafters, strict=True)
            )
        )
        assert preemptions(stand) > before
        for answer, expected in zip(answers, alone, strict=True):
            assert (answer.ids, answer.text) == (expected.ids, expected.text)
            ended(answer)
        await stand.idle()


async def test_several_choices_follow_the_grammar_each_by_itself(stand: DecodeStand) -> None:
    prompt = prompt_of(37)
    sampling = replace(LONG, n=3)
    plain = await record(stand, prompt, sampling)
    assert len({tuple(ids) for ids in plain.token_ids.values()}) == 3
    assert all(re.fullmatch(r"([0-9]{3}[,;]){10}\.", text) for text in plain.text.values())
    assert plain.token_ids[0] == (await stand.ask(prompt, LONG)).ids
    for speculation in DRAFTERS:
        assert seen(await stand.ask(prompt, sampling, speculation)) == seen(plain)


async def test_bias_bad_words_stop_strings_and_limits_work_beside_a_grammar(stand: DecodeStand) -> None:
    prompt = prompt_of(30)
    free = (await stand.ask(prompt, LONG)).text[0]
    banned = await record(stand, prompt, replace(LONG, bad_word_ids=((ord(";"),),)))
    assert ";" not in banned.text[0]
    ended(banned)
    wanted = await record(stand, prompt, replace(LONG, logit_bias={ord("7"): 1000.0}))
    assert wanted.text[0].count("7") > 25
    stopped = await record(stand, prompt, replace(LONG, stop=(free[9:11],)))
    assert stopped.text[0] == free[: free.index(free[9:11])]
    short = await record(stand, prompt, replace(LONG, max_tokens=7))
    assert (short.text[0], short.reasons[0]) == (free[:7], "FINISH_REASON_LENGTH")
    for sampling, plain in (
        (replace(LONG, bad_word_ids=((ord(";"),),)), banned),
        (replace(LONG, stop=(free[9:11],)), stopped),
    ):
        for drafter in ("scripted-right", "draft_model", "eagle2"):
            answer = await stand.ask(prompt, sampling, SpeculationParams(drafter=drafter, draft_length=6))
            assert seen(answer) == seen(plain)


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 60])
async def test_a_complete_answer_ends_even_before_min_tokens(stand: DecodeStand, min_tokens: int) -> None:
    prompt = prompt_of(30)
    sampling = replace(
        BOUND, temperature=TEMPERATURE, min_tokens=min_tokens, grammar=Grammar("regex", "no|nothing|yes!?")
    )
    plain = await record(stand, prompt, sampling)
    ended(plain)
    words = {"no", "nothing", "yes", "yes!"}
    possible = {word for word in words if len(word) >= min_tokens} or {"nothing", "yes!"}
    if min_tokens == 5:
        possible |= {"yes!"}
    assert plain.text[0] in possible
    for speculation in DRAFTERS:
        assert seen(await stand.ask(prompt, sampling, speculation)) == seen(plain)


async def test_log_probabilities_are_those_without_the_grammar(stand: DecodeStand) -> None:
    prompt = prompt_of(30)
    raw = await stand.ask(prompt, replace(BOUND, grammar=None, max_tokens=1, logprobs=VOCAB))
    bound = await stand.ask(prompt, replace(BOUND, logprobs=VOCAB))
    by_id = {entry.token_id: entry.logprob for entry in raw.logprobs[0][0].top}
    first = bound.logprobs[0][0]
    assert first.chosen.token_id == ord("{")
    assert first.chosen.logprob == by_id[ord("{")]
    assert {entry.token_id: entry.logprob for entry in first.top} == by_id


BAD = [
    (replace(BOUND, grammar=Grammar("json_schema", '{"type": "wish"}')), "sampling.grammar"),
    (replace(BOUND, grammar=Grammar("regex", "(")), "sampling.grammar"),
    (replace(BOUND, grammar=Grammar("ebnf", "root ::= lost")), "sampling.grammar"),
    (replace(BOUND, grammar=Grammar("regex", "")), "sampling.grammar"),
    (replace(BOUND, grammar=Grammar("regex", "x" * (2**17 + 1))), "sampling.grammar"),
    (replace(BOUND, grammar=Grammar("ebnf", "root ::= root")), "sampling.grammar"),
    (replace(BOUND, eos_token_ids=()), "sampling.grammar"),
    (replace(BOUND, ignore_eos=True), "sampling.ignore_eos"),
    (replace(BOUND, bad_word_ids=((ord("{"),),)), "sampling"),
]


@pytest.mark.parametrize(("sampling", "field"), BAD, ids=range(len(BAD)))
async def test_a_bad_grammar_ends_its_own_request_alone(
    stand: DecodeStand, sampling: SamplingParams, field: str
) -> None:
    healthy, refused = await asyncio.gather(
        stand.ask(prompt_of(20), BOUND), stand.answer(stand.request(prompt_of(20), sampling))
    )
    assert isinstance(refused.error, InvalidArgument)
    assert refused.error.field == field
    assert refused.token_ids == {}
    assert is_schema(healthy.text[0])
    assert stand.worker.faults() == {"failed_steps": 0.0, "failed_checks": 0.0}


async def test_a_grammar_that_calls_itself_is_followed(stand: DecodeStand) -> None:
    sampling = replace(BOUND, temperature=TEMPERATURE, grammar=Grammar("ebnf", NESTED), max_tokens=60)
    for seed in range(4):
        prompt = prompt_of(25, seed)
        plain = await record(stand, prompt, replace(sampling, seed=seed))
        text = plain.text[0]
        assert re.fullmatch(r"[<>.a-z]+", text)
        assert plain.reasons[0] == "FINISH_REASON_LENGTH" or text.count("<") == text.count(">")
        for speculation in DRAFTERS[:6]:
            assert seen(await stand.ask(prompt, replace(sampling, seed=seed), speculation)) == seen(plain)
