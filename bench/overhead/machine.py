"""Which machine and which versions the numbers are from."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def machine() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _field(file: Path, name: str) -> str:
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
