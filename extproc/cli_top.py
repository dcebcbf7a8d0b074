"""``baton top``: the live page in a terminal."""

from __future__ import annotations

import asyncio
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live as LiveDisplay

from extproc.admin_client import CommandError, call
from extproc.live_document import VERSION, Live
from extproc.top import Screen

_EVERY_S = 1.0
_TIMEOUT_S = 3.0
_REDRAWS_A_SECOND = 4
"""So often the screen follows a changed size."""


def register(app: typer.Typer) -> None:
    """Add the command to ``baton``."""
    app.command(
        epilog="Examples:  baton top  ·  baton top --admin http://10.0.0.9:9003  ·  baton top --once  ·  "
        "baton top --json | jq '.workers[] | select(.state != \"live\")'"
    )(top)


def top(
    admin: Annotated[
        str, typer.Option(help="Admin port of a running filter: http://host:port, or unix:/path.", envvar="BATON_ADMIN")
    ] = "http://127.0.0.1:9003",
    once: Annotated[bool, typer.Option("--once", help="Print one frame with everything in it, and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the document of /live as JSON once, and leave.")] = False,
) -> None:
    """Show workers, latency, queue and decisions of a running filter, as they change. q or Ctrl-C ends it."""
    try:
        answer = _ask(admin)
        doc = _document(answer, admin)
    except CommandError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(1) from None
    if json:
        sys.stdout.buffer.write(answer + b"\n")
        return
    console = Console(highlight=False)
    if once or not console.is_terminal:
        if not console.is_terminal:
            console = Console(highlight=False, width=max(console.width, 160))
        console.print(Screen(doc, whole=True))
        return
    screen = Screen(doc)
    with (
        _single_keys(),
        LiveDisplay(screen, console=console, screen=True, refresh_per_second=_REDRAWS_A_SECOND) as display,
    ):
        try:
            _follow(admin, screen, display)
        except KeyboardInterrupt:
            return


def _follow(admin: str, screen: Screen, display: LiveDisplay) -> None:
    """Until q. A filter that has gone stays on the screen as it was last, with a word about it."""
    while not _quit_within(_EVERY_S):
        try:
            screen.doc, screen.fault, screen.since_s = _document(_ask(admin), admin), None, time.monotonic()
        except CommandError as error:
            screen.fault = str(error)
        display.refresh()


def _ask(admin: str) -> bytes:
    """Raises CommandError."""
    return asyncio.run(call(admin, "GET", "/live", None, timeout_s=_TIMEOUT_S))


def _document(answer: bytes, admin: str) -> Live:
    """Raises CommandError."""
    try:
        doc = msgspec.json.decode(answer, type=Live)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CommandError(f"{admin}: /live is not of this version of Baton: {error}") from None
    if doc.version != VERSION:
        raise CommandError(f"{admin}: /live has version {doc.version}, this command reads {VERSION}")
    return doc


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come as they are pressed. Where there is no keyboard, none come."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _quit_within(seconds: float) -> bool:
    """Wait, but end the wait at q."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left_s)
        if ready and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False
