"""The command line of the bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.overhead.arrangements import ARRANGEMENTS
from bench.overhead.cells import Spot
from bench.peers import default_peers

BODIES_KB = (4, 32, 128, 512)
CONNECTIONS = (1, 16, 64)
STREAMS = (20, 100, 150, 300)
_QUICK_NAMES = ("baton-grpc", "baton-lean", "envoy+smg")
_DEAR_BODIES_KB = (4, 128)
_DEAR_CONNECTIONS = (1, 16)
_EXAMPLES = """
examples:
  python -m bench.overhead --quick                      two minutes: Baton and Envoy + SMG, 4 and 128 KB, 1 and 16 connections
  python -m bench.overhead --only baton-lean,envoy+smg --bodies 128 --connections 16 --rounds 9
  python -m bench.overhead --json numbers.json --out overhead.svg
"""


class OptionsError(ValueError):
    """The options cannot be what was meant; the message says why."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    names: tuple[str, ...]
    bodies_kb: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    seconds: float
    judged: bool
    peers: Path
    json: Path | None
    out: Path | None

    def spots(self, name: str) -> list[Spot]:
        """The cells of one arrangement."""
        dear = ARRANGEMENTS[name].dear
        return [
            Spot(body_kb, connections)
            for body_kb in self.bodies_kb
            for connections in self.connections
            if not dear or (body_kb in _DEAR_BODIES_KB and connections in _DEAR_CONNECTIONS)
        ]


def parse(arguments: Sequence[str]) -> Options:
    """Raises OptionsError, and SystemExit as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="What Baton, or a peer, costs between clients and workers that answer at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(ARRANGEMENTS)}; default: all")
    parser.add_argument("--bodies", metavar="KB", help=f"sizes of the request bodies (default: {_listed(BODIES_KB)})")
    parser.add_argument("--connections", metavar="N", help=f"connections at once (default: {_listed(CONNECTIONS)})")
    parser.add_argument("--rounds", type=int, help="of each cell, in a new order each time (default: 5)")
    parser.add_argument("--seconds", type=int, help="of one cell in one round, whole ones (default: 2)")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(_QUICK_NAMES)}; 4 and 128 KB; 1 and 16; 3 rounds")
    parser.add_argument("--no-judge", action="store_true", help="measure only: a missed bar is no failure")
    parser.add_argument("--peers", type=Path, default=default_peers(), help="virtual environment of the peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture there, as SVG")
    given = parser.parse_args(arguments)
    quick = bool(given.quick)
    names = tuple(given.only.split(",")) if given.only else _QUICK_NAMES if quick else tuple(ARRANGEMENTS)
    unknown = [name for name in names if name not in ARRANGEMENTS]
    if unknown:
        raise OptionsError(f"--only: no {', '.join(unknown)}; there are {', '.join(ARRANGEMENTS)}")
    options = Options(
        names=names,
        bodies_kb=_numbers("--bodies", given.bodies, (4, 128) if quick else BODIES_KB, 2, 2048),
        connections=_numbers("--connections", given.connections, (1, 16) if quick else CONNECTIONS, 1, 1000),
        rounds=given.rounds or (3 if quick else 5),
        seconds=given.seconds or 2,
        judged=not given.no_judge,
        peers=given.peers,
        json=given.json,
        out=given.out,
    )
    if not 1 <= options.rounds <= 100 or not 1 <= options.seconds <= 600:
        raise OptionsError("--rounds: 1 to 100; --seconds: 1 to 600")
    return options


def _numbers(option: str, text: str | None, default: tuple[int, ...], least: int, most: int) -> tuple[int, ...]:
    if text is None:
        return default
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise OptionsError(f"{option} {text}: whole numbers with commas between them") from None
    if not all(least <= each <= most for each in found):
        raise OptionsError(f"{option} {text}: each from {least} to {most}")
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
