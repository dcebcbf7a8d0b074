"""``baton preflight``: options in, a report out. Measuring is in :mod:`workers.preflight.measure`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.console import Console

from extproc.routing.kv_size import kv_bytes_per_token
from workers import preflight
from workers.preflight import model as models
from workers.preflight import show

_GB = 1e9


def model_of(folder: Path, *, kv_dtype: str = "auto", weights_bytes: float | None = None) -> preflight.Model:
    """A model folder or ``config.json`` -> what a preflight has to know of it. Raises ValueError or OSError, with the file."""
    return models.describe(folder, partial(kv_bytes_per_token, kv_dtype=kv_dtype), weights_bytes=weights_bytes)


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton preflight: {message}", markup=False)
    return typer.Exit(3)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Examples:  baton preflight --role decode --model /models/llama --side-channel-host 10.0.0.7  ·  "
        "baton preflight --device cpu --json",
    )(preflight_)


def preflight_(
    role: Annotated[str | None, typer.Option(help="prefill or decode.")] = None,
    device: Annotated[str, typer.Option(help="gpu or cpu.")] = "gpu",
    model: Annotated[Path | None, typer.Option(help="Model folder or config.json.")] = None,
) -> None:
    """Check whether this node is fit for a worker."""
    ask = preflight.Ask(
        role=cast(Literal["prefill", "decode"] | None, role),
        device=cast(Literal["gpu", "cpu"], device),
        model=None if model is None else model_of(model),
    )
    report = preflight.run(ask)
    Console(highlight=False).print(show.as_text(report))
    raise typer.Exit(report.exit_status())
