"""How long prompts and answers are: a distribution, in words on the command line, as a quantile function here.

Everything is drawn by its quantile function from one uniform number, so that two distributions, or two runs, that are given the
same numbers differ by nothing but themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from extproc.plan.errors import PlanError

LONGEST_TOKENS = 1_048_576
"""No length is more; a distribution without an end of its own is cut here."""
_CUT = 0.9999
_POINTS = 2_000
"""Where means are taken: midpoints of as many equal shares."""
_KINDS = "fixed:TOKENS, uniform:LOW-HIGH, lognormal:mean=TOKENS,cv=RATIO[,max=TOKENS] or percentiles:p50=TOKENS,p90=TOKENS,..."


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, in tokens."""

    text: str
    """As it was given."""
    _quantile: Callable[[float], float] = field(repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[str, str], Lengths], tuple[str, str]]:
        """To another process as the text it came from."""
        return parse, (self.text, "lengths")

    def at(self, share: float) -> int:
        """The length that ``share`` (0 to 1) of all do not exceed, whole tokens, at least 1.

        The longest one in ten thousand is cut: workers must hold the longest, and a distribution without end has none.
        """
        return min(LONGEST_TOKENS, max(1, round(self._quantile(min(max(share, 1 - _CUT), _CUT)))))

    def mean_of(self, what: Callable[[int], float]) -> float:
        """The mean of a function of the length."""
        return math.fsum(what(self.at((point + 0.5) / _POINTS)) for point in range(_POINTS)) / _POINTS

    @property
    def mean(self) -> float:
        """Tokens."""
        return self.mean_of(float)

    @property
    def longest(self) -> int:
        """What a worker must be able to hold."""
        return self.at(1.0)


def fixed(tokens: int) -> Lengths:
    """All the same. Raises PlanError for less than 1."""
    return parse(f"fixed:{tokens}", "length")


def parse(text: str, where: str) -> Lengths:
    """``fixed:28000`` (or ``28000``), ``uniform:100-900``, ``lognormal:mean=4000,cv=0.8``, ``percentiles:p50=1000,p99=8000``.

    Between two percentiles the logarithm of the length is linear in the share; outside of the outermost two the length stays
    what they say. ``cv`` is the standard deviation over the mean. Raises PlanError that names ``where`` the text came from.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        kind, rest = "fixed", kind
    make = _MAKERS.get(kind.strip().lower())
    if make is None:
        raise PlanError(f"{where}: {text!r}: there is no distribution {kind!r}; write {_KINDS}")
    try:
        return Lengths(text.strip(), make(rest.strip()))
    except ValueError as error:
        raise PlanError(f"{where}: {text!r}: {error}; write {_KINDS}") from None


def _fixed(rest: str) -> Callable[[float], float]:
    tokens = _tokens("the length", rest)
    return lambda _: tokens


def _uniform(rest: str) -> Callable[[float], float]:
    low_text, dash, high_text = rest.partition("-")
    if not dash:
        raise ValueError("a lower and an upper end are needed")
    low, high = _tokens("the lower end", low_text), _tokens("the upper end", high_text)
    if high < low:
        raise ValueError(f"the upper end {high} is below the lower end {low}")
    return lambda share: low + share * (high - low)


def _lognormal(rest: str) -> Callable[[float], float]:
    given = _named(rest)
    unknown = sorted(set(given) - {"mean", "cv", "max"})
    if unknown or not {"mean", "cv"} <= set(given):
        raise ValueError(f"mean and cv are needed, max may be given; not {', '.join(sorted(given)) or 'nothing'}")
    mean, cv = _tokens("mean", given["mean"]), _number("cv", given["cv"])
    if not 0 <= cv <= 20:
        raise ValueError(f"cv: from 0 to 20, not {cv:g}")
    longest = _tokens("max", given["max"]) if "max" in given else LONGEST_TOKENS
    # Of a lognormal: cv^2 = exp(sigma^2) - 1, mean = exp(mu + sigma^2 / 2).
    variance = math.log1p(cv * cv)
    middle, spread, normal = math.log(mean) - variance / 2, math.sqrt(variance), NormalDist()
    return lambda share: min(longest, math.exp(middle + spread * normal.inv_cdf(share)))


def _percentiles(rest: str) -> Callable[[float], float]:
    points: list[tuple[float, float]] = []
    for name, text in _named(rest).items():
        if not name.startswith("p"):
            raise ValueError(f"{name!r} is no percentile; they are called p50, p99.9")
        share = _number(name, name[1:]) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: a percentile is from p0 to p100")
        points.append((share, math.log(_tokens(name, text))))
    points.sort()
    if len(points) < 2:
        raise ValueError("at least two percentiles are needed")
    for (before, low), (after, high) in itertools.pairwise(points):
        if high < low:
            raise ValueError(f"p{100 * after:g} is less than p{100 * before:g}")

    def quantile(share: float) -> float:
        before, low = points[0]
        if share <= before:
            return math.exp(low)
        for after, high in points[1:]:
            if share <= after:
                return math.exp(low + (high - low) * (share - before) / (after - before))
            before, low = after, high
        return math.exp(low)

    return quantile


_MAKERS: Mapping[str, Callable[[str], Callable[[float], float]]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "percentiles": _percentiles,
}


def _named(rest: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals:
            raise ValueError(f"{part!r} is not name=value")
        if name in given:
            raise ValueError(f"{name} is there twice")
        given[name] = value
    return given


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: {text.strip()!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}: {text.strip()!r} is not a number")
    return value


def _tokens(name: str, text: str) -> int:
    value = _number(name, text.replace("_", ""))
    if value != int(value) or not 1 <= value <= LONGEST_TOKENS:
        raise ValueError(f"{name}: whole tokens from 1 to {LONGEST_TOKENS:,}, not {text.strip()}")
    return int(value)
