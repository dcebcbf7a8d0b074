"""What a second filter process is worth: requests a second and processor time per request, with one process and with several.

    python -m bench.processes                        # 1 and 2 processes, both transports, 4 KB bodies
    python -m bench.processes --kb 32 --rounds 5 --transport lean

Everything runs at once and is measured in turn: the load (wrk), Envoy, the workers that answer at once, and the filters share
the machine's cores. So requests a second grow only as far as these leave cores for the filters; the processor time per request
says what sharing the ledger costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.overhead.bodies import bodies
from bench.overhead.cpu import Meter, spent
from bench.overhead.workers import Workers
from bench.overhead.wrk import find_wrk, numbers_from, run, write_bodies
from extproc.config import Config
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from workers.process import Child
from workers.ready import free_ports, wait_ready

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_FILTER, _ENVOY = "filter", "envoy"


@dataclass
class Case:
    """One number of processes under one transport, running, and what it came to."""

    transport: str
    processes: int
    port: int
    meter: Meter
    per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    filter_us: list[float] = field(default_factory=list)
    envoy_us: list[float] = field(default_factory=list)
    errors: int = 0


def start(parts: ExitStack, folder: Path, workers: Workers, transport: str, processes: int) -> Case:
    """Envoy and a filter in a folder of their own. Raises PartError."""
    directory = folder / f"{transport}-{processes}"
    directory.mkdir()
    port, admin, envoy_admin = free_ports(3)
    base = stack_config(
        directory,
        prefill=workers.prefill,
        decode=workers.decode,
        listen=f"{_HOST}:{port}",
        admin=f"{_HOST}:{admin}",
        envoy_admin=f"{_HOST}:{envoy_admin}",
        processes=processes,
    )
    tree = msgspec.to_builtins(base)
    tree["transport"] = transport
    tree["prefill"]["via"] = "direct"
    tree["observe"]["sample"] = 0
    tree["envoy"]["debug_headers"] = False
    config = msgspec.convert(tree, Config)
    config_file, envoy_file = write_configs(config, directory)
    filter_ = parts.enter_context(Child("filter", filter_command(config_file), log=directory / "filter.log", grace_s=5.0))
    await_endpoints(config, filter_)
    envoy = parts.enter_context(
        Child("envoy", envoy_command(find_envoy(), envoy_file), log=directory / "envoy.log", grace_s=3.0)
    )
    wait_ready(filter_, f"http://{_HOST}:{admin}/healthz", _START_TIMEOUT_S)
    wait_ready(envoy, f"http://{_HOST}:{envoy_admin}/ready", _START_TIMEOUT_S)
    return Case(transport, processes, port, Meter([(_FILTER, filter_), (_ENVOY, envoy)]))


def measure(case: Case, wrk: str, body_file: Path, *, connections: int, seconds: float) -> None:
    """One round."""
    before = case.meter.cpu_s()
    load = run(wrk, case.port, body_file, connections=connections, seconds=seconds, first_number=numbers_from(), headers={})
    used = spent(before, case.meter.cpu_s())
    case.per_s.append(load.per_s)
    case.p50_ms.append(load.p50_s * 1e3)
    case.filter_us.append(used[_FILTER] / max(load.requests, 1) * 1e6)
    case.envoy_us.append(used[_ENVOY] / max(load.requests, 1) * 1e6)
    case.errors += sum(load.errors.values())


def table(cases: Sequence[Case]) -> Table:
    """Medians over the rounds."""
    made = Table(
        *("transport", "processes", "req/s", "p50 ms", "filter CPU µs/req", "Envoy CPU µs/req", "errors"),
        box=None,
        pad_edge=False,
    )
    for case in cases:
        numbers = [case.per_s, case.p50_ms, case.filter_us, case.envoy_us]
        rate, p50, filter_us, envoy_us = map(statistics.median, numbers)
        made.add_row(
            *(case.transport, str(case.processes), f"{rate:,.0f}", f"{p50:.2f}", f"{filter_us:.0f}", f"{envoy_us:.0f}"),
            str(case.errors),
        )
    return made


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--transport", nargs="+", default=["grpc", "lean"], choices=["grpc", "lean"])
    parser.add_argument("--kb", type=int, default=4, help="size of a request's body")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one round")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    wrk = find_wrk()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name, ExitStack() as parts:
        folder = Path(name)
        body_file = folder / "bodies"
        write_bodies(bodies(options.kb * 1024), body_file)
        console.print("starting workers", highlight=False)
        workers = parts.enter_context(Workers(folder))
        cases = []
        for transport in options.transport:
            for processes in options.processes:
                console.print(f"starting Envoy and {processes} filter processes, {transport}", highlight=False)
                cases.append(start(parts, folder, workers, transport, processes))
        for case in cases:  # connections, imports, first prompts
            measure(case, wrk, body_file, connections=options.connections, seconds=1.0)
            for numbers in (case.per_s, case.p50_ms, case.filter_us, case.envoy_us):
                numbers.clear()
        for number in range(options.rounds):
            console.print(f"round {number + 1} of {options.rounds}", highlight=False)
            for case in cases:
                measure(case, wrk, body_file, connections=options.connections, seconds=options.seconds)
        console.print(f"\n{os.cpu_count()} cores, {options.kb} KB bodies, {options.connections} connections", highlight=False)
        console.print(table(cases))


if __name__ == "__main__":
    main()
