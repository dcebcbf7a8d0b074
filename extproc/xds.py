"""Endpoints for Envoy as files (EDS over ``path_config_source``). Only what writes those files may live here."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from betterproto2 import Casing
from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse
from envoy_data_plane.google.protobuf import Any


def endpoints_file(directory: Path, cluster: str) -> Path:
    """Where the endpoints of a cluster are written, and where Envoy reads them."""
    return directory / f"{cluster}.json"


def write_endpoints(directory: Path, cluster: str, endpoints: Sequence[str]) -> None:
    """Replace the endpoints (``ip:port`` or ``[v6]:port``) of a cluster, atomically. Raises OSError.

    Envoy notices only a rename into the directory, and reads the file at that moment: it must be complete by then.
    """
    text = discovery_response(cluster, endpoints).to_json(indent=1, casing=Casing.SNAKE) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{cluster}.", suffix=".tmp", dir=directory)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; Envoy may run as another user.
        temporary.chmod(0o644)
        temporary.replace(endpoints_file(directory, cluster))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def discovery_response(cluster: str, endpoints: Sequence[str]) -> DiscoveryResponse:
    """The message Envoy reads. The same endpoints give the same bytes; none at all is valid and means: serve nobody."""
    assignment = ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[LocalityLbEndpoints(lb_endpoints=[_endpoint(text) for text in endpoints])] if endpoints else [],
    )
    version = hashlib.sha256(bytes(assignment)).hexdigest()[:16]
    return DiscoveryResponse(version_info=version, resources=[Any.pack(assignment)])


def _endpoint(text: str) -> LbEndpoint:
    host, _, port = text.rpartition(":")
    address = SocketAddress(address=host.removeprefix("[").removesuffix("]"), port_value=int(port))
    return LbEndpoint(endpoint=Endpoint(address=Address(socket_address=address)))
