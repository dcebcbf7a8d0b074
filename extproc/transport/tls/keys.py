"""A certificate, its key and the clients' CAs: read, and found to fit each other, before any client sees them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from extproc.tls.files import read_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_BYTES: Final = 1 << 20
"""Of one file."""

ALPN: Final = "h2"
"""What a gRPC client offers in its handshake (RFC 9113 section 3.2)."""


class KeysError(ValueError):
    """They cannot be used; the message says which file and why, and nothing of what is in it."""


class Keys(msgspec.Struct, frozen=True):
    """All of it as PEM."""

    chain_pem: bytes
    """The server's certificate, then those between it and its CA."""
    key_pem: bytes
    client_ca_pem: bytes | None
    """None: clients need no certificate."""
    expires_s: float
    """When the certificate ends, as Unix time."""

    def __repr__(self) -> str:
        return f"Keys(expires_s={self.expires_s})"  # the key is for no log

    def context(self) -> ssl.SSLContext:
        """For one server. Raises KeysError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        # A client could have the server do handshakes without end on one connection.
        made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        made.set_alpn_protocols([ALPN])
        try:
            with _as_file(self.chain_pem) as chain, _as_file(self.key_pem) as key:
                made.load_cert_chain(chain, key, password=_no_password)
            if self.client_ca_pem is not None:
                made.load_verify_locations(cadata=self.client_ca_pem.decode("ascii"))
                made.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, UnicodeDecodeError) as error:
            raise KeysError(f"OpenSSL refuses them: {error}") from None
        return made


def read(cert_file: str, key_file: str, client_ca_file: str | None, *, now: Callable[[], datetime] | None = None) -> Keys:
    """What the files say. Raises KeysError."""
    chain_pem, key_pem = _read(cert_file), _read(key_file)
    certificate = _certificates(cert_file, chain_pem)[0]
    try:
        key = load_pem_private_key(key_pem, None)
    except TypeError:
        raise KeysError(f"{key_file}: the key is encrypted, and nobody is there to give a password") from None
    except ValueError:
        raise KeysError(f"{key_file}: it holds no private key in PEM") from None
    of_certificate, of_key = (
        each.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for each in (certificate, key)
    )
    if of_certificate != of_key:
        raise KeysError(f"{key_file}: it is not the key of the certificate in {cert_file}")
    at = datetime.now(UTC) if now is None else now()
    if at > certificate.not_valid_after_utc:
        raise KeysError(f"{cert_file}: the certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if at < certificate.not_valid_before_utc:
        raise KeysError(
            f"{cert_file}: the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        )
    return Keys(chain_pem, key_pem, read_client_ca(client_ca_file), certificate.not_valid_after_utc.timestamp())


def read_client_ca(path: str | None) -> bytes | None:
    """Certificates of the CAs that clients must come from. Raises KeysError."""
    if path is None:
        return None
    raw = _read(path)
    # What else may stand in such a file is for people.
    return b"".join(each.public_bytes(Encoding.PEM) for each in _certificates(path, raw))


def _read(path: str) -> bytes:
    try:
        return read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror or error}") from None


def _certificates(path: str, raw: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(raw)
    except ValueError:
        raise KeysError(f"{path}: it holds no certificate in PEM") from None


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """OpenSSL takes names of files only; this one is in memory, and nobody else's."""
    descriptor = os.memfd_create("baton-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    return ""
