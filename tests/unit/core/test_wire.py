"""Records that travel from the router to a worker arrive as they were."""

import pytest

from core.records import EarlyStopping, SamplingParams
from core.wire import sampling_from_wire, sampling_to_wire
from outrider.v1 import common_pb2, decode_pb2


def across(params: SamplingParams) -> SamplingParams:
    request = decode_pb2.DecodeRequest(
        sampling=sampling_to_wire(params),
        bad_word_ids=[common_pb2.TokenIds(ids=ids) for ids in params.bad_word_ids],
        eos_token_ids=params.eos_token_ids,
    )
    return sampling_from_wire(decode_pb2.DecodeRequest.FromString(request.SerializeToString()))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_every_sampling_parameter_arrives(early_stopping: EarlyStopping) -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: -1.5}, bad_words=("x",), bad_word_ids=((1, 2), (3,)), max_tokens=7,
        min_tokens=2, stop=("end",), stop_token_ids=(4,), eos_token_ids=(0, 5), seed=2**53 - 1, logprobs=0, n=3,
        ignore_eos=True, beam_width=4, length_penalty=-0.5, early_stopping=early_stopping,
    )  # fmt: skip
    assert across(params) == params


def test_defaults_arrive_as_defaults() -> None:
    assert across(SamplingParams()) == SamplingParams()
    assert sampling_from_wire(decode_pb2.DecodeRequest()) == SamplingParams()
