"""Expressions that stand in several panels.

Several filters may look at the same workers. What a filter counts of its own requests is summed over them; what it read from a
worker is the same in each, so the largest is taken, never the sum.
"""

from __future__ import annotations

CLIENT = 'model=~"$model",policy=~"$policy"'
WORKER = 'role=~"$role",endpoint=~"$endpoint"'
RANGE = "$__rate_interval"


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Events a second, summed over filters."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}[{RANGE}]))"


def quantile(share: float, histogram: str, labels: str = "", by: str = "") -> str:
    """Of a histogram. Samples that several filters read from one engine are in it several times, which changes no quantile."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', labels, f'le, {by}' if by else 'le')})"


def mean(histogram: str, labels: str = "", by: str = "") -> str:
    """Mean of a histogram's samples."""
    return share(rate(f"{histogram}_sum", labels, by), rate(f"{histogram}_count", labels, by))


def share(part: str, whole: str) -> str:
    """A ratio; no value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def read(gauge: str, labels: str = WORKER) -> str:
    """What workers report, by worker."""
    return f"max by (role, endpoint) ({gauge}{{{labels}}})"


def read_rate(counter: str, labels: str = WORKER, by: str = "role, endpoint") -> str:
    """What workers count, a second, by worker."""
    return f"max by ({by}) (rate({counter}{{{labels}}}[{RANGE}]))"


def of_role(role: str) -> str:
    """Selector of the workers that have a role, those with both included."""
    return f'role=~"{role}|both"'
