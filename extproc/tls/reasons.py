"""What went wrong with a connection, in words that may be shown: no key, no content, no address."""

from __future__ import annotations

import ssl
from typing import Final

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
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"TLS: its certificate is not accepted: {error.verify_message}"
        if isinstance(error, ssl.SSLError):
            reason = error.reason or type(error).__name__
            return f"TLS: {_OF_ALERTS.get(reason, reason)}"
        inner = getattr(error, "certificate_error", None)
        error = inner or error.__cause__ or error.__context__
    return None


def described(error: BaseException) -> str:
    """Of any error of a connection, for a log line and ``/healthz``."""
    return tls_reason(error) or f"{type(error).__name__}: {error}"


def kind_of(error: BaseException) -> str:
    """The same as one of a few words, for a label."""
    if tls_reason(error) is not None:
        return TLS
    if isinstance(error, TimeoutError):
        return "timeout"
    return "unreachable"
