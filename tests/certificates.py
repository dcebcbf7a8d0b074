"""Certificates for tests: an authority, and what it signs. Everything is on disk, as PEM."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path

    def server(self, clients: Path | None = None) -> ssl.SSLContext:
        """For a server. ``clients``: those must have a certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=clients)
        return context


class Authority:
    """Signs certificates; its own is ``ca``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"{name} of a test")
        self.ca = directory / f"{name}.pem"
        own = (
            _builder(self._name, self._name, self._key.public_key(), days=10)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, sans: Sequence[str] = (), *, days: int = 5, replace: Pair | None = None) -> Pair:
        """A certificate for ``name`` (its common name) and ``sans`` (DNS names, IP addresses), for servers and clients.

        ``days`` below 0: it has expired. ``replace``: it takes the place of these files, by renames.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.IPAddress(ip_address(s)) if _is_ip(s) else x509.DNSName(s) for s in sans or (name,)]
        made = (
            _builder(_named(name), self._name, key.public_key(), days=days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = replace or Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        for path, content, mode in (
            (pair.key, private, 0o600),
            (pair.cert, made.public_bytes(serialization.Encoding.PEM), 0o644),
        ):
            fresh = path.with_suffix(f"{path.suffix}.new")
            fresh.write_bytes(content)
            fresh.chmod(mode)
            fresh.replace(path)
        return pair


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    start = now - timedelta(days=max(1, 1 - days))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
