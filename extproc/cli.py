"""The command ``baton``: reads options, calls the part that does the work, turns its errors into an exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from extproc import __version__, cli_bench, cli_cache, cli_epp, cli_kubernetes, cli_plan, cli_preflight, cli_top, cli_worker
from extproc.config import Config, ConfigError, load

if TYPE_CHECKING:
    from extproc.processes.member import Member

app = typer.Typer(
    help="Prefill/decode disaggregation for vLLM behind Envoy.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (YAML).")]


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {message}", markup=False)
    return typer.Exit(1)


def _load(path: Path) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        raise _fail(str(error)) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Prefill/decode disaggregation for vLLM behind Envoy."""


@app.command(
    epilog="Examples:  baton up  ·  baton up --prefill 2 --decode 2 --port 9000  ·  baton up --model /models/my-llama  ·  "
    "baton up --topology compose.yaml --profile sim --scale decode-sim=2"
)
def up(
    ctx: typer.Context,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    model: Annotated[
        str, typer.Option(help="smollm2, a folder in Hugging Face layout, or a name to load from the hub.")
    ] = "smollm2",
    engine: Annotated[str, typer.Option(help="What the workers run: vllm, or sim, a simulated engine.")] = "vllm",
    host: Annotated[str, typer.Option(help="Address that Envoy listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that Envoy listens on.")] = 8000,
    run_dir: Annotated[
        Path | None, typer.Option(help="Keep logs, sockets and generated configuration here instead of a temporary folder.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes of the filter, one core each.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer, in tokens.")] = None,
    kv_events: Annotated[
        bool, typer.Option(help="Workers publish what their caches hold, and the filter goes by it; no: it predicts.")
    ] = True,
    start_timeout: Annotated[float, typer.Option(help="Seconds that the parts may take to get ready.")] = 600.0,
    once: Annotated[bool, typer.Option("--once", help="Leave after the first answer, or when the topology is up.")] = False,
    topology: Annotated[
        Path | None, typer.Option(help="Run the services of this compose file as processes; the workers are what it says.")
    ] = None,
    profile: Annotated[list[str] | None, typer.Option(help="With --topology: a profile of it. May come several times.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help="With --topology: service=number. May come several times.")] = None,
) -> None:
    """Run Envoy, the filter and vLLM workers on this machine, without GPU or Docker, and ask a first question."""
    from extproc.up import UpOptions, run_up

    if topology is None and (profile or scale):
        raise _fail("--profile and --scale go with --topology")
    if topology is not None:
        from extproc.topology_run import TopologyOptions, run_topology

        engines = ("prefill", "decode", "model", "engine", "block_size", "max_model_len", "kv_events")
        for name in (*engines, "host", "port", "processes"):
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise _fail(f"--{name.replace('_', '-')} does not go with --topology: the file says it")

        try:
            counts = {name: int(count) for name, _, count in (text.partition("=") for text in scale or ())}
        except ValueError:
            raise _fail(f"--scale {' '.join(scale or ())}: service=number is needed") from None
        raise typer.Exit(
            run_topology(
                TopologyOptions(
                    file=topology,
                    profiles=profile or (),
                    scale=counts,
                    run_dir=run_dir,
                    once=once,
                    start_timeout_s=start_timeout,
                )
            )
        )

    raise typer.Exit(
        run_up(
            UpOptions(
                prefill=prefill,
                decode=decode,
                model=model,
                engine=engine,
                kv_events=kv_events,
                host=host,
                port=port,
                processes=processes,
                run_dir=run_dir,
                block_size_tokens=block_size,
                max_model_len_tokens=max_model_len,
                start_timeout_s=start_timeout,
                once=once,
            )
        )
    )


@app.command(
    epilog="Examples:  baton serve --config baton.yaml  ·  baton serve --config baton.yaml --processes 4  ·  "
    "baton serve --config baton.yaml --epp"
)
def serve(
    config: ConfigOption = Path("baton.yaml"),
    processes: Annotated[
        int | None,
        typer.Option(help="Processes that share the work, one core each, instead of `processes` of the configuration."),
    ] = None,
    epp: Annotated[
        bool,
        typer.Option("--epp", help="Be an InferencePool's endpoint picker, as `epp.enabled` of the configuration says."),
    ] = False,
    member: Annotated[str | None, typer.Option(hidden=True, help="What a parent tells one of its processes.")] = None,
) -> None:
    """Run the ext_proc filter until SIGTERM, then drain."""
    from extproc.observe.logs import make_logger, make_writer

    settings = _as_picker(_with_processes(_load(config), processes), epp)
    among = None if member is None else _member(member)
    writer = make_writer(
        sys.stderr.fileno(), settings.log_format, colour=sys.stderr.isatty() if among is None else among.colour
    )
    log = make_logger(settings.log_level, log_format=settings.log_format, sink=writer)
    try:
        if among is None and settings.processes > 1:
            from extproc.processes import parent

            status = parent.run(config, settings.processes, log, writer, colour=sys.stderr.isatty())
            if status:
                raise typer.Exit(status)
            return
        from extproc import server

        server.run(settings, log, writer, among)
    except (OSError, ConfigError) as error:
        writer.close()
        raise _fail(str(error)) from None
    finally:
        writer.close()


def _with_processes(settings: Config, processes: int | None) -> Config:
    if processes is None:
        return settings
    try:
        return msgspec.structs.replace(settings, processes=processes)
    except ConfigError as error:
        raise _fail(f"--processes: {error}") from None


def _as_picker(settings: Config, wanted: bool) -> Config:
    if not wanted or settings.epp.enabled:
        return settings
    try:
        return msgspec.structs.replace(settings, epp=msgspec.structs.replace(settings.epp, enabled=True))
    except ConfigError as error:
        raise _fail(f"--epp: {error}") from None


def _member(text: str) -> Member:
    from extproc.processes.member import Member

    try:
        return msgspec.json.decode(text, type=Member)
    except msgspec.DecodeError as error:
        raise _fail(f"--member: {error}; only `baton serve --processes` starts processes with it") from None


@app.command(epilog="Example:  baton check --config baton.yaml")
def check(config: ConfigOption = Path("baton.yaml")) -> None:
    """Read a configuration file and show what it means; exit 1 if it cannot be used."""
    from extproc.kv import routing_of

    settings = _load(config)
    try:
        sizes = routing_of(settings).kv_bytes_by_model
    except ConfigError as error:
        raise _fail(f"{config}: {error}") from None
    workers = settings.workers
    table = Table("setting", "value", box=None, pad_edge=False)
    table.add_row("prefill workers", "\n".join(workers.prefill_addresses))
    table.add_row("decode workers", "\n".join(workers.decode_addresses))
    for source in (workers.file, *(each.name or each.srv for each in workers.dns)):
        if source is not None:
            table.add_row("more workers from", source)
    if workers.kubernetes is not None:
        table.add_row("more workers from", "Kubernetes (`baton kubernetes workers` shows them)")
    table.add_row("ext_proc listens on", "\n".join(map(str, settings.listens)))
    if settings.tls_mode != "none":
        clients = "of one of its CAs" if settings.tls.client_ca_file is not None else "without certificates, too"
        table.add_row("ext_proc speaks TLS", f"{settings.tls_mode}, with clients {clients}")
    if settings.epp.enabled:
        table.add_row("endpoint picker", "of an InferencePool")
        table.add_row("gRPC health, metrics", f"{settings.epp.health_listen or '-'}, {settings.epp.metrics_listen or '-'}")
    table.add_row("prefill calls go", settings.prefill.via)
    table.add_row("admin", settings.admin)
    table.add_row("Envoy listens on", settings.envoy.listen)
    table.add_row("Envoy learns of workers", settings.envoy.eds_dir or "over gRPC, from the filter")
    if settings.routes.only:
        table.add_row(
            "chooses", "no workers, only the route: x-gateway-model-name" + (", x-baton-pool" if settings.names_pools else "")
        )
    for pool in settings.pools:
        what = [*(f"{name}={value}" for name, value in pool.labels.items()), *pool.models]
        table.add_row(f"pool {pool.name}", ", ".join(what))
    for rule in settings.policies:
        slo = "" if rule.slo.ttft_s is None else f", TTFT within {rule.slo.ttft_s:g} s"
        table.add_row(f"policy {rule.name}", f"{rule.mode.value}, {rule.objective.value}, {rule.dispatch}{slo}")
    if not settings.policies:
        table.add_row("policies", "none: what costs least, held in our queue")
    for name, size_bytes in sizes.items():
        table.add_row(f"KV cache of {name}", f"{size_bytes:,.0f} bytes a token")
    Console().print(table)


@app.command(
    "sim-engine",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def sim_engine(context: typer.Context) -> None:
    """Run workers of the simulated engine: a vLLM without a GPU that forgives nothing (--help for its options)."""
    from workers.sim.__main__ import parse
    from workers.sim.main import run

    raise typer.Exit(run(parse(context.args, prog="baton sim-engine")))


@app.command(
    "envoy-config",
    epilog="Examples:  baton envoy-config --config baton.yaml > envoy.yaml  ·  baton envoy-config -c baton.yaml -o envoy.yaml",
)
def envoy_config(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file; without it, the example in envoy/.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of standard output.")] = None,
    processes: Annotated[int | None, typer.Option(help="As for `baton serve`, if it is told there.")] = None,
    guard: Annotated[
        bool,
        typer.Option("--guard", help="Only the Lua filter that a mesh's own Envoy needs behind ext_proc where it fails open."),
    ] = False,
) -> None:
    """Write Envoy's configuration that fits the filter's."""
    from extproc import filter_down
    from extproc.envoy_config import EXAMPLE
    from extproc.envoy_tls import write_secrets
    from extproc.envoy_yaml import render

    try:
        read = _with_processes(EXAMPLE if config is None else _load(config), processes)
        text = filter_down.guard() if guard else render(read)
        for path in () if guard else write_secrets(read):
            typer.echo(f"wrote {path}", err=True)
        if output is None:
            sys.stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8")
            typer.echo(f"wrote {output}", err=True)
    except (ConfigError, OSError) as error:
        raise _fail(str(error)) from None


@app.command(
    epilog="Examples:  baton replay --trace trace.jsonl.gz --load 0.9  ·  "
    "baton replay --trace trace.jsonl.gz --rate 2.5 --policy baton --policy cache-aware --json  ·  "
    "baton replay --trace trace.jsonl.gz --policy baton --cache-tokens 210000 --filters 2 --index events  ·  "
    "baton replay --trace trace.jsonl.gz --policy baton --cache-tokens 210000 --host-cache-tokens 630000 --index events",
)
def replay(
    trace: Annotated[Path, typer.Option(help="JSON lines, or gzipped: timestamp, input_length, output_length, hash_ids.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second, instead of --load.")] = None,
    load: Annotated[float, typer.Option(help="Share of the rate that round robin can just serve.")] = 0.9,
    requests: Annotated[int, typer.Option(min=2, help="So many of the trace, from its start.")] = 2_000,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 3,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 5,
    policy: Annotated[
        list[str] | None, typer.Option(help="Of these only: baton, round-robin, cache-aware, least-load, prefix, random.")
    ] = None,
    cache_tokens: Annotated[int, typer.Option(min=512, help="KV cache of each worker, in tokens.")] = 4_900 * 512,
    host_cache_tokens: Annotated[
        int, typer.Option(min=0, help="KV that the host's memory keeps behind the cache of each prefill worker, in tokens.")
    ] = 0,
    index: Annotated[
        str,
        typer.Option(help="How Baton knows what caches hold: predicted, events (of the workers), oracle (looks in)."),
    ] = "predicted",
    filters: Annotated[int, typer.Option(min=1, help="Filters that know nothing of each other.")] = 1,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Policies and routing of baton, in place of --objective, --mode, --late, --dispatch, --max-wait.",
        ),
    ] = None,
    objective: Annotated[str, typer.Option(help="Of the policy baton.")] = "balanced",
    mode: Annotated[str, typer.Option(help="Of the policy baton: auto, disaggregate or aggregate.")] = "auto",
    late: Annotated[str, typer.Option(help="Of the policy baton, for the late ones: wait, reject or aggregate.")] = "wait",
    dispatch: Annotated[str, typer.Option(help="Of the policy baton: queue or immediate.")] = "queue",
    max_wait: Annotated[float, typer.Option(help="Longest wait in the queue of the policy baton, in seconds.")] = 60.0,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token that count as good.")] = 2.5,
    itl_slo: Annotated[float, typer.Option(help="Seconds between tokens (p99 of a request) that count as good.")] = 0.045,
    seed: Annotated[int, typer.Option(help="Of whatever is left to chance.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay a trace on simulated workers with a virtual clock, one policy after the other."""
    from extproc import replay_command as command
    from extproc.replay import Setup
    from extproc.replay_index import Index
    from extproc.routing.settings import Routing

    settings = None if config is None else _load(config)
    try:
        chosen = command.aims_of(
            objective=objective,
            mode=mode,
            late=late,
            dispatch=dispatch,
            ttft_slo_s=ttft_slo,
            itl_slo_s=itl_slo,
            max_wait_s=max_wait,
        )
        options = command.ReplayOptions(
            trace=trace,
            requests=requests,
            rate_per_s=rate,
            load=load,
            setup=Setup.with_caches(cache_tokens, host_cache_tokens, prefill=prefill, decode=decode),
            aims=(lambda _: chosen) if settings is None else command.aims_of_config(settings),
            routing=Routing(queue_wait_s=max_wait, seed=seed) if settings is None else settings.routing,
            policies=policy or command.POLICIES,
            index=command.one_of(Index, "index", index),
            filters=filters,
            ttft_slo_s=ttft_slo,
            itl_slo_s=itl_slo,
        )
        found = command.run_replay(options, progress=lambda name: typer.echo(f"replaying {name}", err=True))
    except (ValueError, OSError) as error:
        raise _fail(str(error)) from None
    if json:
        typer.echo(command.as_json(found))
        return
    Console(width=max(Console().width, 120)).print(command.as_table(found))
    typer.echo(
        f"{found.requests} requests at {found.rate_per_s:.2f}/s; round robin can serve {found.capacity_per_s:.2f}/s "
        f"with {prefill} prefill workers"
    )


@app.command(
    epilog="Examples:  baton explain request.json  ·  baton explain request.json --header x-tier=gold --json  ·  "
    "baton explain --save-snapshot then.json  ·  baton explain request.json --snapshot then.json --config baton.yaml",
)
def explain(
    request: Annotated[str | None, typer.Argument(help="File with the request's JSON body; - for standard input.")] = None,
    path: Annotated[str | None, typer.Option(help="Path of the request. Without it, by the body: chat or completions.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="Header of the request, name=value; may come several times.")] = None,
    admin: Annotated[
        str | None, typer.Option(help="Admin port of a running filter.", show_default="http://127.0.0.1:9003")
    ] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Ask a stored snapshot instead, under --config.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file, with --snapshot.")] = None,
    save_snapshot: Annotated[Path | None, typer.Option(help="Store what the running filter knows in this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which workers a request would get, and why not others. Nothing is sent to a worker, and nothing changes."""
    from extproc import explain_command as command
    from extproc.admin_client import CommandError

    filter_ = admin or "http://127.0.0.1:9003"
    try:
        if snapshot is not None and (admin is not None or save_snapshot is not None):
            raise CommandError("--snapshot asks no filter: neither --admin nor --save-snapshot goes with it")
        if (snapshot is None) != (config is None):
            raise CommandError("--snapshot and --config go together: a running filter has its own configuration")
        if request is None and save_snapshot is None:
            raise CommandError("which request? Name a file with its JSON body, or - for standard input")
        if save_snapshot is not None:
            save_snapshot.write_bytes(command.fetch_snapshot(filter_))
            typer.echo(f"wrote {save_snapshot}", err=True)
        if request is None:
            return
        body = sys.stdin.buffer.read() if request == "-" else Path(request).read_bytes()
        source = "standard input" if request == "-" else request
        question = command.question(body, source=source, path=path, headers=header or ())
        if snapshot is not None and config is not None:
            report = command.ask_snapshot(snapshot, _load(config), question)
        else:
            report = command.ask_filter(filter_, question)
    except (CommandError, OSError) as error:
        raise _fail(str(error)) from None
    if json:
        typer.echo(command.as_json(report))
        return
    Console(width=max(Console().width, 160), highlight=False).print(command.as_table(report))


cli_bench.register(app)
cli_cache.register(app)
cli_epp.register(app)
cli_kubernetes.register(app)
cli_plan.register(app)
cli_preflight.register(app)
cli_top.register(app)
cli_worker.register(app)


def main() -> None:
    """Entry point of the command."""
    app()
