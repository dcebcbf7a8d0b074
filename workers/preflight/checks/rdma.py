"""RDMA devices: there, active, fast, reachable from a container, and without loss on Ethernet."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts, RdmaPort
from workers.preflight.findings import Finding, Severity
from workers.preflight.identity import on_one_host
from workers.preflight.routes import kind_of, net_devices, rdma_wanted, usable_ports, wanted
from workers.preflight.transports import RDMA, expand, matches

_SLOW_GBIT_PER_S = 100.0
_LOST_MANY = 1_000


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about RDMA; none where UCX_TLS rules it out."""
    asked = bool(expand(wanted(facts, ask).names) & RDMA) and not wanted(facts, ask).everything
    if not rdma_wanted(facts, ask):
        if facts.rdma and ask.device == "gpu":
            return [_ruled_out(facts, ask)]
        return []
    if not facts.rdma:
        return [_none(facts, ask, asked=asked)]
    return [*_ports(facts, ask), *_nodes(facts), *_lossless(facts, ask)]


def _ruled_out(facts: Facts, ask: Ask) -> Finding:
    names = ", ".join(port.name for port in facts.rdma)
    return Finding(
        id="rdma.ports",
        severity=Severity.WARN,
        found=f"{names} is there, but UCX_TLS={wanted(facts, ask).text} does not let it be used",
        why=f"KV blocks go over TCP: about {numbers.rate(numbers.TCP_GUESS_BYTES_PER_S)} a connection "
        f"instead of up to {numbers.rate(max(port.rate_gbit_per_s for port in facts.rdma) * 1e9 / 8)}.",
        fix="UCX_TLS=all, or rc,cuda_copy,cuda_ipc,sm,self.",
    )


def _none(facts: Facts, ask: Ask, *, asked: bool) -> Finding:
    local = on_one_host(facts, ask)
    severity = Severity.ERROR if asked and not local else Severity.WARN if ask.device == "gpu" and not local else Severity.INFO
    return Finding(
        id="rdma.ports",
        severity=severity,
        found="no RDMA device" + (f", and UCX_TLS={wanted(facts, ask).text} asks for one" if asked else ""),
        why="KV blocks go over TCP" + (" or shared memory" if local else "") + f": about "
        f"{numbers.rate(numbers.TCP_GUESS_BYTES_PER_S)} a connection instead of {numbers.rate(numbers.DIRECT_BYTES_PER_S)} "
        "with a 400 Gb/s NIC.",
        fix="Load the NIC's driver (mlx5_ib); give the container the devices (--device /dev/infiniband, --network host, "
        "or the cluster's RDMA resource)." + ("" if asked else " Without such a NIC: UCX_TLS=tcp,sm,self says so on purpose."),
    )


def _ports(facts: Facts, ask: Ask) -> list[Finding]:
    patterns = net_devices(facts, ask)
    named = [port for port in facts.rdma if matches(port.name, patterns)]
    down = [port for port in named if not port.active]
    active = usable_ports(facts, ask)
    findings = []
    if not active:
        what = ", ".join(f"{port.name} {port.state} ({port.physical})" for port in down) or "none that UCX_NET_DEVICES names"
        findings.append(
            Finding(
                id="rdma.ports",
                severity=Severity.ERROR,
                found=f"no RDMA port is active: {what}",
                why=f"UCX leaves them out without a word: KV blocks go over TCP at about "
                f"{numbers.rate(numbers.TCP_GUESS_BYTES_PER_S)} a connection.",
                fix="Cable, switch port, and for InfiniBand a subnet manager (INIT means that none has seen the port); ibstat.",
            )
        )
        return findings
    described = ", ".join(f"{port.name} {kind_of(port)} {port.rate_gbit_per_s:g} Gb/s" for port in active)
    findings.append(Finding(id="rdma.ports", severity=Severity.OK, found=f"active: {described}"))
    if down:
        findings.append(
            Finding(
                id="rdma.ports_down",
                severity=Severity.WARN if patterns else Severity.INFO,
                found=", ".join(f"{port.name} {port.state} ({port.physical})" for port in down),
                why="UCX leaves them out; those that should share the load do not.",
                fix="Cable, switch port, subnet manager; or name the good ones in UCX_NET_DEVICES.",
            )
        )
    slow = active[0]
    if 0 < slow.rate_gbit_per_s < _SLOW_GBIT_PER_S:
        findings.append(
            Finding(
                id="rdma.rate",
                severity=Severity.WARN,
                found=f"the fastest port has {slow.rate_gbit_per_s:g} Gb/s",
                why=f"{numbers.rate(slow.rate_gbit_per_s * 1e9 / 8)}; a handoff takes "
                f"{400 / max(slow.rate_gbit_per_s, 1):.0f} times what it takes with 400 Gb/s. A link may have come "
                "up slower than it can.",
                fix="ibstat or ethtool shows what it could do; check cable, transceiver and the switch port's speed.",
            )
        )
    return findings


def _nodes(facts: Facts) -> list[Finding]:
    if facts.verbs_nodes:
        return []
    return [
        Finding(
            id="rdma.device_nodes",
            severity=Severity.ERROR,
            found="sysfs shows RDMA devices, but there is no /dev/infiniband/uverbs*",
            why="Without them no process opens a device: UCX leaves RDMA out without a word.",
            fix="docker run --device /dev/infiniband (compose: devices: [/dev/infiniband]); on the host: modprobe ib_uverbs.",
        )
    ]


def _lossless(facts: Facts, ask: Ask) -> list[Finding]:
    findings = []
    for port in usable_ports(facts, ask):
        if not port.roce:
            continue
        findings.append(_pfc(port))
        if port.ecn is False:
            findings.append(
                Finding(
                    id="rdma.roce_ecn",
                    severity=Severity.WARN,
                    found=f"{port.name} ({port.netdev}): congestion notification (ECN, DCQCN) is off for all priorities",
                    why="When many prefill workers send to one decode worker, nobody slows down until frames are "
                    "dropped or paused.",
                    fix=f"echo 1 > /sys/class/net/{port.netdev}/ecn/roce_np/enable/3 and the same below roce_rp; ECN "
                    "marking on the switches.",
                )
            )
        if port.lost is not None and port.lost >= _LOST_MANY:
            findings.append(
                Finding(
                    id="rdma.loss",
                    severity=Severity.WARN,
                    found=f"{port.name}: {port.lost:,} packets lost or out of order since the driver was loaded",
                    why="RoCE sends again from the lost packet on: one loss in a thousand can cost more than half of "
                    "the bandwidth.",
                    fix="Watch whether hw_counters/out_of_sequence grows during transfers; then look at PFC and ECN "
                    "of every hop.",
                )
            )
    return findings


def _pfc(port: RdmaPort) -> Finding:
    name = f"{port.name} ({port.netdev})"
    fix = (
        f"mlnx_qos -i {port.netdev} --pfc 0,0,0,1,0,0,0,0 --trust dscp (or dcb pfc set dev {port.netdev} prio-pfc 3:on), "
        "and the same priority on every switch port between the nodes."
    )
    if port.pfc is None:
        return Finding(
            id="rdma.roce_pfc",
            severity=Severity.INFO,
            found=f"{name}: neither dcb nor mlnx_qos could say whether priority flow control is on",
            why="RoCE needs a network that does not drop. With loss, transfers drop to a fraction of the rate, and "
            "only under load.",
            fix=f"Check: mlnx_qos -i {port.netdev}. Set: {fix}",
        )
    on = [str(priority) for priority, state in enumerate(port.pfc) if state]
    if on:
        return Finding(id="rdma.roce_pfc", severity=Severity.OK, found=f"{name}: priority flow control on {', '.join(on)}")
    return Finding(
        id="rdma.roce_pfc",
        severity=Severity.WARN,
        found=f"{name}: priority flow control (PFC) is off for all priorities",
        why=f"When several workers send to one port ({port.rate_gbit_per_s:g} Gb/s), switches drop frames; RoCE "
        "sends again from the "
        "lost one on, and tail latency of handoffs goes from milliseconds to seconds.",
        fix=fix,
    )
