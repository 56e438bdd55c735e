"""What the router fixes for a request: seed, tokens of prompt and bad words; what it keeps of an answer."""

import asyncio
import hashlib

import pytest

from core.errors import Cancelled, InvalidArgument
from core.records import SEED_LIMIT, SpeculationReport
from core.wire import report_to_wire
from outrider.v1 import common_pb2, decode_pb2
from router.answer import AnswerState
from router.idempotency import LiveCalls, seed_of
from router.metadata import IDEMPOTENCY_KEY, TENANT, caller_from_metadata
from router.tokenise import TokenisingPool
from router.views import Caller, ChatTurn, PromptInput
from tests.support.router_stand import ByteTokenizer


def test_the_clients_seed_wins_then_the_keys_then_chance() -> None:
    keyed = Caller(tenant="acme", idempotency_key="k")
    assert seed_of(keyed, 5) == 5
    assert seed_of(keyed, None) == seed_of(keyed, None)
    drawn = {seed_of(Caller(), None) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < SEED_LIMIT for seed in drawn)


def test_the_keys_seed_is_the_first_53_bits_of_the_digest_of_tenant_and_key() -> None:
    joined = (4).to_bytes(8, "big") + b"acme" + (1).to_bytes(8, "big") + b"k"
    bits = "".join(format(byte, "08b") for byte in hashlib.sha256(joined).digest())
    assert seed_of(Caller(tenant="acme", idempotency_key="k"), None) == int(bits[:53], 2)


def test_tenant_and_key_are_not_confused_by_where_one_ends() -> None:
    assert seed_of(Caller("ab", "c"), None) != seed_of(Caller("a", "bc"), None)


async def test_a_call_that_is_cancelled_by_its_client_is_not_taken_for_superseded() -> None:
    live = LiveCalls()
    caller = Caller(idempotency_key="k")

    async def serve() -> None:
        with live.running(caller, b"body"):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    older = asyncio.create_task(serve())
    await asyncio.sleep(0)
    newer = asyncio.create_task(serve())
    with pytest.raises(Cancelled, match="superseded"):
        await older
    with pytest.raises(InvalidArgument), live.running(caller, b"another body"):
        pass
    newer.cancel()
    await asyncio.gather(newer, return_exceptions=True)
    assert len(live) == 0


@pytest.mark.parametrize(
    ("name", "value"), [(TENANT, "t" * 129), (IDEMPOTENCY_KEY, ""), (IDEMPOTENCY_KEY, "k" * 257)]
)
def test_metadata_beyond_its_limits_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        caller_from_metadata(((name, value),), None)
    assert caught.value.field == name


async def test_prompts_become_ids_as_text_chat_or_ids() -> None:
    pool = TokenisingPool(ByteTokenizer())
    assert await pool.prompt_ids(PromptInput(text="ab")) == (97, 98)
    assert await pool.prompt_ids(PromptInput(token_ids=(1, 2))) == (1, 2)
    turns = (ChatTurn("system", "be brief"), ChatTurn("user", "hi"))
    chat = await pool.prompt_ids(PromptInput(chat=turns))
    assert bytes(chat).decode() == "<system>be brief\n<user>hi\n<assistant>"
    assert await pool.classified_text(PromptInput(chat=turns)) == "hi"
    assert await pool.classified_text(PromptInput(token_ids=(104, 105))) == "hi"
    pool.close()


async def test_bad_words_are_banned_with_and_without_a_space_before_them() -> None:
    pool = TokenisingPool(ByteTokenizer())
    assert await pool.bad_word_ids(["no", " no"]) == ((110, 111), (32, 110, 111))
    assert await pool.bad_word_ids([]) == ()
    pool.close()


def _delta(
    ids: list[int], report: SpeculationReport, index: int = 0, last: bool = False
) -> decode_pb2.DecodeDelta:
    delta = decode_pb2.DecodeDelta(index=index, token_ids=ids, report=report_to_wire(report))
    if last:
        delta.finish.CopyFrom(common_pb2.ChoiceFinish(index=index, reason=common_pb2.FINISH_REASON_STOP))
    return delta


def test_reports_of_attempts_add_up_and_each_attempt_counts_once() -> None:
    state = AnswerState(1, (9,), "code")
    state.begin_attempt("")
    state.take(_delta([1, 2], SpeculationReport("ngram", steps=1, step_tokens=2, position_offered=(1, 1))))
    state.take(_delta([3], SpeculationReport("ngram", steps=2, step_tokens=3, position_offered=(2, 1))))
    assert [list(entry.token_ids) for entry in state.committed()] == [[9, 1, 2, 3]]
    state.begin_attempt("drafter_not_hosted")
    state.take(_delta([4], SpeculationReport("none", steps=1, step_tokens=1)))
    state.close(
        decode_pb2.DecodeFinished(report=report_to_wire(SpeculationReport("none", steps=2, step_tokens=2)))
    )
    report = state.report("none")
    assert (report.steps, report.step_tokens, report.position_offered) == (4, 5, (2, 1))
    assert (report.request_class, report.fallback_reason) == ("code", "drafter_not_hosted")
    assert state.num_tokens() == 5


def test_an_answer_is_complete_when_every_choice_has_ended() -> None:
    state = AnswerState(2, (), "chat")
    state.begin_attempt("")
    state.take(_delta([1], SpeculationReport("none"), index=1, last=True))
    assert not state.complete
    (entry,) = state.committed()
    assert (entry.index, entry.finished) == (1, True)
    state.take(_delta([2], SpeculationReport("none"), index=0, last=True))
    assert state.complete
