"""The section `kv_events:` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec


class EventPorts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the workers of a role publish."""

    port: int
    """Port of the publisher (`--kv-events-config`, `endpoint`) of data-parallel rank 0; rank r has `port + r`."""
    replay_port: int | None = None
    """Port where missed batches can be asked for (`replay_endpoint`), likewise. Null: nowhere, so a lost batch costs all that
    is known of the worker."""


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Follow what workers say that their KV caches hold. See [KV events](kv-events.md)."""

    enabled: bool = False
    """Subscribe to the workers' events. Needs pyzmq (`pip install 'kv-baton[kv-events]'`), and workers with
    `--kv-events-config`."""
    find: Literal["ask", "ports"] = "ask"
    """How a worker's publishers are found. `ask`: its `/kv_event_sources` tells, which recent versions of vLLM have. `ports`:
    `ports` does. A label `kv-events` of a worker, `5557` or `5557-5657` (publisher and replay), comes before both."""
    ports: dict[str, EventPorts] = {}
    """With `find: ports`: by role, `prefill` and `decode`. A worker of both roles has those of `decode`. A role that is missing
    publishes nothing."""
    ranks: int = 1
    """With `find: ports` or the label: data-parallel ranks behind one address, each with a publisher of its own."""
    topic: str = ""
    """Only topics that begin so. Workers that are asked tell theirs."""
    unknown: Literal["predict", "nothing"] = "predict"
    """What counts for a worker that is not in step, and for a prompt whose token ids are not known. `predict`: what the index
    over text expects. `nothing`: only what is known, and what was sent there a moment ago. `baton_cache_lookups_total` counts
    both."""
    max_blocks: int = 4_000_000
    """So many different blocks are kept in mind, at about 190 bytes each; then the worker with most of them loses those it
    stored longest ago, which `baton_kv_index_evictions_total` counts. A block that several workers hold counts half for each
    but the first."""
    max_batch_bytes: int = 4 << 20
    """A batch that is larger is not read: the connection is cut, and the worker is out of step."""
    check_interval_s: float = 5.0
    """A publisher that was silent for so long is asked whether that is right: a restart, or a last batch that was lost, would
    not be noticed otherwise. Also how often a worker is asked again that did not publish."""
    replay_timeout_s: float = 5.0
    """So long nothing may come of a replay, before it counts as failed."""


def faults(settings: KvEvents) -> Iterator[str]:
    """What contradicts itself: field and reason."""
    for role, ports in settings.ports.items():
        if role not in ("prefill", "decode"):
            yield f"ports.{role}: roles are prefill and decode"
        for name, reason in port_faults(ports, settings.ranks):
            yield f"ports.{role}{name}: {reason}"
    if not 1 <= settings.ranks <= 1024:
        yield f"ranks: {settings.ranks} is not from 1 to 1024"
    if settings.find == "ports" and not settings.ports:
        yield "ports: names no role, with find: ports"
    if settings.find == "ask" and settings.ports:
        yield "ports: is for find: ports; with find: ask, workers tell"
    if not 1024 <= settings.max_blocks <= 1 << 30:
        yield f"max_blocks: {settings.max_blocks} is not from 1024 to {1 << 30}"
    if not 1 << 16 <= settings.max_batch_bytes <= 1 << 28:
        yield f"max_batch_bytes: {settings.max_batch_bytes} is not from 65536 to 268435456"
    for name, seconds in (("check_interval_s", settings.check_interval_s), ("replay_timeout_s", settings.replay_timeout_s)):
        if not 0.05 <= seconds <= 3600:
            yield f"{name}: {seconds} is not from 0.05 to 3600"


def port_faults(ports: EventPorts, ranks: int) -> Iterator[tuple[str, str]]:
    """Why so many ranks cannot have these ports and those behind them: field and reason."""
    for name, port in ((".port", ports.port), (".replay_port", ports.replay_port)):
        if port is not None and not 0 < port <= 65536 - ranks:
            yield name, f"{port} is not from 1 to 65535, for all {ranks} rank(s)"
    if ports.replay_port is not None and abs(ports.port - ports.replay_port) < ranks:
        yield "", f"port and replay_port overlap, with {ranks} rank(s)"
