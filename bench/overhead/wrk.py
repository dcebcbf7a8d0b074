"""The load: wrk with our bodies. It sends as fast as its connections are answered."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.overhead.bodies import Body

PATH = "/v1/chat/completions"
_SCRIPT = Path(__file__).with_name("post.lua")
_GRACE_S = 10.0


class LoadError(RuntimeError):
    """wrk is missing or did not do its work; the message says which."""


class _Report(msgspec.Struct, frozen=True):
    """What the script prints at the end, in wrk's microseconds."""

    requests: int
    duration_us: float
    errors: dict[str, int]
    p50_us: float
    p99_us: float
    mean_us: float
    bytes: int


@dataclass(frozen=True)
class Load:
    """What one run of wrk came to."""

    requests: int
    seconds: float
    errors: dict[str, int]
    """connect, read, write, timeout and status (which is everything from 400 on) -> how many; those of 0 are left out."""
    p50_s: float
    p99_s: float
    cpu_s: float
    """Of wrk itself."""

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds if self.seconds else 0.0


def find_wrk() -> str:
    """Raises LoadError."""
    found = shutil.which("wrk")
    if found is None:
        raise LoadError("wrk is not there: apt-get install wrk (`make bench-overhead` does it)")
    return found


def write_bodies(found: Sequence[Body], file: Path) -> None:
    """For the script: pairs of head and tail, each after its length. Raises OSError."""
    with file.open("wb") as out:
        for body in found:
            for part in (body.head, body.tail):
                out.write(b"%d\n%b" % (len(part), part))


def read_bodies(file: Path) -> list[Body]:
    """What :func:`write_bodies` wrote. Raises OSError, ValueError."""
    parts = []
    with file.open("rb") as source:
        while size := source.readline():
            parts.append(source.read(int(size)))
    return [Body(head, tail) for head, tail in zip(parts[::2], parts[1::2], strict=True)]


def run(
    wrk: str, port: int, bodies: Path, *, connections: int, seconds: float, first_number: int, headers: Mapping[str, str]
) -> Load:
    """Send for ``seconds``, whole ones. Raises LoadError."""
    argv = [
        *(wrk, "--threads", "1", "--connections", str(connections), "--duration", f"{max(1, round(seconds))}s"),
        *("--timeout", "10s", "--script", str(_SCRIPT), f"http://127.0.0.1:{port}{PATH}", "--", str(bodies), str(first_number)),
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    before = _children_cpu_s()
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 20 + _GRACE_S, check=False)
    except subprocess.TimeoutExpired:
        raise LoadError(f"wrk did not end within {seconds + 20 + _GRACE_S:g} s") from None
    return parse(done.stdout, done.stderr, cpu_s=_children_cpu_s() - before)


def _children_cpu_s() -> float:
    """Of those that have ended."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime


def parse(output: str, errors: str, *, cpu_s: float) -> Load:
    """What wrk printed -> Load. Raises LoadError."""
    lines = [line for line in output.splitlines() if line.startswith('{"requests"')]
    if not lines:
        raise LoadError(f"wrk printed no result: {(errors or output).strip()[-500:]}")
    report = msgspec.json.decode(lines[-1], type=_Report)
    return Load(
        requests=report.requests,
        seconds=report.duration_us / 1e6,
        errors={kind: number for kind, number in report.errors.items() if number},
        p50_s=report.p50_us / 1e6,
        p99_s=report.p99_us / 1e6,
        cpu_s=cpu_s,
    )


def numbers_from() -> int:
    """A first number that no earlier run has used: the clock's, in 12 digits with room for a run's requests."""
    return int(time.time() * 1e5) % 10**12
