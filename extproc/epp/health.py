"""gRPC health in plaintext, at a port of its own: kubelets speak no TLS, and gateways look there too.

Names and what they mean: endpoint picker protocol, "Health Checking" (docs/proposals/004-endpoint-picker-protocol in
kubernetes-sigs/gateway-api-inference-extension). A name that is not known is answered NOT_FOUND, as the gRPC health protocol
wants it (doc/health-checking.md in grpc/grpc).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import wire
from extproc.config import Epp
from extproc.transport.choose import Kind, make_server

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

ALIVE: Final = ("liveness",)
READY: Final = ("", "readiness", wire.SERVICE_NAME)

_MESSAGE_BYTES: Final = 4096
_STREAMS: Final = 256
"""A kubelet's probes, and an Envoy's for each of its threads."""


class HealthPort:
    """Serves nothing but health. ``publish`` says what holds."""

    def __init__(self, settings: Epp, transport: Kind) -> None:
        assert settings.health_listen is not None
        self._address = settings.health_listen
        self._ready_names = (*READY, *settings.health_services)
        self._ready_after_s = settings.ready_after_s
        self._servicer = health.aio.HealthServicer()
        self._server = make_server(transport, max_message_bytes=_MESSAGE_BYTES, max_streams=_STREAMS)
        self._timer: asyncio.TimerHandle | None = None
        self._latched = self._accepting = False
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Alive from now on; ready when it is said. Raises OSError if the port is taken."""
        register: Callable[[Any, Any], None] = health_pb2_grpc.add_HealthServicer_to_server
        register(self._servicer, self._server)
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"epp.health_listen: {error}") from error
        await self._tell()
        await self._server.start()

    async def stop(self) -> None:
        """At the very end, after the last request."""
        if self._timer is not None:
            self._timer.cancel()
        await self._server.stop(None)

    async def publish(self, *, accepting: bool, ready: bool) -> None:
        """``accepting``: requests are taken. ``ready``: both roles have workers that could serve one now.

        Readiness begins with the first time that both hold, or when that has been waited for long enough; from then on it only
        ends with ``accepting``. A picker that lost its workers must be asked on: it answers 503 and says why, as the protocol
        wants it, and nobody else could.
        """
        if accepting and not self._accepting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._ready_after_s, self._waited)
        self._accepting = accepting
        self._latched |= accepting and ready
        await self._tell()

    def _waited(self) -> None:
        self._latched = True
        task = asyncio.get_running_loop().create_task(self._tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        ready = self._accepting and self._latched
        for name in ALIVE:
            await self._servicer.set(name, _SERVING)
        for name in self._ready_names:
            await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)
