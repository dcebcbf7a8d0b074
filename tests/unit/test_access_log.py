"""Lines of Envoy's access log: read, joined to the request they are of, and missed when they do not come."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2

from extproc.observe.access_log import LATE_S, AccessLog, Note
from extproc.observe.log_lines import Line, lines
from extproc.observe.logs import make_logger
from extproc.observe.tags import Tags

CHAT = Tags("m", "chat", "disaggregate", "acme")


def entry(key: str = "", status: int = 200, details: str = "via_upstream", flag: str | None = None, **tags: str) -> Any:
    made = accesslog_pb2.HTTPAccessLogEntry()
    made.response.response_code.value = status
    made.response.response_code_details = details
    made.response.response_headers["content-type"] = "text/event-stream; charset=utf-8"
    made.request.request_id = "r-1"
    common = made.common_properties
    common.duration.FromMicroseconds(1_500_000)
    common.upstream_remote_address.socket_address.address = "10.0.0.9"
    common.upstream_remote_address.socket_address.port_value = 8200
    common.custom_tags["ttft_us"] = "250000"
    common.custom_tags["generation_us"] = "1000000"
    usage = common.metadata.filter_metadata["baton.usage"].fields
    usage["completion_tokens"].number_value = 51
    usage["prompt_tokens"].number_value = 12
    for name, value in {"id": key, **tags}.items():
        common.metadata.filter_metadata["baton"].fields[name].string_value = value
    if flag is not None:
        setattr(common.response_flags, flag, True)
    return made


def message(*entries: Any) -> Any:
    made = als_pb2.StreamAccessLogsMessage()
    made.http_logs.log_entry.extend(entries)
    return made


def line(made: Any) -> Line:
    (found,) = lines(message(made))
    return found


def test_a_line_has_the_times_the_tokens_and_the_worker() -> None:
    found = line(entry("k"))
    assert (found.key, found.request_id, found.status, found.outcome) == ("k", "r-1", 200, "ok")
    assert (found.upstream, found.streamed, found.duration_s) == ("10.0.0.9:8200", True, 1.5)
    assert (found.ttft_s, found.generation_s, found.prompt_tokens, found.completion_tokens) == (0.25, 1.0, 12, 51)
    assert found.mean_itl_s == pytest.approx(0.02)


def test_what_envoy_does_not_know_is_none() -> None:
    made = entry("k")
    made.common_properties.custom_tags["ttft_us"] = "-"
    made.common_properties.custom_tags["generation_us"] = ""
    del made.common_properties.metadata.filter_metadata["baton.usage"]
    del made.common_properties.metadata.filter_metadata["baton"]
    made.common_properties.ClearField("upstream_remote_address")
    made.common_properties.response_flags.SetInParent()  # Envoy sends it, with nothing set
    found = line(made)
    assert (found.key, found.mode, found.upstream, found.flags) == ("", "", "", ())
    assert (found.ttft_s, found.generation_s, found.completion_tokens, found.mean_itl_s) == (None,) * 4


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_answer_of_one_token_has_no_time_between_tokens(tokens: int) -> None:
    made = entry("k")
    made.common_properties.metadata.filter_metadata["baton.usage"].fields["completion_tokens"].number_value = tokens
    assert line(made).mean_itl_s is None


@pytest.mark.parametrize(
    ("status", "details", "flag", "outcome"),
    [
        (200, "via_upstream", None, "ok"),
        (200, "baton_models", None, "ok"),
        (404, "baton_model_not_found", None, "refused"),
        (429, "baton_queue_full", None, "refused"),
        (400, "via_upstream", None, "client_error"),
        (500, "via_upstream", None, "worker_error"),
        (413, "request_payload_too_large", None, "client_error"),
        (503, "ext_proc_error_gRPC_error_14", None, "gateway_error"),
        (200, "downstream_remote_disconnect", "downstream_connection_termination", "client_gone"),
        (200, "http2.remote_reset", "downstream_remote_reset", "client_gone"),
        (0, "downstream_remote_disconnect", None, "client_gone"),
        (200, "upstream_reset_after_response_started", "upstream_connection_termination", "upstream_reset"),
        (503, "upstream_reset_before_response_started", "upstream_remote_reset", "upstream_reset"),
        (503, "upstream_reset_before_response_started", "upstream_connection_failure", "no_worker"),
        (503, "no_healthy_upstream", "no_healthy_upstream", "no_worker"),
        (504, "stream_idle_timeout", "stream_idle_timeout", "timeout"),
        (504, "upstream_response_timeout", "upstream_request_timeout", "timeout"),
    ],
)
def test_the_end_of_a_request_has_one_of_a_few_names(status: int, details: str, flag: str | None, outcome: str) -> None:
    assert line(entry("k", status, details, flag)).outcome == outcome


def test_a_client_that_leaves_is_not_blamed_on_the_worker_that_is_reset_for_it() -> None:
    made = entry("k", 200, "downstream_remote_disconnect", "downstream_connection_termination")
    made.common_properties.response_flags.upstream_remote_reset = True
    found = line(made)
    assert found.outcome == "client_gone"
    assert found.flags == ("DC", "UR")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """An access log with a clock to turn."""

    def __init__(self, *, expected: bool = True) -> None:
        self.clock = Clock()
        self.told: list[tuple[Line, Note]] = []
        self.log = AccessLog(
            expected=expected, told=lambda *told: self.told.append(told), log=make_logger("critical"), clock=self.clock
        )

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.log.sweep()


def test_a_line_is_joined_to_its_request_and_its_labels_are_those_that_the_filter_keeps() -> None:
    world = World()
    note = world.log.begin()
    note.tags = CHAT
    world.log.end(note)
    world.log.take(message(entry(note.key, model="a name from outside")))
    world.later(LATE_S + 1)
    assert [(found.tags, found.reported) for _, found in world.told] == [(CHAT, True)]
    assert (world.log.received, world.log.foreign, world.log.lost) == (1, 0, 0)


def test_a_line_that_comes_before_the_filter_has_seen_the_end_is_as_good() -> None:
    world = World()
    note = world.log.begin()
    world.log.take(message(entry(note.key)))
    world.log.end(note)
    world.later(LATE_S + 1)
    assert world.log.lost == 0


def test_a_line_that_does_not_come_is_lost_and_counted_once() -> None:
    world = World()
    notes = [world.log.begin() for _ in range(3)]
    for note in notes[:2]:
        world.log.end(note)
    world.later(LATE_S - 1)
    assert world.log.lost == 0
    world.later(2)
    assert world.log.lost == 2  # the third request is still open
    world.later(LATE_S)
    assert world.log.lost == 2


def test_a_client_that_left_before_envoy_knew_the_name_of_its_request_is_no_loss() -> None:
    world = World()
    for note in [world.log.begin() for _ in range(3)]:
        world.log.end(note)
    gone = entry("", 0, "downstream_remote_disconnect", "downstream_connection_termination")
    world.log.take(message(gone, gone, entry("", 400)))
    world.later(LATE_S + 1)
    assert world.log.lost == 1, "two lines of clients that left are those of two of the three"


def test_such_a_line_does_not_hide_a_loss_much_later() -> None:
    world = World()
    world.log.take(message(entry("", 0, "downstream_remote_disconnect", "downstream_connection_termination")))
    world.later(2 * LATE_S + 1)
    world.log.end(world.log.begin())
    world.later(LATE_S + 1)
    assert world.log.lost == 1


def test_where_no_log_is_configured_nothing_is_missed() -> None:
    world = World(expected=False)
    world.log.end(world.log.begin())
    world.later(LATE_S + 1)
    assert world.log.lost == 0
    assert world.log.status()["state"] == "off"


def test_the_line_of_another_filters_request_keeps_no_name_from_outside() -> None:
    world = World()
    world.log.take(
        message(entry("another-7", model="x" * 100, policy="y", mode="aggregate"), entry("", mode="a mode of theirs"))
    )
    assert [note.tags for _, note in world.told] == [Tags("other", "other", "aggregate"), Tags("other", "other", "none")]
    assert world.log.foreign == 2


def test_no_two_requests_and_no_two_processes_have_the_same_name() -> None:
    keys = [World().log.begin().key for _ in range(2)] + [note.key for world in [World()] for note in [world.log.begin()] * 1]
    world = World()
    keys += [world.log.begin().key for _ in range(100)]
    assert len(set(keys)) == len(keys)


def test_the_state_says_what_is_missing_without_envoy() -> None:
    status = World().log.status()
    assert status["state"] == "awaited"
    assert "TTFT" in status["without_it"]


def test_lost_lines_are_told_once_a_minute_with_their_number() -> None:
    out = io.StringIO()
    world = World()
    world.log._log = make_logger("warning", out)
    for _ in range(90):
        world.log.end(world.log.begin())
        world.later(1)
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [each["event"] for each in said] == ["access_log_lines_lost"] * 2
    assert (said[0]["lines"], said[1]["lines"]) == (1, 60)
