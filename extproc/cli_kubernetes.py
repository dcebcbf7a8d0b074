"""``baton kubernetes``: the rights that the filter needs of the API server, and which workers it finds there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from extproc.config import ConfigError, load
from extproc.discovery.kubernetes import rbac as rights
from extproc.discovery.kubernetes.settings import KubernetesWorkers
from extproc.discovery.source import SourceError

if TYPE_CHECKING:
    from extproc.discovery.kubernetes.sources import Watched

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (YAML).")]

_app = typer.Typer(help="Workers in Kubernetes: rights, and what is found.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to ``baton``."""
    app.add_typer(_app, name="kubernetes")


@_app.command(
    epilog="Examples:  baton kubernetes rbac --config baton.yaml --namespace inference | kubectl apply -f -  ·  "
    "baton kubernetes rbac -c baton.yaml -n inference --service-account my-filter --label app=baton"
)
def rbac(
    config: ConfigOption = Path("baton.yaml"),
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where the filter runs, and its workers, unless the file names another.")
    ] = "default",
    service_account: Annotated[str, typer.Option(help="Service account of the filter's pods.")] = "baton",
    label: Annotated[list[str] | None, typer.Option(help="key=value on all objects. May come several times.")] = None,
) -> None:
    """Print Role and RoleBinding for each namespace with workers: what this configuration needs, and nothing else."""
    settings = _settings(config)
    labels: dict[str, str] = {}
    for text in label or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise _fail(f"--label {text}: key=value is needed")
        labels[key] = value
    documents = rights.manifests(settings, namespace=namespace, service_account=service_account, labels=labels)
    sys.stdout.write(rights.as_yaml(documents))


@_app.command(
    epilog="Examples:  baton kubernetes workers --config baton.yaml  ·  KUBECONFIG=~/.kube/config baton kubernetes workers"
)
def workers(
    config: ConfigOption = Path("baton.yaml"),
    timeout: Annotated[float, typer.Option(help="Seconds that the API server may take.", min=1.0)] = 10.0,
) -> None:
    """Ask the API server once and show each pod that is selected: its workers, or why it has none. Exit 1 if that fails."""
    from extproc.discovery.kubernetes.access import find
    from extproc.discovery.kubernetes.sources import sources_of

    settings = _settings(config)
    try:
        access = find(settings.kubeconfig, settings.context)
        found = sources_of(settings, access)
    except SourceError as error:
        raise _fail(str(error)) from None
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"asking {access.server}", markup=False)
    faults = asyncio.run(_show(found, timeout))
    for fault in faults:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {fault}", markup=False)
    if faults:
        raise typer.Exit(1)


async def _show(sources: list[Watched], timeout_s: float) -> list[str]:
    """Prints what they find; what went wrong."""
    running = [asyncio.create_task(source.run()) for source in sources]
    table = Table("source", "what", "role", "worker", "labels", box=None, pad_edge=False)
    faults: list[str] = []
    try:
        for source in sources:
            try:
                async with asyncio.timeout(timeout_s):
                    await source.look()
            except TimeoutError:
                faults.append(f"{source.name}: no answer within {timeout_s:g} s")
            except SourceError as error:
                faults.append(str(error))
            for what, given in source.explain():
                if isinstance(given, str):
                    table.add_row(source.name, what, "", f"none: {given}", "")
                    continue
                for each in given:
                    labels = " ".join(f"{key}={value}" for key, value in each.spec.labels.items())
                    table.add_row(source.name, what, each.role, each.spec.address, labels)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    Console(soft_wrap=True).print(table)
    return faults


def _settings(config: Path) -> KubernetesWorkers:
    try:
        settings = load(config).workers.kubernetes
    except ConfigError as error:
        raise _fail(str(error)) from None
    if settings is None:
        raise _fail(f"{config}: workers.kubernetes is not set")
    return settings


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {message}", markup=False)
    return typer.Exit(1)
