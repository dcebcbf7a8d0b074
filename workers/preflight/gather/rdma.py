"""RDMA devices from sysfs, and what can be told about flow control of RoCE."""

from __future__ import annotations

import re

from workers.preflight.facts import RdmaPort
from workers.preflight.gather.tree import Tree, whole
from workers.preflight.runner import Runner

_COMMAND_TIMEOUT_S = 3.0
_LOST = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
_RATE_MAX_GBIT_PER_S = 100_000.0
"""What is above is no rate."""
_INTERFACE = re.compile(r"[A-Za-z0-9_][\w.@:-]{0,31}", re.ASCII)
_DCB_PRIORITY = re.compile(r"\b([0-7]):(on|off)\b")


def ports(tree: Tree, runner: Runner) -> tuple[RdmaPort, ...]:
    """All ports of all devices."""
    found = []
    for device in tree.names("sys/class/infiniband"):
        base = f"sys/class/infiniband/{device}"
        for number in tree.names(f"{base}/ports"):
            port = f"{base}/ports/{number}"
            netdev = _name(tree.text(f"{port}/gid_attrs/ndevs/0") or next(iter(tree.names(f"{base}/device/net")), ""))
            link_layer = tree.text(f"{port}/link_layer")
            roce = link_layer == "Ethernet" and netdev is not None
            numa = tree.number(f"{base}/device/numa_node")
            lost = [tree.number(f"{port}/hw_counters/{name}") for name in _LOST]
            found.append(
                RdmaPort(
                    device=device,
                    number=whole(number) or 0,
                    # "4: ACTIVE"
                    state=tree.text(f"{port}/state").rpartition(":")[2].strip(),
                    physical=tree.text(f"{port}/phys_state").rpartition(":")[2].strip(),
                    link_layer=link_layer,
                    rate_gbit_per_s=_rate(tree.text(f"{port}/rate")),
                    netdev=netdev,
                    numa_node=numa if numa is not None and numa >= 0 else None,
                    pfc=_pfc(str(netdev), runner) if roce else None,
                    ecn=_ecn(str(netdev), tree) if roce else None,
                    lost=sum(count or 0 for count in lost) if any(count is not None for count in lost) else None,
                )
            )
    return tuple(found)


def _name(text: str) -> str | None:
    """The name of an interface; it becomes part of paths and commands, so nothing else."""
    return text if _INTERFACE.fullmatch(text) else None


def _rate(text: str) -> float:
    """``400 Gb/sec (4X NDR)`` -> 400; 0: it does not say."""
    try:
        rate = float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0
    return rate if 0 < rate < _RATE_MAX_GBIT_PER_S else 0.0


def _ecn(netdev: str, tree: Tree) -> bool | None:
    """NVIDIA's driver has a file a priority for each side of congestion notification."""
    base = f"sys/class/net/{netdev}/ecn/roce_np/enable"
    states = [tree.text(f"{base}/{priority}") for priority in tree.names(base)]
    return any(state == "1" for state in states) if states else None


def _pfc(netdev: str, runner: Runner) -> tuple[bool, ...] | None:
    """From ``dcb`` of iproute2, else from NVIDIA's ``mlnx_qos``."""
    output = runner.run(("dcb", "pfc", "show", "dev", netdev), timeout_s=_COMMAND_TIMEOUT_S)
    if output is not None and output.status == 0:
        states = {int(priority): state == "on" for priority, state in _DCB_PRIORITY.findall(_after(output.text, "prio-pfc"))}
        if states:
            return tuple(states.get(priority, False) for priority in range(8))
    output = runner.run(("mlnx_qos", "-i", netdev), timeout_s=_COMMAND_TIMEOUT_S)
    if output is not None and output.status == 0:
        for line in _after(output.text, "PFC configuration").splitlines():
            if line.split()[:1] == ["enabled"]:
                return tuple(state == "1" for state in line.split()[1:9])
    return None


def _after(text: str, word: str) -> str:
    return text.partition(word)[2]
