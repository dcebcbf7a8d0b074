"""LMCache for prefill workers: one typed block -> the cache server's command, and the connector that a worker needs for it.

Pure: what is free on the machine is given, no process is started. The names are those of LMCache 0.5.6.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import sys
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from workers.spec import Command

_GIB = 1 << 30

DRAM_SHARE = 0.5
"""Of the memory that is available when the server starts, where ``dram_gb`` is not given: the workers of the same machine
start beside it, and the page cache of the disk tier wants some too."""

_DRAM_RESERVE_GB = 1.0
"""What the server's own process needs besides the tier."""

_LEAST_DRAM_GB = 0.5
"""Every tier below fills through this one; less holds no long prompt of a real model."""

CHUNK_TOKENS = 256
"""LMCache's unit: the server tells it to the workers, whose block size must divide it."""

HASH = "blake3"
"""Of the server's keys. A connector that reports KV events, and the coordinator, must hash alike."""

_HEARTBEAT_S = 2.0
"""How often a worker asks whether the server lives, and how long it waits for that: a server that has died delays what is
being looked up by twice as much, then the worker computes on its own. LMCache's default, 10 s, is the whole of a TTFT."""

_REQUEST_TIMEOUT_S = {"cpu": 5.0, "gpu": 30.0}
"""How long a worker waits for one reply, by device; LMCache's default is 300 s. At its start it gives up after that, and on a
GPU the server may need seconds to open the KV cache of every rank. Later the heartbeat ends what waits on a GPU; a CPU worker
copies by itself and stands still for it, twice for each prompt that it stores when the server dies."""

WORKER_ENV = {"LMCACHE_TRACK_USAGE": "false"}
"""For the server and for every worker with the connector: LMCache reports its use over the Internet otherwise."""

PASSWORD_ENV = "LMCACHE_RESP_PASSWORD"  # noqa: S105  (a name)
"""Where LMCache looks for the password of a Redis; what is set for the server counts where the URL has none."""
USERNAME_ENV = "LMCACHE_RESP_USERNAME"

SECRETS = frozenset((PASSWORD_ENV, USERNAME_ENV))
"""Names in ``Command.env`` whose values must not be shown."""

_MODES = {"cpu": "auto", "gpu": "lmcache_driven"}
"""Who copies. On a GPU the server, through the device's own handles. A CPU worker copies itself, which the server must allow;
it then unpickles what comes in, so this is not allowed where it is not needed."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Of a server: what the value of a label of its workers can be, in Kubernetes too."""

_EVICTION = {"eviction_policy": "LRU"}
_WATERMARK = 0.9
_EVICTED_SHARE = 0.1


class Disk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The disk tier."""

    path: str
    """A folder of its own on a local disk; it is made if it is not there."""
    gb: float
    """How much it may hold. Least recently used chunks go first."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: a folder is needed")
        if not (math.isfinite(self.gb) and self.gb > 0):
            raise ValueError(f"gb: {self.gb:g} is not a positive number")


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One LMCache server: what it keeps where."""

    dram_gb: float | None = None
    """GiB of memory. None: a share of what is free, see :func:`fit`."""
    disk: Disk | None = None
    """None: no disk tier."""
    remote: str | None = None
    """`redis://[user[:password]@]host[:port]` (or `valkey://`), or `s3://bucket.s3.region.amazonaws.com?region=region`, shared
    by all servers that name it. What it may hold is its own setting. None: no remote tier."""
    device: Literal["cpu", "gpu"] | None = None
    """Of the workers. None: not known, which both can work with; `baton cache-server` looks at the machine."""
    chunk_tokens: int = CHUNK_TOKENS
    """Least run of tokens that is kept and found again. A multiple of the workers' block size."""
    coordinator: str | None = None
    """`host:port` of the coordinator that is told what this server holds. None: nobody is told."""
    name: str | None = None
    """What the coordinator knows it by: the same after a restart, and no other server's. None: not known; `baton cache-server`
    takes the machine's."""

    def __post_init__(self) -> None:
        if self.dram_gb is not None and not (math.isfinite(self.dram_gb) and self.dram_gb >= _LEAST_DRAM_GB):
            raise ValueError(f"dram_gb: {self.dram_gb:g} is below {_LEAST_DRAM_GB:g}")
        if self.chunk_tokens < 16:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} is below 16, the smallest block")
        if self.remote is not None:
            _remote(self.remote)
        if self.coordinator is not None:
            _host_port(self.coordinator, "coordinator:")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} is not up to 63 letters, digits, '-', '_' and '.' that a label may have")

    def __repr__(self) -> str:
        shown = None if self.remote is None else without_secrets(self.remote)
        told = "" if self.coordinator is None else f", coordinator={self.coordinator!r}, name={self.name!r}"
        return f"CacheSpec(dram_gb={self.dram_gb}, disk={self.disk}, remote={shown!r}, device={self.device!r}{told})"


def available_bytes(meminfo: str, cgroup_limit: str = "max", cgroup_used: str = "0") -> int:
    """Memory that a process can have: of the machine (the text of ``/proc/meminfo``), or of its control group if that has
    less (``memory.max`` and ``memory.current``, whose defaults mean no limit). Raises ValueError for a text without it."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
            break
    else:
        raise ValueError("/proc/meminfo: no line MemAvailable")
    if cgroup_limit.strip() == "max":
        return free
    return max(0, min(free, int(cgroup_limit) - int(cgroup_used)))


def fit(spec: CacheSpec, *, memory_bytes: int, disk_bytes: int | None = None) -> CacheSpec:
    """``spec`` with ``dram_gb`` filled in, never more than fits. Raises ValueError, with the field, for what does not.

    ``memory_bytes``: as of :func:`available_bytes`. ``disk_bytes``: what the disk tier may have at the most, which is free
    space and what the tier holds already; None where that is not known.
    """
    most_gb = memory_bytes / _GIB - _DRAM_RESERVE_GB
    dram_gb = spec.dram_gb
    if dram_gb is None:
        # Rounded down: one decimal is enough, and the command stays readable.
        dram_gb = math.floor(min(memory_bytes / _GIB * DRAM_SHARE, most_gb) * 10) / 10
        if dram_gb < _LEAST_DRAM_GB:
            raise ValueError(f"dram_gb: {memory_bytes / _GIB:.1f} GiB of memory are available, too little for a cache")
    elif dram_gb > most_gb:
        raise ValueError(
            f"dram_gb: {dram_gb:g} GiB do not fit: {memory_bytes / _GIB:.1f} GiB of memory are available, "
            f"{_DRAM_RESERVE_GB:g} of them for the server itself"
        )
    if spec.disk is not None and disk_bytes is not None and spec.disk.gb * _GIB > disk_bytes:
        raise ValueError(f"disk.gb: {spec.disk.gb:g} GiB do not fit: {spec.disk.path} has room for {disk_bytes / _GIB:.1f}")
    return msgspec.structs.replace(spec, dram_gb=dram_gb)


def server_command(spec: CacheSpec, *, host: str, port: int, http_port: int, http_host: str = "127.0.0.1") -> Command:
    """The command of the cache server. Raises ValueError for a spec without ``dram_gb`` (:func:`fit` fills it in), or with a
    coordinator and without a name: LMCache would make a new one at each start, and what is on its disk would be nobody's.

    ``host`` and ``port``: where workers connect. ``http_host`` and ``http_port``: health, metrics and administration, which
    ask nobody who they are. Secrets of the remote tier are in ``env``, never in ``argv``, which every user can read.
    """
    if spec.dram_gb is None:
        raise ValueError("dram_gb: not known yet")
    if port == http_port:
        raise ValueError(f"port and http_port are both {port}")
    argv = [sys.executable, "-m", "lmcache.cli.main", "server"]
    argv += ["--host", host, "--port", str(port), "--http-host", http_host, "--http-port", str(http_port)]
    argv += ["--chunk-size", str(spec.chunk_tokens), "--hash-algorithm", HASH]
    argv += ["--supported-transfer-mode", _MODES[spec.device or "cpu"]]
    argv += ["--l1-size-gb", f"{spec.dram_gb:g}", "--l1-init-size-gb", str(max(1, math.floor(spec.dram_gb / 4)))]
    argv += ["--eviction-policy", "LRU", "--eviction-trigger-watermark", f"{_WATERMARK:g}"]
    argv += ["--eviction-ratio", f"{_EVICTED_SHARE:g}"]
    env = {**WORKER_ENV, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    if spec.disk is not None:
        adapter = {
            "type": "fs_native",
            "base_path": spec.disk.path,
            "max_capacity_gb": spec.disk.gb,
            # Without it the capacity is only something to look at.
            "eviction": {**_EVICTION, "trigger_watermark": _WATERMARK, "eviction_ratio": _EVICTED_SHARE},
        }
        argv += ["--l2-adapter", json.dumps(adapter)]
    if spec.remote is not None:
        adapter, secrets = _remote(spec.remote)
        argv += ["--l2-adapter", json.dumps(adapter)]
        env |= secrets
    if spec.coordinator is not None:
        argv += _reporting(spec.coordinator, spec.name, http_host)
    return Command(tuple(argv), env)


def _reporting(coordinator: str, name: str | None, http_host: str) -> list[str]:
    if name is None:
        raise ValueError("name: a server that reports to a coordinator needs one")
    argv = ["--coordinator-url", f"http://{coordinator}", "--coordinator-event-reporting", "--instance-id", name]
    try:
        own = ipaddress.ip_address(http_host.strip("[]"))
    except ValueError:
        return argv
    # Where the coordinator would call it; by itself LMCache says the address of the default route.
    return argv if own.is_unspecified else [*argv, "--coordinator-advertise-ip", str(own)]


def connector(address: str, *, device: Literal["cpu", "gpu"] = "cpu") -> dict[str, object]:
    """The child of a worker's MultiConnector for the cache server at ``address`` (``host:port``, its port for workers).

    ``device``: of the worker. Raises ValueError for an address that is none.

    The MultiConnector itself should say ``kv_load_failure_policy: recompute``, or a request fails with the cache server. The
    chunk size is not in here: the server tells it.
    """
    host, port = _host_port(address, "cache server")
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{host}",
            "lmcache.mp.port": port,
            "lmcache.mp.mq_timeout": _REQUEST_TIMEOUT_S[device],
            "lmcache.mp.heartbeat_interval": _HEARTBEAT_S,
            "lmcache.mp.hash_algorithm": HASH,
        },
    }


def without_secrets(url: str) -> str:
    """A URL with `***` for its password; all of it hidden where it is none."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "***"
    user = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}" + ("?***" if parts.query else "")


def _host_port(address: str, whose: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{whose} {address!r}: not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{whose} {address!r}: an IPv6 address goes in brackets")
    return host, int(port)


def _remote(url: str) -> tuple[dict[str, object], dict[str, str]]:
    """The adapter of a remote tier and the environment that carries its secrets. Raises ValueError, without the secrets."""
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"remote: {shown} is not a URL") from None
    if not parts.hostname:
        raise ValueError(f"remote: {shown} names no host")
    match parts.scheme:
        case "redis" | "valkey":
            if parts.path not in ("", "/", "/0") or parts.query or parts.fragment:
                raise ValueError(f"remote: {shown}: LMCache uses database 0 and takes nothing after the port")
            secrets = {}
            if parts.username:
                secrets[USERNAME_ENV] = unquote(parts.username)
            if parts.password:
                secrets[PASSWORD_ENV] = unquote(parts.password)
            return {"type": "resp", "host": parts.hostname, "port": port or 6379, "shared": True}, secrets
        case "rediss" | "valkeys":
            raise ValueError(f"remote: {shown}: LMCache's adapter has no TLS; put a local TLS proxy in front, or use s3://")
        case "s3":
            options = dict(parse_qsl(parts.query))
            region = options.pop("region", "")
            if not region or options or parts.path not in ("", "/") or "@" in parts.netloc:
                raise ValueError(
                    f"remote: {shown}: s3://bucket.s3.region.amazonaws.com?region=region and nothing else; "
                    "the credentials are those of the environment, as for every AWS client"
                )
            endpoint = parts.hostname if port is None else f"{parts.hostname}:{port}"
            return {"type": "s3", "s3_endpoint": endpoint, "s3_region": region, "shared": True}, {}
        case _:
            raise ValueError(f"remote: {shown}: not redis://, valkey:// or s3://")
