"""Which connector the configuration asks for."""

from __future__ import annotations

from extproc.config import Handoff as Settings
from extproc.handoff import Connector
from extproc.handoff.llmd_sidecar import LlmdSidecar
from extproc.handoff.lmcache import LmcachePd
from extproc.handoff.nixl_pull import NixlPull
from extproc.handoff.nixl_push import NixlPush


def connector(settings: Settings) -> Connector:
    """The connector, with what it must know of the workers."""
    match settings.connector:
        case "nixl_pull":
            return NixlPull(settings.remote_hosts)
        case "nixl_push":
            return NixlPush(settings.nixl_push)
        case "lmcache":
            return LmcachePd(settings.lmcache)
        case "llmd_sidecar":
            return LlmdSidecar()
