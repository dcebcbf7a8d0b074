"""A certificate that nobody has signed, for peers that encrypt and do not verify, as gateways do with endpoint pickers."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.transport.tls.keys import Keys

_VALID = timedelta(days=3650)
"""Longer than any process runs: whoever wants certificates that end brings files."""
_CLOCKS_DIFFER = timedelta(hours=1)


def make(client_ca_pem: bytes | None = None) -> Keys:
    """A new key and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])
    now = datetime.now(UTC)
    names: list[x509.GeneralName] = [x509.DNSName(each) for each in dict.fromkeys(("localhost", *_own_name()))]
    names.append(x509.IPAddress(ip_address("127.0.0.1")))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Keys(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        client_ca_pem,
        certificate.not_valid_after_utc.timestamp(),
    )


def _own_name() -> list[str]:
    """Of this machine, where it is one that a certificate can hold."""
    name = socket.gethostname()
    return [name] if name and name.isascii() and len(name) < 64 else []
