"""``baton worker``: a vLLM worker in the foreground, from a profile and options; and what profiles there are, and which fit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from workers.spec import Device, LoadFailure, Role

if TYPE_CHECKING:
    from workers.launch import Plan

Engine = Literal["vllm", "sim"]


class _Group(TyperGroup):
    """Commands of their own, and options that are the worker's; what follows a ``--`` goes to vLLM as it stands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["for_vllm"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


worker_app = typer.Typer(
    cls=_Group,
    rich_markup_mode="rich",
    add_completion=False,
    help="Run one vLLM worker in the foreground; or look at profiles and at what fits together.",
    epilog="Examples:  baton worker --role prefill --profile llama-3.3-70b-h200  ·  "
    "baton worker --role decode --profile llama-3.3-70b-h200 --variant tp4 --dry-run  ·  "
    "baton worker --role prefill --profile llama-3.3-70b-h200 --host-cache-gib 512 --dry-run  ·  "
    "baton worker --role prefill --model /models/my-llama --tensor-parallel-size 4 -- --max-logprobs 5  ·  "
    "baton worker profiles  ·  baton worker check llama-3.3-70b-h200",
)


def register(app: typer.Typer) -> None:
    """Add the command to ``baton``."""
    app.add_typer(worker_app, name="worker")


@worker_app.callback(invoke_without_command=True)
def worker(
    ctx: typer.Context,
    role: Annotated[Role | None, typer.Option(help="What it is for.", envvar="BATON_ROLE")] = None,
    profile: Annotated[
        str, typer.Option(help="One of `baton worker profiles`, or a file.", envvar="BATON_PROFILE")
    ] = "default",
    variant: Annotated[
        str | None, typer.Option(help="One of the profile's other ways to run decode workers.", envvar="BATON_VARIANT")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hub name or folder: the same string on every worker, it is compared.", envvar="BATON_MODEL"),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests.", envvar="BATON_SERVED_MODEL_NAME")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. Without it: the one that peers are told.", envvar="BATON_WORKER_HOST"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port.", envvar="BATON_WORKER_PORT")] = None,
    side_channel_host: Annotated[
        str | None,
        typer.Option(
            help="Address that peers reach this worker by. Without it: --host, POD_IP, or the default route's.",
            envvar="BATON_SIDE_CHANNEL_HOST",
        ),
    ] = None,
    side_channel_port: Annotated[
        int | None, typer.Option(help="Rank R answers peers on this port plus R.", envvar="BATON_SIDE_CHANNEL_PORT")
    ] = None,
    kv_events_port: Annotated[
        int | None, typer.Option(help="Rank R publishes KV events on this port plus R; 0: no events.")
    ] = None,
    kv_events_replay_port: Annotated[int | None, typer.Option(help="Likewise for events that were missed; 0: none.")] = None,
    cache_server: Annotated[
        str | None, typer.Option(help="HOST:PORT of an LMCache server (baton cache-server).", envvar="BATON_CACHE_SERVER")
    ] = None,
    host_cache_gib: Annotated[
        float | None,
        typer.Option(
            help="Prefill: GiB of host memory behind the GPU cache, for all its GPUs together; 0: none.",
            envvar="BATON_HOST_CACHE_GIB",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one engine.", envvar="BATON_TENSOR_PARALLEL_SIZE")
    ] = None,
    data_parallel_size: Annotated[int | None, typer.Option(min=1, help="Engines of the group, on all nodes.")] = None,
    data_parallel_local: Annotated[int | None, typer.Option(min=1, help="Engines of the group that run here.")] = None,
    data_parallel_rank: Annotated[int | None, typer.Option(min=0, help="The first rank that runs here.")] = None,
    data_parallel_address: Annotated[str | None, typer.Option(help="Where rank 0 of the group is reached.")] = None,
    device_ids: Annotated[
        str | None, typer.Option(help="GPUs by number, such as 0,1; the others stay visible.", envvar="BATON_DEVICE_IDS")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="In place of the profile's.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one step.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Such as fp8; the same on every worker.")] = None,
    lease: Annotated[
        int | None, typer.Option(min=1, help="Seconds that a prefill worker keeps blocks for a decode worker.")
    ] = None,
    on_load_failure: Annotated[
        LoadFailure | None, typer.Option(help="What a decode worker does that cannot pull blocks.")
    ] = None,
    drain: Annotated[int | None, typer.Option(min=0, help="Seconds that requests may go on after SIGTERM.")] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="PEM: serve HTTPS with this certificate and its chain.", envvar="BATON_SSL_CERTFILE")
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM: its key.", envvar="BATON_SSL_KEYFILE")] = None,
    ssl_ca_certs: Annotated[
        str | None,
        typer.Option(help="PEM: clients must have a certificate of these authorities (mTLS).", envvar="BATON_SSL_CA_CERTS"),
    ] = None,
    ucx_tls: Annotated[str | None, typer.Option(help="Transports for KV blocks.", envvar="BATON_UCX_TLS")] = None,
    ucx_net_devices: Annotated[
        str | None, typer.Option(help="Network devices for KV blocks, such as mlx5_0:1.", envvar="BATON_UCX_NET_DEVICES")
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Without a GPU: cores for this worker, such as 0,1. Without it: all there are.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send.", envvar="BATON_API_KEY_FILE")
    ] = None,
    hf_token_file: Annotated[
        Path | None, typer.Option(help="File with the token for the model hub.", envvar="BATON_HF_TOKEN_FILE")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="vllm, or sim: the simulated engine, by the same command line.", envvar="BATON_ENGINE")
    ] = "vllm",
    preflight: Annotated[
        bool,
        typer.Option(help="Look at this node first, and do not start where it cannot work.", envvar="BATON_PREFLIGHT"),
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, without secrets, and leave.")] = False,
) -> None:
    """Run one vLLM worker in the foreground until it ends or SIGTERM comes. What follows a -- goes to vLLM."""
    if ctx.invoked_subcommand is not None:
        return
    from workers.cores import usable
    from workers.launch import plan
    from workers.profile import load_profile

    if role is None:
        _fail("--role: prefill or decode?")
    changes: dict[str, Any] = {
        "model": model,
        "served_model_name": served_model_name,
        "host": host,
        "port": port,
        "side_channel_host": side_channel_host,
        "side_channel_port": side_channel_port,
        "kv_events_port": kv_events_port,
        "kv_events_replay_port": kv_events_replay_port,
        "cache_server": cache_server or None,
        "host_cache_gib": host_cache_gib,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "data_parallel_local": data_parallel_local,
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_address": data_parallel_address,
        "device": device,
        "device_ids": None if device_ids is None else _numbers("--device-ids", device_ids),
        "max_model_len_tokens": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_lease_s": lease,
        "kv_load_failure_policy": on_load_failure,
        "shutdown_timeout_s": drain,
        "ssl_certfile": ssl_certfile or None,
        "ssl_keyfile": ssl_keyfile or None,
        "ssl_ca_certs": ssl_ca_certs or None,
        "ucx_tls": ucx_tls,
        "ucx_net_devices": ucx_net_devices,
    }
    own_cores = tuple(usable()) if cores is None else _numbers("--cores", cores)
    changes["threads"] = len(own_cores) or None
    try:
        loaded = load_profile(profile)
        made = plan(
            loaded,
            role,
            variant=variant,
            changes=changes,
            arguments=ctx.meta.get("for_vllm", ()),
            environ=os.environ,
            engine=engine,
            secrets=_secrets(VLLM_API_KEY=api_key_file, HF_TOKEN=hf_token_file),
            prepare=not dry_run,
        )
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))
    _show(made, profile, dry_run=dry_run)
    if not dry_run:
        if preflight and engine == "vllm":
            _look_first(made)
        raise typer.Exit(_run(made, engine, own_cores))


@worker_app.command(
    epilog="Examples:  baton worker check llama-3.3-70b-h200  ·  baton worker check p.yaml d.yaml:tp4 --strict --json"
)
def check(
    prefill: Annotated[str, typer.Argument(help="PROFILE or PROFILE:prefill; alone: with each of its own decode workers.")],
    decode: Annotated[str | None, typer.Argument(help="PROFILE, PROFILE:decode or PROFILE:VARIANT.")] = None,
    model: Annotated[str | None, typer.Option(help="For profiles that name none.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what would break the handshake of a prefill and a decode worker, and what would work badly.

    Exits 2 with an error, else 0; with --strict 1 for warnings.
    """
    from extproc import worker_reports as reports
    from workers import fit

    try:
        checked = reports.check([prefill] if decode is None else [prefill, decode], model)
    except ValueError as error:
        _fail(str(error))
    if json:
        typer.echo(reports.check_json(checked))
    else:
        console = Console(highlight=False)
        console = Console(width=max(console.width, 180), highlight=False)
        for each in checked:
            console.print(f"{each.prefill} -> {each.decode}: {'' if each.found else 'everything fits'}", markup=False)
            if each.found:
                console.print(reports.check_table(each))
    raise typer.Exit(max(fit.exit_status(each.found, strict=strict) for each in checked))


@worker_app.command(
    epilog="Examples:  baton worker profiles  ·  baton worker profiles llama-3.3-70b-h200  ·  baton worker profiles --json"
)
def profiles(
    name: Annotated[str | None, typer.Argument(help="One of them, or a file: all of it, with its memory.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the profiles: model, GPUs of each role, where the numbers are from, whether they were run."""
    from extproc import worker_reports as reports
    from workers.profile import builtin_names

    try:
        if json:
            typer.echo(reports.profiles_json(builtin_names() if name is None else [name]))
        elif name is not None:
            typer.echo(reports.profile_text(name))
        else:
            Console(width=max(Console().width, 180), highlight=False).print(reports.profiles_table(builtin_names()))
    except ValueError as error:
        _fail(str(error))


def _show(made: Plan, profile: str, *, dry_run: bool) -> None:
    """The command: on standard output for a dry run, so that it can be piped; else, with all notes, on standard error."""
    from workers.shell import as_shell

    for note in made.notes:
        _say(note)
    # What was handed over by file or flag is shown as the variable that it becomes.
    env = {**made.command.env, **made.secrets}
    text = as_shell(made.command.argv, env, made.unset)
    if dry_run:
        typer.echo(text)
        return
    spec = made.spec
    _say(f"{spec.role} worker from profile {profile}: {spec.served_model_name} on {spec.scheme}://{spec.host}:{spec.port}")
    typer.echo(text, err=True)


def _look_first(made: Plan) -> None:
    """Ends the command where this node cannot run the worker."""
    from extproc.cli_preflight import before_start

    try:
        report = before_start(made.spec, made.command.env)
    except (ValueError, OSError) as error:
        _fail(f"preflight: {error}")
    if report.exit_status() == 2:
        _fail("this node cannot run the worker: see the errors above; --no-preflight starts it all the same")


def _run(made: Plan, engine: str, own_cores: tuple[int, ...]) -> int:
    from workers import cores, foreground, guard
    from workers.process import describe_exit
    from workers.ready import answers

    spec = made.spec
    # What listens everywhere listens on the loopback address too.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.host, spec.host)  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    started_s = time.monotonic()

    own = None if spec.ssl_certfile is None or spec.ssl_keyfile is None else (spec.ssl_certfile, spec.ssl_keyfile)

    def when_ready(above: int) -> bool:
        if not answers(f"{spec.scheme}://{host}:{spec.port}/health", timeout_s=0.5, own_certificate=own):
            return False
        _say(f"ready after {time.monotonic() - started_s:.0f} s")
        if engine == "vllm" and spec.device == "cpu":
            cores.pin(guard.descendants(above), own_cores)
            _say(f"runs on core {', '.join(map(str, own_cores))}")
        return True

    env = {name: value for name, value in os.environ.items() if name not in made.unset}
    status = foreground.run(
        made.command.argv,
        env={**env, **made.command.env, **made.secrets},
        grace_s=made.grace_s,
        say=_say,
        each_poll=when_ready,
    )
    _say(f"the engine {describe_exit(status)}")
    return status


def _secrets(**files: Path | None) -> dict[str, str]:
    """Variable -> content of its file, without white space around it; empty: none. Exits where a file cannot be read."""
    found = {}
    for name, file in files.items():
        if file is None:
            continue
        try:
            value = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            _fail(f"{file}: {error}")
        if value:
            found[name] = value
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        _fail(f"{option}: numbers with commas between them, such as 0,1, not {text!r}")
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        _fail(f"{option}: each number once, from 0, not {text!r}")
    return numbers


def _say(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton worker: {message}", markup=False)


def _fail(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(2)
