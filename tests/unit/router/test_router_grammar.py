"""What the router finds out about a grammar, once, and what a class says of thinking."""

import asyncio

import pytest

from core import grammar as core_grammar
from core.errors import InvalidArgument
from core.records import Grammar, SpeculationParams, ThinkingPace
from core.settings import ClassPolicy
from core.wire import thinking_from_wire, thinking_to_wire
from outrider.v1 import decode_pb2
from router.grammar import GrammarGate
from router.policy import choose_drafting, parse_policies

HOSTED = frozenset({"none", "ngram"})


async def test_good_grammars_pass_and_bad_ones_are_refused_each_time() -> None:
    gate = GrammarGate(timeout_s=20.0)
    await gate.check(None)
    for _ in range(2):
        await gate.check(Grammar("regex", "a+"))
        with pytest.raises(InvalidArgument) as caught:
            await gate.check(Grammar("regex", "("))
        assert caught.value.field == "sampling.grammar"
        assert caught.value.message.count("sampling.grammar") == 1
    gate.close()


async def test_what_takes_too_long_is_refused_and_not_held_against_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = asyncio.Event()
    gate = GrammarGate(timeout_s=0.05)
    loop = asyncio.get_running_loop()

    def slow(grammar: Grammar) -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    monkeypatch.setattr("router.grammar.check_grammar", slow)
    with pytest.raises(InvalidArgument, match=r"0\.05 s"):
        await gate.check(Grammar("regex", "a"))
    release.set()
    monkeypatch.setattr("router.grammar.check_grammar", core_grammar.check_grammar)
    roomy = GrammarGate(timeout_s=20.0)
    await roomy.check(Grammar("regex", "a"))
    roomy.close()
    gate.close()


async def test_the_event_loop_turns_while_a_grammar_is_compiled() -> None:
    gate = GrammarGate(timeout_s=20.0)
    text = "|".join(f"{number:05d}" for number in range(9000))
    task = asyncio.create_task(gate.check(Grammar("regex", text)))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 3
    await asyncio.gather(task, return_exceptions=True)
    gate.close()


def test_thinking_has_a_length_of_its_own_for_what_the_controller_moves() -> None:
    policy = ClassPolicy(draft_length=4, thinking_draft_length=12)
    plan = choose_drafting(SpeculationParams(), policy, HOSTED, 16)
    assert plan.thinking == ThinkingPace(12, "<think>", "</think>")
    assert choose_drafting(SpeculationParams(drafter="ngram"), policy, HOSTED, 16).thinking == plan.thinking
    assert choose_drafting(SpeculationParams(), policy, HOSTED, 8).thinking == ThinkingPace(
        8, "<think>", "</think>"
    )
    assert choose_drafting(SpeculationParams(draft_length=4), policy, HOSTED, 16).thinking is None
    assert choose_drafting(SpeculationParams(drafter="none"), policy, HOSTED, 16).thinking is None
    assert choose_drafting(SpeculationParams(), ClassPolicy(), HOSTED, 16).thinking is None


def test_a_policy_file_names_length_and_markers() -> None:
    text = '[class.reasoning]\nthinking_draft_length = 9\nthinking_markers = ["[T]", "[/T]"]\n'
    policy = parse_policies(text)["reasoning"]
    assert (policy.thinking_draft_length, policy.thinking_markers) == (9, ("[T]", "[/T]"))
    for bad in ('thinking_markers = ["", "x"]', 'thinking_markers = ["x"]', "thinking_draft_length = -1"):
        with pytest.raises(InvalidArgument):
            parse_policies(f"[class.reasoning]\n{bad}\n")


def test_the_pace_of_thinking_survives_the_wire() -> None:
    pace = ThinkingPace(9, "<think>", "</think>")
    request = decode_pb2.DecodeRequest(thinking=thinking_to_wire(pace))
    assert thinking_from_wire(request) == pace
    assert thinking_from_wire(decode_pb2.DecodeRequest()) is None
