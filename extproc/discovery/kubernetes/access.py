"""Where the API server is, and with which credentials: those that a pod is given, or a kubeconfig.

Files are read again when they change: tokens of service accounts are exchanged about once an hour, certificates now and then.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from extproc.discovery.source import SourceError
from workers import yaml_lines

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds token, CA and namespace ("Accessing the Kubernetes API from a Pod")."""

_MAX_FILE_BYTES = 1 << 20


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach an API server. Secrets are never shown: its ``repr`` is its server."""

    server: str
    """``https://host:port``, with a path if it has one."""
    namespace: str
    """Where nobody names another."""
    token: str | None = None
    token_file: Path | None = None
    """Counts more than ``token``."""
    ca_file: Path | None = None
    ca_data: bytes | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    certificate_data: bytes | None = None
    key_data: bytes | None = None
    server_name: str | None = None
    """What its certificate must say; None: the host of ``server``."""
    insecure: bool = False
    """Its certificate is not looked at."""

    def __repr__(self) -> str:
        return f"Access({self.server})"

    def headers(self) -> dict[str, str]:
        """Who we are, for one request. Raises OSError, naming the file."""
        token = self.token if self.token_file is None else _text(self.token_file).strip()
        if not token:
            return {}
        if not token.isascii() or not token.isprintable() or " " in token:
            raise OSError(f"{self.token_file or 'kubeconfig'}: that is no token")
        return {"authorization": f"Bearer {token}"}

    def versions(self) -> tuple[object, ...]:
        """Changes when one of the certificate files does."""
        return tuple(_version(path) for path in (self.ca_file, self.certificate_file, self.key_file))

    def tls(self) -> ssl.SSLContext | bool:
        """For a connection; True where it is plain HTTP. Raises OSError."""
        if not self.server.startswith("https:"):
            return True
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca_file is None else str(self.ca_file),
                cadata=None if self.ca_data is None else self.ca_data.decode("ascii"),
            )
            if self.insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._add_own_certificate(context)
        except (ssl.SSLError, ValueError) as error:
            raise OSError(f"certificates for {self.server} cannot be used: {error}") from error
        return context

    def _add_own_certificate(self, context: ssl.SSLContext) -> None:
        if self.certificate_data is not None and self.key_data is not None:
            # The library reads both from files only. Nobody else can read this one, and it is gone at once.
            with tempfile.NamedTemporaryFile() as file:
                file.write(self.certificate_data + b"\n" + self.key_data)
                file.flush()
                context.load_cert_chain(file.name)
        elif self.certificate_file is not None:
            context.load_cert_chain(self.certificate_file, self.key_file)


def find(
    kubeconfig: str | None,
    context: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Access:
    """The one to use. Raises SourceError, if there is none."""
    given = os.environ if environment is None else environment
    if kubeconfig is not None:
        return from_kubeconfig(Path(kubeconfig), context)
    if given.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(given, service_account)
    if given.get("KUBECONFIG"):
        return from_kubeconfig(Path(given["KUBECONFIG"]), context)
    raise SourceError(
        "workers.kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not set), and there is neither "
        "workers.kubernetes.kubeconfig nor KUBECONFIG"
    )


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """What every pod with a service account is given. Raises SourceError."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    token_file, ca_file = folder / "token", folder / "ca.crt"
    try:
        namespace = _text(folder / "namespace").strip()
        if not _text(token_file).strip():
            raise SourceError(f"workers.kubernetes: {token_file} is empty")
    except OSError as error:
        raise SourceError(
            f"workers.kubernetes: {error}; has the pod automountServiceAccountToken: true and a service account?"
        ) from error
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace or "default",
        token_file=token_file,
        ca_file=ca_file,
    )


def from_kubeconfig(path: Path, context: str | None = None) -> Access:
    """A kubeconfig file (client authentication by token or certificate). Raises SourceError."""
    try:
        text = _text(path)
        tree = yaml_lines.decode(text, dict[str, Any], source=str(path))
    except OSError as error:
        raise SourceError(f"workers.kubernetes: {error}") from error
    except yaml_lines.FaultError:
        # Its message may quote what stands there, which may be a secret.
        raise SourceError(f"workers.kubernetes: {path}: not a kubeconfig in YAML") from None
    try:
        return _access(tree, path, context)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = error if isinstance(error, (_KubeconfigError, KeyError)) else type(error).__name__
        raise SourceError(f"workers.kubernetes: {path}: {what}") from None


class _KubeconfigError(ValueError):
    pass


def _access(tree: Mapping[str, Any], path: Path, wanted: str | None) -> Access:
    name = wanted or tree.get("current-context")
    if not name:
        raise _KubeconfigError("it has no current-context, and workers.kubernetes.context names none")
    context = _entry(tree, "contexts", "context", name)
    cluster = _entry(tree, "clusters", "cluster", context["cluster"])
    user = _entry(tree, "users", "user", context["user"]) if context.get("user") else {}
    for unknown, section in (("exec", user), ("auth-provider", user), ("username", user), ("proxy-url", cluster)):
        if section.get(unknown):
            raise _KubeconfigError(f"`{unknown}` is not supported: a token, a token file or a client certificate is")
    server = str(cluster["server"]).rstrip("/")
    url = urlsplit(server)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query:
        raise _KubeconfigError("`server` is not http://host:port or https://host:port")

    def file(section: Mapping[str, Any], key: str) -> Path | None:
        # Paths are relative to the file in which they stand.
        return path.parent / str(section[key]) if section.get(key) else None

    found = Access(
        server=server,
        namespace=str(context.get("namespace") or "default"),
        token=None if user.get("token") is None else str(user["token"]),
        token_file=file(user, "tokenFile"),
        ca_file=file(cluster, "certificate-authority"),
        ca_data=_data(cluster, "certificate-authority-data"),
        certificate_file=file(user, "client-certificate"),
        key_file=file(user, "client-key"),
        certificate_data=_data(user, "client-certificate-data"),
        key_data=_data(user, "client-key-data"),
        server_name=cluster.get("tls-server-name"),
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
    )
    if (found.certificate_file is None) != (found.key_file is None) or (
        (found.certificate_data is None) != (found.key_data is None)
    ):
        raise _KubeconfigError("client-certificate and client-key go together, as files or as data")
    if url.scheme == "http" and (found.token or found.token_file):
        raise _KubeconfigError("a token over http:// could be read by anybody on the way")
    return found


def _entry(tree: Mapping[str, Any], group: str, kind: str, name: str) -> Mapping[str, Any]:
    for each in tree.get(group) or ():
        if each.get("name") == name:
            return dict(each.get(kind) or {})
    raise _KubeconfigError(f"`{group}` has no {name!r}")


def _data(section: Mapping[str, Any], key: str) -> bytes | None:
    if not section.get(key):
        return None
    try:
        return base64.b64decode(str(section[key]), validate=True)
    except binascii.Error:
        raise _KubeconfigError(f"`{key}` is not base64") from None


def _text(path: Path) -> str:
    """Raises OSError with the name of the file."""
    with path.open("rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise OSError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise OSError(f"{path}: not UTF-8") from None


def _version(path: Path | None) -> object:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
