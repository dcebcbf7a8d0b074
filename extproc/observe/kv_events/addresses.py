"""Where a worker publishes its KV events: a label of it, the configuration, or what it says itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import aiohttp
import msgspec

from extproc import bounded
from extproc.config import Address
from extproc.observe.kv_events.settings import EventPorts, KvEvents, port_faults
from extproc.routing.pool import Endpoint, Role
from extproc.tls.reasons import described
from extproc.tls.workers import WorkerLink

LABEL = "kv-events"
"""Of a worker: `5557`, or `5557-5657` with the replay port; a slash between them will do as well."""

_PATH = "/kv_event_sources"
_MAX_BYTES = 1 << 16
_MOST_RANKS = 64
"""Of a worker, by its own word. Ranks are on its own host, which has 8 or 16 accelerators. Their numbers are higher where the
ranks of several hosts are counted through."""


class Publisher(NamedTuple):
    """One publisher, as ZMQ addresses."""

    rank: int
    events: str
    replay: str | None
    topic: str


class NoPublisherError(Exception):
    """The worker has none that can be reached; the message says why."""


class _Told(msgspec.Struct):
    """Of one rank. vLLM says more."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


_decoder = msgspec.json.Decoder(dict[str, _Told])


def by_settings(settings: KvEvents, endpoint: Endpoint) -> list[Publisher] | None:
    """What is known without asking; None: the worker has to be asked. Raises NoPublisherError."""
    label = endpoint.labels.get(LABEL)
    if label is not None:
        ports = _labelled(label, settings.ranks)
    elif settings.find == "ask":
        return None
    else:
        found = settings.ports.get("decode" if Role.DECODE in endpoint.roles else "prefill")
        if found is None:
            raise NoPublisherError("kv_events.ports has nothing for its role")
        ports = found
    host = _host(endpoint.address)
    return [
        Publisher(
            rank,
            f"tcp://{host}:{ports.port + rank}",
            None if ports.replay_port is None else f"tcp://{host}:{ports.replay_port + rank}",
            settings.topic,
        )
        for rank in range(settings.ranks)
    ]


async def ask(session: aiohttp.ClientSession, link: WorkerLink, headers: Any, address: str) -> list[Publisher]:
    """What the worker says. Raises NoPublisherError."""
    try:
        async with session.get(link.url(address, _PATH), headers=headers, **link.how) as response:
            if response.status != 200:
                raise NoPublisherError(f"{_PATH}: status {response.status}")
            return told(address, await bounded.read(response, _MAX_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, bounded.TooLargeError) as error:
        raise NoPublisherError(f"{_PATH}: {described(error)}") from None


def told(address: str, body: bytes) -> list[Publisher]:
    """The answer to ``/kv_event_sources`` of the worker at ``address``. Raises NoPublisherError.

    Of each ZMQ address only the port counts: a worker must not send us to another host, and behind `*` there is none. Each port
    is one publisher's: what one publishes must not count for several ranks.
    """
    try:
        ranks = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoPublisherError(f"{_PATH}: {error}") from None
    found: list[Publisher] = []
    for rank, each in ranks.items():
        if not each.enable_kv_cache_events or each.publisher != "zmq":
            continue
        number = _number(rank)
        if number is None or number in [publisher.rank for publisher in found] or len(found) == _MOST_RANKS:
            raise NoPublisherError(f"{_PATH}: a rank {rank[:20]!r} after {len(found)} others")
        replay = None if each.replay_endpoint is None else _reached(address, each.replay_endpoint)
        found.append(Publisher(number, _reached(address, each.endpoint), replay, each.topic))
    if not found:
        raise NoPublisherError("it publishes no events")
    taken = [address for each in found for address in (each.events, each.replay) if address is not None]
    twice = next((address for at, address in enumerate(taken) if address in taken[:at]), None)
    if twice is not None:
        raise NoPublisherError(f"{_PATH}: {twice.rpartition(':')[2]} is the port of two publishers")
    return found


def _reached(address: str, bound: str) -> str:
    scheme, _, rest = bound.partition("://")
    port = _number(rest.rpartition(":")[2])
    if scheme != "tcp" or not port:
        raise NoPublisherError(f"{_PATH}: {bound[:80]!r} cannot be reached from here")
    return f"tcp://{_host(address)}:{port}"


def _host(address: str) -> str:
    return Address.parse(address).host  # with the brackets of IPv6


def _labelled(label: str, ranks: int) -> EventPorts:
    told = [_number(port) for port in label.replace("-", "/").split("/")]  # a value of a Kubernetes label has no slash
    if len(told) > 2 or not told[0] or not told[-1]:
        raise NoPublisherError(f"label {LABEL}: {label[:40]!r} is neither a port nor two, as in 5557-5657")
    ports = EventPorts(port=told[0], replay_port=told[1] if len(told) == 2 else None)
    why = next((reason for _, reason in port_faults(ports, ranks)), None)
    if why is not None:
        raise NoPublisherError(f"label {LABEL}: {label[:40]!r}: {why}")
    return ports


def _number(text: str) -> int | None:
    """From 0 to 65535; None: it is none of these."""
    number = int(text) if len(text) <= 5 and text.isascii() and text.isdigit() else 65536
    return number if number < 65536 else None
