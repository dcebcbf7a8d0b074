"""What went wrong with a connection, in words that may be shown: no key, no content, no address."""

from __future__ import annotations

import ssl
from typing import Final

import aiohttp

TLS: Final = "tls"

_OF_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate of ours",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate",
    "WRONG_VERSION_NUMBER": "it speaks no TLS",
    "HTTP_REQUEST": "it speaks no TLS",
    "UNEXPECTED_EOF_WHILE_READING": "it ended the TLS connection",
}


def tls_reason(error: BaseException | None) -> str | None:
    """Of an error that has to do with TLS: what it means; None for any other error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # aiohttp's own errors are of these classes by their ancestors, and have nothing of them.
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        if inner is None and isinstance(error, ssl.SSLCertVerificationError):
            return f"TLS: its certificate is not accepted: {error.verify_message}"
        if inner is None and isinstance(error, ssl.SSLError):
            reason = error.reason or type(error).__name__
            return f"TLS: {_OF_ALERTS.get(reason, reason)}"
        error = inner or error.__cause__ or error.__context__
    return None


def described(error: BaseException, *, tls: bool = False) -> str:
    """Of any error of a connection, for a log line and ``/healthz``. ``tls``: the connection was to have it."""
    if tls and isinstance(error, aiohttp.ServerDisconnectedError):
        # TLS 1.3: a server says no to a client's certificate after the client's side of the handshake is over.
        return "TLS: it closed the connection after the handshake: does it want a certificate of ours that it trusts?"
    return tls_reason(error) or f"{type(error).__name__}: {error}"


def kind_of(error: BaseException, *, tls: bool = False) -> str:
    """The same as one of a few words, for a label."""
    if tls_reason(error) is not None or (tls and isinstance(error, aiohttp.ServerDisconnectedError)):
        return TLS
    if isinstance(error, TimeoutError):
        return "timeout"
    return "unreachable"
