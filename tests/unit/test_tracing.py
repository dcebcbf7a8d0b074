"""The trace of one request, its ids, its spans, and the way to a collector."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from extproc.attempts import leg_id
from extproc.config import ConfigError
from extproc.config import Tracing as Settings
from extproc.observe.logs import make_logger
from extproc.observe.otlp import Exporter, ExportError
from extproc.observe.own_time import ANSWER, DECIDE, PARSE, PREFILL_CALL, QUEUE, REPLY
from extproc.observe.span_queue import SpanQueue
from extproc.observe.tracing import Tracing, open_tracing
from extproc.routing.decision import Decision, Terms

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])")


class Kept(SpanExporter):
    """Keeps spans, or refuses them, or holds them up."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.gate = threading.Event()
        self.gate.set()
        self.result = SpanExportResult.SUCCESS
        self.closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(30)
        self.spans += spans
        return self.result

    def shutdown(self) -> None:
        self.closed = True
        self.gate.set()


class World:
    def __init__(self, *, max_spans: int = 100, **settings: Any) -> None:
        self.kept = Kept()
        self.counted: dict[str, int] = {}
        self.queue = SpanQueue(self.kept, interval_s=0.01, max_spans=max_spans, count=self._count)
        self.tracing = Tracing(Settings(endpoint="http://c", **settings), self.queue, Resource({"service.name": "x"}))

    def _count(self, outcome: str, spans: int) -> None:
        self.counted[outcome] = self.counted.get(outcome, 0) + spans

    async def spans(self) -> dict[str, ReadableSpan]:
        await self.queue.close()
        return {span.name: span for span in self.kept.spans}


def decision() -> Decision:
    return Decision(
        policy="p", objective="ttft", reason="cost", prefill="a:1", decode="b:2", prompt_tokens=9, cached_tokens=4,
        terms=Terms(prefill_s=0.25),
    )  # fmt: skip


async def test_the_phases_become_spans_under_one_root() -> None:
    world = World()
    trace, _ = world.tracing.begin({"traceparent": f"{GIVEN}-01"}, None)
    assert trace is not None and trace.trace_id == GIVEN[3:35]
    for phase in (PARSE, DECIDE, QUEUE, PREFILL_CALL):
        trace.enter(phase)
    trace.decision = decision()
    call, context = trace.prefill("a:1", "r-1")
    trace.prefilled(call, None, outcome="ok", cached_tokens=4, prompt_tokens=None)
    trace.enter(REPLY)
    trace.enter(ANSWER)
    trace.answered(200)
    trace.finish("chat m", {"baton.decode": "b:2", "none": None}, error=None, queued=True)
    spans = await world.spans()
    assert list(spans) == ["chat m", "parse", "decide", "queue", "prefill", "decode"]
    root = spans["chat m"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == GIVEN[36:52]
    assert dict(root.attributes or {}) == {"baton.decode": "b:2"}
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)  # type: ignore[union-attr]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {GIVEN[3:35]}  # type: ignore[union-attr]
    assert context == f"00-{GIVEN[3:35]}-{spans['prefill'].context.span_id:016x}-01"  # type: ignore[union-attr]
    assert trace.decode_context == f"00-{GIVEN[3:35]}-{spans['decode'].context.span_id:016x}-01"  # type: ignore[union-attr]
    assert dict(spans["decide"].attributes or {}) == {
        "baton.objective": "ttft", "baton.reason": "cost", "baton.prompt_tokens": 9, "baton.cached_tokens": 4,
        "baton.position": 0, "baton.candidates": 0, "baton.terms.prefill_s": 0.25,
    }  # fmt: skip
    assert dict(spans["decode"].attributes or {}) == {"http.response.status_code": 200, "server.address": "b:2"}
    assert world.counted == {"exported": 6}


async def test_who_did_not_wait_has_no_queue_span_and_what_was_cut_short_ends_with_the_request() -> None:
    world = World()
    trace, _ = world.tracing.begin({}, None)
    assert trace is not None
    for phase in (PARSE, DECIDE, QUEUE):
        trace.enter(phase)
    trace.prefill("a:1", "r-1")  # and the client leaves
    trace.finish("chat m", {}, error="internal_error", queued=False)
    spans = await world.spans()
    assert list(spans) == ["chat m", "parse", "decide", "prefill"]
    assert spans["prefill"].end_time == spans["chat m"].end_time
    assert not spans["chat m"].status.is_ok and (spans["chat m"].attributes or {})["error.type"] == "internal_error"


@pytest.mark.parametrize(
    ("ratio", "given", "envoys", "sampled", "trace"),
    [
        (1.0, None, None, True, None),
        (0.0, None, None, False, None),
        (0.0, f"{GIVEN}-01", None, True, GIVEN[3:35]),
        (1.0, f"{GIVEN}-00", None, False, GIVEN[3:35]),
        (1.0, f"{GIVEN}-00", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", True, "a" * 32),
        (1.0, "00-0-0-01", None, True, None),
        (1.0, f"{GIVEN}-01,{GIVEN}-01", None, True, None),
        (0.0, "00-" + "0" * 32 + "-" + "b" * 16 + "-01", None, False, None),
    ],
)
async def test_who_decides_whether_a_request_is_sampled(
    ratio: float, given: str | None, envoys: str | None, sampled: bool, trace: str | None
) -> None:
    world = World(sample_ratio=ratio)
    found, onward = world.tracing.begin({} if given is None else {"traceparent": given}, envoys)
    assert (found is not None) is sampled
    match = HEADER.fullmatch(onward or (found.decode_context if found is not None else ""))
    assert match is not None and match[3] == ("01" if sampled else "00")
    assert trace is None or match[1] == trace
    await world.queue.close()


async def test_a_full_queue_drops_whole_traces_and_counts_them() -> None:
    world = World(max_spans=4)
    world.kept.gate.clear()
    for _ in range(5):
        trace, _onward = world.tracing.begin({}, None)
        assert trace is not None
        trace.enter(PARSE)
        trace.finish("chat m", {}, error=None, queued=False)
    assert world.counted == {"dropped": 6} and world.queue.waiting == 4
    world.kept.gate.set()
    await world.queue.close()
    assert world.counted == {"dropped": 6, "exported": 4} and world.queue.waiting == 0


async def test_what_the_collector_refuses_is_counted() -> None:
    world = World()
    world.kept.result = SpanExportResult.FAILURE
    trace, _ = world.tracing.begin({}, None)
    assert trace is not None
    trace.finish("chat m", {}, error=None, queued=False)
    await world.queue.close()
    assert world.counted == {"failed": 1}


async def test_the_end_waits_for_a_collector_that_hangs_no_longer_than_it_may() -> None:
    world = World()
    world.kept.gate.clear()
    trace, _ = world.tracing.begin({}, None)
    assert trace is not None
    trace.finish("chat m", {}, error=None, queued=False)
    assert await asyncio.wait_for(world.queue.close(0.1), 5) == 1
    assert world.kept.closed


class Flaky:
    """Fails so often, then takes what comes."""

    def __init__(self, failures: int, *, again: bool = True) -> None:
        self.failures = failures
        self.again = again
        self.calls = 0

    def send(self, message: bytes, timeout_s: float) -> None:
        assert message and timeout_s > 0
        self.calls += 1
        if self.calls <= self.failures:
            raise ExportError("no", again=self.again)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("transport", "result", "calls"),
    [
        (Flaky(1), SpanExportResult.SUCCESS, 2),
        (Flaky(1, again=False), SpanExportResult.FAILURE, 1),
    ],
)
def test_a_batch_is_tried_again_only_where_that_may_help(transport: Flaky, result: SpanExportResult, calls: int) -> None:
    exporter = Exporter(transport, timeout_s=5.0)
    assert exporter.export([_whole_span()]) is result and transport.calls == calls


def test_a_batch_is_given_up_when_its_time_is_over() -> None:
    exporter = Exporter(Flaky(10**6), timeout_s=0.3)
    assert exporter.export([_whole_span()]) is SpanExportResult.FAILURE
    assert exporter.last_error == "no"


def _whole_span() -> ReadableSpan:
    return ReadableSpan("x", context=SpanContext(1, 2, is_remote=False), resource=Resource({}), start_time=1, end_time=2)


@pytest.mark.parametrize("line", ["no colon", "na me: x", ": x", "näme: x", "a: \x01", "a: ü"])
async def test_a_faulty_file_of_headers_is_named_without_its_text(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"x-key: s3cret\n{line} s3cret\n")
    settings = Settings(endpoint="http://127.0.0.1:1", headers_file=str(file), envoy=False)
    with pytest.raises(ConfigError) as caught:
        open_tracing(settings, count=lambda *_: None, log=make_logger("info", io.StringIO()))
    assert f"{file}:2" in str(caught.value) and "s3cret" not in str(caught.value)


async def test_a_file_of_headers_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    settings = Settings(endpoint="http://127.0.0.1:1", headers_file=str(file), envoy=False)
    with pytest.raises(ConfigError, match=f"tracing.headers_file: {re.escape(str(file))}: No such file"):
        open_tracing(settings, count=lambda *_: None, log=make_logger("info", io.StringIO()))
    file.write_bytes(b"x: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        open_tracing(settings, count=lambda *_: None, log=make_logger("info", io.StringIO()))


@pytest.mark.parametrize("request_id", ["plain-Id_1.2", "", "x" * 500, "a:b;c,d \n\x00ü"])
def test_the_id_of_a_prefill_call_is_unique_and_harmless_and_begins_with_the_requests(request_id: str) -> None:
    first, second = leg_id(request_id), leg_id(request_id)
    assert first != second and len(first) <= 97
    assert re.fullmatch(r"[A-Za-z0-9._-]+", first)
    assert first.startswith(request_id[:4] if request_id.isalnum() else "")
