"""The command ``baton``: reads options, calls the part that does the work, turns its errors into an exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from extproc import __version__
from extproc.config import Config, ConfigError, load

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


@app.command(epilog="Example:  baton serve --config baton.yaml")
def serve(config: ConfigOption = Path("baton.yaml")) -> None:
    """Run the ext_proc filter until SIGTERM, then drain."""
    from extproc import server
    from extproc.observe.logs import make_logger

    settings = _load(config)
    try:
        server.run(settings, make_logger(settings.log_level))
    except OSError as error:
        raise _fail(str(error)) from None


@app.command(epilog="Example:  baton check --config baton.yaml")
def check(config: ConfigOption = Path("baton.yaml")) -> None:
    """Read a configuration file and show what it means; exit 1 if it cannot be used."""
    settings = _load(config)
    table = Table("setting", "value", box=None, pad_edge=False)
    table.add_row("prefill workers", "\n".join(settings.workers.prefill))
    table.add_row("decode workers", "\n".join(settings.workers.decode))
    table.add_row("ext_proc listens on", settings.listen)
    table.add_row("prefill calls go", settings.prefill.via)
    table.add_row("admin", settings.admin)
    table.add_row("Envoy listens on", settings.envoy.listen)
    table.add_row("endpoint files", settings.envoy.eds_dir or "not written")
    Console().print(table)


@app.command(
    "envoy-config",
    epilog="Examples:  baton envoy-config --config baton.yaml > envoy.yaml  ·  baton envoy-config -c baton.yaml -o envoy.yaml",
)
def envoy_config(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file; without it, the example in envoy/.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of standard output.")] = None,
) -> None:
    """Write Envoy's configuration that fits the filter's."""
    from extproc.envoy_config import EXAMPLE, render

    try:
        text = render(EXAMPLE if config is None else _load(config))
        if output is None:
            sys.stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8")
            typer.echo(f"wrote {output}", err=True)
    except (ConfigError, OSError) as error:
        raise _fail(str(error)) from None


def main() -> None:
    """Entry point of the command."""
    app()
