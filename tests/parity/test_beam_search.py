"""Our beam search over the engine's paged KV against transformers' `generate`, in float32."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from core.records import EarlyStopping, SamplingParams
from core.settings import EngineSettings
from decode.beam_group import BeamGroup
from decode.finisher import Finisher
from decode.sampling.history import TokenHistory
from engine.doctor import made_up_tokens
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.parity.test_transformers import save_random_llama
from tests.unit.decode.test_finisher import ByteText

VOCABULARY = 199
MAX_TOKENS = 20
EARLY: tuple[EarlyStopping, ...] = (False, True, "never")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    """The same random weights, ours and theirs."""
    directory = tmp_path_factory.mktemp("llama")
    theirs = save_random_llama(directory, {"initializer_range": 0.2})
    theirs.config.eos_token_id = None
    theirs.generation_config = GenerationConfig()
    engine = Engine.load(
        directory, EngineSettings(dtype="float32", num_blocks=96, block_size=4, num_threads=1)
    )
    return engine, theirs


def ours(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], float]:
    """Answer and score; nothing is left in the pool."""
    kv = engine.kv
    group = BeamGroup(sampling, TokenHistory(prompt), Finisher(sampling, sampling.max_tokens, ByteText()))
    table = kv.open()
    kv.reserve(table, len(prompt))
    logits = engine.step([SequenceStep(table, 0, prompt, logit_rows="last")]).logits
    kv.commit(table, len(prompt))
    group.start(table)
    assert group.advance(kv, logits) is None
    while group.best is None:
        group.reserve(kv)
        logits = engine.step(group.sequences()).logits
        group.commit(kv)
        assert group.advance(kv, logits) is None
        kv.check()
    assert kv.stats().used == 0
    return list(group.best.hypothesis.token_ids), group.best.score


def of_transformers(model: Any, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], float]:
    """The same asked of `generate`."""
    config = GenerationConfig(
        do_sample=False,
        num_beams=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.eos_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return answer.sequences[0, len(prompt) :].tolist(), float(answer.sequences_scores[0])


@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("beam_width", [2, 3, 5, 8])
def test_answers_and_scores_are_those_of_transformers(
    pair: tuple[Engine, Any], beam_width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    engine, theirs = pair
    lengths = set()
    for seed in range(3):
        prompt = made_up_tokens(7 + 3 * seed, VOCABULARY, seed=seed)
        free, _ = ours(engine, prompt, SamplingParams(beam_width=beam_width, max_tokens=MAX_TOKENS))
        for eos in ((), (free[5],), (free[2], free[9])):
            sampling = SamplingParams(
                beam_width=beam_width,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                max_tokens=MAX_TOKENS,
                eos_token_ids=eos,
            )
            expected_ids, expected_score = of_transformers(theirs, prompt, sampling)
            token_ids, score = ours(engine, prompt, sampling)
            assert token_ids == expected_ids, (seed, eos)
            assert score == pytest.approx(expected_score, abs=1e-4)
            lengths.add(len(token_ids))
    assert MAX_TOKENS in lengths
    assert length_penalty > 1.0 or len(lengths) > 1, "the end of sequence was never reached"
