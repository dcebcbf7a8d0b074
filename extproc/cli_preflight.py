"""``baton preflight``: options in, a report out; with a peer, the way to it is measured."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from extproc.routing.kv_size import kv_bytes_per_token
from workers import preflight
from workers.preflight import model as models
from workers.preflight import show
from workers.preflight.measure import run as measuring
from workers.preflight.measure.messages import BUFFER_MAX_BYTES, DEFAULT_PORT, MeasureError, Task
from workers.preflight.of_worker import ask_of
from workers.spec import WorkerSpec

_GB = 1e9
_NOT_RUN = 3

_EXAMPLES = (
    "Examples:  baton preflight --role decode --model /models/llama --tensor-parallel 4 --side-channel-host 10.0.0.7  ·  "
    "baton preflight --device cpu --json  ·  on one node: baton preflight --serve, on the other: "
    "baton preflight --peer 10.0.0.7 --token TOKEN"
)

_REPORT_MAX_BYTES = 1 << 20


def model_of(folder: Path, *, kv_dtype: str = "auto", weights_bytes: float | None = None) -> preflight.Model:
    """A model folder or ``config.json`` -> what a preflight has to know of it. Raises ValueError or OSError, with the file."""
    return models.describe(folder, partial(kv_bytes_per_token, kv_dtype=kv_dtype), weights_bytes=weights_bytes)


def before_start(spec: WorkerSpec, env: Mapping[str, str]) -> preflight.Report:
    """Look at this node for a worker that is about to be started, and show what is found on standard error.

    ``env`` is what its command sets besides the environment. Whoever asks refuses to start it if ``exit_status()`` is 2.
    Raises ValueError or OSError for a model folder that cannot be read.
    """
    folder = Path(spec.model)
    model = model_of(folder, kv_dtype=_kv_dtype(spec)) if (folder / "config.json").is_file() else None
    report = preflight.run(ask_of(spec, model=model), env={**os.environ, **env})
    Console(stderr=True, highlight=False).print(show.as_text(report))
    return report


def _kv_dtype(spec: WorkerSpec) -> str:
    if spec.kv_cache_dtype is not None:
        return spec.kv_cache_dtype
    return spec.dtype or ("float32" if spec.device == "cpu" else "auto")


def register(app: typer.Typer) -> None:
    """Add the command to ``baton``."""
    app.command("preflight", epilog=_EXAMPLES)(_command)


def _command(
    role: Annotated[Literal["prefill", "decode"] | None, typer.Option(help="What the worker is for.")] = None,
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="What it computes on.")] = "gpu",
    model: Annotated[
        Path | None, typer.Option(help="Model folder or config.json: memory and seconds a handoff are worked out.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="vLLM's --kv-cache-dtype.")] = "auto",
    weights_gb: Annotated[float | None, typer.Option(help="Size of the weights, where no files say it.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of the worker.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")] = None,
    kv_lease: Annotated[float, typer.Option(help="Seconds that a prefill worker keeps blocks.")] = 120.0,
    ucx_tls: Annotated[str | None, typer.Option(help="Transports. Without it: UCX_TLS of the environment, else all.")] = None,
    ucx_net_devices: Annotated[str | None, typer.Option(help="Network devices, like --ucx-tls.")] = None,
    side_channel_host: Annotated[str | None, typer.Option(help="Address that peers are told.")] = None,
    side_channel_port: Annotated[int | None, typer.Option(help="Port of the NIXL handshake.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port of the worker.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s to the peer, where it is known and not measured.")] = None,
    peer: Annotated[
        str | None, typer.Option(help="HOST or HOST:PORT that runs `baton preflight --serve`: measure the way there.")
    ] = None,
    peer_side_channel_port: Annotated[
        int | None, typer.Option(help="Also see whether this port of the peer can be reached.")
    ] = None,
    same_host: Annotated[bool, typer.Option("--same-host", help="The peer is a process or container of this host.")] = False,
    peer_report: Annotated[
        Path | None, typer.Option(help="The peer's own --json report: namespaces, GPUs and versions are compared.")
    ] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Measure nothing, for all that a peer is named.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Be the node that is measured: wait for one reader.")] = False,
    listen: Annotated[str, typer.Option(help="With --serve: HOST:PORT.")] = f"0.0.0.0:{DEFAULT_PORT}",
    for_s: Annotated[float, typer.Option("--for", min=1, max=3600, help="With --serve: seconds to wait and serve.")] = 300.0,
    token: Annotated[
        str | None,
        typer.Option(envvar="BATON_PREFLIGHT_TOKEN", help="What both sides must know. --serve makes one up without it."),
    ] = None,
    buffer_mb: Annotated[int, typer.Option(min=1, max=BUFFER_MAX_BYTES >> 20, help="MiB that are read, or served.")] = 256,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Longest time of a measurement.")] = 60.0,
    tool: Annotated[
        Literal["auto", "nixl", "ucx_perftest"],
        typer.Option(help="What --peer measures with. auto: NIXL where it is installed."),
    ] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check whether this node is fit for a worker, and what KV handoffs to and from it will take.

    Exit status: 0 fine (or warnings), 1 warnings with --strict, 2 errors, 3 the check itself could not be done.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        ask = preflight.Ask(
            role=role,
            device=device,
            model=None
            if model is None
            else model_of(model, kv_dtype=kv_dtype, weights_bytes=None if weights_gb is None else weights_gb * _GB),
            ucx_tls=ucx_tls,
            ucx_net_devices=ucx_net_devices,
            side_channel_host=side_channel_host,
            side_channel_port=side_channel_port,
            port=port,
            peer=None if peer is None else _host_port(peer)[0],
            peer_side_channel_port=peer_side_channel_port,
            peer_same_host=same_host,
            peer_identity=None if peer_report is None else _identity(peer_report),
            tensor_parallel=tensor_parallel,
            block_size_tokens=block_size,
            max_model_len_tokens=max_model_len,
            kv_lease_s=kv_lease,
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * _GB,
        )
        if serve and peer is not None:
            raise ValueError("--serve waits for a reader, --peer is one: one of the two")
        measure: Callable[[preflight.Identity], preflight.Outcome] | None = None
        if serve:
            shown = token or secrets.token_hex(8)
            host, number = _host_port(listen)
            if token is None:
                console.print(f"on the other node: baton preflight --peer THIS_NODE:{number} --token {shown}", markup=False)
            measure = _Measure(ask, "serve", (host, number), shown, for_s, buffer_mb=buffer_mb, tool=tool, console=console)
        elif peer is not None and not no_measure:
            if not token:
                raise ValueError("--peer needs the --token that `baton preflight --serve` prints there (or --no-measure)")
            host, number = _host_port(peer)
            measure = _Measure(ask, "read", (host, number), token, seconds, buffer_mb=buffer_mb, tool=tool, console=console)
        console.print("looking at this node", markup=False)
        report = preflight.run(ask, measure=measure)
    except (ValueError, OSError) as error:
        console.print(f"[bold red]baton preflight:[/] {escape(str(error))}")
        raise typer.Exit(_NOT_RUN) from None
    if json:
        typer.echo(show.as_json(report))
    else:
        Console(highlight=False).print(show.as_text(report))
    raise typer.Exit(report.exit_status(strict=strict))


class _Measure:
    """Called with what this node is; starts the measuring process and shows how far it is."""

    def __init__(
        self,
        ask: preflight.Ask,
        kind: Literal["serve", "read"],
        where: tuple[str, int],
        token: str,
        seconds: float,
        *,
        buffer_mb: int,
        tool: str,
        console: Console,
    ) -> None:
        self._ask = ask
        self._kind = kind
        self._where = where
        self._token = token
        self._seconds = seconds
        self._buffer_bytes = buffer_mb << 20
        self._tool = tool
        self._console = console

    def __call__(self, identity: preflight.Identity) -> preflight.Outcome:
        ask = self._ask
        block_bytes = measuring.block_bytes(
            ask.model, block_size_tokens=ask.block_size_tokens, tensor_parallel=ask.tensor_parallel
        )
        task = Task(
            kind=self._kind,
            host=self._where[0],
            port=self._where[1],
            token=self._token,
            seconds=self._seconds,
            block_bytes=min(block_bytes, self._buffer_bytes),
            buffer_bytes=self._buffer_bytes,
            memory="auto" if ask.device == "gpu" else "dram",
            tool=self._tool,
            side_channel_host=ask.side_channel_host or "",
            side_channel_port=ask.side_channel_port,
            identity=identity,
        )
        try:
            with self._console.status("measuring") as status:

                def say(words: str) -> None:
                    status.update(escape(words))
                    if not self._console.is_terminal:
                        self._console.print(words, markup=False)

                result = measuring.run(task, env=self._env(), say=say)
        except MeasureError as error:
            return preflight.Outcome(error=str(error))
        if self._kind == "serve":
            if result is None:
                return preflight.Outcome(error=f"nobody called within {self._seconds:g} s")
            self._console.print(f"{result.peer} measured {result.bytes_per_s / _GB:.3g} GB/s", markup=False)
        return measuring.outcome_of(result)

    def _env(self) -> Mapping[str, str]:
        values = {"UCX_TLS": self._ask.ucx_tls, "UCX_NET_DEVICES": self._ask.ucx_net_devices}
        return {name: value for name, value in values.items() if value is not None}


def _host_port(text: str) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT``, ``[v6]:PORT`` or a bare IPv6 address. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not text.startswith("[")) or text.endswith("]"):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdecimal() or not 1 <= int(port) < 65535 or not host:
        raise ValueError(f"{text!r}: it is HOST or HOST:PORT, with a port from 1 to 65534")
    return host.strip("[]"), int(port)


class _PeerReport(msgspec.Struct):
    """What is read of a report."""

    version: int
    identity: preflight.Identity


def _identity(path: Path) -> preflight.Identity:
    """Of a report that the peer wrote with --json. Raises ValueError or OSError."""
    with path.open("rb") as file:
        text = file.read(_REPORT_MAX_BYTES)
    try:
        return msgspec.json.decode(text, type=_PeerReport).identity
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a report of baton preflight --json: {error}") from None
