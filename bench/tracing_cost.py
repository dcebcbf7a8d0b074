"""What a trace and a log line cost a request, in microseconds of processor time: ``python -m bench.tracing_cost``.

A request is a prompt that is handed over. "event loop": what the loop's own thread spends. "process": that, and the thread that
encodes the spans and sends them to a collector here, which takes everything. Medians of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.sample_record import sample_record
from extproc.config import Tracing as Settings
from extproc.observe.logs import Format, make_logger, make_writer
from extproc.observe.otlp import Exporter
from extproc.observe.own_time import ANSWER, DECIDE, PARSE, PREFILL_CALL, QUEUE, REPLY
from extproc.observe.request_span import finish
from extproc.observe.span_queue import SpanQueue
from extproc.observe.tags import Tags
from extproc.observe.tracing import Tracing
from extproc.routing.decision import Decision, Terms

_ROUNDS = 7
_BUDGET_US = 150.0
_LINE_BUDGET_US = 20.0

_GIVEN = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
_DECISION = Decision(
    policy="default",
    objective="balanced",
    reason="cost",
    prefill="10.0.0.1:8100",
    decode="10.0.0.2:8200",
    prompt_tokens=1200,
    cached_tokens=1000,
    terms=Terms(queue_prefill_s=0.1, prefill_s=0.2, transfer_s=0.01, overhead_s=0.03, queue_decode_s=0.02),
)


class _Nowhere:
    def send(self, message: bytes, timeout_s: float) -> None:
        """Take it."""

    def close(self) -> None:
        """Nothing."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000, help="in a round")
    requests = parser.parse_args().requests
    table = Table("what", "event loop, µs", "process, µs", "budget, µs", box=None, pad_edge=False)
    for name, loop_us, process_us, budget_us in asyncio.run(_all(requests)):
        table.add_row(name, f"{loop_us:.2f}", f"{process_us:.2f}", "" if budget_us is None else f"{budget_us:g}")
    Console().print(table)


async def _all(requests: int) -> list[tuple[str, float, float, float | None]]:
    rows = [("tracing off", *await _cost_us(_untraced, requests), None)]
    for name, ratio, given in (("ratio 1", 1.0, {}), ("the client's context", 0.0, _GIVEN), ("ratio 0", 0.0, {})):
        queue = SpanQueue(
            Exporter(_Nowhere(), timeout_s=5.0), interval_s=0.05, max_spans=10**6, count=lambda _outcome, _spans: None
        )
        tracing = Tracing(Settings(endpoint="http://nowhere", sample_ratio=ratio), queue, _resource())
        work = _traced(tracing, given)
        rows.append((f"tracing on, {name}", *await _cost_us(work, requests, queue), _BUDGET_US))
        await queue.close()
    for log_format in ("json", "text"):
        rows.append((f"a log line, {log_format}", *await _line_us(log_format, requests), _LINE_BUDGET_US))
    return rows


def _resource() -> Any:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "baton"})


async def _cost_us(work: Callable[[], object], times: int, queue: SpanQueue | None = None) -> tuple[float, float]:
    loop_us, process_us = [], []
    for _ in range(_ROUNDS):
        thread_s, process_s = time.thread_time(), time.process_time()
        for _ in range(times):
            work()
        loop_us.append((time.thread_time() - thread_s) / times * 1e6)
        while queue is not None and queue.waiting:  # noqa: ASYNC110  # a thread empties it
            await asyncio.sleep(0.01)
        process_us.append((time.process_time() - process_s) / times * 1e6)
    return statistics.median(loop_us), statistics.median(process_us)


def _untraced() -> None:
    """What is left of it: the places where a request asks whether it is traced."""
    trace = None
    for _ in range(12):
        if trace is not None:
            raise AssertionError


def _traced(tracing: Tracing, given: dict[str, str]) -> Callable[[], None]:
    labels = Tags("m", "default", "disaggregate", "-")
    journey: Any = SimpleNamespace(record=sample_record(), job=None, labels=labels, answer_status=200)

    def request() -> None:
        trace, _ = tracing.begin(given, None)
        if trace is None:
            return
        for phase in (PARSE, DECIDE, QUEUE):
            trace.enter(phase)
        trace.decision = _DECISION
        trace.enter(PREFILL_CALL)
        call, _ = trace.prefill("10.0.0.1:8100", "6f1c8a2e-6e0a-4b0e-9d8e-0a1b2c3d4e5f-00")
        trace.prefilled(call, None, outcome="ok", prompt_tokens=1200, cached_tokens=1000)
        trace.enter(REPLY)
        _ = trace.decode_context
        trace.enter(ANSWER)
        trace.answered(200)
        finish(trace, journey)

    return request


async def _line_us(log_format: Format, times: int) -> tuple[float, float]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    writer = make_writer(descriptor, log_format)
    log = make_logger("info", log_format=log_format, sink=writer)
    record = sample_record()

    def line() -> None:
        fields = {key: value for key, value in msgspec.structs.asdict(record).items() if value is not None}
        log.info("request", **fields, total_ms=4321.0)

    cost_us = await _cost_us(line, times)
    writer.close()
    os.close(descriptor)
    return cost_us


if __name__ == "__main__":
    main()
