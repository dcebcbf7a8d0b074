"""The command line of the bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.overhead.arrangements import ARRANGEMENTS
from bench.overhead.cells import Spot
from bench.overhead.streams import WHOLE, StreamSpot
from bench.peers import default_peers

PARTS = ("requests", "streams", "whole")
BODIES_KB = (4, 32, 128, 512)
CONNECTIONS = (1, 16, 64)
STREAMS = (20, 100, 150, 300)
_QUICK_NAMES = ("baton-grpc", "baton-lean", "envoy+smg")
_ON_REQUEST = ("baton-grpc-loop", "baton-grpc-whole", "baton-grpc-duplex", "baton-lean-duplex")
_DEFAULT_NAMES = tuple(name for name in ARRANGEMENTS if name not in _ON_REQUEST)
_DEAR_BODIES_KB = (4, 128)
_DEAR_CONNECTIONS = (1, 16)
_STREAM_BODY_KB = 4
_WHOLE_NAMES = ("envoy", "baton-grpc", "baton-lean", "smg", "envoy+smg")
_JUDGED_STREAMS = 150
_EXAMPLES = """
examples:
  python -m bench.overhead --quick
      two minutes: Baton and Envoy + SMG, 4 and 128 KB, 1 and 16 connections
  python -m bench.overhead --parts requests --only baton-lean,envoy+smg --bodies 128 --connections 16 --rounds 9
  python -m bench.overhead --parts streams --only envoy,baton-lean,envoy+smg --streams 150
  python -m bench.overhead --json numbers.json --out overhead.svg --markdown overhead.md
  python -m bench.overhead --from numbers.json --out overhead.svg
      nothing is measured: tables, bar and picture of what was measured before
"""


class OptionsError(ValueError):
    """The options cannot be what was meant; the message says why."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    names: tuple[str, ...]
    parts: tuple[str, ...]
    bodies_kb: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    seconds: int
    streams: tuple[int, ...]
    stream_rounds: int
    tokens: int
    token_ms: int
    judged: bool
    peers: Path
    read: Path | None
    json: Path | None
    out: Path | None
    markdown: Path | None

    def spots(self, name: str) -> list[Spot]:
        """The cells of one arrangement, answered at once."""
        dear = ARRANGEMENTS[name].dear
        return [
            Spot(body_kb, connections)
            for body_kb in self.bodies_kb
            for connections in self.connections
            if not dear or (body_kb in _DEAR_BODIES_KB and connections in _DEAR_CONNECTIONS)
        ]

    def rounds_of(self, spot: StreamSpot) -> int:
        """How often a cell of streams is measured: where the bar is, once more than elsewhere."""
        most = self.stream_rounds
        return most if spot == WHOLE or spot.streams == _JUDGED_STREAMS else max(1, most - 1)

    def stream_spots(self, name: str) -> list[StreamSpot]:
        """The cells of one arrangement, streamed."""
        each = ARRANGEMENTS[name]
        # How a request gets to its worker is no matter of tokens.
        if each.loop or each.whole or each.duplex or each.dear:
            return []
        found = []
        # Of two transports, the one that is not judged is measured where the bar is.
        brief = name == "baton-grpc" and "baton-lean" in self.names and _JUDGED_STREAMS in self.streams
        if "streams" in self.parts:
            counts = (_JUDGED_STREAMS,) if brief else self.streams
            found += [StreamSpot(streams, _STREAM_BODY_KB, self.tokens) for streams in counts]
        if "whole" in self.parts and name in _WHOLE_NAMES:
            found.append(WHOLE)
        return found


def parse(arguments: Sequence[str]) -> Options:
    """Raises OptionsError, and SystemExit as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="What Baton, or a peer, costs between clients and workers that answer at once or stream.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(ARRANGEMENTS)}; default: {', '.join(_DEFAULT_NAMES)}")
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}: requests that are answered at once, streams, whole requests")
    parser.add_argument("--bodies", metavar="KB", help=f"sizes of the request bodies (default: {_listed(BODIES_KB)})")
    parser.add_argument("--connections", metavar="N", help=f"connections at once (default: {_listed(CONNECTIONS)})")
    parser.add_argument("--rounds", type=int, help="of each cell of requests, in a new order each time (default: 5)")
    parser.add_argument("--seconds", type=int, default=1, help="of such a cell in one round, whole ones (default: 1)")
    parser.add_argument("--streams", metavar="N", help=f"streams at once (default: {_listed(STREAMS)})")
    parser.add_argument("--stream-rounds", type=int, help="of each cell of streams, one less where no bar is (default: 3)")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream (default: 300)")
    parser.add_argument("--token-ms", type=int, default=20, help="from token to token, milliseconds (default: 20)")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(_QUICK_NAMES)}; requests of 4 and 128 KB; 3 rounds")
    parser.add_argument("--no-judge", action="store_true", help="measure only: a missed bar is no failure")
    parser.add_argument("--peers", type=Path, default=default_peers(), help="virtual environment of the peers")
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE", help="measure nothing, read what --json wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture there, as SVG")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the short tables there")
    given = parser.parse_args(arguments)
    quick = bool(given.quick)
    options = Options(
        names=_names("--only", given.only, _QUICK_NAMES if quick else _DEFAULT_NAMES, ARRANGEMENTS),
        parts=_names("--parts", given.parts, ("requests",) if quick else PARTS, PARTS),
        bodies_kb=_numbers("--bodies", given.bodies, (4, 128) if quick else BODIES_KB, 2, 2048),
        connections=_numbers("--connections", given.connections, (1, 16) if quick else CONNECTIONS, 1, 1000),
        rounds=given.rounds or (3 if quick else 5),
        seconds=given.seconds,
        streams=_numbers("--streams", given.streams, (100,) if quick else STREAMS, 1, 2000),
        stream_rounds=given.stream_rounds or (1 if quick else 3),
        tokens=given.tokens,
        token_ms=given.token_ms,
        judged=not given.no_judge,
        peers=given.peers,
        read=given.read,
        json=given.json,
        out=given.out,
        markdown=given.markdown,
    )
    for option, number, most in (
        ("--rounds", options.rounds, 100),
        ("--seconds", options.seconds, 600),
        ("--stream-rounds", options.stream_rounds, 100),
        ("--tokens", options.tokens, 10_000),
        ("--token-ms", options.token_ms, 1000),
    ):
        if not 1 <= number <= most:
            raise OptionsError(f"{option} {number}: 1 to {most}")
    return options


def _names(option: str, text: str | None, default: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    if text is None:
        return default
    allowed, names = tuple(known), tuple(text.split(","))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise OptionsError(f"{option}: no {', '.join(unknown)}; there are {', '.join(allowed)}")
    return names


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
