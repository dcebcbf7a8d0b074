"""This worker and its peer: what must be the same, and what two on one host must share."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Severity
from workers.preflight.identity import identity_of, on_one_host, used_gpus, visible_gpus
from workers.preflight.routes import isolated_pids, rdma_works

_PID_FIX = (
    "docker run --pid host, or --pid container:NAME of the other (compose: pid: host, or pid: service:NAME); "
    "Kubernetes: both containers in one pod with shareProcessNamespace, or hostPID."
)


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about the pair; none without a peer."""
    if ask.peer is None and ask.peer_identity is None and not ask.peer_same_host:
        return []
    findings = _versions(facts, ask)
    if on_one_host(facts, ask):
        findings += [*_pids(facts, ask), *_gpus(facts, ask)]
    return findings


def _versions(facts: Facts, ask: Ask) -> list[Finding]:
    peer = ask.peer_identity
    if peer is None:
        return []
    own = identity_of(facts, ask)
    findings = []
    if own.vllm and peer.vllm and own.vllm != peer.vllm:
        findings.append(
            Finding(
                id="pair.vllm",
                severity=Severity.ERROR,
                found=f"vLLM {own.vllm} here, {peer.vllm} on {peer.hostname or 'the peer'}",
                why="The version is part of what NIXL compares in the handshake: every handoff fails.",
                fix="The same image on both sides.",
            )
        )
    differ = [f"{name} {a} here, {b} there" for name, a, b in _differences(own, peer)]
    if differ:
        findings.append(
            Finding(
                id="pair.versions",
                severity=Severity.WARN,
                found="; ".join(differ),
                why="Two versions of UCX or NIXL may speak different protocols: transfers fail, or take the slow way.",
                fix="The same image on both sides.",
            )
        )
    if not findings and (own.nixl or own.vllm):
        findings.append(Finding(id="pair.versions", severity=Severity.OK, found="both sides have the same versions"))
    return findings


def _differences(own: object, peer: object) -> list[tuple[str, str, str]]:
    pairs = ((label, getattr(own, field), getattr(peer, field)) for label, field in (("NIXL", "nixl"), ("UCX", "ucx")))
    return [(label, a, b) for label, a, b in pairs if a and b and a != b]


def _pids(facts: Facts, ask: Ask) -> list[Finding]:
    isolated = isolated_pids(facts, ask)
    what = "cuda_ipc (NVLink)" if ask.device == "gpu" else "shared memory"
    otherwise = "RDMA through the NIC" if rdma_works(facts, ask) else "TCP"
    why = f"UCX opens the other process by its id for {what}. Where that fails it takes {otherwise} without a word"
    if ask.device == "gpu":
        why += (
            f": about {numbers.rate(numbers.TCP_GUESS_BYTES_PER_S)} instead of "
            f"{numbers.rate(numbers.NVLINK_GUESS_BYTES_PER_S)} or more"
            if otherwise == "TCP"
            else f": {numbers.rate(numbers.DIRECT_BYTES_PER_S)} at best instead of "
            f"{numbers.rate(numbers.NVLINK_GUESS_BYTES_PER_S)} or more"
        )
    if isolated is None:
        if not facts.container:
            return []
        return [
            Finding(
                id="pair.pid_namespace",
                severity=Severity.WARN if ask.device == "gpu" else Severity.INFO,
                found=f"the peer is on this host, and this container's process namespace is "
                f"{facts.pid_namespace or 'not known'}; "
                "whether the peer shares it cannot be seen from here",
                why=f"{why}.",
                fix=f"{_PID_FIX} Then compare: readlink /proc/self/ns/pid in both, or give --peer-report.",
            )
        ]
    if not isolated:
        return [Finding(id="pair.pid_namespace", severity=Severity.OK, found="both are in one process namespace")]
    serious = ask.device == "gpu" and otherwise == "TCP"
    peer = ask.peer_identity
    return [
        Finding(
            id="pair.pid_namespace",
            severity=Severity.ERROR if serious else Severity.WARN,
            found=f"two process namespaces on one host: {facts.pid_namespace} here, "
            f"{peer.pid_namespace if peer else '?'} there",
            why=f"{why}.",
            fix=_PID_FIX,
        )
    ]


def _gpus(facts: Facts, ask: Ask) -> list[Finding]:
    peer = ask.peer_identity
    if ask.device == "cpu" or peer is None or not facts.gpus:
        return []
    own = {gpu.uuid for gpu in facts.gpus}
    used = {gpu.uuid for gpu in used_gpus(facts, ask)}
    hidden_from_us = [uuid for uuid in peer.used_gpu_uuids if uuid not in own]
    hidden_from_peer = [uuid for uuid in used if uuid not in peer.gpu_uuids]
    if both := sorted(used & set(peer.used_gpu_uuids)):
        return [
            Finding(
                id="pair.gpu_visibility",
                severity=Severity.ERROR,
                found=f"both workers would use {', '.join(both)}",
                why="Each takes most of a GPU's memory at its start: the second one stops.",
                fix="Different GPUs: --device-ids 0 and --device-ids 1, with all of them in both containers.",
            )
        ]
    if hidden_from_us or hidden_from_peer:
        who = " and ".join(
            text
            for text, there in (
                (f"{', '.join(hidden_from_us)} of the peer is not visible here", hidden_from_us),
                (f"{', '.join(hidden_from_peer)} of ours is not visible there", hidden_from_peer),
            )
            if there
        )
        return [
            Finding(
                id="pair.gpu_visibility",
                severity=Severity.WARN if rdma_works(facts, ask) else Severity.ERROR,
                found=who,
                why="CUDA opens memory of another process only on a GPU that it can see: UCX falls back to the network or TCP.",
                fix="All GPUs in both containers (--gpus all, or NVIDIA_VISIBLE_DEVICES with both), and "
                "--device-ids to choose.",
            )
        ]
    visible = {gpu.uuid for gpu in visible_gpus(facts)}
    if masked := [uuid for uuid in peer.used_gpu_uuids if uuid not in visible]:
        return [
            Finding(
                id="pair.gpu_visibility",
                severity=Severity.INFO,
                found=f"CUDA_VISIBLE_DEVICES={facts.env.get('CUDA_VISIBLE_DEVICES', '')} hides {', '.join(masked)} of the peer",
                why="UCX can open memory on a GPU that is masked this way, but it is the case that has gone wrong before.",
                fix="Leave all of them visible and choose with --device-ids.",
            )
        ]
    return [Finding(id="pair.gpu_visibility", severity=Severity.OK, found="both see each other's GPUs")]
