"""Names that the filter and Envoy's configuration share: routing headers and the metadata namespace. Constants only."""

from __future__ import annotations

from typing import Final

DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
"""The worker that serves the request, ``ip:port``: a header, and a key of the same name in the metadata namespace."""

KV_TRANSFER_HEADER: Final = "x-kv-transfer"
"""How the KV blocks reach the decode worker; set by the filter, read by logs, debug headers and the worker."""

CREDENTIAL_HEADERS: Final = ("authorization", "x-api-key")
"""Who asks: a client's, or with `workers.replace_credentials` the filter's own."""

PREFILLER_HEADER: Final = "x-prefiller-host-port"
"""llm-d's sidecar calls the prefill worker that stands here, ``ip:port``."""

MODEL_HEADER: Final = "x-gateway-model-name"
"""The model that serves the request, as gateways of the inference extension name it: what routes match on."""

POOL_HEADER: Final = "x-baton-pool"
"""The pool of the workers that serve the request: what Envoy's own routes match on."""

RANK_HEADER: Final = "x-data-parallel-rank"
"""Which engine of a worker with several (`vllm serve --data-parallel-size`) serves the request: its place, from 0."""

LB_NAMESPACE: Final = "envoy.lb"
"""The dynamic-metadata namespace that Envoy's load balancer reads the destination from."""

SERVED_KEY: Final = f"{DESTINATION_HEADER}-served"
"""In the same namespace: where the load balancer notes which worker it took."""

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
"""The dynamic-metadata namespace in which a gateway says among which workers one is to be chosen."""

SUBSET_KEY: Final = f"{DESTINATION_HEADER}-subset"
"""In that namespace: a list of ``ip:port``. A header of the same name is no word of the gateway's, and goes."""

TAGS_NAMESPACE: Final = "baton"
"""The dynamic-metadata namespace in which the filter notes how a request is served, for Envoy's statistics and logs. No client
can write there."""

WATCH_KEY: Final = "watch"
"""In that namespace, with the value ``1``: the chunks of this answer are watched."""

USAGE_KEY: Final = "usage"
"""In that namespace, with the value ``1``: the answer is a stream that states its tokens at its end."""

UNSEEN_KEY: Final = "unseen"
"""In that namespace, with the value ``1``: the filter need not be shown a good answer."""

USAGE_NAMESPACE: Final = "baton.usage"
"""The dynamic-metadata namespace in which Envoy notes the token counts that a streamed answer states."""

UPSTREAM_ATTRIBUTE: Final = "upstream.address"
"""Envoy's name for the address of the worker that it connected to."""

ROUTING_HEADERS: Final[tuple[str, ...]] = (
    DESTINATION_HEADER,
    SUBSET_KEY,
    SERVED_KEY,
    KV_TRANSFER_HEADER,
    PREFILLER_HEADER,
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    RANK_HEADER,
    "x-kv-cache-source-host-port",
    MODEL_HEADER,
    POOL_HEADER,
)
"""Headers with which a client could choose workers, pools or sources of KV blocks. Only the filter may set them."""

DECISION_HEADER: Final = "x-baton-decision"
"""On an answer, where the policy wants it: which workers were chosen, and why."""

ORIGIN_HEADER: Final = "x-baton-origin"
"""On the prefill listener, Envoy's own replies carry it with the value ``envoy``; a worker's answer never does."""

FILTER_REPLY_DETAILS: Final = "baton"
"""What ``ImmediateResponse.details`` must start with: Envoy then passes the filter's body on as it is."""
