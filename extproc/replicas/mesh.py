"""All connections of one replica: it listens, dials who it knows of, and keeps one connection with each of the others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from extproc import __version__
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.processes.post import Sent
from extproc.replicas import handshake
from extproc.replicas.handshake import Hello, RefusedError
from extproc.replicas.keys import ReplicaKeys
from extproc.replicas.link import Link
from extproc.replicas.peers import Peers
from extproc.replicas.settings import MOST_REPLICAS, ReplicaSettings
from extproc.tls.reasons import described, tls_reason

DIAL_TIMEOUT_S: Final = 3.0
_LOOK_S: Final = 0.1
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 3.0
_REFUSED_PAUSE_S: Final = 5.0
"""Before an address is tried again that does not want us, or that we do not want."""
_MOST_UNPROVED: Final = 64
"""Connections from others that have not said who they are."""


class _Dial:
    """An address, and how it went there."""

    def __init__(self) -> None:
        self.due_s = -math.inf
        self.pause_s = _FIRST_PAUSE_S
        self.task: asyncio.Task[None] | None = None
        self.epoch: str | None = None
        """Who answered there last."""
        self.own = False
        """It is ourselves."""
        self.fault: str | None = None
        """Why there is no connection; said in the log once."""


class Mesh:
    """Carries batches between replicas. ``open`` comes first, then ``run`` must be running."""

    def __init__(
        self, settings: ReplicaSettings, *, epoch: str, keys: ReplicaKeys, peers: Peers, metrics: Metrics, log: Logger
    ) -> None:
        """``epoch``: of this life of the filter."""
        self._settings = settings
        self._epoch = epoch
        self._keys = keys
        self._peers = peers
        self._metrics = metrics
        self._log = log
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._served_with: ssl.SSLContext | None = None
        """The certificate that the listener shows."""
        self._hello: Callable[[], Hello] = lambda: handshake.hello(epoch, socket.gethostname(), f"baton {__version__}")
        self._dials: dict[str, _Dial] = {}
        self._links: dict[int, Link] = {}
        self._unproved: set[Link] = set()
        self._next = 0
        self._closed = False
        self._told: set[str] = set()
        """Refusals of connections from others that were logged."""
        self.on_up: Callable[[int, str], None] = lambda _index, _name: None
        """There is one more: its index for :meth:`send`, and its name."""
        self.on_down: Callable[[int, str], None] = lambda _index, _why: None
        """It is gone."""
        self.on_data: Callable[[int, bytes], None] = lambda _index, _data: None
        """A batch of it."""
        metrics.replicas_known.set_function(lambda: len(self._others()))

    # -- life --------------------------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Listen, and try each of the others once, in ``timeout_s`` seconds at most. Raises OSError."""
        assert self._settings.listen is not None
        host, _, port = self._settings.listen.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_MOST_UNPROVED)
        self._socket.setblocking(False)
        await self._serve()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._peers.look()
                self._look()
                await asyncio.gather(*(each.task for each in self._dials.values() if each.task is not None))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._peers.run())
            while True:
                await asyncio.sleep(_LOOK_S)
                if self._keys.server is not self._served_with:
                    await self._serve()
                self._look()

    async def _serve(self) -> None:
        """Take connections, with the certificate that the files hold now. No connection is refused at a change of it."""
        assert self._socket is not None
        before, self._served_with = self._server, self._keys.server
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._made(None), sock=self._socket.dup(), ssl=self._keys.server
        )
        if before is not None:
            before.close()

    def close(self) -> None:
        """No connection any more; the others see it at once."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()
        for dial in self._dials.values():
            if dial.task is not None:
                dial.task.cancel()
        for link in (*self._links.values(), *self._unproved):
            link.end("we end")

    # -- batches -----------------------------------------------------------------------------------------------------------

    def send(self, index: int, data: bytes) -> Sent:
        """One batch to one of the others."""
        link = self._links.get(index)
        return Sent.AWAY if link is None else link.send(data)

    def drop(self, index: int, why: str) -> None:
        """It is of no use any more."""
        link = self._links.get(index)
        if link is not None:
            link.end(why)

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""
        return {
            "listen": self._settings.listen,
            "addresses": {
                address: "itself" if dial.own else "connected" if self._connected(dial) else dial.fault or "is being connected"
                for address, dial in self._dials.items()
            },
            **({} if self._peers.fault is None else {"dns": self._peers.fault}),
        }

    # -- dialling ----------------------------------------------------------------------------------------------------------

    def _others(self) -> list[str]:
        """Addresses that do not lead to ourselves."""
        return [address for address, dial in self._dials.items() if not dial.own]

    def _connected(self, dial: _Dial) -> bool:
        return dial.epoch is not None and self._of(dial.epoch) is not None

    def _of(self, epoch: str) -> Link | None:
        return next((link for link in self._links.values() if link.peer is not None and link.peer.epoch == epoch), None)

    def _look(self) -> None:
        """Dial whoever is not connected, and whose time has come."""
        addresses = self._peers.addresses
        for gone in self._dials.keys() - set(addresses):
            dial = self._dials.pop(gone)
            if dial.task is not None:
                dial.task.cancel()
        now_s = asyncio.get_running_loop().time()
        for address in addresses:
            dial = self._dials.setdefault(address, _Dial())
            if dial.own or dial.task is not None or now_s < dial.due_s or self._connected(dial):
                continue
            dial.task = asyncio.create_task(self._dial(address, dial))

    async def _dial(self, address: str, dial: _Dial) -> None:
        loop = asyncio.get_running_loop()
        link = self._made(address)
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await loop.create_connection(lambda: link, host.strip("[]"), int(port), ssl=self._keys.client)
                await link.over.wait()
        except (OSError, TimeoutError) as error:
            link.end("not reached")
            self._metrics.replica_links.inc("refused_certificate" if tls_reason(error) else "unreached")
            self._fault(address, dial, described(error) if str(error) else "no answer in time")
        finally:
            self._unproved.discard(link)
            dial.task = None
            if self._connected(dial):
                dial.pause_s, dial.fault = _FIRST_PAUSE_S, None
            dial.due_s = max(dial.due_s, loop.time() + dial.pause_s)
            dial.pause_s = min(2 * dial.pause_s, _LONGEST_PAUSE_S)

    def _fault(self, address: str, dial: _Dial, why: str) -> None:
        if dial.fault != why:
            self._log.warning("replica_not_connected", address=address, why=why)
        dial.fault = why

    # -- for the connections -----------------------------------------------------------------------------------------------

    def _made(self, address: str | None) -> Link:
        link = Link(
            self,
            self._hello(),
            self._keys,
            address=address,
            bytes_per_s=self._settings.max_bytes_per_s,
            on_bytes=lambda direction, size: self._metrics.replica_bytes.inc(direction, by=size),
        )
        self._unproved.add(link)
        return link

    def greeted(self, link: Link) -> None:
        """See Owner."""
        assert link.peer is not None
        if link.address is None and len(self._unproved) > _MOST_UNPROVED:
            raise RefusedError("too_many", f"over {_MOST_UNPROVED} connections at once have not proved anything")
        if link.peer.epoch == self._epoch:
            if link.address is not None:
                self._dials[link.address].own = True
            raise RefusedError("self", "it is this replica itself")
        if link.address is not None and (dial := self._dials.get(link.address)) is not None:
            dial.epoch = link.peer.epoch
            if self._of(link.peer.epoch) is not None:
                raise _KnownError
        if self._of(link.peer.epoch) is None and len(self._links) >= MOST_REPLICAS:
            raise RefusedError("too_many", f"there are {MOST_REPLICAS} others already")

    def proved(self, link: Link) -> None:
        """See Owner."""
        assert link.peer is not None
        self._unproved.discard(link)
        other = self._of(link.peer.epoch)
        if other is not None:
            # Both have dialled at the same time. Both keep the one that the lower epoch has made.
            lower_is_ours = self._epoch < link.peer.epoch
            if (link.address is not None) is not lower_is_ours and (other.address is not None) is lower_is_ours:
                raise _KnownError
            other.end("there is a newer connection")
            self._forget(other, "there is a newer connection")
        self._next += 1
        link.index = self._next
        self._links[self._next] = link
        self._metrics.replica_links.inc("connected")
        self._log.info("replica_connected", replica=link.name, software=link.peer.software, dialled=link.address is not None)
        self.on_up(link.index, link.name)

    def heard(self, link: Link, message: bytes) -> None:
        """See Owner."""
        assert link.index is not None
        self.on_data(link.index, message)

    def ended(self, link: Link, why: str, refused: RefusedError | None) -> None:
        """See Owner."""
        self._unproved.discard(link)
        if link.index is not None:
            self._forget(link, why)
            return
        if refused is None or isinstance(refused, _KnownError) or refused.reason == "self":
            if link.address is None or refused is not None or self._closed:
                return  # whoever looks whether the port is open is none of our business
            # They do not say why they close; their log does.
            refused = RefusedError("timeout", f"it closed the connection before it was proved: {why}")
        else:
            self._metrics.replica_links.inc(f"refused_{refused.reason}")
        if link.address is None:
            self._refuse(link, str(refused))
            return
        dial = self._dials.get(link.address)
        if dial is not None:
            dial.due_s = asyncio.get_running_loop().time() + _REFUSED_PAUSE_S
            self._fault(link.address, dial, str(refused))

    def _refuse(self, link: Link, why: str) -> None:
        """Somebody has dialled whom we do not want; said once, not every few seconds."""
        what = f"{link.host}: {why}"
        if what not in self._told and len(self._told) < 100:
            self._told.add(what)
            self._log.warning("replica_refused", replica=link.name, why=why)

    def _forget(self, link: Link, why: str) -> None:
        index, link.index = link.index, None
        if index is not None and self._links.pop(index, None) is not None:
            self._metrics.replica_links.inc("ended")
            self.on_down(index, why)


class _KnownError(RefusedError):
    """There is a connection with it already."""

    def __init__(self) -> None:
        super().__init__("self", "it is connected already")
