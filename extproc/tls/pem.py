"""Certificates in files, into a TLS context: whom to trust, and who we are."""

from __future__ import annotations

import ssl


def trust(context: ssl.SSLContext, ca_file: str) -> None:
    """Only what these authorities have signed. Raises OSError with the file and why; nothing of what is in it."""
    try:
        context.load_verify_locations(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise OSError(f"{ca_file}: no certificates to trust: {_why(error)}") from None
    if not context.cert_store_stats()["x509"]:
        raise OSError(f"{ca_file}: no certificates to trust")


def present(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    """What a peer is shown of us. ``key_file`` None: the key is in the same file. Raises OSError as :func:`trust`."""
    try:
        # A password would be asked for on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:
        raise OSError(f"{cert_file}, {key_file}: no certificate with its key: {_why(error)}") from None


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or type(error).__name__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
