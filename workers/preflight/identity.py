"""Which GPUs a worker would use, and what this node is for a peer. Pure."""

from __future__ import annotations

from workers.preflight.ask import Ask
from workers.preflight.facts import Facts, Gpu
from workers.preflight.findings import Identity


def visible_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs that CUDA will show a process, in its order. As CUDA does, it stops at the first that does not exist."""
    wanted = facts.env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return facts.gpus
    chosen: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        gpu = next((gpu for gpu in facts.gpus if name and (name == str(gpu.index) or gpu.uuid.startswith(name))), None)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def used_gpus(facts: Facts, ask: Ask) -> tuple[Gpu, ...]:
    """Those that the worker will take: the ones that are named, else the first of the visible ones."""
    visible = visible_gpus(facts)
    if ask.device_ids:
        return tuple(visible[number] for number in ask.device_ids if number < len(visible))
    return visible[: ask.needed_gpus]


def identity_of(facts: Facts, ask: Ask) -> Identity:
    """What a peer compares with its own."""
    gpus = facts.gpus
    return Identity(
        hostname=facts.hostname,
        boot_id=facts.boot_id,
        pid_namespace=facts.pid_namespace,
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
        used_gpu_uuids=tuple(gpu.uuid for gpu in used_gpus(facts, ask)),
        driver=gpus[0].driver if gpus else "",
        ucx=facts.nixl_ucx.version if facts.nixl_ucx else "",
        nixl=facts.nixl,
        vllm=facts.vllm,
    )


def on_one_host(facts: Facts, ask: Ask) -> bool:
    """The peer runs on this host: it was said, its address is one of ours, or it was booted when we were."""
    peer = ask.peer_identity
    if peer is not None and peer.boot_id and facts.boot_id:
        return peer.boot_id == facts.boot_id
    return ask.peer_same_host or bool(facts.peer_addresses & facts.addresses)
