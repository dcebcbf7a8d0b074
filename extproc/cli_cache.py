"""``baton cache-server`` and ``baton cache-coordinator``: LMCache's server, from a typed block and options, and its
coordinator, both in the foreground."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import typer

from workers import cache_disk, lmcache, lmcache_coordinator, yaml_lines
from workers.profile import load_profile
from workers.ready import port_fault
from workers.spec import Command

_GIB = 1 << 30
_PORT = 5555


class CacheFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of ``--config`` holds."""

    cache: lmcache.CacheSpec


def register(app: typer.Typer) -> None:
    """Add the commands to ``baton``."""
    app.command(
        "cache-server",
        epilog="Examples:  baton cache-server --dram-gb 64 --disk /mnt/nvme/kv --disk-gb 500  ·  "
        "baton cache-server --profile llama-3.3-70b-h200 --host 10.0.0.5  ·  "
        "baton cache-server --remote redis://kv.internal --remote-password-file /run/secrets/redis --dry-run",
    )(cache_server)
    app.command(
        "cache-coordinator",
        epilog="Examples:  baton cache-coordinator --checkpoint ./directory.ckpt  ·  "
        "baton cache-coordinator --host 10.0.0.5 --checkpoint /var/lib/baton/directory.ckpt  ·  "
        "baton cache-coordinator --dry-run",
    )(cache_coordinator)


def cache_server(
    dram_gb: Annotated[
        float | None, typer.Option(help="GiB of memory. Without it: half of what is free, of the container if it has less.")
    ] = None,
    disk: Annotated[Path | None, typer.Option(help="Folder of the disk tier, for nothing else.")] = None,
    disk_gb: Annotated[
        float | None, typer.Option(help="GiB that the disk tier may hold; 0: no disk tier.", envvar="BATON_CACHE_DISK_GB")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="redis://[user[:password]@]host[:port], or s3://bucket.s3.region.amazonaws.com?region=region. "
            "A password is better off in --remote-password-file or the variable: options can be seen by every user.",
            envvar="BATON_CACHE_REMOTE",
        ),
    ] = None,
    remote_password_file: Annotated[
        Path | None, typer.Option(help="File with the password of the Redis of --remote.", envvar="BATON_CACHE_PASSWORD_FILE")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file with a block `cache`; options count more than it.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="The block `cache` of a workers' profile: one of `baton worker profiles`, or a file.", envvar="BATON_PROFILE"
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of the workers: cpu or gpu. Without it: gpu if this machine has an NVIDIA driver.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address for workers.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for workers.", min=1, max=65535)] = _PORT,
    http_host: Annotated[
        str, typer.Option(help="Address for health, metrics and administration, which ask nobody who they are.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of these.", min=1, max=65535)] = 8080,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="host:port of `baton cache-coordinator`, which is told what this server holds.",
            envvar="BATON_CACHE_COORDINATOR",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="What the coordinator knows this server by: the same after a restart, and no other server's. "
            "Without it: the machine's name.",
            envvar="BATON_CACHE_NAME",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, without secrets, and leave.")] = False,
) -> None:
    """Run an LMCache server until SIGTERM: KV cache of prefill workers in memory, on disk and on a remote store."""
    if disk_gb == 0:
        disk = disk_gb = None
    if disk is None and disk_gb is not None:
        _fail("--disk-gb: the tier needs a folder, --disk")
    if disk is not None and disk_gb is None:
        _fail("--disk: the tier needs a size, --disk-gb")
    try:
        spec = _block(config, profile)
        spec = _changed(spec, dram_gb=dram_gb, disk=disk, disk_gb=disk_gb, remote=remote, device=device)
        spec = _reporting(spec, coordinator or None, name or None, port)
        spec = _fitted(spec, dry_run=dry_run)
        shown_spec = spec
        if spec.disk is not None and not dry_run:
            spec = _prepare_disk(spec, spec.disk)
        command = lmcache.server_command(spec, host=host, port=port, http_host=http_host, http_port=http_port)
        # An empty file is how a container says that there is none.
        password = "" if remote_password_file is None else remote_password_file.read_text(encoding="utf-8").strip("\r\n")
        if password:
            command.env[lmcache.PASSWORD_ENV] = password
    except (ValueError, OSError) as error:
        _fail(str(error))
    _warn(spec, host, http_host)
    if dry_run:
        typer.echo(shown(command))
        return
    _check(spec, host, port, http_host, http_port)
    for line in _tiers(shown_spec):
        _say(line)
    if spec.coordinator is not None:
        _say(f"what it holds is reported to {spec.coordinator}, as {spec.name}")
    _say(f"workers connect to {host}:{port}; health and metrics on http://{http_host}:{http_port}/healthcheck and /metrics")
    _become(command)


def cache_coordinator(
    host: Annotated[
        str, typer.Option(help="Address for cache servers and the filter; nobody is asked who they are.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.", min=1, max=65535)] = lmcache_coordinator.PORT,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="File from which it goes on after a restart; without it, it then knows nothing of what servers hold."
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="That of the cache servers.")] = lmcache.CHUNK_TOKENS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and leave.")] = False,
) -> None:
    """Run LMCache's coordinator until SIGTERM: it knows which cache server holds what, for `cache_store.directory`."""
    try:
        command = lmcache_coordinator.coordinator_command(
            host=host, port=port, chunk_tokens=chunk_tokens, checkpoint=None if checkpoint is None else checkpoint.absolute()
        )
        if not _is_loopback(host):
            _say(
                f"warning: --host {host}: whoever reaches this port can say what servers hold, and have it deleted there: "
                "workers' network only"
            )
        if dry_run:
            typer.echo(shown(command))
            return
        if checkpoint is not None:
            checkpoint.absolute().parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        _fail(str(error))
    _check_installed({"lmcache": "lmcache==0.5.6"})
    _check_port("port", host, port)
    _say(
        "what it knows is "
        + ("lost with a restart" if checkpoint is None else f"kept in {checkpoint}, every 60 s and at its end")
    )
    _say(f"cache servers report to {host}:{port} (--coordinator), the filter asks there (cache_store.directory)")
    _become(command)


def _become(command: Command) -> NoReturn:
    sys.stdout.flush()
    # In place of this process: signals reach the server itself, and its exit status is this command's.
    os.execve(command.argv[0], list(command.argv), {**os.environ, **command.env})  # noqa: S606


def shown(command: Command) -> str:
    """The command as a line for a shell; a secret is left to a variable of the shell that has its name."""
    setting = [
        f'{name}="${name}"' if name in lmcache.SECRETS else f"{name}={shlex.quote(value)}"
        for name, value in command.env.items()
    ]
    return " ".join(["env", *setting, shlex.join(command.argv)])


def _block(config: Path | None, profile: str | None) -> lmcache.CacheSpec:
    """The block of the file or of the profile, or an empty one. Raises ValueError or OSError."""
    if config is not None:
        return yaml_lines.decode(config.read_text(encoding="utf-8"), CacheFile, source=str(config)).cache
    if profile is None:
        return lmcache.CacheSpec()
    found = load_profile(profile)
    spec = found.cache or lmcache.CacheSpec()
    return msgspec.structs.replace(spec, device=spec.device or found.device)


def _changed(
    spec: lmcache.CacheSpec,
    *,
    dram_gb: float | None,
    disk: Path | None,
    disk_gb: float | None,
    remote: str | None,
    device: str | None,
) -> lmcache.CacheSpec:
    """``spec`` with what the options say. Raises ValueError."""
    changes: dict[str, Any] = {}
    if dram_gb is not None:
        changes["dram_gb"] = dram_gb
    if disk is not None:
        changes["disk"] = lmcache.Disk(path=str(disk.absolute()), gb=disk_gb or 0.0)
    if remote is not None:
        changes["remote"] = remote
    if device is not None:
        if device not in ("cpu", "gpu"):
            raise ValueError(f"--device: {device!r} is not cpu or gpu")
        changes["device"] = device
    elif spec.device is None:
        changes["device"] = _device_here()
    return msgspec.structs.replace(spec, **changes)


def _reporting(spec: lmcache.CacheSpec, coordinator: str | None, name: str | None, port: int) -> lmcache.CacheSpec:
    """``spec`` with whom it reports to, and as whom. Raises ValueError."""
    coordinator, name = coordinator or spec.coordinator, name or spec.name
    if coordinator is not None and name is None:
        # Of two servers on one machine one has another port, and is another server.
        name = socket.gethostname() + ("" if port == _PORT else f"-{port}")
    return msgspec.structs.replace(spec, coordinator=coordinator, name=name)


def _device_here() -> Literal["cpu", "gpu"]:
    return "gpu" if Path("/dev/nvidiactl").exists() else "cpu"


def _fitted(spec: lmcache.CacheSpec, *, dry_run: bool) -> lmcache.CacheSpec:
    """``spec`` with all sizes known. Raises ValueError for what does not fit, OSError for what cannot be read.

    A dry run may be for another machine: what does not fit here is only said.
    """
    try:
        disk_bytes = None if spec.disk is None else cache_disk.room_bytes(Path(spec.disk.path))
        return lmcache.fit(spec, memory_bytes=_memory_bytes(), disk_bytes=disk_bytes)
    except (ValueError, OSError) as error:
        if not dry_run or spec.dram_gb is None:
            raise
        _say(f"warning: on this machine: {error}")
        return spec


def _memory_bytes() -> int:
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"  # of a container; the machine's root group has neither
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    if limit.is_file() and used.is_file():
        return lmcache.available_bytes(meminfo, limit.read_text(encoding="ascii"), used.read_text(encoding="ascii"))
    return lmcache.available_bytes(meminfo)


def _prepare_disk(spec: lmcache.CacheSpec, disk: lmcache.Disk) -> lmcache.CacheSpec:
    """Make the folder, make room in it, and give LMCache what is left of the tier. Raises OSError."""
    folder = Path(disk.path)
    folder.mkdir(parents=True, exist_ok=True)
    left = cache_disk.trim(folder, math.floor(disk.gb * _GIB))
    if left.kept_bytes or left.removed_bytes:
        kept_gb, removed_gb = left.kept_bytes / _GIB, left.removed_bytes / _GIB
        _say(f"disk tier: {kept_gb:.2f} GiB of an earlier run are kept, {removed_gb:.2f} GiB removed")
    gb = round(disk.gb - left.kept_bytes / _GIB, 3)
    return msgspec.structs.replace(spec, disk=lmcache.Disk(path=disk.path, gb=gb))


def _warn(spec: lmcache.CacheSpec, host: str, http_host: str) -> None:
    if not _is_loopback(http_host):
        _say(
            f"warning: --http-host {http_host}: whoever reaches this port can empty and reconfigure the cache; nobody is asked "
            "who they are"
        )
    if not _is_loopback(host):
        why = "and can run code here (a CPU worker's data is unpickled)" if spec.device != "gpu" else "of every user"
        _say(f"warning: --host {host}: whoever reaches this port can read and write cached KV {why}: workers' network only")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check(spec: lmcache.CacheSpec, host: str, port: int, http_host: str, http_port: int) -> None:
    """Leave with a sentence where the server would fail with a traceback, or only much later."""
    needed = {"lmcache": "lmcache==0.5.6"}
    if spec.remote is not None and spec.remote.startswith("s3:"):
        needed |= {"awscrt": "awscrt", "boto3": "boto3"}
    _check_installed(needed)
    _check_port("port", host, port)
    _check_port("http-port", http_host, http_port)


def _check_installed(needed: dict[str, str]) -> None:
    """``needed``: module -> what `pip` calls it."""
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            _fail(f"{package.partition('=')[0]} is not installed: pip install --no-deps {package}")


def _check_port(option: str, host: str, port: int) -> None:
    fault = port_fault(host, port)
    if fault is not None:
        _fail(f"--{option} {port}: {host} cannot be listened on: {fault}")


def _tiers(spec: lmcache.CacheSpec) -> list[str]:
    tiers = [f"memory: {spec.dram_gb:g} GiB"]
    if spec.disk is not None:
        tiers.append(f"disk: {spec.disk.gb:g} GiB in {spec.disk.path}")
    if spec.remote is not None:
        tiers.append(f"remote: {lmcache.without_secrets(spec.remote)}")
    return tiers


def _say(line: str) -> None:
    typer.echo(f"baton: {line}", err=True)


def _fail(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(1)
