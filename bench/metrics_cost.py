"""What metrics cost: a request's share, one look at a worker, and one page of ours.

``python -m bench.metrics_cost``. A request is a prompt that is handed over, with every metric call that is made for it, and its
log line. The first line is the same loop with nothing in it. Medians of several rounds, in microseconds of
processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.sample_record import sample_record
from extproc.observe.engines import Engines
from extproc.observe.load import parse
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.observe.own_time import DECIDE, PARSE, PHASES, PREFILL_CALL, REPLY, OwnTime
from extproc.routing.pool import Role

_ROUNDS = 7
_PAGE = Path(__file__).parent.parent / "tests" / "cases" / "metrics" / "vllm-0.32.txt"
_WORKERS = 200


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000, help="in a round")
    arguments = parser.parse_args()
    table = Table("what", "µs", box=None, pad_edge=False)
    for name, cost_us in costs(arguments.requests):
        table.add_row(name, f"{cost_us:,.1f}")
    Console().print(table)


def costs(requests: int) -> list[tuple[str, float]]:
    """(what, microseconds of one)."""
    page = _PAGE.read_bytes()
    metrics = Metrics()
    engines = Engines(metrics)
    requesting = _request(metrics, engines)
    logging = _log_line()
    first, second = parse(page), parse(page)
    second.itl_buckets = {bound: samples + 1 for bound, samples in (second.itl_buckets or {}).items()}
    second.generation_tokens = (second.generation_tokens or 0) + 100
    turn = [first, second]

    def look() -> None:
        turn.reverse()
        engines.on_scrape("10.0.0.1:8000", (Role.DECODE,), turn[0], 1.0)

    found = [
        ("nothing", _cost_us(lambda: None, requests)),
        ("two tasks and eight waits, without their time", _cost_us(_tasks, requests)),
        ("a request: all metrics", _cost_us(requesting, requests)),
        ("the same, with their time by phase", _cost_us(_own_time, requests)),
        ("a request: its log line", _cost_us(logging, requests)),
        (f"a worker's page of {len(page) / 1e3:.0f} kB: read", _cost_us(lambda: parse(page), 100)),
        ("a worker's page: into our metrics", _cost_us(look, 500)),
    ]
    for number in range(_WORKERS):
        engines.on_scrape(f"10.0.{number // 250}.{number % 250}:8000", (Role.DECODE,), first, 1.0)
    size = len(asyncio.run(metrics.render()))
    name = f"our own page, {_WORKERS} workers ({size / 1e3:.0f} kB), in turns"
    found.append((name, _cost_us(lambda: asyncio.run(metrics.render()), 1)))
    return found


def _cost_us(work: Callable[[], object], times: int) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        began_s = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - began_s) / times)
    return statistics.median(rounds) * 1e6


def _request(metrics: Metrics, engines: Engines) -> Callable[[], None]:
    spent_s = [0.0001] * len(PHASES)
    phases = [metrics.filter_phase_seconds.child(phase) for phase in PHASES]
    held = ExitStack()  # every request has one, metrics or none

    def request() -> None:
        tenant = metrics.accounts.tenant("acme", "x-tenant")
        metrics.decisions.inc("disaggregate", "handed_over", "default")
        metrics.queue_wait_seconds.observe(0.2)
        metrics.prefix_prompt_tokens.inc(by=1200)
        metrics.prefix_predicted_tokens.inc(by=1000)
        metrics.prefix_reported_tokens.inc(by=990)
        metrics.prefill_seconds.observe(0.25, "ok")
        metrics.handoff_age_seconds.observe(0.002)
        metrics.handoffs.inc("nixl-pull", "10.0.0.1:8100", "10.0.0.2:8200")
        metrics.handoff_blocks.observe(75)
        sent = engines.recompute.sent("10.0.0.2:8200", 1200, handoff=True)
        held.callback(setattr, sent, "ended_s", 1.0)
        held.close()
        metrics.requests.inc("chat", "m", "default", "disaggregate", "handoff")
        for observe, seconds in zip(phases, spent_s, strict=True):
            observe(seconds)
        metrics.filter_seconds.observe(sum(spent_s))
        metrics.accounts.note_prompt("m", tenant, 1200, 990)
        metrics.accounts.note_completion("m", tenant, 300)

    return request


class _Wait:
    def __await__(self):  # type: ignore[no-untyped-def]
        yield


async def _steps(own: OwnTime) -> None:
    for phase in (PARSE, DECIDE, PREFILL_CALL, REPLY):
        own.enter(phase)
        await _Wait()


def _own_time() -> None:
    own = OwnTime()
    for _ in range(2):
        task = own.of(_steps(own))
        for _ in range(4):
            task.send(None)
        task.close()


def _tasks() -> None:
    own = OwnTime()
    for _ in range(2):
        task = _steps(own)
        for _ in range(4):
            task.send(None)
        task.close()


def _log_line() -> Callable[[], None]:
    log = make_logger("info", io.StringIO())
    record = sample_record()

    def line() -> None:
        fields = {key: value for key, value in msgspec.structs.asdict(record).items() if value is not None}
        log.info("request", **fields, total_ms=4321.0)

    return line


if __name__ == "__main__":
    main()
