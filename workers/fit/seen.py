"""What NIXL will see of a worker, worked out from its description."""

from __future__ import annotations

from typing import Any

from workers.spec import WorkerSpec
from workers.vllm import transfer_config

NO_HMA = frozenset(("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1"))
"""Connectors that vLLM turns the hybrid KV cache manager off for."""


def connectors(spec: WorkerSpec) -> list[str]:
    """The connectors that are in use: those inside a MultiConnector, or the one."""
    config = transfer_config(spec)
    extra: Any = config.get("kv_connector_extra_config") or {}
    children = extra.get("connectors") if config.get("kv_connector") == "MultiConnector" else None
    return [str(child.get("kv_connector")) for child in children] if children else [str(config.get("kv_connector"))]


def hma(spec: WorkerSpec) -> bool:
    """Whether the hybrid KV cache manager will be on."""
    if spec.hybrid_kv_cache_manager is not None:
        return spec.hybrid_kv_cache_manager
    return not NO_HMA.intersection(connectors(spec))


def mode(spec: WorkerSpec) -> str:
    """Who moves the blocks: the decode worker (``pull``), the prefill worker (``push``), or ``none`` without NIXL."""
    names = connectors(spec)
    if "NixlPushConnector" in names:
        return "push"
    return "pull" if {"NixlConnector", "NixlPullConnector"}.intersection(names) else "none"


def reads_back(spec: WorkerSpec) -> bool:
    """Whether its NIXL connector has ``bidirectional_kv_xfer``."""
    config = transfer_config(spec)
    extra: Any = config.get("kv_connector_extra_config") or {}
    children = extra.get("connectors") if config.get("kv_connector") == "MultiConnector" else None
    known = [(each.get("kv_connector_extra_config") or {}) for each in children] if children else [extra]
    return any(bool(each.get("bidirectional_kv_xfer")) for each in known)


def hashed_draft(spec: WorkerSpec) -> dict[str, Any] | None:
    """What of the speculative configuration is compared: that of methods with hidden states of the model."""
    draft = spec.speculative
    method = str((draft or {}).get("method", ""))
    if draft is None or not (method.startswith("eagle") or "mtp" in method or method in ("dflash", "dspark")):
        return None
    return {key: draft.get(key) for key in ("method", "model", "revision")}


def option(spec: WorkerSpec, *names: str) -> int:
    """The value of an integer option among the extra arguments; 1 where it is not given."""
    value = 1
    for index, argument in enumerate(spec.extra_args):
        flag, equals, inline = argument.partition("=")
        if flag in names:
            given = inline if equals else next(iter(spec.extra_args[index + 1 :]), "")
            value = int(given) if given.isdecimal() else value
    return value
