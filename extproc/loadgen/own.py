"""Whether the generator itself keeps up: how late its event loop is, and how much of its processor it uses.

The clock of every time of a run is the loop's own process: while it is busy, tokens that have come are not seen to come.
"""

from __future__ import annotations

import asyncio
import time
from array import array

import msgspec

from workers.goodput import percentile

_TICK_S = 0.01
now_s = time.perf_counter
"""Not the loop's clock, which counts milliseconds with uvloop."""

LATE_WARNING_S = 0.010
"""Later than this, at the 99th percentile, and what is measured is partly the generator. An assumption: well above the
millisecond that uvloop's timers are exact to, and at most the gap between two tokens of models that are worth such a test."""
CPU_WARNING = 0.8
"""Share of one processor, above which waiting in a process with one thread is no longer short. An assumption, too."""


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """The generator's own numbers."""

    send_late_p50_s: float
    send_late_p99_s: float
    send_late_max_s: float
    """How much later than due requests were sent; their times to the first token contain it."""
    loop_late_p99_s: float
    """How late its event loop was, and so how late tokens were seen."""
    cpu_share: float
    """CPU time over time, of one processor."""
    cpu_s: float

    @property
    def warnings(self) -> list[str]:
        """In words; empty where it kept up."""
        found = []
        if self.send_late_p99_s > LATE_WARNING_S:
            found.append(f"1 % of the requests were sent more than {self.send_late_p99_s * 1e3:.1f} ms late")
        if self.loop_late_p99_s > LATE_WARNING_S:
            found.append(f"1 % of the time tokens were seen more than {self.loop_late_p99_s * 1e3:.1f} ms late")
        if self.cpu_share > CPU_WARNING:
            found.append(f"the generator used {self.cpu_share:.0%} of a processor")
        return found


class Watch:
    """Async context manager around a run."""

    def __init__(self) -> None:
        self._loop_late_s = array("d")
        self._task: asyncio.Task[None] | None = None
        self._began_s = self._cpu_began_s = 0.0
        self.wall_s = self.cpu_s = 0.0

    async def __aenter__(self) -> Watch:
        self._began_s, self._cpu_began_s = now_s(), time.process_time()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = now_s() - self._began_s, time.process_time() - self._cpu_began_s
        if self._task is not None:
            self._task.cancel()

    async def _beat(self) -> None:
        while True:
            began_s = now_s()
            await asyncio.sleep(_TICK_S)
            self._loop_late_s.append(max(0.0, now_s() - began_s - _TICK_S))

    def own(self, send_late_s: list[float]) -> Own:
        """The numbers, once the run is over."""
        late_s = [max(0.0, each) for each in send_late_s]  # a timer may go off a moment early
        return Own(
            send_late_p50_s=percentile(late_s, 0.5),
            send_late_p99_s=percentile(late_s, 0.99),
            send_late_max_s=max(late_s, default=0.0),
            loop_late_p99_s=percentile(self._loop_late_s, 0.99) if self._loop_late_s else 0.0,
            cpu_share=self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0,
            cpu_s=self.cpu_s,
        )
