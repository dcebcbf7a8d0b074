"""Endpoints for Envoy over gRPC: ADS and EDS, state of the world and delta, on the filter's own server.

A stream is one loop: it waits for what Envoy says or for a change, and nothing else ever writes to it. What Envoy has refused
is not sent again until it changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec
from envoy_data_plane.envoy.service.discovery.v3 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
    DiscoveryResponse,
    Resource,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage

from extproc.observe.logs import Logger
from extproc.xds import ENDPOINTS_TYPE, Assignment, assignment

MAX_STREAMS: Final = 256
MAX_TYPES: Final = 32
"""Kinds of resources that one stream may ask for."""
MAX_NAMES: Final = 4096
"""Resources that one stream may ask for, of one kind."""
WRITE_TIMEOUT_S: Final = 30.0
"""An Envoy that takes nothing for so long loses its stream."""

_WILDCARD = "*"
_ADS = "envoy.service.discovery.v3.AggregatedDiscoveryService"
_EDS = "envoy.service.endpoint.v3.EndpointDiscoveryService"


class RefusedError(Exception):
    """Envoy asks for something that no stream may ask for; the message says what."""


class Snapshot(msgspec.Struct, frozen=True):
    """All clusters at one moment."""

    version: str
    assignments: Mapping[str, Assignment]


class Nack(msgspec.Struct, frozen=True):
    """Envoy refused what it was sent, and goes on with what it had."""

    node: str
    type_url: str
    nonce: str
    error: str


class _Conversation(Protocol):
    """What one stream has asked for and was told: no I/O, so that each rule of the protocol can be tested by itself."""

    def hear(self, request: Any) -> Nack | None:
        """Take one request in. Raises RefusedError."""

    def replies(self, snapshot: Snapshot) -> Iterable[Any]:
        """What is to be sent now, if anything; it counts as sent."""


class _Subscription:
    """State of the world: one kind of resource on one stream."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.named = False
        self.wildcard = True
        self.nonce = ""
        self.sent: tuple[str, frozenset[str]] | None = None
        """Version and names of the last reply."""
        self.due = True
        """A reply is owed even if nothing has changed."""


class StateOfTheWorld:
    """The rules of ``StreamAggregatedResources`` and ``StreamEndpoints``."""

    def __init__(self, *, only: str | None) -> None:
        """``only``: the one type that may be asked for, and that is meant where none is named; None: any (ADS)."""
        self._only = only
        self._node = ""
        self._nonces = 0
        self._subscriptions: dict[str, _Subscription] = {}

    def hear(self, request: DiscoveryRequest) -> Nack | None:
        """Take one request in. Raises RefusedError."""
        kind = _kind(request.type_url, self._only, self._subscriptions)
        self._node = request.node.id if request.node else self._node
        known = self._subscriptions.get(kind)
        if known is None:
            # On a new stream the version and the nonce are those of an old one: the first reply is owed in any case.
            known = self._subscriptions[kind] = _Subscription()
        elif request.response_nonce != known.nonce:
            return None  # about an older reply: Envoy will answer the newer one, too
        _limit(len(request.resource_names))
        names = frozenset(request.resource_names) - {_WILDCARD}
        known.named |= bool(request.resource_names)
        # No names mean everything, but only for who never named any.
        wildcard = _WILDCARD in request.resource_names or not known.named
        known.due |= bool(names - known.names) or wildcard > known.wildcard
        known.names, known.wildcard = names, wildcard
        if request.error_detail is None:
            return None
        return Nack(self._node, kind, request.response_nonce, request.error_detail.message)

    def replies(self, snapshot: Snapshot) -> Iterable[DiscoveryResponse]:
        """What is to be sent now; it counts as sent."""
        for kind, known in self._subscriptions.items():
            found = snapshot.assignments if kind == ENDPOINTS_TYPE else {}
            wanted = {name: item for name, item in found.items() if known.wildcard or name in known.names}
            version = _version(wanted.values())
            now = (version, frozenset(wanted))
            if not known.due and (known.sent == now or (known.sent is None and not wanted)):
                continue
            self._nonces += 1
            known.nonce, known.sent, known.due = str(self._nonces), now, False
            yield DiscoveryResponse(
                version_info=version,
                resources=[_packed(item) for item in wanted.values()],
                type_url=kind,
                nonce=known.nonce,
            )


class _DeltaSubscription:
    """Delta: one kind of resource on one stream."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.wildcard = False
        self.told: dict[str, str | None] = {}
        """What Envoy has, by our book: name -> version, or None for one that it was told does not exist."""
        self.due = True


class Delta:
    """The rules of ``DeltaAggregatedResources`` and ``DeltaEndpoints``."""

    def __init__(self, *, only: str | None) -> None:
        """``only``: as for :class:`StateOfTheWorld`."""
        self._only = only
        self._node = ""
        self._nonces = 0
        self._subscriptions: dict[str, _DeltaSubscription] = {}

    def hear(self, request: DeltaDiscoveryRequest) -> Nack | None:
        """Take one request in. Raises RefusedError."""
        kind = _kind(request.type_url, self._only, self._subscriptions)
        self._node = request.node.id if request.node else self._node
        known = self._subscriptions.get(kind)
        subscribe, unsubscribe = request.resource_names_subscribe, request.resource_names_unsubscribe
        if known is None:
            known = self._subscriptions[kind] = _DeltaSubscription()
            _limit(len(request.initial_resource_versions))
            known.told.update(request.initial_resource_versions)
            # Old clients ask for everything by naming nothing, and only in their first request.
            known.wildcard = not subscribe
        else:
            for name in subscribe:
                known.told.pop(name, None)  # asked for again: sent again
        for name in subscribe:
            known.names.add(name)
        known.wildcard |= _WILDCARD in known.names
        known.names.discard(_WILDCARD)
        for name in unsubscribe:
            known.names.discard(name)
            known.told.pop(name, None)
        if _WILDCARD in unsubscribe:
            known.wildcard = False
            known.told = {name: version for name, version in known.told.items() if name in known.names}
        _limit(len(known.names))
        if request.error_detail is None:
            return None
        return Nack(self._node, kind, request.response_nonce, request.error_detail.message)

    def replies(self, snapshot: Snapshot) -> Iterable[DeltaDiscoveryResponse]:
        """What is to be sent now; it counts as sent."""
        for kind, known in self._subscriptions.items():
            found = snapshot.assignments if kind == ENDPOINTS_TYPE else {}
            wanted = {name: item for name, item in found.items() if known.wildcard or name in known.names}
            changed = [item for name, item in wanted.items() if known.told.get(name) != item.version]
            gone = [name for name, version in known.told.items() if version is not None and name not in wanted]
            absent = [name for name in known.names if name not in wanted and name not in known.told]
            if not (changed or gone or absent or known.due):
                continue
            known.due = False
            for name in gone:
                del known.told[name]
            known.told.update(dict.fromkeys((name for name in (*gone, *absent) if name in known.names), None))
            known.told.update({item.cluster: item.version for item in changed})
            self._nonces += 1
            yield DeltaDiscoveryResponse(
                system_version_info=snapshot.version,
                resources=[Resource(name=item.cluster, version=item.version, resource=_packed(item)) for item in changed],
                removed_resources=sorted({*gone, *absent}),
                type_url=kind,
                nonce=str(self._nonces),
            )


def _kind(type_url: str, only: str | None, known: Mapping[str, object]) -> str:
    kind = type_url or only
    if not kind:
        raise RefusedError("a request without type_url")
    if only is not None and kind != only:
        raise RefusedError(f"type_url {kind!r} on a stream for {only!r}")
    if kind not in known and len(known) >= MAX_TYPES:
        raise RefusedError(f"more than {MAX_TYPES} kinds of resources on one stream")
    return kind


def _limit(names: int) -> None:
    if names > MAX_NAMES:
        raise RefusedError(f"{names} resource names, more than {MAX_NAMES}")


def _version(items: Iterable[Assignment]) -> str:
    """Of a set of assignments: as good as a number that counts up, and the same in every filter and after every restart."""
    return "-".join(sorted(item.version for item in items)) or "0"


def _packed(item: Assignment) -> AnyMessage:
    return AnyMessage(type_url=ENDPOINTS_TYPE, value=item.encoded)


class EndpointServer:
    """Serves what was published last, and every change of it, to all Envoys that are connected."""

    def __init__(self, log: Logger, *, on_nack: Callable[[], None], max_streams: int = MAX_STREAMS) -> None:
        """``on_nack`` is called for every refusal of Envoy's, to be counted; the log says what it was."""
        self._log = log
        self._on_nack = on_nack
        self._max_streams = max_streams
        self._snapshot = Snapshot("0", {})
        self._open: set[asyncio.Event] = set()
        """One for each open stream: set when it is to look what is new."""
        self._closed = False
        self._published_at: float | None = None

    def publish(self, clusters: Mapping[str, Sequence[str]]) -> None:
        """Name of a cluster -> its endpoints (``ip:port``), for all clusters. Whatever changed goes out to every stream."""
        assignments = {name: assignment(name, endpoints) for name, endpoints in clusters.items()}
        version = _version(assignments.values())
        if version == self._snapshot.version:
            return
        self._snapshot = Snapshot(version, assignments)
        self._published_at = time.time()
        self._wake()

    def close(self) -> None:
        """End all streams, and let no new one begin: a server that drains would wait for them. Envoy keeps what it has."""
        self._closed = True
        self._wake()

    def status(self) -> dict[str, object]:
        """For people: who is connected and what they are told."""
        return {
            "streams": len(self._open),
            "version": self._snapshot.version,
            "published_at": self._published_at,
            "clusters": sorted(self._snapshot.assignments),
        }

    def register(self, server: Any) -> None:
        """Serve ADS and EDS on ``server``."""
        state, delta = (DiscoveryRequest, StateOfTheWorld), (DeltaDiscoveryRequest, Delta)
        services = {
            _ADS: {
                "StreamAggregatedResources": self._method(*state, only=None),
                "DeltaAggregatedResources": self._method(*delta, only=None),
            },
            _EDS: {
                "StreamEndpoints": self._method(*state, only=ENDPOINTS_TYPE),
                "DeltaEndpoints": self._method(*delta, only=ENDPOINTS_TYPE),
            },
        }
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        server.add_generic_rpc_handlers(tuple(handlers))

    def _method(self, request: Any, conversation: Callable[..., _Conversation], *, only: str | None) -> Any:
        async def handle(_: AsyncIterator[Any], context: Any) -> None:
            await self._serve(conversation(only=only), context)

        return grpc.stream_stream_rpc_method_handler(handle, request_deserializer=request.parse, response_serializer=bytes)

    def _wake(self) -> None:
        for stirred in self._open:
            stirred.set()

    async def _serve(self, conversation: _Conversation, context: Any) -> None:
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the filter is shutting down")
        if len(self._open) >= self._max_streams:
            self._log.error("xds_stream_refused", why="too many streams", max_streams=self._max_streams)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {self._max_streams} discovery streams")
        stirred = asyncio.Event()
        self._open.add(stirred)
        tasks: set[asyncio.Task[Any]] = set()
        try:
            await self._converse(conversation, context, stirred, tasks)
        except RefusedError as error:
            self._log.error("xds_stream_refused", why=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            self._log.error("xds_stream_cut", why=f"Envoy took nothing for {WRITE_TIMEOUT_S:g} s")
        except grpc.aio.BaseError:
            pass  # the call or the server is no more: nobody is there to be told anything
        finally:
            self._open.discard(stirred)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _converse(
        self, conversation: _Conversation, context: Any, stirred: asyncio.Event, tasks: set[asyncio.Task[Any]]
    ) -> None:
        """Until Envoy ends the stream, or we are closed. ``tasks`` holds what is under way, for the caller to end."""

        def start(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = asyncio.create_task(waiting)
            tasks.add(task)
            return task

        read, changed = start(context.read()), start(stirred.wait())
        while not self._closed:
            await asyncio.wait((read, changed), return_when=asyncio.FIRST_COMPLETED)
            if read.done():
                tasks.discard(read)
                request = read.result()
                if request is grpc.aio.EOF:
                    return
                refused = conversation.hear(request)
                if refused is not None:
                    self._refused(refused)
                read = start(context.read())
            if changed.done():
                tasks.discard(changed)
                stirred.clear()
                changed = start(stirred.wait())
            for reply in conversation.replies(self._snapshot):
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(reply)

    def _refused(self, nack: Nack) -> None:
        self._on_nack()
        self._log.error("xds_nack", node=nack.node, type_url=nack.type_url, nonce=nack.nonce, error=nack.error)
