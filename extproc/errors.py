"""What the client is told when a request cannot be served: one table of codes, and the bodies in either API's shape.

Only data and its rendering live here; who raises what is the business of the module that finds the fault.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Kind(NamedTuple):
    """HTTP status and OpenAI ``type`` of a code."""

    status: int
    type: str
    meaning: str


_INVALID = "invalid_request_error"
_SERVER = "server_error"

CODES: dict[str, Kind] = {
    "empty_body": Kind(400, _INVALID, "the endpoint needs a JSON body and got none"),
    "invalid_json": Kind(400, _INVALID, "the body is not JSON in UTF-8, or nested too deeply"),
    "not_an_object": Kind(400, _INVALID, "the body is JSON but not an object"),
    "bad_timeout": Kind(400, _INVALID, "a timeout header is not a positive number of milliseconds"),
    "bad_override": Kind(400, _INVALID, "an `x-baton-…` header that the policy allows has a value that it cannot have"),
    "model_missing": Kind(400, _INVALID, "the body names no model"),
    "model_not_found": Kind(404, _INVALID, "no live worker serves the model"),
    "duplicate_key": Kind(400, _INVALID, "a key stands twice at the top level of the body"),
    "field_not_allowed": Kind(400, _INVALID, "a form has the field `vllm_xargs`, which could carry KV transfer parameters"),
    "not_found": Kind(404, _INVALID, "an endpoint that controls the engine: never reachable through Baton"),
    "unsupported_media_type": Kind(415, _INVALID, "the endpoint takes application/json only"),
    "request_too_large": Kind(413, _INVALID, "the body is over limits.max_body_bytes"),
    "too_many_requests": Kind(
        429, "rate_limit_error", "limits.max_streams, limits.max_held_bytes or prefill.max_concurrent is reached"
    ),
    "queue_full": Kind(429, "rate_limit_error", "routing.queue_requests or routing.queue_bytes is reached"),
    "queue_timeout": Kind(429, "rate_limit_error", "no prefill worker had room within routing.queue_wait_s, or the policy's"),
    "slo_unreachable": Kind(429, "rate_limit_error", "the TTFT SLO cannot be met, and the policy says `when_late: reject`"),
    "policy_limit": Kind(429, "rate_limit_error", "limits.max_in_flight of the policy is reached"),
    "prefill_failed": Kind(502, _SERVER, "the prefill worker answered with an error of its own"),
    "prefill_unreachable": Kind(502, _SERVER, "no connection to the prefill worker, or it broke"),
    "handoff_invalid": Kind(502, _SERVER, "the prefill worker's reply holds no usable kv_transfer_params"),
    "handoff_stale": Kind(503, _SERVER, "every handoff was too old to be used when it could be read"),
    "no_prefill_worker": Kind(503, _SERVER, "no prefill worker is live"),
    "no_decode_worker": Kind(503, _SERVER, "no decode worker is live"),
    "no_subset_worker": Kind(503, _SERVER, "none of the decode workers that the gateway allows can take the request"),
    "warming": Kind(503, _SERVER, "no pair of workers was warm within the request's deadline"),
    "prefill_timeout": Kind(504, _SERVER, "no prefill was done within the deadline"),
    "internal_error": Kind(500, _SERVER, "a fault of Baton itself; the log has the request id"),
}


# Anthropic's names for the kinds of errors, by status; what is missing is an api_error.
_ANTHROPIC_TYPES = {
    400: _INVALID,
    404: "not_found_error",
    413: "request_too_large",
    415: _INVALID,
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request ends here, with this answer. ``code`` is a key of :data:`CODES`."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """``retry_after_s`` goes into the answer's ``retry-after``, rounded up."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.message = message
        self.param = param
        self.kind = CODES[code]

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.kind.status

    def openai_body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        error = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """``{"type": "error", "error": {"type", "message"}}``, with our code beside them."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}})


class RelayedError(Exception):
    """A worker's own 4xx: the client gets it as it is, status, content type and body."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"worker answered {status}")
        self.status = status
        self.content_type = content_type
        self.body = body
