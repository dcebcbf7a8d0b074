"""How workers are reached, by everything here that speaks to one: plain HTTP, or HTTPS with certificates that may change."""

from __future__ import annotations

import ssl
from typing import Any

from extproc.tls.files import Followed
from extproc.tls.pem import present, trust
from extproc.tls.settings import ClientTls


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """A context for new connections, from the files as they are now. Raises OSError that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        assert tls.ca_file is not None
        trust(context, tls.ca_file)
    if tls.cert_file is not None:
        present(context, tls.cert_file, tls.key_file)
    return context


class WorkerLink:
    """For all calls to workers. Plain HTTP unless it is given TLS settings."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """Raises OSError where the files cannot be used."""
        self._tls = tls
        self.context: ssl.SSLContext | None = None
        """For new connections; another one after the files have changed. None: plain HTTP."""
        self.server_name: str | None = None if tls is None else tls.server_name
        self.followed: list[Followed] = []
        """Its files."""
        self._how: dict[str, Any] = {"allow_redirects": False}
        if tls is not None:
            self._follow(tls)
            self._load(tls)

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self._tls is None else "https"

    @property
    def how(self) -> dict[str, Any]:
        """Arguments for a request with aiohttp. A redirect is never followed: it could lead anywhere."""
        return self._how

    def url(self, worker: str, path: str) -> str:
        """``worker`` is ``ip:port``."""
        return f"{self.scheme}://{worker}{path}"

    def _follow(self, tls: ClientTls) -> None:
        paths = [path for path in (tls.ca_file, tls.cert_file, tls.key_file) if path is not None]
        secret = [] if tls.key_file is None else [tls.key_file]
        self.followed = [Followed("workers.tls", paths, lambda: self._load(tls), secret=secret)]

    def _load(self, tls: ClientTls) -> None:
        self.context = client_context(tls)
        # Without a name to look for, aiohttp would send the address by SNI.
        self._how = {"allow_redirects": False, "ssl": self.context, "server_hostname": tls.server_name}


PLAIN = WorkerLink()
"""To workers without TLS."""
