"""``baton up``: the whole system on one machine without a GPU: workers, filter, Envoy, and a first answer.

What may live here: starting the parts in order, showing how they are doing, and ending all of them when one ends or the user
has had enough. How a worker is started is in the package ``workers``; what Envoy is told is in ``envoy_config``.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from ipaddress import IPv4Address
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from extproc import first_answer
from extproc.config import ConfigError
from extproc.stack import (
    UpError,
    await_endpoints,
    envoy_command,
    filter_command,
    find_envoy,
    stack_config,
    write_configs,
)
from workers import cores, model, vllm
from workers.process import Child, stop_all
from workers.ready import PartError, answers, check_alive, free_ports, port_fault
from workers.sim import command as sim

_LOOPBACK = "127.0.0.1"
_QUESTION = "What is the capital of France?"
_HEARTBEAT_S = 10.0
_POLL_S = 0.2
_ANSWER_MAX_TOKENS = 40
_WORKER_GRACE_S = 3.0
"""An idle vLLM ends within half a second; one that is still starting does not listen to SIGTERM at all."""

_INTERRUPTED = 130
_FAILED = 1
_BAD_OPTIONS = 2


class OptionsError(UpError):
    """The options cannot be what was meant."""


_ENGINES = {"vllm": vllm.command, "sim": sim.command}
"""What the workers run: real vLLM on the CPU, or the simulated engine, which is up in seconds."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What ``baton up`` is told. Everything has a default that works on a laptop."""

    prefill: int = 1
    decode: int = 1
    model: str = model.SMOLLM2
    engine: str = "vllm"
    host: str = _LOOPBACK
    port: int = 8000
    run_dir: Path | None = None
    """Logs, sockets and generated configuration. None: a temporary one, removed at the end unless something failed."""
    cache_dir: Path | None = None
    """Converted models. None: the user's cache."""
    block_size_tokens: int = 128
    max_model_len_tokens: int | None = None
    once: bool = False
    """Leave after the first answer."""
    start_timeout_s: float = 600.0
    answer_timeout_s: float = 180.0

    def check(self) -> None:
        """Raise OptionsError for what cannot work, before anything is started."""
        for role, count in (("prefill", self.prefill), ("decode", self.decode)):
            if not 1 <= count <= 16:
                raise OptionsError(f"--{role} {count}: between 1 and 16 workers")
        if self.engine not in _ENGINES:
            raise OptionsError(f"--engine {self.engine}: one of {', '.join(_ENGINES)}")
        if self.block_size_tokens < 32 or self.block_size_tokens % 32:
            raise OptionsError(f"--block-size {self.block_size_tokens}: vLLM on a CPU takes multiples of 32")
        if not 1 <= self.port <= 65535:
            raise OptionsError(f"--port {self.port}: not a port")
        try:
            IPv4Address(self.host)
        except ValueError:
            raise OptionsError(f"--host {self.host}: not an IPv4 address") from None
        if fault := port_fault(self.host, self.port):
            raise OptionsError(f"cannot listen on {self.host}:{self.port}: {fault}; choose another with --port")


@dataclass
class _Part:
    """One process of the system, and when it was ready."""

    child: Child
    ready_url: str
    started_at: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None

    def look(self) -> None:
        """Note whether it is ready. Raises PartError if it has ended."""
        check_alive(self.child)
        if self.ready_after_s is None and answers(self.ready_url):
            self.ready_after_s = time.monotonic() - self.started_at


def run_up(options: UpOptions, console: Console | None = None) -> int:
    """Bring everything up and stay until Ctrl-C. Returns the exit status; whatever happens, no process is left."""
    console = console or Console(soft_wrap=True)
    try:
        options.check()
        envoy = find_envoy()
        if options.engine == "vllm":
            _check_engine()
    except UpError as error:
        _complain(console, str(error))
        return _BAD_OPTIONS if isinstance(error, OptionsError) else _FAILED
    with _signals_raise(), _run_dir(options) as run_dir:
        status = _run(options, envoy, run_dir, console)
        if status == _FAILED:
            console.print(f"Logs and configuration are in {run_dir}", highlight=False)
        elif options.run_dir is None:
            shutil.rmtree(run_dir, ignore_errors=True)
    return status


def _run(options: UpOptions, envoy: Path, run_dir: Path, console: Console) -> int:
    parts: list[_Part] = []
    up = False
    try:
        _start(options, envoy, run_dir, console, parts)
        _await_ready(parts, options.start_timeout_s, console)
        _pin_workers(options, parts, console)
        first_answer.show(
            console,
            host=_LOOPBACK if options.host == "0.0.0.0" else options.host,  # noqa: S104
            port=options.port,
            model=served_name(options.model),
            names={part.ready_url.split("/")[2]: part.child.name for part in parts},
            timeout_s=options.answer_timeout_s,
            check=partial(_check_all, parts),
        )
        up = True
        if not options.once:
            console.print("\nUp. Ctrl-C ends it all.")
            while True:
                time.sleep(_POLL_S)
                _check_all(parts)
        return 0
    except (UpError, PartError, ConfigError, model.ModelError, OSError) as error:
        _complain(console, str(error))
        return _FAILED
    except KeyboardInterrupt:
        console.print("\nStopping …")
        return 0 if up else _INTERRUPTED
    finally:
        # A second Ctrl-C must not leave the clean-up half done.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop_all(part.child for part in parts)


def _check_all(parts: list[_Part]) -> None:
    """Raise PartError if one of them has ended."""
    for part in parts:
        check_alive(part.child)


# --- what is needed ---------------------------------------------------------------------------------------------------


def _check_engine() -> None:
    for package in ("vllm", "nixl"):
        if importlib.util.find_spec(package) is None:
            raise UpError(f"the package {package} is not installed here: pip install 'kv-baton[cpu]'")
    try:
        torch, vision = metadata.version("torch"), metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    if torch.endswith("+cpu") and not vision.endswith("+cpu"):
        raise UpError(
            f"torchvision {vision} cannot be loaded beside torch {torch}, and vLLM would fail on it; it is not needed: "
            "pip uninstall torchvision torchaudio torchcodec"
        )


@contextmanager
def _run_dir(options: UpOptions) -> Iterator[Path]:
    if options.run_dir is None:
        yield Path(tempfile.mkdtemp(prefix="baton-"))
        return
    options.run_dir.mkdir(parents=True, exist_ok=True)
    yield options.run_dir.resolve()


# --- the parts --------------------------------------------------------------------------------------------------------


def _start(options: UpOptions, envoy: Path, run_dir: Path, console: Console, parts: list[_Part]) -> None:
    """Start every part, appending it to ``parts`` at once, so that the caller can stop what there is."""
    roles: list[vllm.Role] = []
    roles += ["prefill"] * options.prefill
    roles += ["decode"] * options.decode
    simulated = options.engine == "sim"
    if options.model == model.SMOLLM2 and not simulated:
        console.print("Preparing the model (converted once, which takes about half a minute) …")
    source = options.model if simulated else model.resolve(options.model, options.cache_dir)
    ports = iter(free_ports(2 * len(roles) + 2, _LOOPBACK))
    shares = cores.spread(len(roles), cores.usable())
    specs = [
        vllm.WorkerSpec(
            role=role,
            model=str(source),
            local_model=isinstance(source, Path),
            served_model_name=served_name(options.model),
            host=_LOOPBACK,
            port=next(ports),
            side_channel_port=next(ports),
            block_size_tokens=options.block_size_tokens,
            max_model_len_tokens=options.max_model_len_tokens,
            threads=max(1, len(share)),
        )
        for role, share in zip(roles, shares, strict=True)
    ]
    config = stack_config(
        run_dir,
        prefill=[f"{spec.host}:{spec.port}" for spec in specs if spec.role == "prefill"],
        decode=[f"{spec.host}:{spec.port}" for spec in specs if spec.role == "decode"],
        listen=f"{options.host}:{options.port}",
        admin=f"{_LOOPBACK}:{next(ports)}",
        envoy_admin=f"{_LOOPBACK}:{next(ports)}",
        lease_s=specs[0].kv_lease_s,
    )
    config_file, envoy_file = write_configs(config, run_dir)

    counts = {"prefill": itertools.count(), "decode": itertools.count()}
    for spec in specs:
        name = f"{spec.role}-{next(counts[spec.role])}"
        command = _ENGINES[options.engine](spec)
        child = Child(name, command.argv, log=run_dir / f"{name}.log", env=command.env, grace_s=_WORKER_GRACE_S)
        parts.append(_Part(child, f"http://{spec.host}:{spec.port}/health"))
    child = Child("filter", filter_command(config_file), log=run_dir / "filter.log")
    parts.append(_Part(child, f"http://{config.admin}/healthz"))
    await_endpoints(config, child)
    child = Child("envoy", envoy_command(envoy, envoy_file), log=run_dir / "envoy.log")
    parts.append(_Part(child, f"http://{config.envoy.admin}/ready"))


def served_name(name: str) -> str:
    """The model's name in requests: its own, or the last part of its path."""
    return name if name == model.SMOLLM2 else Path(name).name


def _pin_workers(options: UpOptions, parts: list[_Part], console: Console) -> None:
    if options.engine != "vllm":
        return
    workers = parts[: options.prefill + options.decode]
    for part, share in zip(workers, cores.spread(len(workers), cores.usable()), strict=True):
        if cores.pin(part.child.pids(), share):
            console.print(f"{part.child.name} runs on core {', '.join(map(str, share))}", highlight=False)


# --- progress ---------------------------------------------------------------------------------------------------------


def _await_ready(parts: list[_Part], timeout_s: float, console: Console) -> None:
    start = time.monotonic()
    live = Live(console=console, refresh_per_second=4, get_renderable=lambda: _table(parts))
    watch: AbstractContextManager[object] = live if console.is_terminal else nullcontext()
    if not console.is_terminal:
        for part in parts:
            console.print(f"starting {part.child.name}, log {part.child.log}", highlight=False)
    next_heartbeat_s = _HEARTBEAT_S
    with watch:
        while waiting := [part for part in parts if part.ready_after_s is None]:
            for part in parts:
                part.look()
                if part in waiting and part.ready_after_s is not None and not console.is_terminal:
                    console.print(f"{part.child.name} is ready after {part.ready_after_s:.0f} s", highlight=False)
            elapsed_s = time.monotonic() - start
            names = ", ".join(part.child.name for part in waiting)
            if elapsed_s > timeout_s:
                raise UpError(
                    f"not ready after {timeout_s:g} s: {names}; the end of {waiting[0].child.log}:\n{waiting[0].child.tail()}"
                )
            if elapsed_s > next_heartbeat_s:
                next_heartbeat_s += _HEARTBEAT_S
                if not console.is_terminal:
                    console.print(f"{elapsed_s:.0f} s: waiting for {names}", highlight=False)
            time.sleep(_POLL_S)


def _table(parts: list[_Part]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("part", "state", "seconds", "log"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for part in parts:
        ready = part.ready_after_s is not None
        seconds = part.ready_after_s if part.ready_after_s is not None else time.monotonic() - part.started_at
        state = "[green]ready[/]" if ready else "[yellow]starting[/]"
        table.add_row(part.child.name, state, f"{seconds:.0f}", str(part.child.log))
    return table


def _complain(console: Console, message: str) -> None:
    console.print("[bold red]baton up:[/] ", end="")
    console.print(message, markup=False, highlight=False)


# --- signals ----------------------------------------------------------------------------------------------------------

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this like Ctrl-C does, by an exception that passes every clean-up on its way."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
