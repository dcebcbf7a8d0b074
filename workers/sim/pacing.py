"""Waiting until a moment, to well under a millisecond.

The event loop's own timers count whole milliseconds. A simulated step takes a few of them, fewer where time runs faster, so the
gaps between tokens would show the timer more than the step. Linux has timers that are file descriptors; elsewhere the loop's
own has to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0


class _Spec(ctypes.Structure):
    """``struct itimerspec``: a timer that fires once has no interval."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class Pacer:
    """One waiting at a time, in one event loop. Close it in the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._descriptor = -1
        if sys.platform != "linux":
            return
        library = ctypes.CDLL(None, use_errno=True)
        try:
            descriptor = library.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
            self._settime = library.timerfd_settime
        except AttributeError:  # a C library without them
            return
        if descriptor >= 0:
            self._descriptor = descriptor
            self._spec = _Spec()
            self._loop.add_reader(descriptor, self._on_time)

    async def until(self, moment_s: float) -> None:
        """Wait until ``time.monotonic()`` is at least this; in any case let others run."""
        left_s = moment_s - time.monotonic()
        if left_s <= 0 or self._descriptor < 0:
            await asyncio.sleep(max(0.0, left_s))
            return
        whole_s = int(moment_s)
        self._spec.value_s, self._spec.value_ns = whole_s, int((moment_s - whole_s) * 1e9)
        waiter = self._waiter = self._loop.create_future()
        if self._settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        await waiter

    def close(self) -> None:
        """Give the timer back."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_time(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # set anew in the meantime
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
