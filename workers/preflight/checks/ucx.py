"""UCX and NIXL: installed, and able to do what UCX_TLS and UCX_NET_DEVICES ask for."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Severity
from workers.preflight.identity import on_one_host
from workers.preflight.routes import available, net_devices, usable_ports, wanted
from workers.preflight.transports import CUDA, RDMA, expand, matches


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about UCX."""
    return [*_nixl(facts), *_builds(facts, ask), *_transports(facts, ask), *_cuda(facts, ask), *_devices(facts, ask)]


def _nixl(facts: Facts) -> list[Finding]:
    if facts.nixl:
        return [Finding(id="nixl.installed", severity=Severity.OK, found=f"nixl {facts.nixl}")]
    return [
        Finding(
            id="nixl.installed",
            severity=Severity.ERROR,
            found="the Python package nixl is not installed beside this command",
            why="vLLM's NixlConnector does not start without it.",
            fix="pip install nixl, in the environment that vLLM runs in (and run the preflight there).",
        )
    ]


def _builds(facts: Facts, ask: Ask) -> list[Finding]:
    if not facts.ucx:
        return [
            Finding(
                id="ucx.found",
                severity=Severity.WARN,
                found="no UCX could be asked: NIXL's would not load, and there is no ucx_info",
                why="Whether the transports exist is not known before the first transfer.",
                fix="python -c 'import nixl' says why; apt install ucx-utils for ucx_info.",
            )
        ]
    builds = "; ".join(f"{build.source}: UCX {build.version or 'of unknown version'}" for build in facts.ucx)
    findings = [Finding(id="ucx.found", severity=Severity.OK, found=builds)]
    if len(facts.ucx) > 1:
        own, system = facts.ucx[0], facts.ucx[1]
        lacks = (wanted(facts, ask).allowed(system.transports) - own.transports) & (RDMA | CUDA)
        if lacks:
            findings.append(
                Finding(
                    id="ucx.builds_differ",
                    severity=Severity.WARN,
                    found=f"{system.source} has {', '.join(sorted(lacks))}, {own.source} has not",
                    why="vLLM uses the one of NIXL: what ucx_info shows is not what transfers get.",
                    fix="Set UCX_MODULE_DIR to the ucx folder of the NIXL package for your CUDA, and remove the "
                    "package for the other.",
                )
            )
    return findings


def _transports(facts: Facts, ask: Ask) -> list[Finding]:
    there, asked = facts.nixl_ucx, wanted(facts, ask)
    if there is None:
        return []
    shown = ", ".join(sorted(there.transports))
    usable = asked.allowed(there.transports)
    missing = asked.missing(there.transports)
    if missing:
        serious = not usable - {"self"} or bool(expand(missing) & (RDMA | CUDA))
        left = ", ".join(sorted(usable)) or "nothing"
        return [
            Finding(
                id="ucx.transports",
                severity=Severity.ERROR if serious else Severity.WARN,
                found=f"UCX_TLS={asked.text}: {there.source} has no {', '.join(missing)}; it has {shown}",
                why=f"UCX only warns and goes on with {left}: the worker looks healthy and transfers take the slow way, "
                f"about {numbers.rate(numbers.TCP_GUESS_BYTES_PER_S)} over TCP.",
                fix="Drivers and devices first (rdma.*, gpu.* above); else take it out of UCX_TLS so that the list "
                "says what is used.",
            )
        ]
    reach = usable & (RDMA | {"tcp", "ud_mlx5", "ud_verbs"})
    if not reach and not on_one_host(facts, ask):
        return [
            Finding(
                id="ucx.transports",
                severity=Severity.ERROR,
                found=f"UCX_TLS={asked.text} leaves {', '.join(sorted(usable)) or 'nothing'}: no transport to another host",
                why="The first handoff fails, and every one after it.",
                fix="Add rc (RDMA) or tcp.",
            )
        ]
    found = f"UCX_TLS={asked.text}: {', '.join(sorted(usable))}"
    return [Finding(id="ucx.transports", severity=Severity.OK, found=found)]


def _cuda(facts: Facts, ask: Ask) -> list[Finding]:
    there, asked = available(facts), wanted(facts, ask)
    if ask.device == "cpu" or there is None:
        return []
    if not asked.allows("cuda_copy"):
        return [
            Finding(
                id="ucx.cuda",
                severity=Severity.ERROR,
                found=f"UCX_TLS={asked.text} leaves out cuda_copy",
                why="UCX then does not know GPU memory at all: registering the KV cache fails, or it is read as host memory.",
                fix="Add cuda_copy,cuda_ipc (or cuda) to UCX_TLS.",
            )
        ]
    if "cuda_copy" not in there and asked.everything:
        return [
            Finding(
                id="ucx.cuda",
                severity=Severity.ERROR if facts.gpus else Severity.INFO,
                found=f"{facts.ucx[0].source} has no cuda_copy: its CUDA plugin did not load",
                why="UCX then does not know GPU memory at all: registering the KV cache fails.",
                fix="libcuda.so.1 must be found (NVIDIA container toolkit, "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility), and the "
                "NIXL package must be for your CUDA: nixl-cu12 or nixl-cu13.",
            )
        ]
    return []


def _devices(facts: Facts, ask: Ask) -> list[Finding]:
    patterns = net_devices(facts, ask)
    if not patterns:
        return []
    ports = [port.name for port in facts.rdma]
    interfaces = [device.name for device in facts.net if device.up] + ["lo"]
    unknown = [pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in (*ports, *interfaces))]
    if unknown:
        bare = [name for name in unknown if name in {port.device for port in facts.rdma}]
        hint = f" UCX wants the port with it: {', '.join(f'{name}:1' for name in bare)}." if bare else ""
        return [
            Finding(
                id="ucx.net_devices",
                severity=Severity.ERROR,
                found=f"UCX_NET_DEVICES names {', '.join(unknown)}; there are {', '.join((*ports, *interfaces))}",
                why="UCX leaves out every device that is not named: with none left the first transfer fails.",
                fix=f"Name what is there, or all.{hint}",
            )
        ]
    if ports and not usable_ports(facts, ask) and any(port.active for port in facts.rdma) and ask.device == "gpu":
        return [
            Finding(
                id="ucx.net_devices",
                severity=Severity.WARN,
                found=f"UCX_NET_DEVICES={','.join(patterns)} leaves out the RDMA ports {', '.join(ports)}",
                why="KV blocks go over TCP.",
                fix="Add the RDMA ports, such as mlx5_0:1.",
            )
        ]
    return [Finding(id="ucx.net_devices", severity=Severity.OK, found=f"UCX_NET_DEVICES={','.join(patterns)} is there")]
