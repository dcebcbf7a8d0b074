"""What the configuration says of a TLS client. Pure: no I/O."""

from __future__ import annotations

import re

import msgspec

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*")


class ClientTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS towards a server: whom to trust, by which name, and what to show of ourselves. Files are PEM, and are read again when
    they change."""

    ca_file: str | None = None
    """Certificates of the authorities that the server's certificate must come from. No other is trusted, none of the system's
    either."""
    server_name: str | None = None
    """The DNS name that the server's certificate must hold (subjectAltName), and that is asked for by SNI. Workers are reached
    by address, so all of them have this one name in their certificates, or a wildcard for it."""
    cert_file: str | None = None
    """Our own certificate with its chain, for servers that want one (mTLS). Goes with `key_file`."""
    key_file: str | None = None
    """Its key, without a password. Readable by this process only."""
    insecure_skip_verify: bool = False
    """Encrypt, but take any certificate: whoever is on the way can read and change everything, prompts included. For tests."""


def faults(tls: ClientTls) -> str | None:
    """Why these settings cannot be meant, with the field named; None: they can."""
    if (tls.cert_file is None) != (tls.key_file is None):
        return "cert_file: goes with key_file"
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(tls, name) == "":
            return f"{name}: an empty path"
    if tls.server_name is not None and _NAME.fullmatch(tls.server_name) is None:
        return f"server_name: {tls.server_name!r} is no DNS name"
    if tls.insecure_skip_verify:
        return "insecure_skip_verify: contradicts ca_file" if tls.ca_file is not None else None
    if tls.ca_file is None:
        return "ca_file: who signs the certificates of the servers? (or insecure_skip_verify: true, for tests)"
    if tls.server_name is None:
        return "server_name: which name do the servers' certificates hold?"
    return None
