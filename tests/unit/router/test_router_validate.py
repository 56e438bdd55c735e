"""Every field of a GenerateRequest: what is refused, by which name, and what passes (CASES B51)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidArgument
from core.settings import RouterSettings
from outrider.v1 import common_pb2, inference_pb2
from router.validate import check_request, fit_context
from router.views import CheckedRequest, Offer, ServedModel

MODEL = ServedModel("tiny", "r1", vocab_size=100, max_context=64)
OFFER = Offer(frozenset({"none", "ngram"}), max_draft_length=16)
SETTINGS = RouterSettings(
    max_prompt_bytes=1024, max_n=4, max_draft_length=32, max_tokens_limit=48, max_grammar_bytes=2048
)
Request = inference_pb2.GenerateRequest
Change = Callable[[Request], object]


def check(request: Request, offer: Offer = OFFER) -> CheckedRequest:
    return check_request(request, MODEL, offer, SETTINGS)


def changed(change: Change) -> Request:
    request = Request(text="hello")
    change(request)
    return request


def bias(token: int, value: float) -> Change:
    return lambda request: request.sampling.logit_bias.update({token: value})


def sampling(**values: object) -> Change:
    return lambda request: request.sampling.MergeFrom(common_pb2.SamplingParams(**values))  # type: ignore[arg-type]


def speculation(**values: object) -> Change:
    return lambda request: request.speculation.MergeFrom(common_pb2.SpeculationParams(**values))  # type: ignore[arg-type]


def beams(**values: object) -> Change:
    return sampling(beam_width=4, **values)


def both(first: Change, second: Change) -> Change:
    return lambda request: (first(request), second(request))


def token_ids(*ids: int) -> Change:
    return lambda request: request.token_ids.CopyFrom(common_pb2.TokenIds(ids=ids))


def chat(*turns: tuple[str, str]) -> Change:
    messages = [common_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return lambda request: request.chat.CopyFrom(common_pb2.Chat(messages=messages))


def resume(ids: list[int], **values: object) -> Change:
    def change(request: Request) -> None:
        request.resume_token_ids.ids.extend(ids)
        sampling(**values)(request)

    return change


BAD: list[tuple[str, Change]] = [
    ("prompt", lambda request: request.ClearField("text")),
    ("text", lambda request: setattr(request, "text", "")),
    ("text", lambda request: setattr(request, "text", "x" * 1025)),
    ("text", lambda request: setattr(request, "text", "é" * 600)),
    ("token_ids", token_ids()),
    ("token_ids[1]", token_ids(1, -1)),
    ("token_ids[0]", token_ids(100)),
    ("token_ids[2]", token_ids(1, 2, 2**31 - 1)),
    ("token_ids", token_ids(*[1] * 64)),
    ("token_ids", token_ids(*[1] * 300)),
    ("chat.messages", chat()),
    ("chat.messages", chat(*[("user", "x")] * 1025)),
    ("chat.messages[0].role", chat(("robot", "x"))),
    ("chat.messages[1].content", chat(("user", "x"), ("assistant", ""))),
    ("chat", chat(("user", "x" * 600), ("user", "x" * 600))),
    ("sampling.max_tokens", sampling(max_tokens=0)),
    ("sampling.max_tokens", sampling(max_tokens=-1)),
    ("sampling.max_tokens", sampling(max_tokens=49)),
    ("sampling.min_tokens", sampling(max_tokens=5, min_tokens=6)),
    ("sampling.min_tokens", sampling(min_tokens=-1)),
    *[("sampling.temperature", sampling(temperature=value)) for value in (math.nan, math.inf, -0.1, 101.0)],
    *[("sampling.top_p", sampling(top_p=value)) for value in (0.0, 1.1, -0.5, math.nan)],
    *[("sampling.min_p", sampling(min_p=value)) for value in (-0.1, 1.1, math.nan)],
    ("sampling.top_k", sampling(top_k=-1)),
    *[
        ("sampling.repetition_penalty", sampling(repetition_penalty=value))
        for value in (0.0, -1.0, 1e-42, 11.0, math.inf)
    ],
    *[("sampling.presence_penalty", sampling(presence_penalty=value)) for value in (-2.1, 2.1, math.nan)],
    *[("sampling.frequency_penalty", sampling(frequency_penalty=value)) for value in (-2.1, 2.1, math.inf)],
    ("sampling.logit_bias[100]", bias(100, 1.0)),
    ("sampling.logit_bias[-1]", bias(-1, 1.0)),
    *[("sampling.logit_bias[3]", bias(3, value)) for value in (-math.inf, math.nan, 101.0)],
    (
        "sampling.logit_bias",
        lambda request: request.sampling.logit_bias.update(dict.fromkeys(range(1025), 1.0)),
    ),
    ("sampling.stop", sampling(stop=["x"] * 17)),
    ("sampling.stop", sampling(stop=["x"] * 10**6)),
    ("sampling.stop[1]", sampling(stop=["x", ""])),
    ("sampling.stop[0]", sampling(stop=["x" * 257])),
    ("sampling.stop_token_ids[0]", sampling(stop_token_ids=[100])),
    ("sampling.stop_token_ids[1]", sampling(stop_token_ids=[1, -1])),
    ("sampling.stop_token_ids", sampling(stop_token_ids=[1] * 65)),
    ("sampling.bad_words", sampling(bad_words=["x"] * 65)),
    ("sampling.bad_words[0]", sampling(bad_words=[""])),
    ("sampling.seed", sampling(seed=2**53)),
    ("sampling.logprobs", sampling(logprobs=-1)),
    ("sampling.logprobs", sampling(logprobs=21)),
    *[("sampling.n", sampling(n=value)) for value in (0, -1, 5)],
    *[("sampling.beam_width", sampling(beam_width=value)) for value in (0, -1, 17)],
    *[("sampling.length_penalty", beams(length_penalty=value)) for value in (math.nan, -math.inf, 10.5)],
    ("sampling.early_stopping", beams(early_stopping=9)),
    ("sampling.length_penalty", sampling(length_penalty=1.0)),
    ("sampling.length_penalty", sampling(length_penalty=1.0, beam_width=1)),
    ("sampling.early_stopping", sampling(early_stopping=common_pb2.EARLY_STOPPING_FALSE)),
    *[("sampling.temperature", beams(temperature=value)) for value in (1e-3, 0.7)],
    ("sampling.top_k", beams(top_k=5)),
    ("sampling.top_p", beams(top_p=0.9)),
    ("sampling.min_p", beams(min_p=0.1)),
    ("sampling.seed", beams(seed=0)),
    ("sampling.n", beams(n=2)),
    ("sampling.grammar", beams(regex="a+")),
    ("resume_token_ids", resume([1], beam_width=2)),
    *[
        (f"speculation.{next(iter(values))}", both(beams(), speculation(**values)))
        for values in (
            {"drafter": "ngram"},
            {"draft_length": 0},
            {"draft_width": 1},
            {"verification": common_pb2.VERIFICATION_REJECTION},
        )
    ],
    *[
        ("sampling.grammar", sampling(**{kind: text}))
        for kind in ("json_schema", "regex", "ebnf")
        for text in ("", "x" * 2049, "é" * 1025)
    ],
    ("sampling.ignore_eos", sampling(regex="a+", ignore_eos=True)),
    ("resume_token_ids", resume([1], n=2, seed=1)),
    ("resume_token_ids", resume([1], temperature=0.8)),
    ("resume_token_ids", resume([1] * 8, max_tokens=8)),
    ("resume_token_ids[1]", resume([1, 100])),
    ("speculation.drafter", speculation(drafter="oracle")),
    *[
        ("speculation.draft_length", speculation(drafter="ngram", draft_length=value))
        for value in (-1, 17, 10**6)
    ],
    ("speculation.draft_length", speculation(draft_length=-1)),
    ("speculation.draft_length", speculation(drafter="none", draft_length=4)),
    *[("speculation.draft_width", speculation(draft_width=value)) for value in (0, -1, 9, 10**6)],
    ("speculation.draft_width", speculation(draft_width=2, verification=common_pb2.VERIFICATION_BLOCK)),
    ("speculation.verification", speculation(verification=common_pb2.VERIFICATION_TYPICAL)),
    ("speculation.verification", speculation(verification=17)),
    ("request_class", lambda request: setattr(request, "request_class", "poetry")),
    ("adapter", lambda request: setattr(request, "adapter", "lora-1")),
    ("cache_salt", lambda request: setattr(request, "cache_salt", "x" * 257)),
    ("model", lambda request: setattr(request, "model", "another")),
]


@pytest.mark.parametrize(
    ("field", "change"), BAD, ids=[f"{index}-{field}" for index, (field, _) in enumerate(BAD)]
)
def test_bad_input_is_refused_by_the_name_of_its_field(field: str, change: Change) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(changed(change))
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


GOOD: list[Change] = [
    lambda request: setattr(request, "text", "with a NUL \0 inside"),
    lambda request: setattr(request, "model", "tiny"),
    sampling(temperature=0.0),
    sampling(temperature=1e-3),
    sampling(top_p=1.0, top_k=0, min_p=1.0),
    sampling(seed=2**53 - 1),
    sampling(logprobs=0),
    sampling(stop=["\0", "x" * 256]),
    bias(99, -100.0),
    speculation(drafter="ngram", draft_length=0),
    speculation(drafter="ngram", draft_length=16, draft_width=8),
    speculation(drafter="none", draft_length=0),
    speculation(allow_approximate=True),
    speculation(allow_approximate=True, verification=common_pb2.VERIFICATION_TYPICAL),
    speculation(draft_width=8, verification=common_pb2.VERIFICATION_REJECTION),
    resume([1, 2], seed=3, temperature=0.8),
    resume([1, 2]),
    token_ids(0, 99),
    sampling(beam_width=1),
    sampling(beam_width=16, length_penalty=-10.0, early_stopping=common_pb2.EARLY_STOPPING_NEVER),
    beams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, n=1, logprobs=2, min_tokens=3, stop=["x"]),
    both(beams(), speculation(drafter="none", verification=common_pb2.VERIFICATION_INVARIANT)),
    both(beams(), speculation(drafter="auto")),
    sampling(regex="a" * 2048),
    sampling(ebnf='root ::= "a"', ignore_eos=False),
]


@pytest.mark.parametrize("change", GOOD)
def test_what_lies_on_the_border_is_taken(change: Change) -> None:
    check(changed(change))


def test_absent_fields_take_their_documented_defaults() -> None:
    checked = check(Request(text="hello"))
    assert checked.sampling.max_tokens == min(256, SETTINGS.max_tokens_limit)
    assert (checked.sampling.temperature, checked.sampling.top_p, checked.sampling.n) == (0.0, 1.0, 1)
    assert (checked.speculation.drafter, checked.speculation.verification) == ("auto", "invariant")
    assert checked.request_class is None
    assert checked.sampling.grammar is None


@pytest.mark.parametrize(
    ("spelling", "known"),
    [("summarization", "summarisation"), ("rag", "summarisation"), ("qa", "chat"), ("code", "code")],
)
def test_a_class_may_be_given_in_several_spellings(spelling: str, known: str) -> None:
    assert check(Request(text="x", request_class=spelling)).request_class == known


def test_block_verification_drafts_chains_by_default_and_rejection_what_the_drafter_likes() -> None:
    block = check(changed(speculation(verification=common_pb2.VERIFICATION_BLOCK)))
    assert (block.speculation.verification, block.speculation.draft_width) == ("block", 1)
    rejection = check(changed(speculation(verification=common_pb2.VERIFICATION_REJECTION)))
    assert rejection.speculation.draft_width is None


def test_what_a_search_is_asked_for_reaches_its_record() -> None:
    early = common_pb2.EARLY_STOPPING_TRUE
    searched = check(changed(beams(length_penalty=0.5, early_stopping=early))).sampling
    assert (searched.beam_width, searched.length_penalty, searched.early_stopping) == (4, 0.5, True)
    plain = check(Request(text="x")).sampling
    assert (plain.beam_width, plain.length_penalty, plain.early_stopping) == (1, 1.0, False)


def test_drafter_names_are_not_judged_while_no_worker_is_known() -> None:
    unknown = Offer(frozenset(), 0, known=False)
    assert (
        check(changed(speculation(drafter="oracle", draft_length=8)), unknown).speculation.drafter == "oracle"
    )


def test_the_default_max_tokens_is_cut_to_the_context_and_a_given_one_is_refused() -> None:
    assert fit_context(check(Request(text="x")), 60, MODEL, None) == 4
    with pytest.raises(InvalidArgument, match=r"sampling.max_tokens"):
        fit_context(check(changed(sampling(max_tokens=5))), 60, MODEL, None)
    assert fit_context(check(changed(sampling(max_tokens=4))), 60, MODEL, None) == 4


@pytest.mark.parametrize(("tokens", "pool"), [(0, None), (64, None), (33, 32)])
def test_a_prompt_that_cannot_be_held_is_refused_with_its_size(tokens: int, pool: int | None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fit_context(check(Request(text="x")), tokens, MODEL, pool)
    assert caught.value.field == "prompt"


def test_a_prompt_as_large_as_the_pool_passes() -> None:
    assert fit_context(check(Request(text="x")), 32, MODEL, 32) == 32


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5, 1.0])
integers = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 120)
any_sampling = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            numbers,
        ),
        "length_penalty": numbers,
        **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n", "logprobs", "beam_width"), integers),
        "early_stopping": st.integers(0, 5),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.lists(st.text(max_size=4), max_size=3),
        "bad_words": st.lists(st.text(max_size=4), max_size=3),
        "stop_token_ids": st.lists(integers, max_size=3),
        "logit_bias": st.dictionaries(integers, st.floats(width=32), max_size=3),
    },
)
any_speculation = st.fixed_dictionaries(
    {},
    optional={
        "drafter": st.sampled_from(["auto", "none", "ngram", "", "x"]),
        "draft_length": integers,
        "draft_width": integers,
        "verification": st.integers(0, 6),
        "allow_approximate": st.booleans(),
    },
)


@given(any_sampling, any_speculation, st.lists(integers, max_size=4))
def test_whatever_comes_is_refused_by_name_or_safe_for_a_worker(
    sampling_fields: dict[str, Any], speculation_fields: dict[str, Any], ids: list[int]
) -> None:
    request = Request(token_ids=common_pb2.TokenIds(ids=ids))
    request.sampling.CopyFrom(common_pb2.SamplingParams(**sampling_fields))
    request.speculation.CopyFrom(common_pb2.SpeculationParams(**speculation_fields))
    try:
        checked = check(request)
    except InvalidArgument as error:
        assert error.field
        return
    safe = checked.sampling
    assert 0 < safe.top_p <= 1
    assert 0 <= safe.temperature < math.inf
    assert 0 <= safe.min_tokens <= safe.max_tokens <= SETTINGS.max_tokens_limit
    assert 1 <= safe.beam_width <= SETTINGS.max_beam_width
    assert abs(safe.length_penalty) <= 10
    assert safe.beam_width == 1 or (safe.greedy and safe.n == 1)
    assert all(0 <= token < MODEL.vocab_size for token in (*ids, *safe.stop_token_ids, *safe.logit_bias))
    assert checked.speculation.verification != "typical" or checked.speculation.allow_approximate
    assert checked.speculation.draft_length is None or 0 <= checked.speculation.draft_length <= 16


def test_a_drafter_that_is_known_but_not_hosted_is_refused_with_the_setting_that_hosts_it() -> None:
    with pytest.raises(InvalidArgument, match=r"decode_worker\.drafters\.rest"):
        check(changed(speculation(drafter="rest")))
    with pytest.raises(InvalidArgument) as caught:
        check(changed(speculation(drafter="shipped")))
    assert "decode_worker" not in caught.value.message
