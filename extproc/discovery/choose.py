"""Which sources a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from extproc.config import Workers
from extproc.discovery.dns import Dns, resolver
from extproc.discovery.guarded import Guarded, Networks
from extproc.discovery.kubernetes.access import find
from extproc.discovery.kubernetes.sources import sources_of
from extproc.discovery.listing import name_server
from extproc.discovery.source import Source
from extproc.discovery.static import Static
from extproc.discovery.watched_file import WatchedFile


def sources(
    workers: Workers,
    on_refused: Callable[[str, str, str], None],
    on_request: Callable[[str, str], None] = lambda _verb, _outcome: None,
) -> list[Source]:
    """All of them; where two name one worker, the earlier one counts. Raises SourceError if there is no name server, or no API
    server of Kubernetes, to ask.

    ``on_request(verb, outcome)``: of each request to the API server.
    ``on_refused(kind, address, why)``: an address that no worker may have; see :mod:`extproc.discovery.guarded`.
    """
    found: list[Source] = []
    if workers.file is not None:
        found.append(WatchedFile(Path(workers.file)))
    if workers.dns:
        ask = resolver([name_server(text) for text in workers.dns_servers])
        for entry in workers.dns:
            found.append(
                Dns(
                    ask,
                    role=entry.role,
                    name=entry.name or entry.srv or "",
                    port=entry.port,
                    refresh_s=entry.refresh_s,
                    labels=entry.labels,
                )
            )
    if workers.kubernetes is not None:
        access = find(workers.kubernetes.kubeconfig, workers.kubernetes.context)
        found += sources_of(workers.kubernetes, access, on_request=on_request)
    # What the operator wrote into the configuration is meant.
    networks = Networks(workers.networks)
    return [Static(workers.endpoint_set()), *(Guarded(source, networks, on_refused) for source in found)]
