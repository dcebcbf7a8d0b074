"""The bar: what Baton has to reach against the peers, line by line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.overhead.cells import Cell, Spot

BATON = ("baton-lean", "baton-grpc")
"""The best one that was measured is judged."""
_SMG, _VLLM_ROUTER = "envoy+smg", "envoy+vllm-router"
_BODIES_KB = (4, 128)
_ROUTER_RATE = 1.6
_AIM_RATE = 1.5


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
        return f"{'aim' if self.aim else 'bar'}: {self.text}: {self.ratio:.2f}, {word} {self.bar:g}: {verdict}"


def judged_name(names: Iterable[str]) -> str | None:
    """Whose numbers the bar is held against; None if no Baton was measured."""
    measured = set(names)
    return next((name for name in BATON if name in measured), None)


def request_verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Of the requests that are answered at once."""
    by_name = _by_name(cells)
    name = judged_name(by_name)
    if name is None:
        return []
    return [
        *_against(by_name, name, _SMG, "req/s", 1.0, least=True),
        *_against(by_name, name, _SMG, "p50", 1.0, least=False),
        *_against(by_name, name, _VLLM_ROUTER, "req/s", _ROUTER_RATE, least=True),
        *_against(by_name, name, _SMG, "req/s", _AIM_RATE, least=True, aim=True),
    ]


def _against(
    by_name: Mapping[str, Mapping[Spot, Cell]], name: str, peer: str, what: str, bar: float, *, least: bool, aim: bool = False
) -> Iterable[Verdict]:
    for spot, own in by_name[name].items():
        other = by_name.get(peer, {}).get(spot)
        if other is None or spot.body_kb not in _BODIES_KB:
            continue
        ratio = _ratio(own.per_s, other.per_s) if what == "req/s" else _ratio(own.p50_s, other.p50_s)
        yield Verdict(f"{what} of {name} over {peer}, {spot}", ratio, bar, least, aim)


def _by_name(cells: Sequence[Cell]) -> dict[str, dict[Spot, Cell]]:
    found: dict[str, dict[Spot, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.name, {})[cell.spot] = cell
    return found


def _ratio(own: float, other: float) -> float:
    return own / other if other else float("inf")
