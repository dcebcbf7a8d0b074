"""Who is left alone for a while because it failed, and when it is tried again. One breaker a worker and leg.

A 4xx, a 429 or a client that left is no failure of a worker; whoever calls this knows that.
"""

from __future__ import annotations

import math

from extproc.routing.pool import Leg
from extproc.routing.settings import Routing

_PAUSE_MAX_S = 60.0
_TRIAL_S = 30.0
"""How long a trial may take before the next one."""


def usable(leg: Leg, now_s: float) -> bool:
    """Whether it may get a request."""
    return leg.blocked_until_s <= now_s


def failed(leg: Leg, settings: Routing, now_s: float) -> None:
    """A request failed on it."""
    leg.failures += 1
    over = leg.failures - settings.breaker_failures
    if over >= 0:
        leg.blocked_until_s = now_s + min(settings.breaker_pause_s * 2.0 ** min(over, 10), _PAUSE_MAX_S)


def chosen(leg: Leg, settings: Routing, now_s: float) -> None:
    """It gets a request. If that is the trial after a pause, nobody else gets there until it has come out."""
    if leg.failures >= settings.breaker_failures:
        leg.blocked_until_s = now_s + _TRIAL_S


def succeeded(leg: Leg) -> None:
    """A request went well on it."""
    leg.failures = 0
    leg.blocked_until_s = -math.inf


def undecided(leg: Leg, now_s: float) -> None:
    """A request on it ended without telling anything about the worker: the next one may be the trial."""
    if leg.failures and leg.blocked_until_s > now_s:
        leg.blocked_until_s = now_s
