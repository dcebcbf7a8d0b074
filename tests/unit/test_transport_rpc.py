"""Servicers written for grpc.aio on the lean server, called by grpc's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy_data_plane.envoy.service.discovery.v3 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.observe.access_log import AccessLog
from extproc.observe.logs import make_logger
from extproc.transport.lean_call import LeanCall
from extproc.transport.lean_server import LeanServer
from extproc.xds import ENDPOINTS_TYPE
from extproc.xds_server import EndpointServer

LIMIT = 32 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"


class Served:
    """A server, a channel to it, and what the server has reported."""

    def __init__(self, server: LeanServer, channel: grpc.aio.Channel, faults: list[Any]) -> None:
        self.server, self.channel, self.faults = server, channel, faults

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.server._running or any(link.connection.streams for link in self.server._links):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(register: Callable[[LeanServer], None], tmp_path: Path) -> AsyncIterator[Served]:
    faults: list[Any] = []
    server = LeanServer(max_message_bytes=LIMIT, max_streams=2_000, on_fault=lambda *fault: faults.append(fault))
    register(server)
    address = f"unix:{tmp_path}/s.sock"
    server.add_insecure_port(address)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address, options=UNLIMITED) as channel:
        served = Served(server, channel, faults)
        yield served
        await served.idle()
    await server.stop(None)


def generic(**methods: grpc.RpcMethodHandler[Any, Any]) -> Callable[[LeanServer], None]:
    """Methods of the service ``x.Y``, whose messages are bytes."""
    handler = grpc.method_handlers_generic_handler("x.Y", methods)
    return lambda server: server.add_generic_rpc_handlers((handler,))


def native(handler: Callable[[LeanCall], Coroutine[Any, Any, None]]) -> Callable[[LeanServer], None]:
    return lambda server: server.serve("/x.Y/M", handler)  # type: ignore[arg-type]


async def echo(call: LeanCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


# -- native calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 100_000, 20_000_000])
async def test_messages_of_every_size_come_back(tmp_path: Path, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with serving(native(echo), tmp_path) as served:
        call = served.channel.stream_stream("/x.Y/M")()
        for _ in range(3):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_five_hundred_calls_at_once_that_are_held(tmp_path: Path) -> None:
    gate, held = asyncio.Event(), [0]

    async def hold(call: LeanCall) -> None:
        message = await call.receive()
        held[0] += 1
        await gate.wait()
        assert message is not None
        await call.send(message)

    async with serving(native(hold), tmp_path) as served:
        method = served.channel.stream_stream("/x.Y/M")
        calls = [method(iter([b"%d" % number * 10_000])) for number in range(500)]
        while held[0] < 500:
            await asyncio.sleep(0.01)
        gate.set()
        for number, call in enumerate(calls):
            assert await call.read() == b"%d" % number * 10_000
            assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_cancels(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def watching(call: LeanCall) -> None:
        seen.append(await call.receive())
        seen.append(await call.receive())

    async with serving(native(watching), tmp_path) as served:
        call = served.channel.stream_stream("/x.Y/M")()
        await call.write(b"x")
        while not seen:
            await asyncio.sleep(0.001)
        call.cancel()
        await served.idle()
        assert seen == [b"x", None]


async def test_a_message_above_the_limit(tmp_path: Path) -> None:
    async with serving(native(echo), tmp_path) as served:
        error = await failure(served.channel.stream_unary("/x.Y/M")(iter([bytes(LIMIT + 1)])))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_client_that_compresses_is_told_that_it_may_not(tmp_path: Path) -> None:
    async with serving(native(echo), tmp_path) as served:
        method = served.channel.unary_unary("/x.Y/M")
        error = await failure(method(b"a" * 10_000, compression=grpc.Compression.Gzip))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "compressed" in (error.details() or "")


# -- every kind of method -----------------------------------------------------------------------------------------------------


async def shout(request: bytes, _context: Any) -> bytes:
    return request.upper()


async def spell(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    for byte in request:
        yield bytes((byte,))


async def join(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    return b"".join([each async for each in requests])


async def double(requests: AsyncIterator[bytes], context: Any) -> None:
    async for each in requests:
        await context.write(each * 2)


METHODS = generic(
    Shout=grpc.unary_unary_rpc_method_handler(shout),
    Spell=grpc.unary_stream_rpc_method_handler(spell),
    Join=grpc.stream_unary_rpc_method_handler(join),
    Double=grpc.stream_stream_rpc_method_handler(double),
)


async def test_each_kind_of_method(tmp_path: Path) -> None:
    async with serving(METHODS, tmp_path) as served:
        channel = served.channel
        assert await channel.unary_unary("/x.Y/Shout")(b"abc") == b"ABC"
        assert [each async for each in channel.unary_stream("/x.Y/Spell")(b"abc")] == [b"a", b"b", b"c"]
        assert await channel.stream_unary("/x.Y/Join")(iter([b"a", b"b"])) == b"ab"
        assert [each async for each in channel.stream_stream("/x.Y/Double")(iter([b"a", b"b"]))] == [b"aa", b"bb"]
        error = await failure(channel.unary_unary("/x.Y/Nothing")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not served.faults


async def test_metadata_both_ways_and_what_a_context_says(tmp_path: Path) -> None:
    said: dict[str, Any] = {}
    ended: list[Any] = []

    async def curious(request: bytes, context: Any) -> bytes:
        context.add_done_callback(ended.append)
        said["metadata"] = {key: value for key, value in context.invocation_metadata() if key.startswith("k")}
        said["peer"], said["time"] = context.peer(), context.time_remaining()
        said["cancelled"], said["done"] = context.cancelled(), context.done()
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last", "2"), ("last-bin", b"\x00\xff")))
        context.set_details("well")
        return request

    async with serving(generic(M=grpc.unary_unary_rpc_method_handler(curious)), tmp_path) as served:
        call = served.channel.unary_unary("/x.Y/M")(b"x", metadata=(("k", "v"), ("k-bin", b"\x00\x01\xfe")), timeout=30)
        assert await call == b"x"
        assert dict(await call.initial_metadata())["first"] == "1"
        trailing = dict(await call.trailing_metadata())
        assert (trailing["last"], trailing["last-bin"]) == ("2", b"\x00\xff")
        assert said.pop("time") == pytest.approx(30, abs=5)
        assert said == {"metadata": {"k": "v", "k-bin": b"\x00\x01\xfe"}, "peer": "unix:", "cancelled": False, "done": False}
        assert len(ended) == 1 and ended[0].done()


async def test_a_status_that_the_servicer_sets_or_aborts_with(tmp_path: Path) -> None:
    async def sets(_request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("nö")
        return b""

    async def aborts(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there", (("k", "v"),))
        raise AssertionError("abort returns")

    async def raises(_request: bytes, _context: Any) -> bytes:
        raise KeyError("the secret")

    methods = {name: grpc.unary_unary_rpc_method_handler(each) for name, each in (("S", sets), ("A", aborts), ("R", raises))}
    async with serving(generic(**methods), tmp_path) as served:
        error = await failure(served.channel.unary_unary("/x.Y/S")(b""))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "nö")
        error = await failure(served.channel.unary_unary("/x.Y/A")(b""))
        assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "there")
        assert dict(error.trailing_metadata() or ())["k"] == "v"
        assert not served.faults, "an abort is no fault"
        error = await failure(served.channel.unary_unary("/x.Y/R")(b""))
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert "secret" not in (error.details() or "")
        assert [what for what, _ in served.faults] == ["/x.Y/R failed"]


async def test_a_peer_that_leaves_cancels_a_servicer_of_grpc(tmp_path: Path) -> None:
    seen: list[str] = []

    async def waits(_request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda ended: seen.append(f"done, cancelled: {ended.cancelled()}"))
        try:
            seen.append("waits")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return b""

    async with serving(generic(M=grpc.unary_unary_rpc_method_handler(waits)), tmp_path) as served:
        call = served.channel.unary_unary("/x.Y/M")(b"")
        while not seen:
            await asyncio.sleep(0.001)
        call.cancel()
        await served.idle()
        assert seen == ["waits", "cancelled", "done, cancelled: True"]


async def test_a_deadline_cancels_a_servicer_of_grpc(tmp_path: Path) -> None:
    seen: list[str] = []

    async def waits(_request: bytes, _context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")
        return b""

    async with serving(generic(M=grpc.unary_unary_rpc_method_handler(waits)), tmp_path) as served:
        error = await failure(served.channel.unary_unary("/x.Y/M")(b"", timeout=0.05))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.idle()
        assert seen in (["ended"], [])  # it may be over before it has begun


async def test_a_request_that_cannot_be_parsed(tmp_path: Path) -> None:
    handler = grpc.unary_unary_rpc_method_handler(shout, request_deserializer=health_pb2.HealthCheckRequest.FromString)
    async with serving(generic(M=handler), tmp_path) as served:
        error = await failure(served.channel.unary_unary("/x.Y/M")(b"\xff\xff"))
        assert error.code() is grpc.StatusCode.UNKNOWN


# -- the servicers that Baton has ---------------------------------------------------------------------------------------------


async def test_grpc_health_check_and_watch(tmp_path: Path) -> None:
    servicer = health.aio.HealthServicer()
    register = lambda server: health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # noqa: E731
    async with serving(register, tmp_path) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        await servicer.set("baton", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        asked = health_pb2.HealthCheckRequest(service="baton")
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        error = await failure(stub.List(health_pb2.HealthListRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        watch = stub.Watch(asked)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await servicer.set("baton", health_pb2.HealthCheckResponse.SERVING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_endpoints_for_envoy_until_the_server_of_them_closes(tmp_path: Path) -> None:
    endpoints = EndpointServer(make_logger("error"), on_nack=lambda: None)
    endpoints.publish({"decode": ["10.0.0.1:1"]})
    async with serving(endpoints.register, tmp_path) as served:
        call = served.channel.stream_stream(ADS, request_serializer=bytes, response_deserializer=DeltaDiscoveryResponse.parse)()
        await call.write(DeltaDiscoveryRequest(type_url=ENDPOINTS_TYPE, resource_names_subscribe=["decode"]))
        first = await call.read()
        assert [each.name for each in first.resources] == ["decode"]
        endpoints.publish({"decode": ["10.0.0.2:1"]})
        second = await call.read()
        assert second.nonce != first.nonce
        endpoints.close()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        late = served.channel.stream_stream(ADS)()
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        assert not served.faults


@pytest.mark.parametrize("how", ["ends", "cancels"])
async def test_the_access_log(tmp_path: Path, how: str) -> None:
    lines: list[Any] = []
    access_log = AccessLog(expected=True, told=lambda line, _note: lines.append(line), log=make_logger("error"))
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.append(accesslog_pb2.HTTPAccessLogEntry())
    async with serving(access_log.register, tmp_path) as served:
        call = als_pb2_grpc.AccessLogServiceStub(served.channel).StreamAccessLogs()
        for _ in range(2):
            await call.write(message)
        while len(lines) < 2:
            await asyncio.sleep(0.001)
        assert access_log.streams == 1
        if how == "ends":
            await call.done_writing()
            assert await call == als_pb2.StreamAccessLogsResponse()
        else:
            call.cancel()
        await served.idle()
        assert access_log.streams == 0
        assert not served.faults
