"""The machine and what its limits leave a process: memory, cores, locked memory, shared memory."""

from __future__ import annotations

import math
import re

from workers.preflight.gather.tree import Tree, whole

_KERNEL = re.compile(r"^(?:Linux version )?(\d+)\.(\d+)")
_SHM_SIZE = re.compile(r"(?:^|,)size=(\d+)([kmg]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The number that the kernel gives the first one."""


def kernel(tree: Tree) -> tuple[int, int] | None:
    """Version of the kernel."""
    found = _KERNEL.match(tree.text("proc/sys/kernel/osrelease") or tree.text("proc/version"))
    return (int(found[1]), int(found[2])) if found else None


def modules(tree: Tree) -> frozenset[str]:
    """Loaded kernel modules. A container sees those of its host."""
    return frozenset(line.split()[0] for line in tree.text("proc/modules").splitlines() if line.strip())


def in_container(tree: Tree) -> bool:
    """This is not the host itself."""
    if any(tree.exists(path) for path in (".dockerenv", "run/.containerenv")):
        return True
    namespace = tree.link("proc/self/ns/pid")
    return bool(namespace) and namespace != _HOST_PID_NAMESPACE


def limit(tree: Tree, name: str) -> float | None:
    """The soft limit of this process; inf: there is none."""
    for line in tree.text("proc/self/limits").splitlines():
        if line.startswith(name):
            soft = next(iter(line[len(name) :].split()), "")
            return math.inf if soft == "unlimited" else _float(soft)
    return None


def shm_bytes(tree: Tree) -> int | None:
    """Size of /dev/shm. A tmpfs without a size has half of the memory."""
    for line in reversed(tree.text("proc/mounts").splitlines()):
        parts = line.split()
        if len(parts) > 3 and parts[1] == "/dev/shm":  # noqa: S108  (a mount point, not a file of ours)
            found = _SHM_SIZE.search(parts[3])
            size = whole(found[1]) if found else None
            if found and size is not None:
                return size * _UNITS[found[2].lower()]
            total = _meminfo(tree, "MemTotal")
            return None if total is None else total // 2
    return None


def memory_bytes(tree: Tree) -> int | None:
    """Memory of the machine, or the limit of the cgroup if that is less."""
    bounds = [_meminfo(tree, "MemTotal"), tree.number("sys/fs/cgroup/memory.max")]
    bounds.append(tree.number("sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min((bound for bound in bounds if bound is not None), default=None)


def available_bytes(tree: Tree) -> int | None:
    """Memory that can be had now."""
    return _meminfo(tree, "MemAvailable")


def _meminfo(tree: Tree, name: str) -> int | None:
    for line in tree.text("proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            size_kib = whole(next(iter(line.split()[1:]), ""))
            return None if size_kib is None else size_kib * 1024
    return None


def cores(tree: Tree) -> float:
    """Cores that this process may use; a fraction where the cgroup has a quota. 0: cannot be told."""
    allowed = 0
    for line in tree.text("proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            for part in line.partition(":")[2].strip().split(","):
                first, _, last = part.partition("-")
                start, end = whole(first), whole(last or first)
                if start is not None and end is not None:
                    allowed += max(0, end - start + 1)
    quota, _, period = tree.text("sys/fs/cgroup/cpu.max").partition(" ")
    share, of = whole(quota), whole(period)
    return min(float(allowed), share / of) if share and of else float(allowed)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def cpu_flags(tree: Tree) -> frozenset[str]:
    """Of the first core."""
    for line in tree.text("proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
