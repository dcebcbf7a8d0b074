"""What stands between client and workers: the names, and how each is started. Processes, all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.overhead.plain_envoy import passing
from bench.peers import MissingPeerError, peer, smg_command, vllm_router_command
from extproc.config import Config, ConfigError
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from workers.process import Child, stop_all
from workers.ready import PartError, free_ports, wait_ready

Kind = Literal["direct", "envoy", "baton", "vllm-router", "smg", "fastapi"]

ENVOY, ROUTER = "envoy", "router"
"""Names that processor time is printed under; the filter, a peer's gateway and the proxy are all the router."""
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_PATIENCE_S = 600
_MODE_HEADER = "x-bench-mode"


@dataclass(frozen=True)
class Arrangement:
    """One way from the client to the workers."""

    name: str
    kind: Kind
    title: str
    envoy: bool = False
    """Behind an Envoy that passes everything on. Baton is always."""
    transport: str = "grpc"
    """Baton: what carries Envoy's questions to the filter."""
    loop: bool = False
    """Baton: its prefill calls go through Envoy."""
    duplex: bool = False
    """Baton: bodies of requests come in pieces (FULL_DUPLEX_STREAMED)."""
    whole: bool = False
    """Baton: one worker does all of it, so there is no prefill call."""
    dear: bool = False
    """So slow that it is measured in fewer cells."""

    @property
    def apart(self) -> bool:
        """Whether each request is to reach a prefill and a decode worker."""
        return self.kind not in ("direct", "envoy") and not self.whole


def _baton(transport: str) -> Iterable[Arrangement]:
    name = f"baton-{transport}"
    yield Arrangement(name, "baton", f"Envoy + Baton ({transport})", transport=transport)
    yield Arrangement(f"{name}-loop", "baton", f"… prefill through Envoy ({transport})", transport=transport, loop=True)
    yield Arrangement(f"{name}-duplex", "baton", f"… bodies in pieces ({transport})", transport=transport, duplex=True)
    yield Arrangement(f"{name}-whole", "baton", f"… aggregated ({transport})", transport=transport, whole=True)


ARRANGEMENTS = {
    each.name: each
    for each in (
        Arrangement("direct", "direct", "direct to a worker"),
        Arrangement("envoy", "envoy", "Envoy alone", envoy=True),
        *_baton("grpc"),
        *_baton("lean"),
        Arrangement("smg", "smg", "SMG"),
        Arrangement("envoy+smg", "smg", "Envoy + SMG", envoy=True),
        Arrangement("vllm-router", "vllm-router", "vllm-router"),
        Arrangement("envoy+vllm-router", "vllm-router", "Envoy + vllm-router", envoy=True),
        Arrangement("fastapi", "fastapi", "FastAPI + httpx", dear=True),
        Arrangement("envoy+fastapi", "fastapi", "Envoy + FastAPI + httpx", envoy=True, dear=True),
    )
}


@dataclass(frozen=True)
class Way:
    """A running arrangement: where it listens, and whose processor time counts."""

    arrangement: Arrangement
    port: int
    parts: list[tuple[str, Child]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """What requests have besides."""
        return {_MODE_HEADER: "aggregate"} if self.arrangement.whole else {}


def refused(arrangement: Arrangement) -> str | None:
    """Why this checkout cannot run it; None if it can."""
    if arrangement.kind == "baton":
        workers = {"prefill": ["127.0.0.1:1"], "decode": ["127.0.0.1:2"]}
        try:
            msgspec.convert({"workers": workers, "transport": arrangement.transport}, Config)
        except msgspec.ValidationError as error:
            return f"the configuration refuses it: {error}"
    return None


class Site:
    """All wanted arrangements, running at once, so that they can be measured in turn. Context manager."""

    def __init__(
        self,
        wanted: Sequence[Arrangement],
        directory: Path,
        peers: Path,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        said: Callable[[str], None],
    ) -> None:
        """``prefill`` and ``decode``: `ip:port` of the workers."""
        self._wanted = wanted
        self._directory = directory
        self._peers = peers
        self._prefill = list(prefill)
        self._decode = list(decode)
        self._say = said
        self._children: list[Child] = []
        self.ways: list[Way] = []
        self.failures: list[str] = []
        """Of what could not be started; the others run."""

    def __enter__(self) -> Site:
        with ExitStack() as parts:
            parts.callback(self._stop)
            self._start()
            parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        stop_all(reversed(self._children))

    def _child(self, name: str, argv: Sequence[str]) -> Child:
        child = Child(name, argv, log=self._directory / f"{name}.log", grace_s=3.0)
        self._children.append(child)
        return child

    def _start(self) -> None:
        by_name: dict[str, Way] = {}
        routers: dict[str, tuple[Child, int]] = {}
        stacks: dict[str, tuple[int, list[tuple[str, Child]]]] = {}
        tried: set[str] = set()
        for each in self._wanted:
            if each.kind == "direct":
                by_name[each.name] = Way(each, _port_of(self._decode[0]))
            elif each.kind == "baton":
                key = f"baton-{each.transport}{'-loop' * each.loop}{'-duplex' * each.duplex}"
                if key not in tried:
                    tried.add(key)
                    with self._unless_it_fails(key):
                        stacks[key] = self._baton(each)
                if key in stacks:
                    by_name[each.name] = Way(each, *stacks[key])
            elif each.kind != "envoy" and each.kind not in tried:
                tried.add(each.kind)
                with self._unless_it_fails(each.kind):
                    routers[each.kind] = self._router(each.kind)
        by_name |= self._fronted(routers)
        self.ways = [by_name[each.name] for each in self._wanted if each.name in by_name]

    @contextmanager
    def _unless_it_fails(self, name: str) -> Iterator[None]:
        self._say(f"starting {name}")
        try:
            yield
        except (PartError, MissingPeerError, ConfigError, msgspec.ValidationError) as error:
            self.failures.append(f"{name}: {error}")

    def _fronted(self, routers: dict[str, tuple[Child, int]]) -> dict[str, Way]:
        """Peers alone and behind one plain Envoy, which also passes on to the decode workers."""
        found: dict[str, Way] = {}
        behind = [each for each in self._wanted if each.envoy and (each.kind == "envoy" or each.kind in routers)]
        if behind:
            admin, *ports = free_ports(1 + len(behind))
            plain = [_port_of(address) for address in self._decode]
            servers = [plain if each.kind == "envoy" else [routers[each.kind][1]] for each in behind]
            file = self._directory / "front.json"
            file.write_bytes(msgspec.json.encode(passing(list(zip(ports, servers, strict=True)), admin_port=admin)))
            envoy = self._child("front", envoy_command(find_envoy(), file))
            wait_ready(envoy, f"http://{_HOST}:{admin}/ready", _START_TIMEOUT_S)
            for each, port in zip(behind, ports, strict=True):
                router = [(ROUTER, routers[each.kind][0])] if each.kind in routers else []
                found[each.name] = Way(each, port, [(ENVOY, envoy), *router])
        for each in self._wanted:
            if each.kind in routers and not each.envoy:
                child, port = routers[each.kind]
                found[each.name] = Way(each, port, [(ROUTER, child)])
        return found

    def _baton(self, arrangement: Arrangement) -> tuple[int, list[tuple[str, Child]]]:
        name = f"{arrangement.transport}{'-loop' * arrangement.loop}{'-duplex' * arrangement.duplex}"
        directory = self._directory / name
        directory.mkdir()
        port, admin, envoy_admin = free_ports(3)
        base = stack_config(
            directory,
            prefill=self._prefill,
            decode=self._decode,
            listen=f"{_HOST}:{port}",
            admin=f"{_HOST}:{admin}",
            envoy_admin=f"{_HOST}:{envoy_admin}",
        )
        tree: dict[str, Any] = msgspec.to_builtins(base)
        tree["transport"] = arrangement.transport
        tree["envoy"]["debug_headers"] = False
        if arrangement.duplex:
            tree["envoy"]["body_mode"] = "full_duplex"
        if not arrangement.loop:
            tree["prefill"]["via"] = "direct"
        tree["policies"] = [
            {"name": "whole", "match": {"headers": {_MODE_HEADER: {"exact": "aggregate"}}}, "mode": "aggregate"},
            {"name": "default", "mode": "disaggregate"},
        ]
        config = msgspec.convert(tree, Config)
        config_file, envoy_file = write_configs(config, directory)
        filter_ = self._child(f"filter-{name}", filter_command(config_file))
        await_endpoints(config, filter_)
        envoy = self._child(f"envoy-{name}", envoy_command(find_envoy(), envoy_file))
        wait_ready(filter_, f"http://{_HOST}:{admin}/healthz", _START_TIMEOUT_S)
        wait_ready(envoy, f"http://{_HOST}:{envoy_admin}/ready", _START_TIMEOUT_S)
        return port, [(ENVOY, envoy), (ROUTER, filter_)]

    def _router(self, kind: Kind) -> tuple[Child, int]:
        port, metrics_port = free_ports(2)
        if kind == "vllm-router":
            argv = vllm_router_command(
                self._peers,
                prefill=self._prefill,
                decode=self._decode,
                port=port,
                metrics_port=metrics_port,
                patience_s=_PATIENCE_S,
            )
            ready = "/health"
        elif kind == "smg":
            argv = smg_command(
                self._peers,
                self._directory,
                prefill=self._prefill,
                decode=self._decode,
                port=port,
                metrics_port=metrics_port,
                patience_s=_PATIENCE_S,
            )
            ready = "/readiness"
        else:
            proxy = Path(__file__).with_name("proxy.py")
            argv = [peer(self._peers, "python"), str(proxy), str(port), ",".join(self._prefill), ",".join(self._decode)]
            ready = "/health"
        child = self._child(kind, argv)
        wait_ready(child, f"http://{_HOST}:{port}{ready}", _START_TIMEOUT_S)
        return child, port


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
