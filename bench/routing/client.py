"""The load generator: every request at its time, whatever became of those before it (open loop), and when its tokens came.

Lean on purpose, because it shares the machine with everything it measures: one process, one connection a request, and per
piece of a stream no more than counting events.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from workers.goodput import Outcome, Status, percentile

_REFUSALS = (429, 503)
_DECISION = re.compile(rb"^x-baton-decision:(.*)$", re.MULTILINE)
_QUEUED = re.compile(rb";queued-ms=([0-9.]+)")
_DETAIL_BYTES = 300
_now_s = time.perf_counter
"""Not the loop's clock, which counts milliseconds with uvloop."""


@dataclass(frozen=True)
class Planned:
    """One request to be sent."""

    at_s: float
    """Simulated seconds since the start of the run."""
    payload: Callable[[], bytes]
    """Makes the bytes to send."""
    input_tokens: int
    output_tokens: int
    tenant: str = ""


class Exchange(asyncio.Protocol):
    """One request on its connection."""

    def __init__(self, payload: bytes, done: asyncio.Future[None]) -> None:
        self._payload = payload
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._head = b""
        self._body = b""
        self.status: int | None = None
        self.times_s = array("d")
        """When each event came; several that came in one piece have one time."""
        self.complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send it all."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._payload)
        self._payload = b""

    def data_received(self, data: bytes) -> None:
        """Count events. A blank line ends one, and occurs nowhere else: lines of chunked encoding end in CR LF."""
        now_s = _now_s()
        if self.status is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self.status = int(self._head[9:12])
            data = self._head[end + 4 :]
            self._head = self._head[:end].lower()
        if self.status != 200:
            self._body += data
            if self._whole_error():
                self._finish()
            return
        seen = self._tail + data
        for _ in range(seen.count(b"\n\n")):
            self.times_s.append(now_s)
        self._tail = seen[-1:] if not seen.endswith(b"\n\n") else b""
        # The last chunk may come in pieces, but its text is the only one that ends so.
        self._body = (self._body + data)[-_DETAIL_BYTES:]
        if self._body.endswith(b"\r\n0\r\n\r\n"):
            self.complete = b"[DONE]" in self._body
            self._finish()

    def _whole_error(self) -> bool:
        if b"transfer-encoding: chunked" in self._head:
            return self._body.endswith(b"0\r\n\r\n")
        for line in self._head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return len(self._body) >= int(line.partition(b":")[2])
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        """The other side has had enough."""
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    @property
    def decision(self) -> bytes:
        """Baton's explanation, where it was asked for one; else empty."""
        found = _DECISION.search(self._head)
        return found[1].strip() if found else b""

    @property
    def wait_s(self) -> float:
        """What the explanation says of the time in Baton's queue, in real seconds."""
        found = _QUEUED.search(self.decision)
        return float(found[1]) / 1e3 if found else 0.0

    @property
    def detail(self) -> str:
        """The start of an error's body, or the end of a stream that went wrong."""
        return self._body[:_DETAIL_BYTES].decode(errors="replace")


@dataclass
class Report:
    """What came of a run's requests."""

    outcomes: list[Outcome]
    errors: list[str]
    """The first few, in words."""
    whole: int
    """Requests that Baton had a decode worker do alone."""
    late_p99_s: float
    """How late requests were sent, simulated seconds."""


async def replay(
    planned: Sequence[Planned],
    host: str,
    ports: Sequence[int],
    *,
    speed: float,
    timeout_s: float,
    progress: Callable[[int, int, int], None] = lambda _sent, _done, _all: None,
) -> Report:
    """Send all of them, ``speed`` times faster than planned, and wait for all ends, at most ``timeout_s`` of real time each.
    Which of several ports a request goes to is drawn, alike in every run.

    All times in the report are simulated seconds. What was cancelled half way reports what there is.
    """
    loop = asyncio.get_running_loop()
    # All of them before the first is sent: making a long one takes milliseconds, in which no token would be seen to come.
    payloads = [plan.payload() for plan in planned]
    start_s = _now_s() + 0.05
    outcomes: list[Outcome] = []
    errors: list[str] = []
    late_s = array("d")
    counts: Counter[str] = Counter()
    tasks: set[asyncio.Task[None]] = set()

    async def one(plan: Planned, payload: bytes, port: int) -> None:
        due_s = start_s + plan.at_s / speed
        done: asyncio.Future[None] = loop.create_future()
        exchange = Exchange(payload, done)
        problem = ""
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: exchange, host, port)
                await done
        except (OSError, TimeoutError) as error:
            problem = f"{type(error).__name__} {error}".strip()
            exchange.connection_lost(None)
        outcome = _outcome(plan, exchange, due_s, speed)
        outcomes.append(outcome)
        counts["whole"] += exchange.decision.startswith(b"aggregate")
        if outcome.status is not Status.SERVED and len(errors) < 5:
            got = f"{len(exchange.times_s)} events of {plan.output_tokens + 1}"
            errors.append(f"status {exchange.status}, {got} {problem} {exchange.detail}")

    sent = 0
    drawn = random.Random(0)  # noqa: S311 (not a secret)
    try:
        for number, plan in enumerate(planned):
            payload, payloads[number] = payloads[number], b""
            await asyncio.sleep(max(0.0, start_s + plan.at_s / speed - _now_s()))
            late_s.append((_now_s() - start_s) * speed - plan.at_s)
            task = asyncio.create_task(one(plan, payload, drawn.choice(ports)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
            progress(sent, len(outcomes), len(planned))
        while tasks:
            await asyncio.wait(tuple(tasks), timeout=1.0)
            progress(sent, len(outcomes), len(planned))
    finally:
        for task in tuple(tasks):
            task.cancel()
    return Report(outcomes, errors, counts["whole"], percentile(late_s, 0.99))


def _outcome(plan: Planned, exchange: Exchange, due_s: float, speed: float) -> Outcome:
    times_s = exchange.times_s
    whole = exchange.complete and len(times_s) == plan.output_tokens + 1
    if whole:
        status = Status.SERVED
        times_s = times_s[:-1]  # the last event says that it is over
    else:
        status = Status.REFUSED if exchange.status in _REFUSALS else Status.FAILED
    gaps_s = [(later - earlier) * speed for earlier, later in itertools.pairwise(times_s)]
    return Outcome(
        arrived_s=plan.at_s,
        ttft_s=(times_s[0] - due_s) * speed if times_s else None,
        itl_p99_s=percentile(gaps_s, 0.99) if gaps_s else None,
        input_tokens=plan.input_tokens,
        output_tokens=len(times_s),
        status=status,
        tenant=plan.tenant,
        wait_s=exchange.wait_s * speed,
    )
