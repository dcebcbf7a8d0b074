"""UCX's own benchmark, where NIXL is not installed."""

from __future__ import annotations

import shutil
import subprocess
import time

from workers.preflight.measure.messages import MeasureError

_START_S = 0.5
"""Until its server listens."""
_STOP_S = 5.0


def installed() -> bool:
    """There is a ucx_perftest on the PATH."""
    return shutil.which("ucx_perftest") is not None


def start_server(port: int, *, seconds: float) -> subprocess.Popen[bytes]:
    """It serves one client and ends; without one it would wait for ever, so it gets a time. Raises MeasureError."""
    argv = ("timeout", f"{seconds:.0f}", "ucx_perftest", "-p", str(port))
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise MeasureError(f"ucx_perftest cannot be started: {error}") from None
    time.sleep(_START_S)
    if process.poll() is not None:
        raise MeasureError(f"ucx_perftest ended at once with status {process.returncode}: is port {port} taken?")
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server."""
    process.terminate()  # which `timeout` passes on
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def get(host: str, port: int, *, size_bytes: int, times: int, memory: str, timeout_s: float) -> tuple[float, float]:
    """Median seconds of one get, and bytes a second over all. Raises MeasureError."""
    kind = "cuda" if memory == "cuda" else "host"
    argv = ["ucx_perftest", host, "-p", str(port), "-t", "ucp_get", "-s", str(size_bytes)]
    argv += ["-n", str(times), "-w", "2", "-f", "-m", kind]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasureError(f"ucx_perftest: {error}") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise MeasureError(f"ucx_perftest: status {done.returncode}: {done.stderr.decode(errors='replace')[-300:].strip()}")
    return parse(text)


def parse(text: str) -> tuple[float, float]:
    """The last line with numbers: iterations, latency (median, average, overall) in µs, bandwidth (average, overall) in MiB/s.

    Raises MeasureError.
    """
    for line in reversed(text.splitlines()):
        cells = line.replace("|", " ").split()
        if len(cells) >= 6:
            try:
                values = [float(cell) for cell in cells]
            except ValueError:
                continue
            return values[1] * 1e-6, values[5] * (1 << 20)
    raise MeasureError(f"ucx_perftest said nothing that can be read: {text[-200:]!r}")
