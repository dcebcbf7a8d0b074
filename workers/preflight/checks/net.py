"""The side channel: its address, its port, and the way to the peer's."""

from __future__ import annotations

import ipaddress

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Dial, Facts, Listener
from workers.preflight.findings import Finding, Severity
from workers.preflight.identity import on_one_host

_ANY = frozenset(("0.0.0.0", "::", "localhost", ""))  # noqa: S104  (refused, not bound)


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about addresses and ports."""
    findings = _host(facts, ask)
    ports = (("side_channel.port", _side_channel_port(facts, ask), "side-channel port"), ("worker.port", ask.port, "HTTP port"))
    for kind, port, name in (*ports, *(("worker.port", port, f"{what}: port") for port, what in ask.more_ports)):
        if port is not None:
            findings.append(_free(kind, port, name, facts, ask))
    return findings + [_reached(dial) for dial in facts.dials]


def check_reverse(outcome: str) -> Finding:
    """Whether the peer reached our side-channel port while we listened on it."""
    if outcome == "connected":
        return Finding(id="peer.reaches_us", severity=Severity.OK, found="the peer reaches our side-channel port")
    return Finding(
        id="peer.reaches_us",
        severity=Severity.ERROR,
        found=f"the peer cannot reach our side-channel port: {outcome}",
        why="A decode worker there asks for our memory layout on this port: the handshake times out after 5 s.",
        fix="Firewall, security group or network policy for the port, and that peers use the address they can reach.",
    )


def _side_channel_port(facts: Facts, ask: Ask) -> int | None:
    if ask.side_channel_port is not None:
        return ask.side_channel_port
    text = facts.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return int(text) if text.isdecimal() else None


def _host(facts: Facts, ask: Ask) -> list[Finding]:
    host = ask.side_channel_host or facts.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    why = "vLLM binds this address and tells it to its peers: they fetch the memory layout there before the first transfer."
    if host is None:
        if ask.role is None:
            return []
        return [
            Finding(
                id="side_channel.host",
                severity=Severity.WARN,
                found="no side-channel host is given",
                why=f"{why} Without one it says localhost, and a peer on another host asks itself.",
                fix="VLLM_NIXL_SIDE_CHANNEL_HOST, an address that peers can reach (baton worker --host sets it).",
            )
        ]
    if host in _ANY:
        return [
            Finding(
                id="side_channel.host",
                severity=Severity.ERROR,
                found=f"the side-channel host is {host!r}",
                why=f"{why} This one leads a peer to itself.",
                fix=f"One of this node's addresses: {_some(facts)}.",
            )
        ]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return [
            Finding(id="side_channel.host", severity=Severity.OK, found=f"side-channel host {host} (a name, not looked up)")
        ]
    if facts.addresses and str(address) not in facts.addresses and not address.is_loopback:
        return [
            Finding(
                id="side_channel.host",
                severity=Severity.ERROR,
                found=f"{host} is no address of this node; it has {_some(facts)}",
                why=f"{why} Binding it fails when the worker starts.",
                fix="Take one of them; behind address translation use the host's network.",
            )
        ]
    if address.is_loopback and ask.peer is not None and not on_one_host(facts, ask):
        return [
            Finding(
                id="side_channel.host",
                severity=Severity.ERROR,
                found=f"the side-channel host is {host}, and the peer {ask.peer} is another host",
                why=f"{why} A loopback address leads a peer to itself.",
                fix=f"One of this node's addresses: {_some(facts)}.",
            )
        ]
    return [Finding(id="side_channel.host", severity=Severity.OK, found=f"side-channel host {host}")]


def _some(facts: Facts) -> str:
    usable = sorted(
        address for address in facts.addresses if not (ip := ipaddress.ip_address(address)).is_loopback and not ip.is_link_local
    )
    return ", ".join(usable[:4]) or "none but the loopback"


def _free(kind: str, port: int, name: str, facts: Facts, ask: Ask) -> Finding:
    taken = next((each for each in facts.listeners if each.port == port and _clashes(each, facts, ask)), None)
    if taken is None:
        return Finding(id=kind, severity=Severity.OK, found=f"{name} {port} is free")
    owner = taken.owner or "a process of another user or container"
    return Finding(
        id=kind,
        severity=Severity.ERROR,
        found=f"{name} {port} is taken: {owner} listens on {taken.address}",
        why="The worker stops when it binds the port, minutes later, with the model loaded; or peers ask the wrong worker.",
        fix=f"End that process, or choose another port: every worker of a host needs its own (ss -ltnp sport = :{port}).",
    )


def _clashes(taken: Listener, facts: Facts, ask: Ask) -> bool:
    """It has the port on the address that we would bind, or one of the two is for all addresses."""
    host = ask.side_channel_host or facts.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    return host is None or taken.address in (host, "0.0.0.0", "::") or host in _ANY or not _is_address(host)  # noqa: S104


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _reached(dial: Dial) -> Finding:
    if dial.outcome == "connected":
        found = f"{dial.target} answers after {numbers.seconds(dial.seconds)}"
        return Finding(id="peer.reachable", severity=Severity.OK, found=found)
    if dial.outcome == "refused":
        return Finding(
            id="peer.reachable",
            severity=Severity.INFO,
            found=f"{dial.target}: the host answers, nobody listens on the port",
            why="As it should be if the peer's worker is not up yet.",
            fix="Once it is up, ask again; a worker that binds another address (VLLM_NIXL_SIDE_CHANNEL_HOST) looks the same.",
        )
    return Finding(
        id="peer.reachable",
        severity=Severity.ERROR,
        found=f"{dial.target}: {dial.outcome}",
        why="The decode worker asks there for the memory layout: the handshake times out after 5 s and the request "
        "fails with 500.",
        fix="The name and address; then firewall, security group or network policy: the side-channel port and, for "
        "UCX over TCP, "
        "all high ports between the workers.",
    )
