"""Network interfaces, addresses of this node, and the ports that are taken."""

from __future__ import annotations

import ipaddress
import re

from workers.preflight.facts import Listener, NetDevice
from workers.preflight.gather.tree import Tree, whole

_LISTEN = "0A"
_SOCKET = re.compile(r"^socket:\[(\d+)\]$")
_PROCESSES_MAX = 2_000
"""On a node with more, ports have no owner here."""


def devices(tree: Tree) -> tuple[NetDevice, ...]:
    """Interfaces other than the loopback."""
    found = []
    for name in tree.names("sys/class/net"):
        if name == "lo" or not tree.exists(f"sys/class/net/{name}/operstate"):
            continue
        speed = tree.number(f"sys/class/net/{name}/speed")
        found.append(
            NetDevice(
                name=name,
                up=tree.text(f"sys/class/net/{name}/operstate") in ("up", "unknown"),
                mbit_per_s=speed if speed is not None and speed > 0 else None,
                mtu=tree.number(f"sys/class/net/{name}/mtu"),
            )
        )
    return tuple(found)


def addresses(tree: Tree) -> frozenset[str]:
    """IP addresses of this node."""
    found: set[str] = set()
    last = ""
    for line in tree.text("proc/net/fib_trie").splitlines():
        if "|-- " in line:
            last = line.partition("|-- ")[2].strip()
        elif "/32 host LOCAL" in line:
            found.add(last)
    found = {address for address in found if _is_address(address)}
    for line in tree.text("proc/net/if_inet6").splitlines():
        digits = next(iter(line.split()), "")
        if len(digits) == 32 and (address := _address(digits, swap=False)) is not None:
            found.add(address)
    return frozenset(found)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def listeners(tree: Tree) -> tuple[Listener, ...]:
    """TCP ports that are listened on, in this network namespace."""
    sockets = []
    for path in ("proc/net/tcp", "proc/net/tcp6"):
        for line in tree.text(path).splitlines()[1:]:
            parts = line.split()
            if len(parts) > 9 and parts[3] == _LISTEN:
                digits, _, number = parts[1].partition(":")
                address, port = _address(digits), whole(number, 16)
                if address is not None and port is not None:
                    sockets.append((address, port, parts[9]))
    owners = _owners(tree, {inode for _, _, inode in sockets}) if sockets else {}
    return tuple(Listener(address=address, port=port, owner=owners.get(inode)) for address, port, inode in sockets)


def _address(digits: str, *, swap: bool = True) -> str | None:
    """The kernel writes them as words of the machine's byte order, which is little-endian on all that run vLLM."""
    try:
        raw = bytes.fromhex(digits)
        words = (raw[start : start + 4][:: -1 if swap else 1] for start in range(0, len(raw), 4))
        return str(ipaddress.ip_address(b"".join(words)))
    except ValueError:
        return None


def _owners(tree: Tree, inodes: set[str]) -> dict[str, str]:
    owners: dict[str, str] = {}
    processes = [name for name in tree.names("proc") if name.isdecimal()]
    if len(processes) > _PROCESSES_MAX:
        return owners
    for pid in processes:
        for number in tree.names(f"proc/{pid}/fd"):
            found = _SOCKET.match(tree.link(f"proc/{pid}/fd/{number}"))
            if found and found[1] in inodes:
                owners[found[1]] = f"process {pid} ({tree.text(f'proc/{pid}/comm') or 'name unknown'})"
    return owners
