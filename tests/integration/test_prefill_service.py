"""The prefill worker's gRPC face: handshake, tickets, status, drain."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from core.errors import FailedPrecondition
from core.grpc_options import channel_options
from core.numerics import NumericsClass
from core.settings import HandoffSettings
from decode.handoff import HandoffClient, PeerRefused
from engine.kv_cache import KvCache
from outrider.v1 import admin_pb2, admin_pb2_grpc, common_pb2, prefill_pb2
from tests.support.handoff_rig import GRPC, HANDOFF, OTHER_KEYS, Rig, handoff_rig
from tests.support.toy_engine import ToyEngine
from tests.unit.test_peer import DIFFERENCES

PROMPT = list(range(21))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = ToyEngine(hidden_layers=(1,))
    async with handoff_rig(engine, KvCache(engine.kv.layout, 64)) as rig:
        yield rig


@pytest.fixture
async def admin(rig: Rig) -> AsyncIterator[admin_pb2_grpc.AdminStub]:
    async with grpc.aio.insecure_channel(rig.peer.address, options=channel_options(GRPC)) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


async def refusal_of(rig: Rig, message: prefill_pb2.FetchUp) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(rig.peer.address, options=channel_options(GRPC)) as channel:
        call = channel.stream_stream(
            "/outrider.v1.Prefill/Fetch",
            request_serializer=prefill_pb2.FetchUp.SerializeToString,
            response_deserializer=prefill_pb2.FetchDown.FromString,
        )()
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        return refused.value


@pytest.mark.parametrize("field", DIFFERENCES)
async def test_a_pool_that_differs_is_refused_by_the_field_and_nothing_is_computed(
    rig: Rig, field: str
) -> None:
    ours = common_pb2.PeerInfo()
    ours.CopyFrom(rig.ours)
    DIFFERENCES[field](ours)
    assert ours != rig.ours
    client = HandoffClient(ours, rig.receiver.layout, 97, HANDOFF, GRPC)
    rig.client, honest = client, rig.client
    with pytest.raises(PeerRefused) as refused:
        await rig.fetch(PROMPT)
    assert isinstance(refused.value.error, FailedPrecondition)
    assert refused.value.error.field == field
    await client.close()
    assert isinstance(rig.engine, ToyEngine)
    assert rig.engine.num_rows == 0
    rig.client = honest
    await rig.fetch(PROMPT)
    await rig.idle()


async def test_another_numerics_class_is_refused_by_the_field(rig: Rig) -> None:
    numerics = NumericsClass("toy-1", "float32", "float32", "cpu", "toy", "toy", "pad=4")
    ours = common_pb2.PeerInfo()
    ours.CopyFrom(rig.ours)
    ours.numerics_class = numerics.digest()
    ours.numerics_fields.clear()
    ours.numerics_fields.update(numerics.as_fields())
    client = HandoffClient(ours, rig.receiver.layout, 97, HANDOFF, GRPC)
    rig.client, honest = client, rig.client
    with pytest.raises(PeerRefused, match=r"pad=4.*pad=1|pad=1.*pad=4") as refused:
        await rig.fetch(PROMPT)
    assert refused.value.error.field == "numerics_class.row_padding"
    await client.close()
    rig.client = honest


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("forged", grpc.StatusCode.PERMISSION_DENIED),
        ("other key", grpc.StatusCode.PERMISSION_DENIED),
        ("expired", grpc.StatusCode.PERMISSION_DENIED),
        ("other prompt", grpc.StatusCode.PERMISSION_DENIED),
        ("other worker", grpc.StatusCode.PERMISSION_DENIED),
        ("other class", grpc.StatusCode.FAILED_PRECONDITION),
        ("no credit", grpc.StatusCode.INVALID_ARGUMENT),
        ("other transport", grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_fetch_without_a_good_ticket_is_refused_and_holds_nothing(
    rig: Rig, fault: str, code: grpc.StatusCode
) -> None:
    message = rig.open(PROMPT)
    if fault == "forged":
        message.ticket.claims = message.ticket.claims + b"\x20\x01"
    elif fault == "other key":
        message.ticket.CopyFrom(OTHER_KEYS.sign(rig.claims(PROMPT)))
    elif fault == "expired":
        message.ticket.CopyFrom(rig.ticket(PROMPT, expires_unix_ms=1))
    elif fault == "other prompt":
        message.token_ids[3] = 50
    elif fault == "other worker":
        message.ticket.CopyFrom(rig.ticket(PROMPT, prefill_worker_ids=("prefill-9",)))
    elif fault == "other class":
        message.ticket.CopyFrom(rig.ticket(PROMPT, numerics_class="0" * 16))
    elif fault == "no credit":
        message.credit_bytes = 0
    else:
        message.transport = "collective"
    error = await refusal_of(rig, prefill_pb2.FetchUp(open=message))
    assert error.code() is code
    await rig.idle()


async def test_a_stream_that_does_not_begin_with_its_opening_is_refused(rig: Rig) -> None:
    error = await refusal_of(rig, prefill_pb2.FetchUp(credit=prefill_pb2.Credit(bytes=5)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_status_tells_blocks_leases_process_and_memory(
    rig: Rig, admin: admin_pb2_grpc.AdminStub
) -> None:
    async with rig.raw_stream(PROMPT) as call:
        await call.read()
        status = await admin.Status(admin_pb2.StatusRequest())
        assert (status.leases, status.tasks, status.used_blocks) == (1, 1, 6)
    await rig.idle()
    status = await admin.Status(admin_pb2.StatusRequest())
    assert (status.worker_id, status.role, status.epoch) == ("prefill-0", "prefill", rig.peer.epoch)
    assert (status.ready, status.draining, status.address) == (True, False, rig.peer.address)
    assert (status.leases, status.tasks, status.running, status.waiting) == (0, 0, 0, 0)
    assert status.used_blocks == 0
    assert status.free_blocks + status.cached_blocks == status.total_blocks == 64
    assert status.process_id > 0
    assert status.resident_bytes > 2**20
    assert status.peer == rig.worker.peer


async def test_drain_by_name_makes_the_worker_not_ready(rig: Rig, admin: admin_pb2_grpc.AdminStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.Drain(admin_pb2.DrainRequest(worker_id="prefill-7"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rig.worker.status().ready
    reply = await admin.Drain(admin_pb2.DrainRequest(worker_id="prefill-0", grace_s=1.0))
    assert reply.remaining == 0
    status = await admin.Status(admin_pb2.StatusRequest())
    assert (status.ready, status.draining) == (False, True)
    assert (await refusal_of(rig, prefill_pb2.FetchUp(open=rig.open(PROMPT)))).code() is (
        grpc.StatusCode.UNAVAILABLE
    )


def test_a_chunk_and_the_logits_of_a_large_vocabulary_fit_in_one_message() -> None:
    assert HandoffSettings.model_validate({}).chunk_bytes + 2**16 <= GRPC.max_message_bytes
    assert GRPC.max_message_bytes >= 4 * 500_000
