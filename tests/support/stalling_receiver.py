"""A process that opens Fetch streams, reads their announcements, and then does nothing. For tests that kill it.

Arguments: address, file with one serialised FetchOpen after the other (4-byte lengths). Prints `ready`.
"""

import asyncio
import sys
from pathlib import Path

import grpc.aio

from outrider.v1 import prefill_pb2, prefill_pb2_grpc


def pack(messages: list[prefill_pb2.FetchOpen]) -> bytes:
    """What the file holds."""
    parts = [message.SerializeToString() for message in messages]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _unpack(data: bytes) -> list[prefill_pb2.FetchOpen]:
    messages = []
    while data:
        size = int.from_bytes(data[:4], "little")
        messages.append(prefill_pb2.FetchOpen.FromString(data[4 : 4 + size]))
        data = data[4 + size :]
    return messages


async def _main(address: str, messages: list[prefill_pb2.FetchOpen]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        calls = [prefill_pb2_grpc.PrefillStub(channel).Fetch() for _ in messages]
        for call, message in zip(calls, messages, strict=True):
            await call.write(prefill_pb2.FetchUp(open=message))
        reads = [asyncio.create_task(call.read()) for call in calls]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], _unpack(Path(sys.argv[2]).read_bytes())))
