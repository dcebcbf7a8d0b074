"""Log lines: both forms, what is escaped and cut, and a writer that never makes anybody wait."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator

import pytest

from extproc.observe.log_writer import LogWriter
from extproc.observe.logs import Format, make_logger, make_writer, take_over
from extproc.observe.shown import shown

EVIL = 'two words\n{"event":"forged"}\r\x1b[31mred\x9b\u202e\u2028\x00end'
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_value_can_neither_forge_a_line_nor_reach_the_terminal(log_format: Format) -> None:
    out = io.StringIO()
    log = make_logger("info", out, log_format=log_format)
    log.info("request", path=EVIL, count=3, share=0.5, nothing=None, flag=True)
    text = out.getvalue()
    assert text.endswith("\n") and text.count("\n") == 1
    assert not CONTROL.search(text)
    assert "\\x1b[31mred" in text and "two words" in text


def test_json_has_time_level_and_event_first_and_then_what_was_given() -> None:
    out = io.StringIO()
    make_logger("info", out).warning("prefill_failed", b=1, a="x")
    line = json.loads(out.getvalue())
    assert list(line) == ["time", "level", "event", "b", "a"]
    assert line["level"] == "warning" and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_text_is_aligned_and_quotes_what_is_more_than_one_word() -> None:
    out = io.StringIO()
    log = make_logger("info", out, log_format="text")
    log.info("request", a="two words", b="plain", c="")
    log.warning("stale", a=1)
    first, second = out.getvalue().splitlines()
    assert first.endswith('a="two words" b=plain c=""') and second.endswith("a=1")
    assert first.index("request") == second.index("stale") and first.index("a=") == second.index("a=")


def test_colours_are_for_terminals_only() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        make_logger("info", out, log_format="text").error("fault", a=1)
    assert "\x1b" not in plain.getvalue() and "\x1b[31m" in terminal.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())[24:] == plain.getvalue()[24:]


def test_levels_below_the_wanted_one_say_nothing() -> None:
    out = io.StringIO()
    log = make_logger("warning", out)
    log.info("request")
    log.debug("detail")
    assert out.getvalue() == ""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_an_exception_shows_where_it_came_from_and_not_what_it_says(log_format: Format) -> None:
    out = io.StringIO()
    log = make_logger("info", out, log_format=log_format)
    try:
        try:
            {}["a secret prompt"]
        except KeyError as cause:
            raise ValueError("a secret prompt") from cause
    except ValueError:
        log.exception("internal_error", request_id="r")
    text = out.getvalue()
    assert "secret" not in text
    assert "KeyError" in text and "ValueError" in text and "tests/unit/test_logs.py:" in text


def test_what_libraries_log_takes_our_form_without_what_they_were_given() -> None:
    out = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        take_over(make_logger("info", out))
        logging.getLogger("a.library").warning("could not read %s", "a secret prompt")
        logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: ValueError('a secret prompt')")
        logging.getLogger("a.library").info("chatter")
    finally:
        root.handlers[:], root.level = before, level
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["event"] == "library" and first["logger"] == "a.library" and first["message"] == "could not read %s"
    assert second["level"] == "error" and second["message"] == "Task exception was never retrieved"


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("plain é ü 漢", 20, "plain é ü 漢"),
        ("x" * 5, 5, "x" * 5),
        ("x" * 6, 5, "xxxxx…"),
        ("a\nb", 9, "a\\nb"),
        ("\x00" * 9, 8, "\\x00\\x00…"),
    ],
)
def test_text_of_others_is_cut_and_escaped(text: str, limit: int, expected: str) -> None:
    assert shown(text, limit) == expected


def test_lines_come_in_order_and_all_of_them_before_the_end(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = make_writer(write)
    log = make_logger("info", sink=writer)
    for number in range(100):
        log.info("request", number=number)
    writer.close()
    numbers = [json.loads(line)["number"] for line in os.read(read, 1 << 16).splitlines()]
    assert numbers == list(range(100)) and writer.dropped == 0


def test_a_full_pipe_holds_up_nobody_and_what_is_lost_is_counted_and_told(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = LogWriter(write, dropped_line=lambda count: f"{count} lost\n".encode(), most_lines=50)
    noted: list[int] = []
    writer.on_drop = lambda: noted.append(1)
    line = b"x" * 4095 + b"\n"
    began = time.monotonic()
    for _ in range(500):  # two megabytes into a pipe that holds 64 kB, and nobody reads
        writer.write(line)
    assert time.monotonic() - began < 5, "it would have waited for ever"
    lost = writer.dropped
    assert lost >= 300 and len(noted) == lost

    got: list[bytes] = []

    def drain() -> None:
        while sum(piece.count(b"\n") for piece in got) < 501 - lost:  # those that were not lost, and one that tells
            got.append(os.read(read, 1 << 16))

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    reader.join(10)
    lines = b"".join(got).splitlines()
    told = sum(int(each.split()[0]) for each in lines if each.endswith(b"lost"))
    assert told == lost and lines.count(line[:-1]) == 500 - lost
    writer.close()


def test_a_writer_whose_pipe_is_full_ends_all_the_same(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    for _ in range(100):
        writer.write(b"x" * 4096)
    began = time.monotonic()
    writer.close(timeout_s=0.2)
    writer.write(b"late\n")
    assert time.monotonic() - began < 5 and writer.dropped == 1
    left = 100 * 4096
    while left:  # or its thread would write into the pipe of another test
        left -= len(os.read(pipe[0], 1 << 16))
    writer.close(timeout_s=10)


def test_a_reader_that_has_gone_is_no_fault(pipe: tuple[int, int]) -> None:
    read, write = os.pipe()
    os.close(read)
    writer = LogWriter(write)
    writer.write(b"a line\n")
    writer.close()
    os.close(write)
    assert writer.dropped == 1


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    writer = LogWriter(write)
    for number in range(400):
        writer.write(f"{number:4095}\n".encode())
    got = b""
    while len(got) < 400 * 4096:
        got += os.read(read, 1 << 16)
    assert [int(line) for line in got.splitlines()] == list(range(400)) and writer.dropped == 0
    writer.close()
