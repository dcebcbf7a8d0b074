"""Envoy's access log messages: one request each, when it is over. Plain Python out; a line costs some ten microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from envoy.service.accesslog.v3 import als_pb2

from extproc.headers import FILTER_REPLY_DETAILS, TAGS_NAMESPACE, USAGE_NAMESPACE

SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"

TTFT_TAG: Final = "ttft_us"
GENERATION_TAG: Final = "generation_us"
"""Names under which Envoy is asked for its own times, in microseconds."""

STREAM_TYPE: Final = "text/event-stream"

ID_KEY: Final = "id"
"""In the metadata: by which the filter knows the request again."""
MODE_KEY: Final = "mode"
"""In the metadata: how it is served."""

Outcome = Literal[
    "ok",
    "client_gone",
    "upstream_reset",
    "timeout",
    "no_worker",
    "refused",
    "client_error",
    "worker_error",
    "gateway_error",
    "cut",
]
"""How a request ended, in Envoy's eyes.

``ok``: an answer came whole. ``client_gone``: the client closed before. ``upstream_reset``: the worker broke the answer off, or
closed the connection before one. ``timeout``: no answer, or a silence that was too long. ``no_worker``: none could be reached.
``refused``: the filter answered by itself. ``client_error``, ``worker_error``: the worker's answer, 4xx or 5xx.
``gateway_error``: any other error of Envoy's own. ``cut``: an answer broke off, and nobody says by whom (only where the filter
tells by itself, :mod:`extproc.observe.own_line`)."""

_ID_CHARS = 128

# Envoy's flags (short names as in its text log), the ones that say most first.
_FLAGS: tuple[tuple[str, str, Outcome], ...] = (
    ("downstream_connection_termination", "DC", "client_gone"),
    ("downstream_remote_reset", "DR", "client_gone"),
    ("downstream_protocol_error", "DPE", "client_gone"),
    ("stream_idle_timeout", "SI", "timeout"),
    ("upstream_request_timeout", "UT", "timeout"),
    ("duration_timeout", "DT", "timeout"),
    ("upstream_max_stream_duration_reached", "UMSDR", "timeout"),
    ("no_healthy_upstream", "UH", "no_worker"),
    ("upstream_connection_failure", "UF", "no_worker"),
    ("upstream_overflow", "UO", "no_worker"),
    ("no_cluster_found", "NC", "no_worker"),
    ("upstream_remote_reset", "UR", "upstream_reset"),
    ("upstream_connection_termination", "UC", "upstream_reset"),
    ("upstream_protocol_error", "UPE", "upstream_reset"),
    ("local_reset", "LR", "upstream_reset"),
    ("overload_manager", "OM", "gateway_error"),
    ("no_route_found", "NR", "gateway_error"),
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is over."""

    key: str
    """The filter's own name of the request; empty: no filter has seen it."""
    request_id: str
    mode: str
    """How it was served, as the filter noted it for Envoy; empty: no filter did."""
    status: int
    """That the client got; 0: none."""
    flags: tuple[str, ...]
    """Envoy's short names of what went wrong."""
    outcome: Outcome
    details: str
    """Envoy's word for who answered, and how."""
    upstream: str
    """``ip:port`` of the worker; empty: none was reached."""
    streamed: bool
    """The answer was a stream of events."""
    duration_s: float
    """From the first byte of the request to the last one of the answer."""
    ttft_s: float | None
    """From the first byte of the request to the first one of the answer's body. None: there was none."""
    generation_s: float | None
    """From there to the last byte from the worker. None: it did not come to its end."""
    prompt_tokens: int | None
    """As the answer states it; None: it does not."""
    completion_tokens: int | None
    """Likewise."""
    received_bytes: int
    """Body of the request, as the client sent it."""
    sent_bytes: int
    """Body of the answer."""

    @property
    def mean_itl_s(self) -> float | None:
        """From token to token, on average; None where that is not known."""
        if self.generation_s is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return self.generation_s / (self.completion_tokens - 1)


def lines(message: als_pb2.StreamAccessLogsMessage) -> Iterator[Line]:
    """The requests of one message."""
    for entry in message.http_logs.log_entry:
        yield _line(entry)


def _line(entry: Any) -> Line:
    # Each attribute of a message is a call into its library, so nothing is read twice, or without need.
    common, request, response = entry.common_properties, entry.request, entry.response
    metadata, times, duration = common.metadata.filter_metadata, common.custom_tags, common.duration
    tags = metadata[TAGS_NAMESPACE].fields if TAGS_NAMESPACE in metadata else {}
    usage = metadata[USAGE_NAMESPACE].fields if USAGE_NAMESPACE in metadata else {}
    status = response.response_code.value
    details = response.response_code_details
    found: list[tuple[str, str, Outcome]] = []
    if common.HasField("response_flags") and (flags := common.response_flags).ByteSize():  # mostly nothing went wrong
        found = [row for row in _FLAGS if getattr(flags, row[0])]
    return Line(
        key=_text(tags, ID_KEY),
        request_id=request.request_id[:_ID_CHARS],  # a client may have chosen it
        mode=_text(tags, MODE_KEY),
        status=status,
        flags=tuple([row[1] for row in found]) if found else (),
        outcome=found[0][2] if found else _outcome(status, details),
        details=details,
        upstream=_address(common.upstream_remote_address),
        streamed=response.response_headers.get("content-type", "").startswith(STREAM_TYPE),
        duration_s=duration.seconds + duration.nanos / 1e9,
        ttft_s=_microseconds(times.get(TTFT_TAG, "")),
        generation_s=_microseconds(times.get(GENERATION_TAG, "")),
        prompt_tokens=_count(usage, "prompt_tokens") if usage else None,
        completion_tokens=_count(usage, "completion_tokens") if usage else None,
        received_bytes=request.request_body_bytes,
        sent_bytes=response.response_body_bytes,
    )


def _outcome(status: int, details: str) -> Outcome:
    """Of an answer that Envoy sees nothing wrong with."""
    if details.startswith(FILTER_REPLY_DETAILS):
        return "ok" if status < 400 else "refused"
    if status == 0:
        return "client_gone"
    if status < 400:
        return "ok"
    if details != "via_upstream":
        return "gateway_error" if status >= 500 else "client_error"
    return "worker_error" if status >= 500 else "client_error"


def _text(fields: Any, key: str) -> str:
    value = fields.get(key)
    return value.string_value if value is not None else ""


def _address(address: Any) -> str:
    socket = address.socket_address
    return f"{socket.address}:{socket.port_value}" if socket.address else ""


def _microseconds(text: str) -> float | None:
    return int(text) / 1e6 if text.isascii() and text.isdigit() else None


def _count(fields: Any, key: str) -> int | None:
    value = fields.get(key)
    return int(value.number_value) if value is not None else None
