"""Envoy's configuration as YAML, with the reason of every setting that is not obvious beside it. Pure: no I/O."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import betterproto2

from extproc.config import Config, ConfigError
from extproc.envoy_config import build

_HEADER = """
The configuration of Envoy for Baton, made by `baton envoy-config`: change that, not this file.

Clients reach the listener `front`. The ext_proc filter holds each request while Baton picks the workers and makes the
prefill call; then Envoy sends it to the one decode worker that Baton named, and streams the answer back by itself.
""".strip()

# Path of a setting (its end is enough; a list item goes by its name, or by its index) -> why it is there. A comment
# stands at the first place where its path occurs.
_COMMENTS: Mapping[str, str] = {
    "admin": "Anybody who reaches this port controls Envoy: loopback only.",
    "listeners.front": "Clients connect here, with HTTP/1.1 or HTTP/2.",
    "front.per_connection_buffer_limit_bytes": (
        "How much Envoy reads ahead of a slow peer, each way. It does not limit request bodies: "
        "`request_body_buffer_limit` does."
    ),
    "front.tcp_keepalive": (
        "A client whose machine vanished without a word is noticed after a minute, and its decode cancelled."
    ),
    "use_remote_address": "x-forwarded-for and the client address in the log come from the connection.",
    "preserve_external_request_id": (
        "A client's own x-request-id is kept, so that it names the request in every log; without one Envoy makes it."
    ),
    "normalize_path": "The path that the filter decides on is the path that the worker serves.",
    "path_with_escaped_slashes_action": (
        "Names of models have slashes: /v1/models/org%2Fname is a legal request. Unescaped here, so that nobody behind "
        "sees two spellings of one path."
    ),
    "headers_with_underscores_action": (
        "Some servers read a_b as a-b: such a header could pose as one that was stripped. Dropped, not refused: "
        "clients send them in good faith."
    ),
    "request_headers_timeout": "Against clients that send headers a byte at a time.",
    "stream_idle_timeout": (
        "Longest silence on a request. The timer also runs while the filter holds it. There is no limit on the whole "
        "duration: a long answer is not an error."
    ),
    "early_header_mutation_extensions": "Runs before everything else: a client cannot choose workers or KV sources.",
    "local_reply_config": "Envoy's own errors, in the shape of OpenAI's. The first mapper that matches wins.",
    "local_reply_config.mappers.0": "The filter's own answer: its body is already in that shape and is left alone.",
    "routes.decode.request_body_buffer_limit": (
        "A larger body is answered 413. The filter does so at `limits.max_body_bytes`; this is 1 MiB more, because it "
        "also holds for the body that the filter gives back, which is longer by the KV parameters."
    ),
    "typed_config.http2_protocol_options": (
        "With HTTP/2, Envoy takes the larger of the stream window and `request_body_buffer_limit` as the limit of a "
        "body: the default window of 16 MiB would undo a smaller limit."
    ),
    "no_traffic_interval": "The default, 60 s, would also hold for the first minute of traffic.",
    "routes.decode.route.timeout": (
        "The default, 15 s, would cut every longer answer. There is no retry policy: the load balancer may only choose the "
        "one worker, which a retry would have tried already, and KV blocks are good for one attempt."
    ),
    "access_log.envoy.access_loggers.stats.times": (
        "At /stats/prometheus as `envoy_baton_…`. Time to first token, without looking at a single chunk: from the first byte "
        "of the request to the first byte of the answer's body (headers may come long before that). Only of streams that came "
        "to their end."
    ),
    "stats.times.typed_config.histograms.0.stat.tags": (
        "The filter notes these with its reply: dynamic metadata, which no client can write. Policies and modes are of the "
        "configuration, models are those that workers serve: the number of series is bounded."
    ),
    "access_log.envoy.access_loggers.stats.tokens": "Only of answers that say how many tokens they have.",
    "access_log.envoy.access_loggers.http_grpc": (
        "The filter is told of each request when it is over. Envoy sends what it has every half second or every 16 KiB; while "
        "the filter is away it drops lines, counts them (`access_logs.grpc_access_log.logs_dropped`), and goes on."
    ),
    "http_grpc.typed_config.common_config.custom_tags": "The log's own times end at the headers of the answer.",
    "filters.http.composite.stream_tokens": (
        "Reads the token counts at the end of a stream (`usage`), for requests that ask for them: the filter marks these in "
        "the metadata. Chunks pass as they come. Not `sse_to_metadata`: an event whose data is a bare JSON number, string or "
        "null ends Envoy 1.40."
    ),
    "filters.http.composite.watch": (
        "The chunks of a sampled answer are shown to the process that watches them. The filter marks such a request in the "
        "metadata; for all others this is one look-up, and no stream is opened."
    ),
    "observability_mode": "Chunks are shown and never held: whatever becomes of the process, the answer goes on.",
    "deferred_close_timeout": "How long the process may take to read the last chunk.",
    "typed_config.processing_mode": (
        "The response never passes through the filter. Asking for its trailers costs nothing and keeps the gRPC stream "
        "open to the end of the answer: that is how the filter learns of it."
    ),
    "allow_mode_override": (
        "For a prompt that is handed over, the filter asks to see the headers of the answer: an error there means that "
        "nobody will fetch the KV blocks, and they are given back."
    ),
    "message_timeout": "The longest prefill, and some time to queue.",
    "grpc_service.retry_policy": "A filter that is being restarted costs a retry, not an error.",
    "metadata_options": (
        "The filter names the decode worker in the metadata that the load balancer reads, and reads there which one it took."
    ),
    "response_attributes": "Which worker was connected to: with this pin, the load balancer does not say.",
    "extension_config.typed_config.failure_mode_allow": (
        "An answer goes on when the filter dies under it. So does a request that it cannot be asked about: the next filter "
        "says how far. `http.front.ext_proc.failure_mode_allowed` counts them."
    ),
    "http_filters.envoy.filters.http.rbac": (
        "A request that the filter has chosen a worker for passes; any other one is 503. Clients cannot send this header."
    ),
    "http2_protocol_options.connection_keepalive": "A replica whose host is gone says nothing: so its connections end.",
    "filters.http.lua": (
        "A request that the filter has chosen a worker for passes. Any other one, because the filter is away, goes on only if "
        "it is a prompt whose body cannot hold KV-transfer keys, however they might be spelt; it is marked, and the next "
        "route is for the marked ones."
    ),
    "front.filter_chains.0.filters.envoy.filters.network.http_connection_manager.typed_config.tracing": (
        "Envoy's own spans. The filter's are children of them: Envoy tells it with each call, and it does as Envoy has decided."
    ),
    "tracing.custom_tags": "No query: clients put keys there.",
    "request_id_extension": "A client's request id stays as it is, and has no part in sampling: that is the sampler's.",
    "sampler.typed_config": "As the caller has decided; this share of those that nobody has decided about.",
    "http_filters.envoy.filters.http.api_key_auth": (
        "Clients' API keys, from a file of their own that is read again when it changes. Who has none is answered 401. The key "
        "goes no further, and the client's name is set in a header that no client can."
    ),
    "http_filters.envoy.filters.http.local_ratelimit": "A token bucket for each client, by the name that its key has given it.",
    "layered_runtime": "The expression of what the filter may change is longer than Envoy takes by default.",
    "mutation_rules": "What the filter may change. Anything else is a bug and fails the request.",
    "listeners.stats": "Statistics for a Prometheus elsewhere: one page of the admin port, and nothing else of it.",
    "listeners.prefill_loop": "The filter makes its prefill calls here, for Envoy's connection pools and statistics.",
    "prefill_loop.address.pipe.mode": "0660: the filter runs as the same user, or in the same group.",
    "mappers.0.headers_to_add": "Tells the filter Envoy's own errors from a worker's.",
    "bypass_overload_manager": (
        "A flood of clients must not stop the prefill calls of those that got in. Not `ignore_global_conn_limit`: with "
        "that, each connection closed here would make room for one client too many (Envoy 1.40)."
    ),
    "eds_config.path_config_source": (
        "Endpoints come from a file that Baton replaces by a rename; Envoy notices nothing else."
    ),
    "eds_config.ads": "Endpoints come from the filter's gRPC server, by `dynamic_resources.ads_config`.",
    "eds_config.initial_fetch_timeout": "Envoy starts without the filter, and says 503 until it is there.",
    "envoy_grpc.retry_policy": "The default would ask only every 30 s for a filter that was away for a while.",
    "filters.http.ext_proc.typed_config.xds_matcher": (
        "Good answers of requests that the filter marks so are not shown to it: a message and a wait less for each. "
        "The access log tells of them."
    ),
    "ads_config": "Changes only, from the server that is also the ext_proc service. While it is away, Envoy keeps what it has.",
    "clusters.decode.load_balancing_policy": (
        "Exactly the worker that the filter named: KV blocks wait for that one, any other would be silently wrong. If "
        "it is not known, or none was named, the fallback chooses, which is a subset policy with no subsets and "
        "with NO_FALLBACK (its default): nobody, and the answer is 503."
    ),
    "clusters.decode.original_dst_lb_config": (
        "Whatever address the filter named. Only the filter can write this metadata; without it the answer is 503."
    ),
    "clusters.decode.transport_socket": (
        "TLS, with certificates that are read again when they change: see `envoy.secrets_dir`."
    ),
    "combined_validation_context": "Signed by these authorities, and for this name: nothing else is a worker, or the filter.",
    "clusters.extproc.transport_socket": "TLS to the filter. Without a validation context any certificate is taken.",
    "match.headers.x-baton-pool": (
        "The filter names the pool of the worker that it has chosen, and has the routes matched again. What a client sends "
        "under this name is gone before."
    ),
    "clusters.extproc.load_balancing_policy": (
        "There are several filters, or processes of one: the one with the fewest open requests."
    ),
    "clusters.extproc.outlier_detection": (
        "One that is gone is left out at the first connection that it refuses: the retry goes to another one."
    ),
    "clusters.any_decode": "The same workers in turn, for requests that no filter has seen.",
    "filters.http.header_to_metadata": (
        "The filter names the prefill worker in a header, which may choose here: nobody else reaches this listener. It "
        "becomes metadata, because a header that is removed on the route is gone before the load balancer reads it."
    ),
    "circuit_breakers": "Admission is the filter's business; Envoy's 1024 would refuse requests held in prefill.",
    "upstream_connection_options": "A worker whose machine is gone is noticed after a minute.",
    "common_http_protocol_options.idle_timeout": (
        "uvicorn (vLLM) closes a connection that was idle for 5 s, and loses a request that is sent at that moment. "
        "Envoy closes it first."
    ),
    "common_lb_config.update_merge_window": "What becomes of a filter counts at once, not up to a second later.",
    "healthy_panic_threshold": "0 %: if no filter is healthy, say so at once instead of trying them all.",
    "overload_manager": "Connections beyond this are closed at once: memory stays bounded.",
}


def render(config: Config) -> str:
    """``build(config)`` as YAML with comments; the same configuration gives the same bytes. Raises ConfigError."""
    if config.routes.only:
        raise ConfigError("routes.only: such a filter is one of a gateway's, whose routes it does not know; see docs/routes.md")
    if config.pools and not config.names_pools:
        raise ConfigError("routes.pool_header: the routes of Envoy's own configuration go by this header, and it is not set")
    tree = build(config).to_dict(casing=betterproto2.Casing.SNAKE)
    return "\n".join([*_comment(_HEADER, 0), *_emit(tree, 0, "", dict(_COMMENTS)), ""])


def _emit(node: Any, indent: int, path: str, comments: dict[str, str]) -> Iterator[str]:
    """The lines of one mapping or list. A comment that is used is taken out of ``comments``."""
    pad = " " * indent
    if isinstance(node, Mapping):
        for key, value in node.items():
            below = f"{path}.{key}"
            yield from _comment(_take(comments, below), indent)
            if isinstance(value, Mapping | list) and value:
                yield f"{pad}{_scalar(key)}:"
                yield from _emit(value, indent + 2, below, comments)
            else:
                yield f"{pad}{_scalar(key)}: {_scalar(value)}"
        return
    for index, item in enumerate(node):
        named = isinstance(item, Mapping) and isinstance(item.get("name"), str)
        below = f"{path}.{item['name'] if named else index}"
        yield from _comment(_take(comments, below), indent)
        if isinstance(item, Mapping | list) and item:
            dash = f"{pad}- "
            for line in _emit(item, indent + 2, below, comments):
                if dash and not line.lstrip().startswith("#"):
                    line, dash = dash + line[len(dash) :], ""
                yield line
        else:
            yield f"{pad}- {_scalar(item)}"


def _take(comments: dict[str, str], path: str) -> str:
    found = next((key for key in comments if path.endswith(f".{key}")), None)
    return "" if found is None else comments.pop(found)


def _comment(text: str, indent: int) -> Iterator[str]:
    for paragraph in text.splitlines():
        for line in textwrap.wrap(paragraph, 118 - indent) or [""]:
            yield f"{' ' * indent}# {line}".rstrip()


_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_YAML_WORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))


def _scalar(value: Any) -> str:
    """A scalar, or an empty collection, as YAML: plain words as they are, everything else as JSON, which is YAML."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
            return value
        if '"' in value and value.isprintable():
            return "'" + value.replace("'", "''") + "'"
    return json.dumps(value, ensure_ascii=False)
