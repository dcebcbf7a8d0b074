"""Start a measuring process, pass on what it says, and end it when its time is up."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from workers.preflight.ask import Model
from workers.preflight.findings import Measurement, Outcome
from workers.preflight.measure.messages import BLOCK_MAX_BYTES, BLOCK_MIN_BYTES, Event, MeasureError, Result, Task

_MARGIN_S = 10.0
"""Loading NIXL and torch, beside the time that the task has."""
_ERRORS_SHOWN = 400


def run(task: Task, *, env: Mapping[str, str], say: Callable[[str], None]) -> Result | None:
    """What came out; None: a server that nobody called. ``env`` is set besides the environment. Raises MeasureError."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            (sys.executable, "-m", "workers.preflight.measure"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **env},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(task))
            process.stdin.close()
            return _follow(process.stdout, task.seconds + _MARGIN_S, say, errors)
        except BrokenPipeError:
            raise MeasureError(f"the measuring process ended at once: {_end(errors)}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _follow(pipe: IO[bytes], seconds: float, say: Callable[[str], None], errors: IO[bytes]) -> Result | None:
    deadline = time.monotonic() + seconds
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if not selector.select(left_s):
                break
            part = os.read(pipe.fileno(), 64 << 10)
            if not part:
                raise MeasureError(f"the measuring process ended without a result: {_end(errors)}")
            buffered += part
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line, type=Event)
                if event.error:
                    raise MeasureError(event.error)
                if event.progress:
                    say(event.progress)
                else:
                    return event.result
    raise MeasureError(f"the measuring process said nothing more and was ended after {seconds:.0f} s: {_end(errors)}")


def _end(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-_ERRORS_SHOWN:].decode(errors="replace").strip() or "it wrote no error"


def outcome_of(result: Result | None) -> Outcome:
    """What a report keeps of it. A side that was read has measured nothing itself."""
    if result is None:
        return Outcome()
    measured = Measurement(
        peer=result.peer,
        tool=result.tool,
        memory=result.memory,
        block_bytes=result.block_bytes,
        first_transfer_s=result.first_transfer_s,
        latency_s=result.latency_s,
        samples=result.samples,
    )
    return Outcome(
        measurement=measured if result.samples else None,
        identity=result.identity,
        reached_side_channel=result.reached_side_channel if result.samples else None,
    )


def block_bytes(model: Model | None, *, block_size_tokens: int, tensor_parallel: int) -> int:
    """Bytes of one descriptor as vLLM makes them: one block of one layer, on one GPU. Without a model: 64 KiB."""
    if model is None:
        return 64 << 10
    ranks = min(tensor_parallel, model.kv_heads)
    size = int(model.kv_bytes_per_token * block_size_tokens / model.layers / ranks) // 4 * 4
    return min(max(size, BLOCK_MIN_BYTES), BLOCK_MAX_BYTES)
