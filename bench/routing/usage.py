"""Whether the machine kept up: CPU time of the processes of a run, and how late they were."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from workers.process import Child

_PROBE_INTERVAL_S = 0.5
_TICK_S = 0.01


def cpu_s(children: Iterable[Child]) -> float:
    """CPU seconds that these and all they have started have used; 0 where there is no /proc."""
    ticks = 0
    for child in children:
        for pid in child.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Lateness:
    """Async context manager: how late this process's event loop is, and how long the engines take to say that they live.

    An engine that cannot answer in time cannot end its steps in time either.
    """

    def __init__(self, http: aiohttp.ClientSession, engines: Mapping[str, Sequence[str]]) -> None:
        """``engines``: addresses, by what is said of them together."""
        self._http = http
        self._engines_of = [(kind, address) for kind, addresses in engines.items() for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self.loop_s: list[float] = []
        self.engine_s: dict[str, list[float]] = {kind: [] for kind in engines}

    async def __aenter__(self) -> Lateness:
        self._tasks = [asyncio.create_task(self._loop()), asyncio.create_task(self._engines())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _loop(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.loop_s.append(max(0.0, time.perf_counter() - began_s - _TICK_S))

    async def _engines(self) -> None:
        while True:
            for kind, address in self._engines_of:
                began_s = time.perf_counter()
                with suppress(aiohttp.ClientError):
                    async with self._http.get(f"http://{address}/health"):
                        self.engine_s[kind].append(time.perf_counter() - began_s)
                await asyncio.sleep(_PROBE_INTERVAL_S / len(self._engines_of))
