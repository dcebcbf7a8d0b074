"""The measuring process: a :class:`Task` on standard input, :class:`Event` lines on standard output."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

from workers.preflight.measure.messages import Event, MeasureError, Task

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """However the command ends, nobody is left who serves."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Exit status 0 if it could measure, or was not called in time."""
    _end_with_parent()
    # Native libraries write to standard output too: they get standard error, the events keep the pipe.
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def emit(event: Event) -> None:
        events.write(msgspec.json.encode(event) + b"\n")

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        from workers.preflight.measure import reader, server

        run = server.serve if task.kind == "serve" else reader.read
        emit(Event(result=run(task, lambda words: emit(Event(progress=words)))))
    except (MeasureError, ImportError, RuntimeError, MemoryError) as error:
        emit(Event(error=str(error) or type(error).__name__))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without the destructors of native libraries, which may wait for peers that are gone.
    os._exit(status)
