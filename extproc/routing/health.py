"""Who is left alone for a while because it failed, and when it is tried again. One breaker a worker and leg.

A 4xx, a 429 or a client that left is no failure of a worker; whoever calls this knows that.
"""

from __future__ import annotations

import math

from extproc.routing.pool import Claim, Leg
from extproc.routing.settings import Routing

_PAUSE_MAX_S = 60.0
_TRIAL_S = 30.0
"""How long a trial may take before the next one."""


def usable(leg: Leg, now_s: float) -> bool:
    """Whether it may get a request."""
    return leg.blocked_until_s <= now_s


def failed(leg: Leg, settings: Routing, now_s: float) -> None:
    """A request failed on it."""
    if leg.failures >= settings.breaker_failures and leg.trial is None and not usable(leg, now_s):
        return  # sent before the pause began: many that fail together are one failure, not a long pause
    leg.failures += 1
    leg.trial = None
    over = leg.failures - settings.breaker_failures
    if over >= 0:
        leg.blocked_until_s = now_s + min(settings.breaker_pause_s * 2.0 ** min(over, 10), _PAUSE_MAX_S)
        leg.version += 1


def chosen(leg: Leg, claim: Claim, settings: Routing, now_s: float) -> None:
    """It gets a request. If that is the trial after a pause, nobody else gets there until it has come out."""
    if leg.failures >= settings.breaker_failures:
        leg.trial = claim
        leg.blocked_until_s = now_s + _TRIAL_S


def succeeded(leg: Leg) -> None:
    """A request went well on it."""
    leg.failures = 0
    leg.trial = None
    leg.blocked_until_s = -math.inf


def undecided(leg: Leg, claim: Claim, now_s: float) -> None:
    """A request on it ended without telling anything more about the worker. If it was the trial, the next one is."""
    if leg.trial is claim:
        leg.trial = None
        leg.blocked_until_s = now_s
