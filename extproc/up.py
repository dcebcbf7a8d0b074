"""``baton up``: the whole system on one machine without a GPU: workers, filter, Envoy, and a first answer.

What may live here: starting the parts in order, showing how they are doing, and ending all of them when one ends or the user
has had enough. How a worker is started is in the package ``workers``; what Envoy is told is in ``envoy_config``.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from ipaddress import IPv4Address
from pathlib import Path

from rich.console import Console

from extproc import first_answer
from extproc.config import MOST_PROCESSES, ConfigError
from extproc.parts import (
    POLL_S,
    Part,
    Progress,
    check_all,
    complain,
    leave_folder,
    run_folder,
    signals_ignored,
    signals_raise,
    stay,
)
from extproc.stack import (
    UpError,
    await_endpoints,
    envoy_command,
    filter_command,
    find_envoy,
    stack_config,
    write_configs,
)
from extproc.tokens.settings import ModelTokenizer, TokenSettings
from workers import cores, model, vllm
from workers.process import Child, stop_all
from workers.ready import PartError, answers, free_ports, port_fault
from workers.sim import command as sim

_LOOPBACK = "127.0.0.1"
_WORKER_GRACE_S = 3.0
"""An idle vLLM ends within half a second; one that is still starting does not listen to SIGTERM at all."""

_ADMIN_PORT = 9003

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
    processes: int = 1
    """Of the filter."""
    run_dir: Path | None = None
    """Logs, sockets and generated configuration. None: a temporary one, removed at the end unless something failed."""
    cache_dir: Path | None = None
    """Converted models. None: the user's cache."""
    block_size_tokens: int = 128
    max_model_len_tokens: int | None = None
    kv_events: bool = True
    """The workers publish what their caches hold, and the filter goes by it; without pyzmq they do not."""
    once: bool = False
    """Leave after the first answer."""
    start_timeout_s: float = 600.0
    answer_timeout_s: float = 180.0

    def check(self) -> None:
        """Raise OptionsError for what cannot work, before anything is started."""
        for role, count in (("prefill", self.prefill), ("decode", self.decode)):
            if not 1 <= count <= 16:
                raise OptionsError(f"--{role} {count}: between 1 and 16 workers")
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise OptionsError(f"--processes {self.processes}: between 1 and {MOST_PROCESSES}")
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


def run_up(options: UpOptions, console: Console | None = None) -> int:
    """Bring everything up and stay until Ctrl-C. Returns the exit status; whatever happens, no process is left."""
    console = console or Console(soft_wrap=True)
    try:
        options.check()
        envoy = find_envoy()
        if options.engine == "vllm":
            _check_engine()
    except UpError as error:
        complain(console, str(error))
        return _BAD_OPTIONS if isinstance(error, OptionsError) else _FAILED
    with signals_raise(), run_folder(options.run_dir) as run_dir:
        status = _run(options, envoy, run_dir, console)
        leave_folder(console, run_dir, temporary=options.run_dir is None, failed=status == _FAILED)
    return status


def _run(options: UpOptions, envoy: Path, run_dir: Path, console: Console) -> int:
    parts: list[Part] = []
    up = False
    try:
        admin = _admin_address()
        names = _start(options, envoy, run_dir, console, parts, admin)
        with Progress(console, parts, options.start_timeout_s) as progress:
            while not progress.look():
                time.sleep(POLL_S)
        first_answer.show(
            console,
            host=_LOOPBACK if options.host == "0.0.0.0" else options.host,  # noqa: S104
            port=options.port,
            model=served_name(options.model),
            names=names,
            timeout_s=options.answer_timeout_s,
            check=partial(check_all, parts),
        )
        up = True
        if not options.once:
            console.print(f"\nLive page: http://{admin}/  ·  in a terminal: baton top --admin http://{admin}", highlight=False)
            console.print("Up. Ctrl-C ends it all.")
            stay(parts)
        return 0
    except (UpError, PartError, ConfigError, model.ModelError, OSError) as error:
        complain(console, str(error))
        return _FAILED
    except KeyboardInterrupt:
        console.print("\nStopping …")
        return 0 if up else _INTERRUPTED
    finally:
        signals_ignored()
        stop_all(part.child for part in parts)


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


# --- the parts --------------------------------------------------------------------------------------------------------


def _admin_address() -> str:
    """The filter's admin port: its usual one, where that is free."""
    return f"{_LOOPBACK}:{_ADMIN_PORT if port_fault(_LOOPBACK, _ADMIN_PORT) is None else free_ports(1, _LOOPBACK)[0]}"


def _start(options: UpOptions, envoy: Path, run_dir: Path, console: Console, parts: list[Part], admin: str) -> dict[str, str]:
    """Start every part, appending it to ``parts`` at once, so that the caller can stop what there is.

    Returns the names of the workers by their addresses.
    """
    roles: list[vllm.Role] = []
    roles += ["prefill"] * options.prefill
    roles += ["decode"] * options.decode
    simulated = options.engine == "sim"
    if options.model == model.SMOLLM2 and not simulated:
        console.print("Preparing the model (converted once, which takes about half a minute) …")
    source = options.model if simulated else model.resolve(options.model, options.cache_dir)
    events = options.kv_events and importlib.util.find_spec("zmq") is not None
    ports = iter(free_ports(4 * len(roles) + 1, _LOOPBACK))
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
            kv_events_port=next(ports) if events else None,
            kv_events_replay_port=next(ports) if events else None,
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
        admin=admin,
        envoy_admin=f"{_LOOPBACK}:{next(ports)}",
        lease_s=specs[0].kv_lease_s,
        processes=options.processes,
        kv_events=events,
        tokens=_tokens(served_name(options.model), None if simulated else source) if events else None,
    )
    config_file, envoy_file = write_configs(config, run_dir)

    counts = {"prefill": itertools.count(), "decode": itertools.count()}
    names: dict[str, str] = {}
    for spec, share in zip(specs, shares, strict=True):
        name = f"{spec.role}-{next(counts[spec.role])}"
        command = _ENGINES[options.engine](spec)
        child = Child(name, command.argv, log=run_dir / f"{name}.log", env=command.env, grace_s=_WORKER_GRACE_S)
        # Before the filter makes its first handoff: workers that share a core would stall in it.
        pin = None if simulated else partial(_pin, child, share, console)
        parts.append(Part(child, partial(answers, f"http://{spec.host}:{spec.port}/health"), when_ready=pin))
        names[f"{spec.host}:{spec.port}"] = name
    child = Child("filter", filter_command(config_file), log=run_dir / "filter.log")
    parts.append(Part(child, partial(answers, f"http://{config.admin}/healthz")))
    await_endpoints(config, child)
    child = Child("envoy", envoy_command(envoy, envoy_file), log=run_dir / "envoy.log")
    parts.append(Part(child, partial(answers, f"http://{config.envoy.admin}/ready")))
    return names


def _tokens(name: str, source: Path | str | None) -> TokenSettings:
    """How prompts get the token ids that workers' events speak of: by the model's own files, where there are any and what reads
    them is installed; else a worker is asked."""
    local = isinstance(source, Path) and (source / "tokenizer.json").is_file()
    if local and all(importlib.util.find_spec(package) is not None for package in ("tokenizers", "jinja2")):
        return TokenSettings(models={name: ModelTokenizer(folder=str(source))})
    return TokenSettings(ask_workers="tokenize")


def served_name(name: str) -> str:
    """The model's name in requests: its own, or the last part of its path."""
    return name if name == model.SMOLLM2 else Path(name).name


def _pin(child: Child, share: Sequence[int], console: Console) -> None:
    if cores.pin(child.pids(), share):
        console.print(f"{child.name} runs on core {', '.join(map(str, share))}", highlight=False)
