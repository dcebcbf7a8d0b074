"""Failure switches: which fault hits which request. Replayable from a seed. No I/O here.

* ``refuse``: a connection is closed as soon as it is accepted. ``hang``: never an answer. ``status``: an HTTP error.
* ``reset``: the connection is cut, in a stream after ``after_chunks`` chunks, else when the answer is ready
  (``after_chunks`` 0: before the engine sees the request).
* ``slow``: steps and transfers take ``factor`` times as long; a request it hits waits ``delay_s`` more.
* ``eos_first``: the first token is EOS. ``null_params``: a prefill answers without kv_transfer_params.
* ``side_channel_dead``: other workers cannot reach this one's blocks.
* ``crash``: the worker stops answering and loses its blocks, for ``duration_s`` or until a restart. ``exit``: the process
  ends. ``restart``: at once a new engine id, all blocks lost.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

REQUEST_KINDS = ("hang", "reset", "status", "eos_first", "null_params", "slow")
"""Those that hit one request."""

WORKER_KINDS = ("refuse", "side_channel_dead", "crash", "exit", "restart")
"""Those that hit a connection or the whole worker."""

Phase = Literal["prefill", "decode", "any"]


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One switch, as it is posted to ``/sim/faults``."""

    kind: Literal[
        "refuse",
        "hang",
        "reset",
        "status",
        "slow",
        "eos_first",
        "null_params",
        "side_channel_dead",
        "crash",
        "exit",
        "restart",
    ]
    phase: Phase = "any"
    """Only requests of this leg; "any" is also those without a handoff."""
    count: int | None = None
    """Hit so many, then stop."""
    probability: float = 1.0
    seed: int = 0
    status: int = 500
    after_chunks: int = 2
    factor: float = 1.0
    delay_s: float = 0.0
    duration_s: float | None = None
    """For how long the switch is on; for a crash, how long the worker is gone."""


class Faults:
    """The switches of one worker that are on."""

    def __init__(self) -> None:
        self._active: list[tuple[Fault, random.Random, list[int], float | None]] = []
        self.hits: dict[str, int] = {}

    def add(self, fault: Fault, now_s: float) -> None:
        """Switch one on."""
        until = None if fault.duration_s is None else now_s + fault.duration_s
        self._active.append((fault, random.Random(fault.seed), [0], until))  # noqa: S311 - replayable, not secret

    def clear(self) -> None:
        """Switch all off."""
        self._active.clear()

    def active(self) -> list[Fault]:
        """What is on."""
        return [fault for fault, *_ in self._active]

    def any_of(self, kind: str, now_s: float) -> bool:
        """Whether a switch of this kind is on, without a hit."""
        self._drop_over(now_s)
        return any(fault.kind == kind for fault, *_ in self._active)

    def take(self, kinds: tuple[str, ...], phase: Phase, now_s: float) -> Fault | None:
        """The switch that hits now, if one does. Every call is one throw of its dice."""
        self._drop_over(now_s)
        for fault, dice, hits, _ in self._active:
            if fault.kind not in kinds or (fault.phase != "any" and fault.phase != phase):
                continue
            if fault.count is not None and hits[0] >= fault.count:
                continue
            if fault.probability < 1.0 and dice.random() >= fault.probability:
                continue
            hits[0] += 1
            self.hits[fault.kind] = self.hits.get(fault.kind, 0) + 1
            return fault
        return None

    def slow_factor(self, now_s: float) -> float:
        """How much longer steps and transfers take."""
        self._drop_over(now_s)
        factor = 1.0
        for fault, *_ in self._active:
            if fault.kind == "slow":
                factor *= fault.factor
        return factor

    def _drop_over(self, now_s: float) -> None:
        if self._active and any(until is not None and until <= now_s for *_, until in self._active):
            self._active = [entry for entry in self._active if entry[3] is None or entry[3] > now_s]
