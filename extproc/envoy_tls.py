"""TLS from Envoy to the workers and to the filter, as Envoy's messages.

Certificates stand in files of their own. Envoy reads them again only if they come as secrets over SDS, so there is a small SDS
file for each in `envoy.secrets_dir`; it says where the certificate is, and never changes. Envoy notices what is *renamed* into
the certificate's directory, a symbolic link that is switched there (as Kubernetes does it) included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as sockets
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google import protobuf

from extproc.config import Address, Config, ConfigError
from extproc.tls.settings import ClientTls

_TYPE: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

WORKERS: Final = "workers"
EXTPROC: Final = "extproc"
"""To whom: what names of secrets begin with."""


def to_workers(config: Config) -> core.TransportSocket | None:
    """For clusters of workers; None: plain HTTP. Raises ConfigError."""
    tls = config.workers.tls
    return None if tls is None else _socket(WORKERS, "workers.tls", tls, config.envoy.secrets_dir)


def to_filter(config: Config, listen: Address) -> core.TransportSocket | None:
    """For clusters of the filter's gRPC servers; None: plaintext, as ever on a socket that both share. Raises ConfigError."""
    if config.tls_mode == "none" or listen.path:
        return None
    tls = config.envoy.extproc_tls
    if tls is None:
        if config.tls_mode == "files":
            raise ConfigError(
                "envoy.extproc_tls: with tls.mode: files, Envoy must be told who signs the filter's certificate and for which "
                "name: ca_file and server_name (or insecure_skip_verify: true, for tests)"
            )
        if config.tls.client_ca_file is not None:
            raise ConfigError("envoy.extproc_tls: tls.client_ca_file wants a certificate of Envoy: cert_file and key_file")
        tls = ClientTls(insecure_skip_verify=True)
    elif config.tls.client_ca_file is not None and tls.cert_file is None:
        raise ConfigError("envoy.extproc_tls.cert_file: tls.client_ca_file wants a certificate of Envoy")
    return _socket(EXTPROC, "envoy.extproc_tls", tls, config.envoy.secrets_dir, alpn=["h2"])


def write_secrets(config: Config) -> list[Path]:
    """Write the SDS files that the configuration needs; which ones. Raises OSError."""
    written = []
    for path, text in sds_files(config).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def sds_files(config: Config) -> dict[Path, str]:
    """What has to stand in `envoy.secrets_dir`."""
    found: dict[Path, str] = {}
    for whom, tls in ((WORKERS, config.workers.tls), (EXTPROC, config.envoy.extproc_tls)):
        if tls is None or (whom == EXTPROC and config.tls_mode == "none") or config.envoy.secrets_dir is None:
            continue
        directory = Path(config.envoy.secrets_dir)
        if tls.ca_file is not None:
            trusted = {"trusted_ca": _file(tls.ca_file), "watched_directory": _watched(tls.ca_file)}
            found[_sds_path(directory, whom, "ca")] = _sds_file(f"{whom}_ca", {"validation_context": trusted})
        if tls.cert_file is not None and tls.key_file is not None:
            own = {
                "certificate_chain": _file(tls.cert_file),
                "private_key": _file(tls.key_file),
                "watched_directory": _watched(tls.cert_file),
            }
            found[_sds_path(directory, whom, "cert")] = _sds_file(f"{whom}_cert", {"tls_certificate": own})
    return found


def _socket(
    whom: str, field: str, tls: ClientTls, secrets_dir: str | None, *, alpn: Sequence[str] = ()
) -> core.TransportSocket:
    common = sockets.CommonTlsContext(
        tls_params=sockets.TlsParameters(tls_minimum_protocol_version=sockets.TlsParametersTlsProtocol.TLSv1_2),
        alpn_protocols=list(alpn),
    )
    if tls.ca_file is not None or tls.cert_file is not None:
        if secrets_dir is None:
            raise ConfigError(f"envoy.secrets_dir: {field} has certificates in files; where shall Envoy find which ones?")
        directory = Path(secrets_dir)
        if tls.ca_file is not None:
            assert tls.server_name is not None
            name = sockets.SubjectAltNameMatcher(
                san_type=sockets.SubjectAltNameMatcherSanType.DNS, matcher=matcher.StringMatcher(exact=tls.server_name)
            )
            common.combined_validation_context = sockets.CommonTlsContextCombinedCertificateValidationContext(
                default_validation_context=sockets.CertificateValidationContext(match_typed_subject_alt_names=[name]),
                validation_context_sds_secret_config=_secret(directory, whom, "ca"),
            )
        if tls.cert_file is not None and tls.key_file is not None:
            if Path(tls.cert_file).parent != Path(tls.key_file).parent:
                raise ConfigError(f"{field}.key_file: in another directory than cert_file; Envoy watches one for changes")
            common.tls_certificate_sds_secret_configs = [_secret(directory, whom, "cert")]
    context = sockets.UpstreamTlsContext(common_tls_context=common, sni=tls.server_name or "")
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=protobuf.Any.pack(context))


def _secret(directory: Path, whom: str, what: str) -> sockets.SdsSecretConfig:
    source = core.PathConfigSource(
        path=str(_sds_path(directory, whom, what)), watched_directory=core.WatchedDirectory(path=str(directory))
    )
    return sockets.SdsSecretConfig(
        name=f"{whom}_{what}",
        sds_config=core.ConfigSource(resource_api_version=core.ApiVersion.V3, path_config_source=source),
    )


def _sds_path(directory: Path, whom: str, what: str) -> Path:
    return directory / f"{whom}_{what}.json"


def _sds_file(name: str, secret: dict[str, Any]) -> str:
    return json.dumps({"resources": [{"@type": _TYPE, "name": name, **secret}]}, indent=2) + "\n"


def _file(path: str) -> dict[str, str]:
    return {"filename": path}


def _watched(path: str) -> dict[str, str]:
    return {"path": str(Path(path).parent)}
