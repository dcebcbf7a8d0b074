"""ZMQ's sockets, as followers use them: read without waiting, bounded, and told of when the other side was away.

They are ZMQ's own, not its asyncio ones, which take a future and a callback for every batch: the event loop watches their file
descriptors. Such a descriptor says only that something may have happened, until the socket was asked (zmq_getsockopt(3),
ZMQ_FD), so whoever is woken reads until there is nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import zmq

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

MET = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
"""Somebody answered at the address: for the first time, or anew."""
CUT = int(zmq.EVENT_DISCONNECTED)
"""The connection broke."""

Socket = zmq.Socket[bytes]


class Sockets:
    """Makes them for one follower. ``wake`` is called when one of them may have something, ``on_news`` when one of those that
    tell of connections may."""

    def __init__(
        self, context: zmq.Context[Any], *, max_message_bytes: int, wake: Callable[[], None], on_news: Callable[[], None]
    ) -> None:
        self._on_news = on_news
        self._context = context
        self._max_message_bytes = max_message_bytes
        self._wake = wake

    def connected(self, kind: int, address: str, *, waiting: int, topic: str | None = None) -> Socket:
        """One that keeps so many messages for us, watched. ``topic``: of a SUB socket."""
        socket = self._made(kind, address, waiting, topic)
        self._watch(socket)
        return socket

    def subscribed(self, address: str, topic: str, *, waiting: int) -> tuple[Socket, Socket]:
        """A SUB socket, and one that tells of its connection, see :func:`news`. What it tells of a connection is there before
        the first message that came over it.
        """
        socket = self._made(zmq.SUB, None, waiting, topic)
        monitor: Socket = socket.get_monitor_socket(MET | CUT)
        socket.connect(address)
        self._watch(socket)
        self._watch(monitor, self._on_news)
        return socket, monitor

    def drop(self, socket: Socket) -> None:
        """Give it up."""
        asyncio.get_running_loop().remove_reader(socket.fileno())
        socket.close(0)

    def _made(self, kind: int, address: str | None, waiting: int, topic: str | None) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.RCVHWM, waiting)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        if topic is not None:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        if address is not None:
            socket.connect(address)
        return socket

    def _watch(self, socket: Socket, wake: Callable[[], None] | None = None) -> None:
        wake = wake or self._wake
        asyncio.get_running_loop().add_reader(socket.fileno(), wake)
        # It may have become readable before it was watched.
        wake()


def receive(socket: Socket) -> list[bytes] | None:
    """The frames of a message; None: there is none."""
    # The exception that says there is nothing costs twice as much as asking first, which costs half as much as a message: so
    # this is for who was told that there is one.
    recv = socket.recv  # ZMQ's objects take long to find their own attributes
    try:
        frame = recv(_NOBLOCK, False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more:
        frame = recv(_NOBLOCK, False)
        frames.append(frame.bytes)
    return frames


def idle(socket: Socket) -> bool:
    """Whether there is nothing. Its descriptor does not say so again then."""
    # Constants of ZMQ that are no more than numbers are cheaper than its own.
    return not socket.get(_EVENTS) & _POLLIN  # type: ignore[operator]


def news(monitor: Socket) -> int | None:
    """What has happened to a connection: :data:`MET` or :data:`CUT`; None: nothing more."""
    frames = None if idle(monitor) else receive(monitor)
    return None if frames is None else int.from_bytes(frames[0][:2], sys.byteorder)
