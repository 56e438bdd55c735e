"""Servers as every process makes them: health, tokens, bind errors."""

import asyncio

import grpc
import pytest

from core.errors import FailedPrecondition
from core.grpc_admin import AdminClient
from core.grpc_server import RpcServer, make_server
from core.settings import GrpcSettings
from outrider.v1 import admin_pb2, admin_pb2_grpc

GRPC = GrpcSettings.model_validate({})


class Echo(admin_pb2_grpc.AdminServicer):
    """Answers Status, and nothing else."""

    async def Status(
        self, request: admin_pb2.StatusRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> admin_pb2.WorkerStatus:
        return admin_pb2.WorkerStatus(worker_id="echo")


async def serving(token: str | None = None) -> RpcServer:
    rpc = make_server(GRPC, token)
    admin_pb2_grpc.add_AdminServicer_to_server(Echo(), rpc.server)
    await rpc.listen("127.0.0.1:0")
    return rpc


async def test_health_says_ready_only_when_told_to_and_never_while_stopping() -> None:
    rpc = await serving()
    client = AdminClient(rpc.address)
    assert not await asyncio.to_thread(client.is_serving)
    await rpc.set_ready(True)
    assert await asyncio.to_thread(client.is_serving)
    await rpc.set_ready(False)
    assert not await asyncio.to_thread(client.is_serving)
    await rpc.stop(0)
    assert not await asyncio.to_thread(client.is_serving)


async def test_without_the_token_every_call_is_unauthenticated_but_health_answers() -> None:
    rpc = await serving("open sesame")
    await rpc.set_ready(True)
    status = await asyncio.to_thread(AdminClient(rpc.address, "open sesame").status)
    assert status.worker_id == "echo"
    assert await asyncio.to_thread(AdminClient(rpc.address).is_serving)
    async with grpc.aio.insecure_channel(rpc.address) as channel:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminStub(channel).Status(
                    admin_pb2.StatusRequest(), metadata=metadata, timeout=5
                )
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "sesame" not in (caught.value.details() or "")
    await rpc.stop(0)


async def test_a_taken_port_is_a_clear_error_not_a_second_listener() -> None:
    first = await serving()
    with pytest.raises(FailedPrecondition, match=f"listen: cannot bind {first.address}"):
        await make_server(GRPC).listen(first.address)
    await first.stop(0)


async def test_an_open_address_without_a_token_is_refused_before_binding() -> None:
    with pytest.raises(FailedPrecondition, match="bearer token"):
        await make_server(GRPC).listen("0.0.0.0:0")
