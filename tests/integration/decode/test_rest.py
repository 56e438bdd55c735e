"""Retrieval changes how fast an answer comes, never which one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from core.drafter_settings import DraftersSettings, RestSettings
from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from core.tokenizer import Tokenizer
from decode.drafters.corpus import CorpusWriter
from decode.drafters.vocabulary import vocabulary_digest
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

LENGTHS = (9, 20, 33, 41)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
SPECULATIONS = (
    SpeculationParams(drafter="rest"),
    SpeculationParams(drafter="rest", draft_length=5),
    SpeculationParams(drafter="rest", draft_length=4, draft_width=3),
)


async def answers(
    stand: DecodeStand, sampling: SamplingParams, speculation: SpeculationParams
) -> list[Answer]:
    return await asyncio.gather(*(stand.ask(prompt_of(length), sampling, speculation) for length in LENGTHS))


@pytest.fixture
async def corpus(tiny_model: Path, script: Path, tmp_path: Path) -> Path:
    """What half of the prompts are answered with, so that some drafts are right and some are wrong."""
    async with decode_stand(tiny_model, script) as stand:
        right = await answers(stand, GREEDY, SpeculationParams(drafter="none"))
        sampled = await answers(stand, SAMPLED, SpeculationParams(drafter="none"))
    tokenizer = Tokenizer.from_directory(tiny_model)
    digest = vocabulary_digest(tokenizer)
    with CorpusWriter(tmp_path / "corpus", digest, tokenizer.vocab_size, lambda line: None) as writer:
        for answer, other in zip(right[:2], sampled[:2], strict=True):
            writer.add([*answer.ids, *other.ids])
        for length in LENGTHS:
            writer.add(prompt_of(length, seed=5))
        writer.close()
    return tmp_path / "corpus"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_text_is_that_of_plain_decoding(
    tiny_model: Path, script: Path, corpus: Path, sampling: SamplingParams
) -> None:
    drafters = DraftersSettings(rest=RestSettings(corpus=str(corpus), min_match=1))
    async with decode_stand(tiny_model, script, decode=DecodeSettings(drafters=drafters)) as stand:
        plain = await answers(stand, sampling, SpeculationParams(drafter="none"))
        accepted = offered = 0
        for speculation in SPECULATIONS:
            drafted = await answers(stand, sampling, speculation)
            assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
            assert [answer.text for answer in drafted] == [answer.text for answer in plain]
            for answer in drafted:
                assert answer.report is not None
                assert (answer.report.drafter, answer.report.fallback_reason) == ("rest", "")
                accepted += answer.report.accepted_tokens
                offered += answer.report.proposed_nodes
        assert 0 < accepted < offered
        await stand.idle()


async def test_a_deployment_without_a_corpus_says_which_drafters_it_has(stand: DecodeStand) -> None:
    answer = await stand.answer(stand.request(prompt_of(9), GREEDY, SPECULATIONS[0]))
    assert answer.error is not None
    assert "'rest' is not hosted here" in answer.error.message


async def test_rejection_verifies_trees(tiny_model: Path, script: Path, corpus: Path) -> None:
    drafters = DraftersSettings(rest=RestSettings(corpus=str(corpus), min_match=1))
    async with decode_stand(tiny_model, script, decode=DecodeSettings(drafters=drafters)) as stand:
        speculation = replace(SPECULATIONS[2], verification="rejection")
        wider = 0
        for answer in await answers(stand, SAMPLED, speculation):
            assert len(answer.ids) == SAMPLED.max_tokens
            assert answer.report is not None
            wider += answer.report.proposed_nodes - answer.report.draft_length_sum
        assert wider > 0
        await stand.idle()
