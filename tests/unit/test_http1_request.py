"""The head of a request: what stands in it, and that nothing can be smuggled into it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http1.errors import RefusedError
from extproc.http1.request import finish, start

OWN = frozenset(("content-type",))
START = start("/v1/completions", "10.0.0.1:8000", {"content-type": "application/json"})


def test_a_whole_head() -> None:
    assert finish(START, {"x-request-id": "a", "Authorization": "Bearer s"}, OWN, 12) == (
        b"POST /v1/completions HTTP/1.1\r\nhost: 10.0.0.1:8000\r\ncontent-type: application/json\r\n"
        b"x-request-id: a\r\nAuthorization: Bearer s\r\ncontent-length: 12\r\n\r\n"
    )


@pytest.mark.parametrize("name", ["content-type", "Content-Type"])
def test_a_header_that_the_start_has_already_comes_once(name: str) -> None:
    assert finish(START, {name: "text/plain"}, OWN, 0).lower().count(b"content-type") == 1


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\0b", "\x7f", "\x01", "\ud800"])
def test_a_value_that_no_header_may_have_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(RefusedError) as refused:
        finish(START, {"x-a": f"secret{value}"}, OWN, 0)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", ["", " a\tb ", "é", "\N{EURO SIGN}", "\ufffd"])
def test_other_values_leave_as_they_came_through_envoy(value: str) -> None:
    assert b"x-a: " + value.encode() + b"\r\n" in finish(START, {"x-a": value}, OWN, 0)


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\nb", "é", "a\0"])
def test_a_name_that_no_header_may_have_is_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        finish(START, {name: "a"}, OWN, 0)


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "Host", "connection", "expect", "upgrade", "te"])
def test_what_frames_a_message_is_not_the_callers_to_set(name: str) -> None:
    with pytest.raises(RefusedError):
        finish(START, {name: "1"}, OWN, 0)


@pytest.mark.parametrize("path", ["", "v1", "/a b", "/a\r\nx: y", "/a\0", "/é", "http://x/", "/a\x7f"])
def test_a_path_that_no_request_may_have_is_refused(path: str) -> None:
    with pytest.raises(RefusedError):
        start(path, "a:1", {})


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=30), max_size=4), st.integers(0, 1 << 40))
def test_whatever_is_given_one_head_comes_out_or_none(fields: dict[str, str], length: int) -> None:
    try:
        head = finish(START, fields, OWN, length)
    except RefusedError:
        return
    lines = head.split(b"\r\n")
    assert head.count(b"\r") == head.count(b"\n") == len(lines) - 1 and b"\0" not in head
    assert lines[-2:] == [b"", b""] and head.count(b"\r\n\r\n") == 1
    names = [line.partition(b":")[0].lower() for line in lines[1:-2]]
    assert names.count(b"content-length") == 1 and names.count(b"host") == 1 and b"transfer-encoding" not in names
    assert len(names) <= len(fields) + 3
