"""The keys that hold now: new connections get these, and those that are there keep what they were made with."""

from __future__ import annotations

import ssl

from extproc.config import Tls
from extproc.tls.files import Followed
from extproc.transport.tls import keys as of_files
from extproc.transport.tls import self_signed
from extproc.transport.tls.keys import Keys


class KeyRing:
    """Keys, and another set once the files have changed. What cannot be used changes nothing."""

    def __init__(self, settings: Tls, *, from_files: bool) -> None:
        """``from_files``: the certificate is one of files; else it is made here. Raises KeysError."""
        self._settings = settings
        self._made = None if from_files else self_signed.make()
        self.handshake_timeout_s = settings.handshake_timeout_s
        self.load()

    @property
    def wants_client_certificates(self) -> bool:
        """Never changes."""
        return self._settings.client_ca_file is not None

    def load(self) -> None:
        """Read the files, and use what they say from the next connection on. Raises KeysError."""
        found = self._read()
        context = found.context()
        self.keys: Keys = found
        self.context: ssl.SSLContext = context

    def _read(self) -> Keys:
        settings, made = self._settings, self._made
        if made is not None:
            ca_pem = of_files.read_client_ca(settings.client_ca_file)
            return Keys(made.chain_pem, made.key_pem, ca_pem, made.expires_s)
        assert settings.cert_file is not None and settings.key_file is not None
        return of_files.read(settings.cert_file, settings.key_file, settings.client_ca_file)

    def followed(self) -> Followed:
        """Its files, for whoever looks at them."""
        settings = self._settings
        paths = [each for each in (settings.cert_file, settings.key_file, settings.client_ca_file) if each is not None]
        return Followed("tls", paths, self.load, secret=[] if settings.key_file is None else [settings.key_file])
