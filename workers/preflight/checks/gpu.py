"""GPUs: there, visible, free, large enough, and read by the NIC without a detour."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Severity
from workers.preflight.identity import used_gpus, visible_gpus
from workers.preflight.routes import Direct, direct, rails_bytes_per_s, rdma_works, slowdown, staged_bytes_per_s, usable_ports

_DRIVER_MIN = 525
"""The first with CUDA 12."""
_DRIVER_CUDA_13 = 580
_TRANSPARENT_SLOWDOWN = 3.0
_RESERVE_BYTES = 4 * numbers.GIB
"""A GPU: activations, CUDA graphs, NCCL and UCX buffers. A rule of thumb."""


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about GPUs."""
    if not facts.gpus:
        return [
            Finding(
                id="gpu.present",
                severity=Severity.ERROR,
                found=f"no GPU: {facts.nvidia_smi or 'nvidia-smi shows none'}",
                why="The worker cannot start.",
                fix="Install the driver and, for containers, the NVIDIA container toolkit (--gpus all); or --device cpu.",
            ),
            *_allocator(facts),
        ]
    return [
        *_visible(facts, ask),
        *_driver(facts),
        *_memory(facts, ask),
        *_allocator(facts),
        *_direct(facts, ask),
        *_near(facts, ask),
    ]


def _visible(facts: Facts, ask: Ask) -> list[Finding]:
    seen, needed = visible_gpus(facts), max((ask.needed_gpus, *(number + 1 for number in ask.device_ids)))
    mask = facts.env.get("CUDA_VISIBLE_DEVICES")
    masked = "" if mask is None else f", CUDA_VISIBLE_DEVICES={mask!r} leaves {len(seen)}"
    found = f"{len(facts.gpus)} × {facts.gpus[0].name}{masked}"
    if len(seen) >= needed:
        return [Finding(id="gpu.present", severity=Severity.OK, found=found)]
    return [
        Finding(
            id="gpu.present",
            severity=Severity.ERROR,
            found=f"{found}; the worker needs {needed}",
            why="The worker cannot start. CUDA ignores everything after the first index of the list that does not exist.",
            fix="Correct CUDA_VISIBLE_DEVICES, give the container more GPUs, or lower --tensor-parallel-size.",
        )
    ]


def _driver(facts: Facts) -> list[Finding]:
    versions = sorted({gpu.driver for gpu in facts.gpus})
    kind = ", open kernel module" if facts.open_driver else ""
    major = versions[0].partition(".")[0]
    number = int(major) if major.isdecimal() else 0
    found = f"driver {', '.join(versions)}{kind}"
    if number < _DRIVER_MIN:
        return [
            Finding(
                id="gpu.driver",
                severity=Severity.ERROR,
                found=found,
                why=f"CUDA 12 needs {_DRIVER_MIN} or newer: neither vLLM nor NIXL's CUDA plugin loads.",
                fix="Update the driver.",
            )
        ]
    if number < _DRIVER_CUDA_13:
        return [
            Finding(
                id="gpu.driver",
                severity=Severity.INFO,
                found=found,
                why=f"Images built with CUDA 13 need {_DRIVER_CUDA_13} or newer, or NVIDIA's compatibility package.",
                fix="Use an image with CUDA 12, or update the driver.",
            )
        ]
    return [Finding(id="gpu.driver", severity=Severity.OK, found=found)]


def _memory(facts: Facts, ask: Ask) -> list[Finding]:
    gpus = used_gpus(facts, ask)
    if not gpus:
        return []
    findings = []
    share = ask.gpu_memory_utilization
    full = [gpu for gpu in gpus if gpu.total_bytes - gpu.used_bytes < gpu.total_bytes * share]
    if full:
        worst = min(full, key=lambda gpu: gpu.total_bytes - gpu.used_bytes)
        findings.append(
            Finding(
                id="gpu.memory_free",
                severity=Severity.ERROR,
                found=f"GPU {worst.index} has {numbers.size(worst.total_bytes - worst.used_bytes)} free "
                f"of {numbers.size(worst.total_bytes)}",
                why=f"vLLM takes {share:.0%} ({numbers.size(worst.total_bytes * share)}) at its start, and stops if "
                "that is not free.",
                fix="End what runs there (nvidia-smi shows it), choose another GPU, or lower --gpu-memory-utilization.",
            )
        )
    smallest = min(gpu.total_bytes for gpu in gpus)
    model = ask.model
    if model is None or model.weights_bytes is None:
        findings.append(
            Finding(
                id="gpu.memory",
                severity=Severity.OK if model is None else Severity.INFO,
                found=f"{numbers.size(smallest)} a GPU",
                why="" if model is None else "The size of the weights is not known, so it is not compared with the memory.",
                fix="" if model is None else "Give a model folder that holds the weights, or --weights-gb.",
            )
        )
        return findings
    weights = model.weights_bytes / ask.tensor_parallel
    left = smallest * share - weights - _RESERVE_BYTES
    split = min(ask.tensor_parallel, model.kv_heads)
    tokens = max(0.0, left) * split / model.kv_bytes_per_token
    longest = ask.max_model_len_tokens or model.max_tokens
    found = (
        f"{numbers.size(smallest)} a GPU; weights {numbers.size(weights)} each ({model.weights_source}); "
        f"room for the KV cache of about {tokens:,.0f} tokens"
    )
    if left <= 0:
        severity = Severity.ERROR
        why = "The weights do not fit: the worker does not start."
        fix = "More GPUs (--tensor-parallel-size), a quantised model, or larger GPUs."
    elif longest is not None and tokens < longest:
        severity = Severity.ERROR
        why = f"One request may have {longest:,} tokens, {longest / tokens:.1f} times that: vLLM refuses to start."
        fix = f"--max-model-len {int(tokens * 0.9) // 1024 * 1024}, an fp8 KV cache (half the size), or more GPUs."
    elif longest is not None and tokens < 4 * longest:
        severity = Severity.WARN
        why = (
            f"Only {tokens / longest:.1f} requests of {longest:,} tokens fit at once; a prefill worker also keeps blocks "
            f"that are not fetched yet for up to {ask.kv_lease_s:g} s."
        )
        fix = "An fp8 KV cache (half the size), a smaller --max-model-len, or more GPUs."
    else:
        severity, why, fix = Severity.OK, "", ""
    findings.append(Finding(id="gpu.memory", severity=severity, found=found, why=why, fix=fix))
    return findings


def _allocator(facts: Facts) -> list[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = facts.env.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            return [
                Finding(
                    id="gpu.expandable_segments",
                    severity=Severity.ERROR,
                    found=f"{name}={value}",
                    why="Memory that is mapped piece by piece cannot be registered for RDMA as a whole; "
                    "vLLM refuses to start with a KV connector.",
                    fix=f"Unset {name}, or take expandable_segments out of it.",
                )
            ]
    return [Finding(id="gpu.expandable_segments", severity=Severity.OK, found="expandable_segments is off")]


def _direct(facts: Facts, ask: Ask) -> list[Finding]:
    if not rdma_works(facts, ask):
        return []
    how = direct(facts)
    if how in (Direct.PEERMEM, Direct.DMABUF):
        return [Finding(id="gpu.direct_rdma", severity=Severity.OK, found=f"the NIC reads GPU memory itself, by {how.value}")]
    rails, staged = rails_bytes_per_s(facts, ask), min(rails_bytes_per_s(facts, ask), staged_bytes_per_s(ask))
    numbers_say = f"Through host memory it is about {numbers.rate(staged)} instead of {numbers.rate(rails)}"
    if ask.model is not None:
        size_bytes = ask.model.kv_bytes_per_token * 32_768
        numbers_say += (
            f": {numbers.seconds(size_bytes / staged)} instead of {numbers.seconds(size_bytes / rails)} "
            f"for a prompt of 32,768 tokens ({numbers.size(size_bytes)})"
        )
    fix = (
        "modprobe nvidia_peermem on the host (after ib_core; it comes with the driver) and list it in /etc/modules-load.d; "
        "or the open driver on a kernel from 5.12 on, which has DMA-BUF. NVIDIA's GPU operator: driver.rdma.enabled=true."
    )
    if how is Direct.MAYBE:
        return [
            Finding(
                id="gpu.direct_rdma",
                severity=Severity.INFO,
                found="no nvidia_peermem; kernel and driver have DMA-BUF, and nothing here says whether UCX uses it",
                why=f"{numbers_say}, if it does not.",
                fix="Measure it: baton preflight --serve there, --peer here. Or modprobe nvidia_peermem.",
            )
        ]
    times = slowdown(facts, ask)
    severity = Severity.ERROR if times >= _TRANSPARENT_SLOWDOWN else Severity.WARN if times > 1.2 else Severity.INFO
    return [
        Finding(
            id="gpu.direct_rdma",
            severity=severity,
            found="nvidia_peermem is not loaded and there is no DMA-BUF: host staging, KV blocks go through host "
            "memory on both sides",
            why=f"{numbers_say}.",
            fix=fix,
        )
    ]


def _near(facts: Facts, ask: Ask) -> list[Finding]:
    gpus = [gpu for gpu in used_gpus(facts, ask) if gpu.numa_node is not None]
    ports = [port for port in usable_ports(facts, ask) if port.numa_node is not None]
    if not gpus or not ports or not rdma_works(facts, ask):
        return []
    nodes = {port.numa_node for port in ports}
    far = [gpu for gpu in gpus if gpu.numa_node not in nodes]
    if not far:
        return [Finding(id="gpu.nic_distance", severity=Severity.OK, found="each GPU has a NIC on its own NUMA node")]
    where = ", ".join(f"GPU {gpu.index} on node {gpu.numa_node}" for gpu in far)
    return [
        Finding(
            id="gpu.nic_distance",
            severity=Severity.WARN,
            found=f"{where}; the NICs are on node {', '.join(str(node) for node in sorted(n for n in nodes if n is not None))}",
            why="Every block crosses the link between the sockets, which commonly halves the bandwidth of GPU memory to a NIC.",
            fix="Choose GPUs and NICs of one node: CUDA_VISIBLE_DEVICES and UCX_NET_DEVICES (nvidia-smi topo -m shows which).",
        )
    ]
