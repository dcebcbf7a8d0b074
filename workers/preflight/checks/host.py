"""Limits of the host or the container: locked memory, shared memory, files, memory, cores."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Severity
from workers.preflight.routes import rdma_works

_SHM_MIN_BYTES = 1 * numbers.GIB
_SHM_WELL_BYTES = 8 * numbers.GIB
_PROCESSES_BYTES = 3 * numbers.GIB
"""Of a worker's own processes, beside weights and caches: an assumption, of the order of what workers here take."""
_NOFILE_MIN = 4_096
_NOFILE_WELL = 65_536
_MEMLOCK_WELL_BYTES = 64 * numbers.GIB


def check(facts: Facts, ask: Ask) -> list[Finding]:
    """All findings about limits."""
    findings = [*_memlock(facts, ask), *_shm(facts, ask), *_nofile(facts)]
    findings += _host_cache(facts, ask)
    if ask.device == "cpu":
        findings += [*_memory(facts, ask), *_cores(facts), *_vectors(facts)]
    return findings


def _memlock(facts: Facts, ask: Ask) -> list[Finding]:
    limit = facts.memlock_bytes
    if limit is None:
        return []
    found = f"locked memory: {numbers.size(limit)}"
    if limit >= _MEMLOCK_WELL_BYTES:
        return [Finding(id="host.memlock", severity=Severity.OK, found=found)]
    fix = (
        "docker run --ulimit memlock=-1 (compose: ulimits: {memlock: -1}) and --cap-add IPC_LOCK; systemd: "
        "LimitMEMLOCK=infinity; "
        "a shell: /etc/security/limits.d."
    )
    if not rdma_works(facts, ask):
        return [
            Finding(
                id="host.memlock",
                severity=Severity.INFO,
                found=found,
                why="Enough for TCP and shared memory; RDMA registers the whole KV cache and would fail.",
                fix=fix,
            )
        ]
    return [
        Finding(
            id="host.memlock",
            severity=Severity.ERROR,
            found=found,
            why="RDMA pins every buffer that it uses: the whole KV cache (tens of GiB), staging buffers and queues. "
            "Registering fails with ENOMEM, and UCX leaves the device out.",
            fix=fix,
        )
    ]


def _shm(facts: Facts, ask: Ask) -> list[Finding]:
    size_bytes = facts.shm_bytes
    if size_bytes is None:
        return []
    found = f"/dev/shm: {numbers.size(size_bytes)}"  # noqa: S108  (words, not a file)
    parallel = ask.tensor_parallel > 1
    fix = (
        "docker run --ipc host or --shm-size 16g (compose: ipc: host or shm_size: 16g); Kubernetes: an emptyDir of "
        "medium Memory."
    )
    tier_bytes = (ask.host_cache_gib or 0.0) * numbers.GIB
    if tier_bytes and size_bytes < tier_bytes + _SHM_MIN_BYTES:
        return [
            Finding(
                id="host.shm",
                severity=Severity.ERROR,
                found=found,
                why=f"The host cache of {numbers.size(tier_bytes)} lies in it (vLLM: shared_offload_region.py), and 1 GiB is "
                "for the rest: the worker does not start.",
                fix=f"{fix} That large; or a smaller --host-cache-gib.",
            )
        ]
    if size_bytes < _SHM_MIN_BYTES:
        return [
            Finding(
                id="host.shm",
                severity=Severity.ERROR if parallel else Severity.WARN,
                found=found,
                why=(
                    f"{ask.tensor_parallel} GPUs exchange through it (vLLM's message queues, NCCL): the worker stops "
                    "with a bus error."
                    if parallel
                    else "Docker's default is 64 MiB. vLLM's processes and UCX's shared-memory transports fail in it "
                    "under load."
                ),
                fix=fix,
            )
        ]
    if parallel and size_bytes < _SHM_WELL_BYTES:
        return [
            Finding(
                id="host.shm",
                severity=Severity.WARN,
                found=found,
                why=f"{ask.tensor_parallel} GPUs exchange through it; 8 GiB and more are usual.",
                fix=fix,
            )
        ]
    return [Finding(id="host.shm", severity=Severity.OK, found=found)]


def _nofile(facts: Facts) -> list[Finding]:
    limit = facts.nofile
    if limit is None:
        return []
    found = f"open files: {'unlimited' if limit == float('inf') else f'{limit:,.0f}'}"
    if limit >= _NOFILE_WELL:
        return [Finding(id="host.nofile", severity=Severity.OK, found=found)]
    return [
        Finding(
            id="host.nofile",
            severity=Severity.WARN if limit < _NOFILE_MIN else Severity.INFO,
            found=found,
            why="Every client, every peer and every RDMA queue takes some; at the limit new connections are refused.",
            fix=f"ulimit -n {_NOFILE_WELL}; docker run --ulimit nofile={_NOFILE_WELL}; systemd: LimitNOFILE={_NOFILE_WELL}.",
        )
    ]


def _memory(facts: Facts, ask: Ask) -> list[Finding]:
    total, free = facts.memory_bytes, facts.available_bytes
    if total is None:
        return []
    usable = total if free is None else min(total, free)
    weights = ask.model.weights_bytes if ask.model is not None else None
    cache = (ask.kv_cache_gib or 1.0) * numbers.GIB
    found = f"memory: {numbers.size(usable)} of {numbers.size(total)} free"
    needed = cache + _PROCESSES_BYTES + (weights or 0.0)
    parts = f"KV cache {numbers.size(cache)}, about 3 GiB for the processes" + (
        f", weights {numbers.size(weights)}" if weights else "; the weights come on top"
    )
    if usable < needed:
        return [
            Finding(
                id="host.memory",
                severity=Severity.ERROR,
                found=found,
                why=f"A worker needs about {numbers.size(needed)}: {parts}. The kernel ends it while it loads.",
                fix="A smaller model or KV cache (VLLM_CPU_KVCACHE_SPACE), or more memory.",
            )
        ]
    return [
        Finding(id="host.memory", severity=Severity.OK, found=f"{found}; a worker needs about {numbers.size(needed)} ({parts})")
    ]


def _host_cache(facts: Facts, ask: Ask) -> list[Finding]:
    """Whether the tier behind the GPU cache fits: vLLM takes all of it at its start, and locks it for the GPUs."""
    if ask.host_cache_gib is None or facts.memory_bytes is None:
        return []
    tier_bytes = ask.host_cache_gib * numbers.GIB
    free = facts.memory_bytes if facts.available_bytes is None else min(facts.memory_bytes, facts.available_bytes)
    found = f"memory: {numbers.size(free)} of {numbers.size(facts.memory_bytes)} free"
    if free < tier_bytes + _PROCESSES_BYTES:
        return [
            Finding(
                id="host.cache",
                severity=Severity.ERROR,
                found=found,
                why=f"The host cache takes {numbers.size(tier_bytes)} at the start, and the processes about 3 GiB: the kernel "
                "ends the worker.",
                fix="A smaller --host-cache-gib, or more memory for the container.",
            )
        ]
    return [Finding(id="host.cache", severity=Severity.OK, found=f"{found}; the host cache takes {numbers.size(tier_bytes)}")]


def _cores(facts: Facts) -> list[Finding]:
    if not facts.cores:
        return []
    found = f"cores: {facts.cores:g}"
    if facts.cores >= 4:
        return [Finding(id="host.cores", severity=Severity.OK, found=found)]
    return [
        Finding(
            id="host.cores",
            severity=Severity.ERROR if facts.cores < 1 else Severity.WARN,
            found=found,
            why="A worker keeps one core busy with UCX's progress thread alone. Two workers that share a core stall "
            "each other: "
            "about one decode in five by 30 to 45 s.",
            fix="4 cores for a pair; with fewer, a core of its own for each worker (baton up does that).",
        )
    ]


def _vectors(facts: Facts) -> list[Finding]:
    flags = facts.cpu_flags
    if not flags or not flags & {"sse2", "avx", "avx2"}:
        return []  # not x86, or cannot be told
    if "avx2" not in flags:
        return [
            Finding(
                id="host.avx512",
                severity=Severity.ERROR,
                found="the processor has no AVX2",
                why="vLLM's CPU build ends with an illegal instruction.",
                fix="Another machine; in a VM, pass the host's processor through.",
            )
        ]
    fast = sorted(flags & {"amx_bf16", "avx512_bf16"})
    if fast:
        return [Finding(id="host.avx512", severity=Severity.OK, found=f"the processor has {', '.join(fast)}: bfloat16 is fast")]
    has = "AVX-512" if "avx512f" in flags else "AVX2"
    return [
        Finding(
            id="host.avx512",
            severity=Severity.INFO,
            found=f"the processor has {has}, but neither AVX-512 BF16 nor AMX",
            why="bfloat16 takes a path about 50 times slower than float32.",
            fix="--dtype float32, which the CPU profile has.",
        )
    ]
