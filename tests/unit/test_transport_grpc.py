"""grpc.aio as a transport: what it allocates for a read is given back only by a read that comes to its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from extproc.transport.grpc_server import GrpcCall


class Context:
    """Of a call on which nothing comes until it ends, as grpc.aio shows it to a handler."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.reads: list[str] = []

    async def read(self) -> Any:
        self.reads.append("open")
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.reads[-1] = "cancelled"
            raise
        self.reads[-1] = "ended"
        return grpc.aio.EOF


@pytest.mark.parametrize("watched", [False, True])
async def test_a_handler_that_is_cancelled_leaves_its_read_to_end_by_itself(watched: bool) -> None:
    context = Context()
    call = GrpcCall(context)
    if watched:
        call.stirred()
    handler = asyncio.create_task(call.receive())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    handler.cancel()  # as grpc.aio does when the peer resets the call
    with pytest.raises(asyncio.CancelledError):
        await handler
    assert context.reads == ["open"]
    context.ended.set()
    await asyncio.sleep(0.01)
    assert context.reads == ["ended"]


async def test_a_read_that_nobody_waits_for_ends_by_itself() -> None:
    context = Context()
    GrpcCall(context).stirred()
    await asyncio.sleep(0)
    assert context.reads == ["open"]
    context.ended.set()
    await asyncio.sleep(0.01)
    assert context.reads == ["ended"]


async def test_one_read_serves_the_watch_and_the_message() -> None:
    context = Context()
    call = GrpcCall(context)
    stirred = call.stirred()
    assert call.stirred() is stirred
    context.ended.set()
    assert await call.receive() is None
    assert stirred.done()
    assert context.reads == ["ended"]
