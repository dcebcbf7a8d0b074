"""Endpoints as Envoy's messages, and as the files it reads them from (EDS over ``path_config_source``)."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from betterproto2 import encode_varint
from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)

from extproc.routing.partition import DEFAULT_POOL

ENDPOINTS_TYPE: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

_ENDPOINTS_TAG = b"\x12"
"""Of ClusterLoadAssignment.endpoints (field 2, length-delimited)."""


class Assignment(msgspec.Struct, frozen=True):
    """The endpoints of one cluster, as a resource of Envoy's discovery protocol."""

    cluster: str
    version: str
    """The same endpoints have the same version."""
    encoded: bytes
    """A ClusterLoadAssignment."""


def assignment(cluster: str, endpoints: Sequence[str]) -> Assignment:
    """The endpoints (``ip:port`` or ``[v6]:port``) of a cluster; none at all is valid and means: serve nobody.

    An endpoint that was seen before costs a microsecond, a new one a third of a millisecond.
    """
    encoded = bytes(ClusterLoadAssignment(cluster_name=cluster))
    if endpoints:
        # Protobuf: the encodings of two messages, one after the other, are the message with the lists of both.
        locality = b"".join(map(_encoded_endpoint, endpoints))
        encoded += _ENDPOINTS_TAG + encode_varint(len(locality)) + locality
    return Assignment(cluster, hashlib.sha256(encoded).hexdigest()[:16], encoded)


def cluster_of(role: str, pool: str) -> str:
    """Name of the cluster with the workers of one role of a pool."""
    return role if pool == DEFAULT_POOL else f"{role}-{pool}"


def endpoints_file(directory: Path, cluster: str) -> Path:
    """Where the endpoints of a cluster are written, and where Envoy reads them."""
    return directory / f"{cluster}.json"


def write_endpoints(directory: Path, cluster: str, endpoints: Sequence[str]) -> None:
    """Replace the endpoints (``ip:port`` or ``[v6]:port``) of a cluster, atomically. Raises OSError.

    Envoy notices only a rename into the directory, and reads the file at that moment: it must be complete by then.
    """
    text = endpoints_json(cluster, endpoints)
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{cluster}.", suffix=".tmp", dir=directory)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; Envoy may run as another user.
        temporary.chmod(0o644)
        temporary.replace(endpoints_file(directory, cluster))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def endpoints_json(cluster: str, endpoints: Sequence[str]) -> bytes:
    """A DiscoveryResponse as JSON, one endpoint a line. The same endpoints give the same bytes.

    Written down here and not by ``to_json`` of the typed message, which takes a millisecond an endpoint.
    """
    head = {"version_info": assignment(cluster, endpoints).version}
    locality = {"lb_endpoints": [{"endpoint": {"address": {"socket_address": _socket(text)}}} for text in endpoints]}
    resource = {"@type": ENDPOINTS_TYPE, "cluster_name": cluster, **({"endpoints": [locality]} if endpoints else {})}
    text = msgspec.json.encode({**head, "resources": [resource]})
    return text.replace(b'{"endpoint":', b'\n{"endpoint":') + b"\n"


def _socket(text: str) -> dict[str, str | int]:
    host, _, port = text.rpartition(":")
    return {"address": host.removeprefix("[").removesuffix("]"), "port_value": int(port)}


@functools.lru_cache(maxsize=8192)
def _encoded_endpoint(text: str) -> bytes:
    """A LocalityLbEndpoints with this one endpoint."""
    only = LbEndpoint(endpoint=Endpoint(address=Address(socket_address=SocketAddress.from_dict(_socket(text)))))
    return bytes(LocalityLbEndpoints(lb_endpoints=[only]))
