"""The line of a request, made in one go, is the line that the log would write."""

from __future__ import annotations

import io
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bench.sample_record import sample_record
from extproc.journey import Record
from extproc.observe.logs import make_logger
from extproc.observe.request_log import RequestLine, RequestLog


class Lines:
    """A sink."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, line: bytes) -> None:
        self.written += line

    def flush(self) -> None:
        pass


def a_line(**changed: object) -> RequestLine:
    fields = {**msgspec.structs.asdict(sample_record()), "treatment": "chat", "total_ms": 4321.0, **changed}
    return RequestLine(**fields)


_texts = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)


@given(_texts, _texts, st.none() | st.integers(100, 599), st.none() | st.floats(0, 1e6), st.floats(1e9, 2e9))
def test_both_ways_say_the_same_in_the_same_order(path: str, policy: str, status: int, queued_ms: float, now_s: float) -> None:
    line = a_line(path=path, policy=policy, status=status, queued_ms=queued_ms)
    at_once, usual = Lines(), Lines()
    RequestLog(make_logger("info", io.StringIO()), at_once, clock=lambda: now_s).write(line)
    RequestLog(make_logger("info", sink=usual)).write(line)
    ours, theirs = json.loads(at_once.written), json.loads(usual.written)
    assert list(ours) == list(theirs)
    assert {**ours, "time": ""} == {**theirs, "time": ""}
    assert at_once.written.endswith(b"\n") and at_once.written.count(b"\n") == 1


def test_the_time_is_that_of_the_request_in_milliseconds() -> None:
    sink, times = Lines(), iter((0.0, 0.9996, 1.0, 1_700_000_000.0625))
    log = RequestLog(make_logger("info", io.StringIO()), sink, clock=lambda: next(times))
    for _ in range(4):
        log.write(a_line())
    assert [json.loads(line)["time"] for line in sink.written.splitlines()] == [
        "1970-01-01T00:00:00.000Z",
        "1970-01-01T00:00:00.999Z",
        "1970-01-01T00:00:01.000Z",
        "2023-11-14T22:13:20.062Z",
    ]


def test_what_is_not_known_is_left_out_and_zero_is_known() -> None:
    sink = Lines()
    RequestLog(make_logger("info", io.StringIO()), sink).write(a_line(decode=None, body_bytes=0, outcome=""))
    line = json.loads(sink.written)
    assert "decode" not in line and line["body_bytes"] == 0 and line["outcome"] == ""


def test_everything_that_a_record_holds_is_in_the_line() -> None:
    assert set(Record.__struct_fields__) | {"answer_status", "trace_id", "total_ms"} == set(RequestLine.__struct_fields__)


def test_a_log_of_text_gets_the_line_as_text() -> None:
    out = io.StringIO()
    RequestLog(make_logger("info", out, log_format="text")).write(a_line(path="/v1/x"))
    assert "path=/v1/x" in out.getvalue() and "total_ms=4321.0" in out.getvalue()
