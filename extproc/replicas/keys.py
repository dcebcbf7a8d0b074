"""The certificates and the secret of replicas, from files that may change."""

from __future__ import annotations

import ssl
from typing import Any, Final

from extproc.replicas.handshake import RefusedError
from extproc.replicas.settings import ReplicaSettings, ReplicaTls
from extproc.tls.files import Followed, read_bounded
from extproc.tls.pem import present, trust

LEAST_SECRET_BYTES: Final = 16
_MOST_SECRET_BYTES: Final = 4_096


class ReplicaKeys:
    """As the files have them now."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Raises OSError where a file cannot be used."""
        self._tls = settings.tls
        self._secret_file = settings.secret_file
        self._names = frozenset(settings.tls.names) if settings.tls is not None else frozenset()
        self.secret: bytes | None = None
        """None: certificates alone must do."""
        self.server: ssl.SSLContext | None = None
        self.client: ssl.SSLContext | None = None
        self.followed: list[Followed] = []
        """Their files."""
        if (tls := settings.tls) is not None:
            paths = [tls.ca_file, tls.cert_file, tls.key_file]
            self.followed.append(Followed("replicas.tls", paths, lambda: self._load_tls(tls), secret=[tls.key_file]))
            self._load_tls(tls)
        if (path := settings.secret_file) is not None:
            self.followed.append(Followed("replicas.secret_file", [path], lambda: self._load_secret(path), secret=[path]))
            self._load_secret(path)

    def check(self, connection: ssl.SSLObject | None) -> None:
        """Whether the certificate of the other one is a replica's. Raises RefusedError."""
        if self._tls is None:
            return
        shown: dict[str, Any] | None = None if connection is None else connection.getpeercert()
        if not shown:
            raise RefusedError("certificate", "it shows no certificate")
        names = {value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "URI")}
        if self._names and not self._names & names:
            raise RefusedError("certificate", f"its certificate is for {', '.join(sorted(names))[:200] or 'nobody'}")

    def _load_tls(self, tls: ReplicaTls) -> None:
        self.server, self.client = (_context(tls, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))

    def _load_secret(self, path: str) -> None:
        found = read_bounded(path, _MOST_SECRET_BYTES).strip()
        if len(found) < LEAST_SECRET_BYTES:
            raise OSError(f"{path}: a secret has {LEAST_SECRET_BYTES} bytes at least")
        self.secret = found


def _context(tls: ReplicaTls, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers are reached by address: which of their names count, the settings say, and ReplicaKeys.check looks.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    trust(context, tls.ca_file)
    present(context, tls.cert_file, tls.key_file)
    return context
