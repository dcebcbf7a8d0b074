"""Real-time priorities, so that neither other work on the machine nor a prompt being read shows in the gaps between tokens.

Whoever has little to do and must do it in time goes first: the load generator, which looks at the clock; then the engines that
decode, and Envoy, which passes their tokens on; then what decides; last the engines that prefill, whose steps are long. A
router that passes tokens on and decides in one process has the place of what decides. Children inherit what their parent had.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum


class Priority(IntEnum):
    """Higher goes first."""

    PREFILL = 1
    ROUTER = 2
    DECODE = 3
    PROXY = 3
    LOAD = 4


def take(priority: Priority) -> bool:
    """For this thread and what it starts from now on; whether the system allows it."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
        return True
    return False


@contextmanager
def starting(priority: Priority) -> Iterator[None]:
    """What is started inside gets this priority, if this thread has a real-time one at all."""
    if not hasattr(os, "SCHED_RR") or os.sched_getscheduler(0) != os.SCHED_RR:
        yield
        return
    before = os.sched_getparam(0)
    take(priority)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_RR, before)
