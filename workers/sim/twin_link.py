"""Links that transfers share, for the twin: how long each takes depends on what else is under way. No clock of its own.

Every worker has a port, with a rate for each direction (full duplex, as Ethernet and InfiniBand are). Transfers that go through
the same port at the same time share it, and what one cannot use, because its other end is busier, is left to the others:
max-min fairness, which is what TCP's congestion control and InfiniBand's credits come near to. The fabric between the ports is
taken to be non-blocking.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple

_DONE_BYTES = 1e-3
"""What rounding leaves of a transfer that is over."""


class Arrived(NamedTuple):
    """A transfer ended."""

    to: str
    """The worker that waited for it."""
    name: str
    """What it is called there."""
    at_s: float


class _Flow:
    __slots__ = ("left_bytes", "name", "ports", "rate", "to")

    def __init__(self, to: str, name: str, ports: tuple[str, ...], left_bytes: float) -> None:
        self.to = to
        self.name = name
        self.ports = ports
        self.left_bytes = left_bytes
        self.rate = 0.0


class Wires:
    """Ports, by name, and what goes through them. Time only moves in :meth:`advance`."""

    def __init__(self, bytes_a_s: Mapping[str, float]) -> None:
        """Raises ValueError for a port that carries nothing."""
        for port, rate in bytes_a_s.items():
            if not rate > 0:
                raise ValueError(f"{port}: {rate:g} bytes/s")
        self._bytes_a_s = dict(bytes_a_s)
        self._flows: list[_Flow] = []
        self._to_come: list[tuple[float, int, _Flow]] = []
        self._order = 0
        self._now_s = 0.0
        self._next_end_s = math.inf
        self.carried_bytes = dict.fromkeys(bytes_a_s, 0.0)
        """By port, since the start, of transfers that were begun."""

    def begin(self, to: str, name: str, ports: tuple[str, ...], size_bytes: float, at_s: float) -> None:
        """So many bytes flow through all of ``ports`` from ``at_s`` on, which is not before what was advanced to."""
        self._order += 1
        heapq.heappush(self._to_come, (max(at_s, self._now_s), self._order, _Flow(to, name, ports, size_bytes)))
        for port in ports:
            self.carried_bytes[port] += size_bytes

    def next_event_s(self) -> float:
        """When a transfer begins or ends next; infinity: nothing is under way."""
        return min(self._to_come[0][0], self._next_end_s) if self._to_come else self._next_end_s

    def advance(self, now_s: float) -> list[Arrived]:
        """What has ended by ``now_s``, in order."""
        arrived: list[Arrived] = []
        while (next_s := self.next_event_s()) <= now_s:
            self._flow(next_s)
            if self._next_end_s <= next_s:
                over = [flow for flow in self._flows if flow.left_bytes <= max(_DONE_BYTES, flow.rate * 1e-9)]
                arrived += [Arrived(flow.to, flow.name, next_s) for flow in over]
                self._flows = [flow for flow in self._flows if flow not in over]
            while self._to_come and self._to_come[0][0] <= next_s:
                self._flows.append(heapq.heappop(self._to_come)[2])
            self._share()
        return arrived

    def _flow(self, to_s: float) -> None:
        """Everything under way moves on."""
        passed_s = to_s - self._now_s
        for flow in self._flows:
            flow.left_bytes -= flow.rate * passed_s
        self._now_s = to_s

    def _share(self) -> None:
        """Give each transfer its rate: the fullest port decides about its own, then the fullest of the rest, and so on."""
        left = dict(self._bytes_a_s)
        users: dict[str, int] = {}
        for flow in self._flows:
            for port in flow.ports:
                users[port] = users.get(port, 0) + 1
        waiting = self._flows
        while waiting:
            tightest = min((port for port, count in users.items() if count), key=lambda port: left[port] / users[port])
            share = left[tightest] / users[tightest]
            rest = []
            for flow in waiting:
                if tightest not in flow.ports:
                    rest.append(flow)
                    continue
                flow.rate = share
                for port in flow.ports:
                    left[port] = max(0.0, left[port] - share)
                    users[port] -= 1
            waiting = rest
        self._next_end_s = min((self._now_s + flow.left_bytes / flow.rate for flow in self._flows), default=math.inf)
