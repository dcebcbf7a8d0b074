"""Spans on their way to the collector: the library's batches, with a bound that we see, and an end that is not waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

SHUTDOWN_S = 2.0
"""Longest time that the end of the process waits for the last spans."""

_MOST_IN_A_BATCH = 512


class SpanQueue(SpanExporter):
    """Takes spans on the event loop, hands them over in a thread of the library's.

    ``count`` is told ``exported``, ``dropped`` or ``failed``, and how many; ``exported`` and ``failed`` by that thread.
    """

    def __init__(self, exporter: SpanExporter, *, interval_s: float, max_spans: int, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._max_spans = max_spans
        self._count = count
        self._taken = 0
        self._done = 0
        self._batches = BatchSpanProcessor(
            self,
            max_queue_size=max_spans,
            schedule_delay_millis=interval_s * 1e3,
            max_export_batch_size=min(_MOST_IN_A_BATCH, max_spans),
        )

    @property
    def waiting(self) -> int:
        """Spans that were taken and not sent yet."""
        return self._taken - self._done

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Those of one request: all of them, or none where there is no room. Never blocks."""
        if self.waiting + len(spans) > self._max_spans:
            self._count("dropped", len(spans))
            return
        self._taken += len(spans)
        for span in spans:
            self._batches.on_end(span)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """For the library's thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._done += len(spans)
            self._count("exported" if result is SpanExportResult.SUCCESS else "failed", len(spans))
        return result

    def shutdown(self) -> None:
        """For the library: its thread is through."""
        self._exporter.shutdown()

    async def close(self, timeout_s: float = SHUTDOWN_S) -> int:
        """Send what is there, for no longer than ``timeout_s``. How many spans were left behind."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def send() -> None:
            self._batches.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over.set)

        # A daemon, so that the process does not wait for it either.
        threading.Thread(target=send, name="last-spans", daemon=True).start()
        try:
            await asyncio.wait_for(over.wait(), timeout_s)
        except TimeoutError:
            self._exporter.shutdown()
        return self.waiting
