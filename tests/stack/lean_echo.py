"""A process with the lean gRPC server, whose ext_proc service does what a request's path says; for test_transport.

    python -m tests.stack.lean_echo unix:PATH

``/echo`` is answered with its body, ``/pass`` goes on with its body turned round, ``/hold`` is answered once ``/release`` came,
``/held`` says how many are held. SIGTERM stops it, with time for what is open.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health, health_pb2_grpc

from extproc.transport.call import Call, CallGoneError
from extproc.transport.choose import make_server

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
GRACE_S = 10.0


def immediate(body: bytes) -> bytes:
    reply = pb.ProcessingResponse()
    reply.immediate_response.status.code = 200
    reply.immediate_response.body = body
    return reply.SerializeToString()


def turned_round(body: bytes) -> bytes:
    reply = pb.ProcessingResponse()
    reply.request_body.response.body_mutation.body = body[::-1]
    return reply.SerializeToString()


def go_on(field: str) -> bytes:
    reply = pb.ProcessingResponse()
    getattr(reply, field).SetInParent()
    return reply.SerializeToString()


class Echo:
    """All calls share it."""

    def __init__(self) -> None:
        self.held = self.left = 0
        self.release = asyncio.Event()

    async def handle(self, call: Call) -> None:
        path = ""
        while (message := await call.receive()) is not None:
            request = pb.ProcessingRequest.FromString(message)
            kind = request.WhichOneof("request")
            try:
                if kind == "request_headers":
                    path = next(
                        each.raw_value.decode() for each in request.request_headers.headers.headers if each.key == ":path"
                    )
                    if request.request_headers.end_of_stream:
                        await call.send(await self.answer(path, call))
                        continue
                elif kind == "request_body":
                    body = request.request_body.body
                    await call.send(turned_round(body) if path == "/pass" else immediate(body))
                    continue
                await call.send(go_on(kind))
            except CallGoneError:
                return

    async def answer(self, path: str, call: Call) -> bytes:
        if path == "/hold":
            self.held += 1
            released = asyncio.ensure_future(self.release.wait())
            gone = call.stirred()
            await asyncio.wait((released, gone), return_when=asyncio.FIRST_COMPLETED)
            self.held -= 1
            self.left += gone.done()
            return immediate(b"released")
        if path == "/release":
            self.release.set()
        return immediate(f"{self.held} {self.left}".encode())


async def main(address: str) -> None:
    server: Any = make_server("lean", max_message_bytes=64 << 20, max_streams=2_000)
    echo = Echo()
    server.serve(PATH, echo.handle)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(address)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    asyncio.get_running_loop().call_later(0.3, echo.release.set)
    await server.stop(GRACE_S)
    print("stopped", flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
