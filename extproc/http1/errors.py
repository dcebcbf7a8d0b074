"""Why a call has no answer. Only the kinds live here."""

from __future__ import annotations


class HttpError(Exception):
    """There is no answer; the message says why, in words that may be shown."""


class RefusedError(HttpError):
    """The request could not be written as it is, so nothing of it was. A fault of the caller."""


class ConnectError(HttpError):
    """There is no connection, and the peer has seen nothing of the request."""


class BrokenError(HttpError):
    """The connection ended before the answer was whole. The peer may have seen all of the request."""


class MalformedError(HttpError):
    """What came is no answer that a client may trust."""


class TooLargeError(HttpError):
    """The body of the answer is larger than it may be."""
