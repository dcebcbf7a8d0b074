"""Does a prefill worker fit a decode worker? Pure: two described workers in, findings out."""

from __future__ import annotations

from workers.fit import handshake, running
from workers.fit.misfit import Misfit, Pair, Severity, Side

__all__ = ["Misfit", "Pair", "Severity", "Side", "exit_status", "misfits"]


def misfits(prefill: Side, decode: Side) -> list[Misfit]:
    """Everything that does not fit, worst first."""
    pair = Pair(prefill=prefill, decode=decode)
    found = [misfit for rule in (*handshake.RULES, *running.RULES) for misfit in rule(pair)]
    order = list(Severity)
    return sorted(found, key=lambda misfit: -order.index(misfit.severity))


def exit_status(found: list[Misfit], *, strict: bool = False) -> int:
    """2 with an error, 1 with a warning if ``strict``, else 0."""
    severities = {misfit.severity for misfit in found}
    if Severity.ERROR in severities:
        return 2
    return 1 if strict and Severity.WARN in severities else 0
