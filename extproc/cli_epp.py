"""``baton epp``: an InferencePool's endpoint picker by the options that pickers have, so that the image can take one's place.

The options are those of the reference picker (pkg/lwepp in kubernetes-sigs/gateway-api-inference-extension) and of llm-d's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from extproc.config import Config, ConfigError, Tls, Workers, load
from extproc.discovery.kubernetes.settings import POOL_GROUPS, KubernetesWorkers, PodWorkers, PoolWorkers

_CERTIFICATE, _KEY = "tls.crt", "tls.key"
"""As Kubernetes names them in a secret of the type kubernetes.io/tls."""

_SECURE = "--secure-serving"


def settings_of(
    base: Config | None,
    *,
    pool: PoolWorkers | None,
    prefill: PodWorkers | None,
    ports: tuple[int, int, int],
    bind: str,
    cert_path: Path | None,
    secure: bool,
    conformance: bool,
) -> Config:
    """The configuration that the options stand for. ``ports``: ext_proc, health, metrics. Raises ConfigError."""
    changes: dict[str, Any] = {}
    if pool is not None:
        pods = [] if prefill is None else [prefill]
        changes["workers"] = Workers(kubernetes=KubernetesWorkers(inference_pools=[pool], pods=pods))
    elif base is None:
        raise ConfigError("--pool-name: which InferencePool? Or --config, with workers")
    listen, health, metrics = (f"{bind}:{port}" for port in ports)
    before = Config(workers=changes["workers"]) if base is None else base
    changes["listen"] = listen
    changes["epp"] = msgspec.structs.replace(
        before.epp,
        enabled=True,
        health_listen=health,
        metrics_listen=metrics,
        conformance_headers=conformance or before.epp.conformance_headers,
    )
    if not secure:
        changes["tls"] = Tls(mode="none")
    elif cert_path is not None:
        changes["tls"] = Tls(
            mode="files",
            cert_file=str(cert_path / _CERTIFICATE),
            key_file=str(cert_path / _KEY),
            client_ca_file=before.tls.client_ca_file,
        )
    return msgspec.structs.replace(before, **changes)


def secure_and_rest(arguments: list[str]) -> tuple[bool, list[str]]:
    """``--secure-serving`` as Go's flags have it (alone, or ``=true``, ``=false``), and the arguments that mean nothing here.

    Raises ConfigError.
    """
    secure, rest = True, []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in (_SECURE, _SECURE[1:]):
            rest.append(argument)
        elif not equals or value in ("true", "1", "t", "T", "TRUE", "True"):
            secure = True
        elif value in ("false", "0", "f", "F", "FALSE", "False"):
            secure = False
        else:
            raise ConfigError(f"{_SECURE}: {value!r} is neither true nor false")
    return secure, rest


def epp(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (YAML) for all that no option here says.")
    ] = None,
    pool_name: Annotated[
        str | None, typer.Option(help="The InferencePool; its pods' label llm-d.ai/role says what each does.")
    ] = None,
    pool_namespace: Annotated[str | None, typer.Option(help="Of the InferencePool; without it, that of this pod.")] = None,
    pool_group: Annotated[str, typer.Option(help="API group of the InferencePool.")] = POOL_GROUPS["v1"],
    prefill_selector: Annotated[
        str | None, typer.Option(help="Label selector of prefill workers that are not in the pool, in its namespace.")
    ] = None,
    prefill_port: Annotated[int, typer.Option(help="HTTP port of these.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="ext_proc.")] = 9002,
    grpc_health_port: Annotated[int, typer.Option(help="gRPC health.")] = 9003,
    metrics_port: Annotated[int, typer.Option(help="/metrics.")] = 9090,
    bind: Annotated[str, typer.Option(help="Address of all three; [::] where pods have IPv6 only.")] = "0.0.0.0",  # noqa: S104
    cert_path: Annotated[
        Path | None, typer.Option(help="Folder with tls.crt and tls.key; without it a self-signed certificate is made.")
    ] = None,
    conformance_test_hooks: Annotated[
        bool, typer.Option("--conformance-test-hooks", help="Headers of the conformance suite; not for production.")
    ] = False,
) -> None:
    """Be an InferencePool's endpoint picker, by the options of other pickers. The log names those that mean nothing here.

    --secure-serving=false: plaintext.
    """
    from extproc import server
    from extproc.observe.logs import make_logger, make_writer

    try:
        secure, ignored = secure_and_rest(ctx.args)
        api = next((version for version, group in POOL_GROUPS.items() if group == pool_group), None)
        if api is None:
            raise ConfigError(f"--pool-group: {pool_group!r} is none of {', '.join(POOL_GROUPS.values())}")
        pool = None if pool_name is None else PoolWorkers(name=pool_name, namespace=pool_namespace, api=api)  # type: ignore[arg-type]  # a key of POOL_GROUPS
        prefill = None
        if prefill_selector is not None:
            prefill = PodWorkers(selector=prefill_selector, role="prefill", namespace=pool_namespace, ports=[prefill_port])
        settings = settings_of(
            None if config is None else load(config),
            pool=pool,
            prefill=prefill,
            ports=(grpc_port, grpc_health_port, metrics_port),
            bind=bind,
            cert_path=cert_path,
            secure=secure,
            conformance=conformance_test_hooks,
        )
    except ConfigError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(1) from None
    writer = make_writer(sys.stderr.fileno(), settings.log_format, colour=sys.stderr.isatty())
    log = make_logger(settings.log_level, log_format=settings.log_format, sink=writer)
    if ignored:
        log.warning("options_ignored", options=[each.partition("=")[0] for each in ignored if each.startswith("-")])
    try:
        server.run(settings, log, writer)
    except (OSError, ConfigError) as error:
        writer.close()
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        writer.close()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "epp",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        epilog="Examples:  baton epp --pool-name llama --pool-namespace inference  ·  baton epp --pool-name llama "
        "--prefill-selector llm-d.ai/role=prefill --cert-path /certs  ·  baton epp --config baton.yaml --grpc-port 9002",
    )(epp)
