"""The bar: what Baton has to reach against the peers, line by line. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bench.overhead.cells import Cell
from bench.overhead.results import Results
from bench.overhead.streams import WHOLE, StreamCell

BATON = ("baton-lean", "baton-grpc")
"""The first of them that was measured is judged."""
ENVOY, SMG, ENVOY_SMG, ENVOY_VLLM_ROUTER = "envoy", "smg", "envoy+smg", "envoy+vllm-router"

_BODIES_KB = (4, 128)
_ROUTER_RATE = 1.6
_AIM_RATE = 1.5
_TOKEN_CPU = 0.5
_ITL = 0.8
_ITL_STREAMS = 150
_LEAST_NOISE = 0.05


@dataclass(frozen=True)
class Verdict:
    """One line of the bar."""

    text: str
    ratio: float
    """Baton's number over the peer's."""
    bar: float
    least: bool
    """The ratio must be at least the bar; otherwise at most."""
    aim: bool = False
    """Wanted, not demanded."""

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.ratio >= self.bar if self.least else self.ratio <= self.bar

    def as_json(self) -> dict[str, str | float | bool]:
        """All of it."""
        return {"text": str(self), "ratio": self.ratio, "bar": self.bar, "least": self.least, "aim": self.aim, "met": self.met}

    def __str__(self) -> str:
        verdict = "met" if self.met else f"MISSED by {abs(self.ratio / self.bar - 1):.0%}"
        word = "at least" if self.least else "at most"
        return f"{'aim' if self.aim else 'bar'}: {self.text}: {self.ratio:.2f}, {word} {self.bar:.3g}: {verdict}"


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def spot(self) -> Hashable: ...


_Any = TypeVar("_Any", bound=_Named)


def judged(cells: Iterable[_Named]) -> str | None:
    """Whose numbers the bar is held against; None if no Baton was measured."""
    measured = {cell.name for cell in cells}
    return next((name for name in BATON if name in measured), None)


def ratio(own: float, other: float) -> float:
    """``own`` over ``other``; without end where there is nothing to compare with."""
    return own / other if other else float("inf")


def verdicts(results: Results) -> list[Verdict]:
    """All lines for which both sides were measured."""
    return [*request_verdicts(results.cells), *stream_verdicts(results.stream_cells)]


def request_verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Of the requests that are answered at once."""
    name = judged(cells)
    if name is None:
        return []
    chosen = [cell for cell in cells if cell.spot.body_kb in _BODIES_KB]
    pairs = {peer: _pairs(chosen, name, peer) for peer in (ENVOY_SMG, ENVOY_VLLM_ROUTER)}

    def rate(peer: str, bar: float, *, aim: bool = False) -> Iterable[Verdict]:
        for own, other in pairs[peer]:
            text = f"req/s of {name} over {peer}, {own.spot}"
            yield Verdict(text, ratio(own.per_s, other.per_s), bar, least=True, aim=aim)

    p50 = [
        Verdict(f"p50 of {name} over {ENVOY_SMG}, {own.spot}", ratio(own.p50_s, other.p50_s), 1.0, least=False)
        for own, other in pairs[ENVOY_SMG]
    ]
    return [*rate(ENVOY_SMG, 1.0), *p50, *rate(ENVOY_VLLM_ROUTER, _ROUTER_RATE), *rate(ENVOY_SMG, _AIM_RATE, aim=True)]


def stream_verdicts(cells: Sequence[StreamCell]) -> list[Verdict]:
    """Of streams and of whole requests."""
    name = judged(cells)
    if name is None:
        return []
    found = []
    streamed = [cell for cell in cells if cell.spot != WHOLE]
    for own, other in _pairs(streamed, name, ENVOY_SMG):
        text = f"CPU a token of {name} over {ENVOY_SMG}, {own.spot}"
        found.append(Verdict(text, ratio(own.between_a_token_s, other.between_a_token_s), _TOKEN_CPU, least=False))
    for own, other in _pairs([cell for cell in streamed if cell.spot.streams == _ITL_STREAMS], name, ENVOY_SMG):
        text = f"ITL p99 of {name} over {ENVOY_SMG}, {own.spot}"
        found.append(Verdict(text, ratio(own.itl_p99_s, other.itl_p99_s), _ITL, least=False))
    for own, other in _pairs(streamed, name, ENVOY):
        text = f"ITL p99 of {name} over {ENVOY} alone, {own.spot}"
        found.append(Verdict(text, ratio(own.itl_p99_s, other.itl_p99_s), 1 + noise(other.itl_p99_rounds_s), least=False))
    for own, other in _pairs([cell for cell in cells if cell.spot == WHOLE], name, SMG):
        text = f"CPU a whole request of {name} over {SMG} alone, {own.spot}"
        found.append(Verdict(text, ratio(own.between_a_request_s, other.between_a_request_s), 1.0, least=False))
    return found


def noise(rounds: Sequence[float]) -> float:
    """By how much equal things may differ here: as the rounds of one of them do, and 5 % in any case."""
    return max(_LEAST_NOISE, max(rounds) / min(rounds) - 1 if rounds and min(rounds) > 0 else 0.0)


def _pairs(cells: Iterable[_Any], name: str, peer: str) -> list[tuple[_Any, _Any]]:
    """Baton's cells and the peer's of the same spot."""
    theirs: Mapping[Hashable, _Any] = {cell.spot: cell for cell in cells if cell.name == peer}
    return [(cell, theirs[cell.spot]) for cell in cells if cell.name == name and cell.spot in theirs]
