"""The prefill queue: who goes next, to which worker, and who is turned away.

Order: the band of the priority first; within it tenants that are not ahead of their share; of those the prompts that can still
meet their deadline, in the order in which they came, and the others after them. A prompt goes only to the worker where it is
best off, and waits for that one if it must; the next in line does not wait for it. A small share of the work goes to those that
have waited longest. Each kind of prompt (model, labels of workers) is a queue of its own: however many of one kind wait, those
of another are looked at. See docs/routing.md for what this is worth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from extproc.routing.job import Job, Kind, Late, kind_of
from extproc.routing.pool import Endpoint
from extproc.routing.settings import Routing

TTFT_TARGET_S = 2.5
"""What a prompt whose policy has no TTFT SLO is taken to aim at, when it is put in order. Nobody is refused for it."""

_AGED_AFTER_SHARE = 0.25
"""Of the longest wait: from then on a prompt counts as one that has waited long."""

_TENANTS = 10_000
"""Tenants with a share of their own; the rest have one together."""

_AT_LEAST = 8
"""Prompts of a tenant and kind that are looked at, however many tenants wait."""


class Fit(NamedTuple):
    """Where a prompt is best off at the moment."""

    endpoint: Endpoint
    work_s: float
    """What the worker would need for it."""
    finish_s: float
    """From now to its first token there."""
    soonest_s: float
    """From now to its first token where that comes first."""
    ready: bool
    """Whether that worker has room now."""


class First(NamedTuple):
    """The place of a prompt in the order of all queues: the lesser one goes first."""

    band: int
    late: bool
    came_s: float


def slo_deadline_s(job: Job) -> float:
    """When its first token has to be there (clock seconds), for it not to be late."""
    return job.arrived_s + (job.aims.ttft_slo_s or TTFT_TARGET_S)


class Waiting:
    """One prompt in the queue."""

    __slots__ = ("came_s", "job", "kind", "late", "limit_s", "line", "position", "slo_s", "work_s")

    def __init__(self, job: Job, settings: Routing, now_s: float) -> None:
        self.job = job
        self.kind = kind_of(job)
        self.came_s = now_s
        self.position = 0
        self.limit_s = now_s + min(job.aims.max_wait_s, settings.queue_wait_s)
        self.slo_s = slo_deadline_s(job)
        self.late = False
        self.work_s = 0.0
        """What it was last expected to need."""
        self.line: _Line | None = None


class _Line:
    """The prompts of one tenant in one band."""

    __slots__ = ("aged", "fresh", "served_s", "weight")

    def __init__(self, weight: float, served_s: float) -> None:
        self.fresh: dict[Kind, dict[Waiting, None]] = {}
        """In the order in which they came."""
        self.aged: dict[Kind, dict[Waiting, None]] = {}
        """Those that are late, likewise."""
        self.served_s = served_s
        """Prefill seconds that it got, by its weight: its virtual time."""
        self.weight = weight

    def __bool__(self) -> bool:
        return bool(self.fresh or self.aged)

    def __len__(self) -> int:
        return sum(map(len, self.fresh.values())) + sum(map(len, self.aged.values()))

    def add(self, waiting: Waiting) -> None:
        """One more waits, behind the others."""
        (self.aged if waiting.late else self.fresh).setdefault(waiting.kind, {})[waiting] = None

    def remove(self, waiting: Waiting) -> None:
        """It waits no longer, or is about to be added anew because it has become late."""
        kinds = self.aged if waiting.late else self.fresh
        same = kinds[waiting.kind]
        del same[waiting]
        if not same:
            del kinds[waiting.kind]


class Crowd:
    """All prompts of one kind that wait."""

    __slots__ = ("all", "queued_s")

    def __init__(self) -> None:
        # Ordered, because the first of a plain dict is found past all that was removed before it.
        self.all: OrderedDict[Waiting, None] = OrderedDict()
        """In the order in which they came."""
        self.queued_s = 0.0
        """Work of all of them, as expected when they came."""


class QueueFullError(Exception):
    """No more prompts may wait; the message says which limit is met."""


class PrefillQueue:
    """The queues of all kinds of prompts, side by side. Their limits, priorities and tenants hold for all of them together."""

    def __init__(self, settings: Routing) -> None:
        self._settings = settings
        self._bands: dict[int, dict[str, _Line]] = {}
        # Ordered, because the first of a plain dict is found past all that was removed before it.
        self._all: OrderedDict[Waiting, None] = OrderedDict()
        """In the order in which they came."""
        self._order: dict[int, tuple[dict[Waiting, None], dict[Waiting, None]]] = {}
        """Band -> the same, apart: those that can still meet their deadline, and those that are late."""
        self.crowds: dict[Kind, Crowd] = {}
        """The same by kind; none that is empty."""
        self._limits: list[tuple[float, int, Waiting]] = []
        self._count = 0
        self._work_s = self._aged_work_s = 0.0
        self.bytes = 0
        self.queued_s = 0.0
        """Work of all that wait, as expected when they came."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._all)

    def first(self) -> First | None:
        """Who would go first if all could go to any worker and belonged to one tenant."""
        if not self._all:
            return None
        band = min(self._order)
        fresh, aged = self._order[band]
        waiting = next(iter(fresh or aged))
        return First(band, waiting.late, waiting.came_s)

    # -- coming and going --------------------------------------------------------------------------------------------------

    def add(self, waiting: Waiting, work_s: float) -> None:
        """A prompt begins to wait. Raises QueueFullError."""
        settings = self._settings
        if len(self._all) >= settings.queue_requests:
            raise QueueFullError(f"{len(self._all)} prompts wait already (routing.queue_requests)")
        if self.bytes + waiting.job.size_bytes > settings.queue_bytes:
            raise QueueFullError(f"prompts of {self.bytes} bytes wait already (routing.queue_bytes)")
        waiting.position, waiting.work_s = len(self._all), work_s
        self._all[waiting] = None
        self.bytes += waiting.job.size_bytes
        self.queued_s += work_s
        crowd = self.crowds.get(waiting.kind)
        if crowd is None:
            crowd = self.crowds[waiting.kind] = Crowd()
        crowd.all[waiting] = None
        crowd.queued_s += work_s
        waiting.line = self._line(waiting.job)
        waiting.line.add(waiting)
        self._order.setdefault(waiting.job.aims.priority, ({}, {}))[waiting.late][waiting] = None
        self._count += 1
        heappush(self._limits, (min(waiting.limit_s, waiting.job.deadline_s), self._count, waiting))

    def remove(self, waiting: Waiting) -> bool:
        """It waits no longer, whatever the reason; False if it did not."""
        if waiting not in self._all:
            return False
        del self._all[waiting]
        self.bytes -= waiting.job.size_bytes
        self.queued_s = max(0.0, self.queued_s - waiting.work_s) if self._all else 0.0
        crowd = self.crowds[waiting.kind]
        del crowd.all[waiting]
        if crowd.all:
            crowd.queued_s = max(0.0, crowd.queued_s - waiting.work_s)
        else:
            del self.crowds[waiting.kind]
        assert waiting.line is not None
        waiting.line.remove(waiting)
        band = waiting.job.aims.priority
        order = self._order[band]
        del order[waiting.late][waiting]
        if not any(order):
            del self._order[band]
        if not self._all:
            self._bands = {band: lines for band, lines in self._bands.items() if band == 0}  # any number may be a band
        return True

    def _line(self, job: Job) -> _Line:
        lines = self._bands.setdefault(job.aims.priority, {})
        tenant = job.tenant if job.tenant in lines or len(lines) < _TENANTS else ""
        line = lines.get(tenant)
        active = [each.served_s for each in lines.values() if each]
        start_s = min(active) if active else max((each.served_s for each in lines.values()), default=0.0)
        if line is None:
            if len(lines) > 16:  # forget tenants that have nothing to claim
                for name in [name for name, each in lines.items() if not each and each.served_s <= start_s]:
                    del lines[name]
            line = lines[tenant] = _Line(job.aims.weight, start_s)
        elif not line:
            # Whoever asked for nothing saves nothing up.
            line.served_s = max(line.served_s, start_s)
        line.weight = job.aims.weight
        return line

    # -- time --------------------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[Waiting]:
        """Take out those whose limit or deadline has passed."""
        found = []
        while self._limits and (self._limits[0][0] <= now_s or self._limits[0][2] not in self._all):
            waiting = heappop(self._limits)[2]
            if self.remove(waiting):
                found.append(waiting)
        return found

    def next_due_s(self) -> float | None:
        """When the next limit or deadline passes."""
        while self._limits and self._limits[0][2] not in self._all:
            heappop(self._limits)
        return self._limits[0][0] if self._limits else None

    # -- who goes next -----------------------------------------------------------------------------------------------------

    def next(self, now_s: float, weigh: Callable[[Waiting], Fit | None]) -> tuple[Waiting, Fit] | None:
        """The prompt that goes now, and where; it is taken out. None: nobody can go.

        ``weigh`` says where a prompt is best off; None if nobody can take it at the moment.
        """
        found = self._longest_waiting(now_s, weigh) or self._in_order(now_s, weigh)
        if found is not None:
            waiting, fit = found
            self._work_s = self._work_s * 0.99 + fit.work_s
            self._aged_work_s *= 0.99
            line = waiting.line
            assert line is not None
            line.served_s += fit.work_s / line.weight
            self.remove(waiting)
        return found

    def _longest_waiting(self, now_s: float, weigh: Callable[[Waiting], Fit | None]) -> tuple[Waiting, Fit] | None:
        if not self._all or self._aged_work_s >= self._settings.aged_share * self._work_s:
            return None
        oldest = [next(iter(crowd.all)) for crowd in self.crowds.values()]
        if len(oldest) > 1:
            oldest.sort(key=_came)
        for waiting in oldest:
            wait_s = waiting.limit_s - waiting.came_s
            if not waiting.late or now_s - waiting.came_s < _AGED_AFTER_SHARE * wait_s:
                continue
            fit = weigh(waiting)
            if fit is not None and fit.ready:
                self._aged_work_s += fit.work_s
                return waiting, fit
        return None

    def _in_order(self, now_s: float, weigh: Callable[[Waiting], Fit | None]) -> tuple[Waiting, Fit] | None:
        for band in sorted(self._bands):
            lines = [line for line in self._bands[band].values() if line]
            if not lines:
                continue
            if len(lines) == 1:
                groups = [lines]
            else:
                # One that is ahead of the last by more than the quantum lets the others go first.
                ahead_s = min(line.served_s for line in lines) + self._settings.tenant_quantum_s
                groups = [
                    [line for line in lines if line.served_s <= ahead_s],
                    [line for line in lines if line.served_s > ahead_s],
                ]
            share = max(self._settings.window // len(lines), _AT_LEAST)
            for group in groups:
                found = self._first_fresh(group, share, now_s, weigh) or self._first_late(group, share, weigh)
                if found is not None:
                    return found
        return None

    def _first_fresh(
        self, lines: list[_Line], share: int, now_s: float, weigh: Callable[[Waiting], Fit | None]
    ) -> tuple[Waiting, Fit] | None:
        best: tuple[Waiting, Fit] | None = None
        for same in [same for line in lines for same in line.fresh.values()]:
            for waiting in list(islice(same, share)):
                if best is not None and waiting.came_s >= best[0].came_s:
                    break
                fit = weigh(waiting)
                if fit is None:
                    continue
                if now_s + fit.soonest_s > waiting.slo_s:
                    self._is_late(waiting)
                elif fit.ready:
                    best = waiting, fit
                    break
        return best

    def _first_late(self, lines: list[_Line], share: int, weigh: Callable[[Waiting], Fit | None]) -> tuple[Waiting, Fit] | None:
        best: tuple[Waiting, Fit] | None = None
        for same in [same for line in lines for same in line.aged.values()]:
            for waiting in islice(same, share):
                if best is not None and waiting.came_s >= best[0].came_s:
                    break
                fit = weigh(waiting)
                if fit is not None and fit.ready:
                    best = waiting, fit
                    break
        return best

    def late_ones(self, most: int) -> list[Waiting]:
        """Prompts that cannot meet their deadline any more, the most urgent first, at most so many of each kind."""
        found: list[Waiting] = []
        of_kind: dict[Kind, int] = {}
        for band in sorted(self._bands):
            for line in self._bands[band].values():
                for kind, same in line.aged.items():
                    before = of_kind.get(kind, 0)
                    some = list(islice(same, most - before))
                    of_kind[kind] = before + len(some)
                    found += some
        return found

    def _is_late(self, waiting: Waiting) -> None:
        line = waiting.line
        assert line is not None
        line.remove(waiting)
        waiting.late = True
        line.add(waiting)
        fresh, aged = self._order[waiting.job.aims.priority]
        del fresh[waiting]
        aged[waiting] = None

    def late(self, now_s: float, weigh: Callable[[Waiting], Fit | None]) -> list[Waiting]:
        """Take out those that are late, and whose policy does not let them wait then."""
        found = []
        for lines in self._bands.values():
            for line in lines.values():
                for waiting in [each for same in line.fresh.values() for each in same if each.job.aims.late is not Late.WAIT]:
                    fit = weigh(waiting)
                    if fit is not None and now_s + fit.soonest_s > waiting.slo_s:
                        found.append(waiting)
        for waiting in found:
            self.remove(waiting)
        return found


def longest_wait_share(crowds: Iterable[Crowd], now_s: float) -> float:
    """Of the prompt of these that has waited longest: how much of the time that it may wait is over, 0 to 1."""
    oldest = min((next(iter(crowd.all)) for crowd in crowds), key=_came, default=None)
    if oldest is None:
        return 0.0
    return (now_s - oldest.came_s) / max(oldest.limit_s - oldest.came_s, 1e-9)


def _came(waiting: Waiting) -> float:
    return waiting.came_s
