"""Envoy's bootstrap, made from our configuration, as typed messages.

Pure: no I/O. Why a setting is there stands in :mod:`extproc.envoy_yaml`, which writes it beside the setting.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import betterproto2
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.metrics import v3 as metrics
from envoy_data_plane.envoy.config.overload import v3 as overload
from envoy_data_plane.envoy.config.rbac import v3 as rbac_rules
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.config.trace import v3 as tracers
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel import v3 as cel
from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
from envoy_data_plane.envoy.extensions.access_loggers.stats import v3 as stats
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream
from envoy_data_plane.envoy.extensions.common.matching import v3 as matching
from envoy_data_plane.envoy.extensions.filters.common.matcher.action import v3 as actions
from envoy_data_plane.envoy.extensions.filters.http.composite import v3 as composite
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as header_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua
from envoy_data_plane.envoy.extensions.filters.http.rbac import v3 as rbac
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin import v3 as round_robin
from envoy_data_plane.envoy.extensions.load_balancing_policies.subset import v3 as subset
from envoy_data_plane.envoy.extensions.matching.common_inputs.network import v3 as inputs
from envoy_data_plane.envoy.extensions.matching.input_matchers.metadata import v3 as input_matchers
from envoy_data_plane.envoy.extensions.request_id.uuid import v3 as request_id
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import v3 as downstream_connections
from envoy_data_plane.envoy.extensions.tracers.opentelemetry.samplers import v3 as samplers
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstreams
from envoy_data_plane.envoy.type import v3 as types
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.envoy.type.tracing import v3 as tracing
from envoy_data_plane.google import protobuf
from envoy_data_plane.xds.core import v3 as xds_core
from envoy_data_plane.xds.type.matcher import v3 as xds_matcher

from extproc import envoy_api_keys, envoy_tls, filter_down, stream_tokens
from extproc.config import BODY_HEADROOM_BYTES, Address, Config, ConfigError, Envoy, Prefill, Tracing, Workers, collector
from extproc.filter_down import OPEN_HEADER
from extproc.headers import (
    DESTINATION_HEADER,
    FILTER_REPLY_DETAILS,
    KV_TRANSFER_HEADER,
    LB_NAMESPACE,
    ORIGIN_HEADER,
    POOL_HEADER,
    ROUTING_HEADERS,
    SERVED_KEY,
    TAGS_NAMESPACE,
    UNSEEN_KEY,
    UPSTREAM_ATTRIBUTE,
    USAGE_KEY,
    USAGE_NAMESPACE,
    WATCH_KEY,
)
from extproc.observe.log_lines import GENERATION_TAG, TTFT_TAG
from extproc.stream_tokens import USAGE_KEYS
from extproc.xds import cluster_of, endpoints_file

RUN_DIRECTORY = "/run/baton"

EXAMPLE = Config(
    # The workers come from endpoint files: no address of theirs is in the rendered text.
    workers=Workers(prefill=["127.0.0.1:8100"], decode=["127.0.0.1:8200"]),
    listen=f"unix:{RUN_DIRECTORY}/extproc.sock",
    prefill=Prefill(via=f"unix:{RUN_DIRECTORY}/prefill.sock"),
    envoy=Envoy(eds_dir=f"{RUN_DIRECTORY}/eds"),
)
"""What ``envoy/envoy.yaml`` is rendered from."""

DECODE_CLUSTER = "decode"
PREFILL_CLUSTER = "prefill"
EXTPROC_CLUSTER = "extproc"
ADMIN_CLUSTER = "admin"
"""Envoy itself, for its statistics."""
WATCH_CLUSTER = "watch"
COLLECTOR_CLUSTER = "collector"
STATS_PREFIX = "baton"
"""What the names of our own statistics in Envoy begin with."""
ANY_DECODE_CLUSTER = "any_decode"
"""The decode workers in turn, while no filter is there."""

_CONNECT_TIMEOUT = timedelta(seconds=2)
_CONNECTION_BUFFER_BYTES = 1 << 20
_MAX_CONNECTIONS = 100_000
_HEADERS_TIMEOUT = timedelta(seconds=10)
# uvicorn, which serves vLLM, closes a connection that was idle for 5 s.
_WORKER_IDLE_TIMEOUT = timedelta(seconds=4)
# Longer, and an Envoy that starts before the filter would not even listen; it then says 503 by itself.
_FIRST_ENDPOINTS_TIMEOUT = timedelta(seconds=2)
_HEALTH_INTERVAL = timedelta(seconds=1)
_HEALTH_PAUSE = timedelta(seconds=0.25)
_EJECTION = timedelta(seconds=30)
# A replica whose host is gone says nothing, not even that a connection is closed.
_PINGS = core.KeepaliveSettings(interval=timedelta(seconds=5), timeout=timedelta(seconds=5))
_EXTPROC_SLACK_S = 30.0
# On requests, on answers, and on the filter's own replies. Envoy refuses a regular expression of more than 100 RE2
# instructions, about one a character, so these are prefixes: of DESTINATION_HEADER, MODEL_HEADER, KV_TRANSFER_HEADER,
# PREFILLER_HEADER, POOL_HEADER and `x-baton-decision`.
_MUTABLE_HEADERS = "content-(length|type)|retry-after|x-(request-id|(gateway-[dm]|data-p|kv-t|prefill|baton-).*)"
_MUTABLE_TRACE = "|tracep.*"
_MUTABLE_CREDENTIALS = "|authorization|x-api-key"
_EXPRESSION_SIZE = 200
_TRACE_HEADERS = ("traceparent", "tracestate")
_STATS_TIMEOUT = timedelta(seconds=10)
_STATS_AT_ONCE = 4
_SOCKET_MODE = 0o660
# How old the newest numbers are; a batch of a second would be a fifth smaller in bytes and no cheaper to read.
_LOG_FLUSH = timedelta(seconds=0.5)
# By then the process that watches has read the last chunk of an answer.
_WATCH_CLOSE_TIMEOUT = timedelta(seconds=1)
# 45 ms and 2.5 s are common limits of ITL and TTFT.
_BUCKETS_MS = (
    *(5, 10, 25, 45, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 2500, 3000, 5000, 7500),
    *(10_000, 15_000, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000),
)


@dataclass(frozen=True)
class _LocalReply:
    """One row of the table of Envoy's own replies: which ones (a CEL expression) and what the client reads."""

    when: str
    code: str
    message: str
    type: str


_INVALID, _SERVER = "invalid_request_error", "server_error"

# The filter went away with the request, and nobody may serve it (_seen_only).
_UNSEEN = _LocalReply(
    "response.code_details.startsWith('rbac_access_denied')",
    "filter_unavailable",
    "The routing service is unavailable. Try again.",
    _SERVER,
)

_LOCAL_REPLIES = (
    _LocalReply(
        "response.code == 504 && response.code_details.startsWith('ext_proc')",
        "timeout",
        "The request was not handed to a worker in time.",
        _SERVER,
    ),
    # Whatever else is wrong between Envoy and the filter: `status_on_error`, and none of the flags that a worker causes.
    _LocalReply(
        "response.code == 503 && response.flags == 0",
        "filter_unavailable",
        "The routing service is unavailable. Try again.",
        _SERVER,
    ),
    _LocalReply("response.code == 401", "invalid_api_key", "The API key is missing or not valid.", _INVALID),
    _LocalReply("response.code == 403", "forbidden", "This API key may not ask that.", _INVALID),
    _LocalReply("response.code == 429", "rate_limit_exceeded", "Too many requests with this API key.", "rate_limit_error"),
    _LocalReply("response.code == 404", "not_found", "There is nothing at this path.", _INVALID),
    _LocalReply("response.code == 408", "timeout", "The request did not arrive in time.", _INVALID),
    _LocalReply("response.code == 413", "request_too_large", "The request body is too large.", _INVALID),
    _LocalReply("response.code == 431", "headers_too_large", "The request headers are too large.", _INVALID),
    _LocalReply("response.code >= 400 && response.code < 500", "bad_request", "The request is not valid.", _INVALID),
    _LocalReply(
        "response.code == 502 || response.code == 503",
        "upstream_unavailable",
        "The worker could not be reached, or closed the connection before it answered.",
        _SERVER,
    ),
    _LocalReply("response.code == 504", "timeout", "No answer came in time.", _SERVER),
    _LocalReply("response.code >= 500", "internal_error", "The gateway failed.", _SERVER),
)


def build(config: Config) -> bootstrap.Bootstrap:
    """The whole bootstrap. Raises ConfigError where an address cannot be used by Envoy."""
    loopback = None if config.prefill.via == "direct" else Address.parse(config.prefill.via)
    listeners = [_front(config)]
    clusters = _pools_of_workers(DECODE_CLUSTER, config)
    if _opens(config):
        clusters.append(_any_decode_worker(config))
    if loopback is not None:
        listeners.append(_prefill_loop(config, loopback))
        clusters += _pools_of_workers(PREFILL_CLUSTER, config)
    clusters.append(_extproc(config))
    if config.watches:
        clusters.append(_watch_cluster(config))
    if config.envoy.stats_listen is not None:
        listeners.append(_stats_page(config.envoy.stats_listen))
        clusters.append(_admin_cluster(config))
    if _traces(config):
        clusters.append(_collector(config.tracing))
    return bootstrap.Bootstrap(
        node=core.Node(id="baton", cluster="baton"),
        admin=bootstrap.Admin(address=_listen_address("envoy.admin", Address.parse(config.envoy.admin), loopback_only=True)),
        static_resources=bootstrap.BootstrapStaticResources(listeners=listeners, clusters=clusters),
        dynamic_resources=_ads() if _asks_filter(config) else None,
        stats_config=_stats_config(),
        layered_runtime=_longer_expressions() if config.workers.replace_credentials else None,
        overload_manager=_overload_manager(config),
    )


# --- the listener that clients connect to -----------------------------------------------------------------------------


def _front(config: Config) -> listener.Listener:
    connections = hcm.HttpConnectionManager(
        stat_prefix="front",
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        access_log=[
            _access_log(traced=_traces(config)),
            *(_stats_logs(tokens=_counts_tokens(config.envoy)) if config.envoy.stats else []),
            *([_log_service()] if config.envoy.access_log else []),
        ],
        use_remote_address=True,
        generate_request_id=True,
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        request_id_extension=_request_id() if _traces(config) else None,
        tracing=_tracing(config.tracing) if _traces(config) else None,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=hcm.HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD,
        common_http_protocol_options=core.HttpProtocolOptions(
            headers_with_underscores_action=core.HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
        ),
        http2_protocol_options=core.Http2ProtocolOptions(
            initial_stream_window_size=_CONNECTION_BUFFER_BYTES,
            initial_connection_window_size=16 * _CONNECTION_BUFFER_BYTES,
        ),
        request_headers_timeout=_HEADERS_TIMEOUT,
        stream_idle_timeout=_seconds(config.envoy.idle_timeout_s),
        early_header_mutation_extensions=[_strip_routing_headers(config)],
        local_reply_config=_local_replies(),
        route_config=_routes(
            *([_filter_down_route(config)] if _opens(config) else []),
            *_pool_routes(_decode_route(config), config),
        ),
        http_filters=[
            *([] if config.envoy.api_keys is None else envoy_api_keys.filters(config.envoy.api_keys)),
            _ext_proc_filter(config),
            *([_filter_down()] if _opens(config) else []),
            *([_seen_only()] if _outlived(config) else []),
            *([_usage()] if _counts_tokens(config.envoy) else []),
            *([_watch_filter()] if config.watches else []),
            _router(),
        ],
    )
    return _listener("front", _listen_address("envoy.listen", Address.parse(config.envoy.listen)), connections)


def _opens(config: Config) -> bool:
    """Whether requests go on while no filter is there."""
    return config.envoy.filter_down == "round_robin"


def _outlived(config: Config) -> bool:
    """Whether an answer goes on when the filter dies under it. Then requests go on, too; those without a worker are refused."""
    return config.envoy.body_mode == "buffered" and not _opens(config) and not config.routes.only


def _seen_only() -> hcm.HttpFilter:
    """Lets requests pass that the filter has named a worker for: clients cannot send this header."""
    named = route.HeaderMatcher(name=DESTINATION_HEADER, present_match=True)
    seen = rbac_rules.Policy(permissions=[rbac_rules.Permission(any=True)], principals=[rbac_rules.Principal(header=named)])
    return _http_filter(
        "envoy.filters.http.rbac",
        rbac.Rbac(rules=rbac_rules.Rbac(action=rbac_rules.RbacAction.ALLOW, policies={"seen": seen})),
    )


def _strip_routing_headers(config: Config) -> core.TypedExtensionConfig:
    traces = config.tracing.endpoint is not None and config.tracing.from_clients == "ignore"
    names = (*ROUTING_HEADERS, *([OPEN_HEADER] if _opens(config) else []), *(_TRACE_HEADERS if traces else ()))
    if config.envoy.api_keys is not None:
        names += (config.envoy.api_keys.client_header,)
    mutations = [mutation_rules.HeaderMutation(remove=name) for name in names]
    return _extension("envoy.http.early_header_mutation.header_mutation", early.HeaderMutation(mutations=mutations))


def _local_replies() -> hcm.LocalReplyConfig:
    own = hcm.ResponseMapper(
        filter=_cel(f"response.code_details.startsWith('{FILTER_REPLY_DETAILS}')"),
        body_format_override=_json_text("%LOCAL_REPLY_BODY%"),
    )
    unseen = _local_reply(_UNSEEN)
    unseen.status_code = 503
    return hcm.LocalReplyConfig(mappers=[own, unseen, *(_local_reply(row) for row in _LOCAL_REPLIES)])


def _local_reply(row: _LocalReply) -> hcm.ResponseMapper:
    body = {"error": {"message": row.message, "type": row.type, "param": None, "code": row.code}}
    return hcm.ResponseMapper(filter=_cel(row.when), body_format_override=_json_text(json.dumps(body)))


def _json_text(text: str) -> core.SubstitutionFormatString:
    return core.SubstitutionFormatString(
        text_format_source=core.DataSource(inline_string=text), content_type="application/json"
    )


def _decode_route(config: Config) -> route.Route:
    debug = [
        _set_header(KV_TRANSFER_HEADER, f"%REQ({KV_TRANSFER_HEADER})%"),
        _set_header("x-decode-endpoint", "%UPSTREAM_HOST%"),
    ]
    return route.Route(
        name=DECODE_CLUSTER,
        match=route.RouteMatch(prefix="/"),
        request_body_buffer_limit=config.limits.max_body_bytes + BODY_HEADROOM_BYTES,
        response_headers_to_add=debug if config.envoy.debug_headers else [],
        route=route.RouteAction(
            cluster=DECODE_CLUSTER,
            timeout=timedelta(0),
            idle_timeout=_seconds(config.envoy.idle_timeout_s),
        ),
    )


def _pool_routes(default: route.Route, config: Config) -> list[route.Route]:
    """The same for each pool, which the filter names in a header; ``default`` is behind them."""
    if not config.pools:
        return [default]
    found = []
    for rule in config.pools:
        made = copy.deepcopy(default)
        assert made.match is not None and made.route is not None
        made.name = made.route.cluster = cluster_of(default.name, rule.name)
        made.match.headers = [
            route.HeaderMatcher(name=POOL_HEADER, string_match=matcher.StringMatcher(exact=rule.name)),
        ]
        found.append(made)
    for made in (*found, default):
        made.request_headers_to_remove = [POOL_HEADER]
    return [*found, default]


def _filter_down_route(config: Config) -> route.Route:
    made = _decode_route(config)
    made.name = ANY_DECODE_CLUSTER
    made.match = route.RouteMatch(
        prefix="/", headers=[route.HeaderMatcher(name=OPEN_HEADER, string_match=matcher.StringMatcher(exact="1"))]
    )
    assert made.route is not None
    made.route.cluster = ANY_DECODE_CLUSTER
    made.request_headers_to_remove = [OPEN_HEADER]
    return made


def _filter_down() -> hcm.HttpFilter:
    return _http_filter(
        "envoy.filters.http.lua", lua.Lua(default_source_code=core.DataSource(inline_string=filter_down.script()))
    )


def _ext_proc_filter(config: Config) -> hcm.HttpFilter:
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    bodies, full_duplex = ext_proc.ProcessingModeBodySendMode, config.envoy.body_mode != "buffered"
    mode = ext_proc.ProcessingMode(
        request_header_mode=send,
        request_body_mode=bodies.FULL_DUPLEX_STREAMED if full_duplex else bodies.BUFFERED,
        request_trailer_mode=send if full_duplex else skip,
        # The filter asks for it where it needs it, which this mode does not let it.
        response_header_mode=send if full_duplex else skip,
        response_body_mode=bodies.FULL_DUPLEX_STREAMED if config.envoy.body_mode == "full_duplex_both" else bodies.NONE,
        response_trailer_mode=send,
    )
    # With whole bodies the filter answers the headers before it sees more: until then anybody may be asked instead. In full
    # duplex it may hold the request by then, and one that ends a filter would be shown to the next one.
    again = "connect-failure,refused-stream,unavailable" + ("" if full_duplex else ",reset")
    retry = core.RetryPolicy(
        retry_on=again,
        num_retries=8,
        retry_back_off=core.BackoffStrategy(base_interval=_seconds(0.1), max_interval=_seconds(1.0)),
    )
    service = core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER), retry_policy=retry)
    made = ext_proc.ExternalProcessor(
        grpc_service=service,
        processing_mode=mode,
        message_timeout=_seconds(config.prefill.timeout_s + _EXTPROC_SLACK_S),
        status_on_error=types.HttpStatus(code=types.StatusCode.ServiceUnavailable),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, TAGS_NAMESPACE]),
            forwarding_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE]),
        ),
        response_attributes=[] if config.envoy.pin == "exact" else [UPSTREAM_ATTRIBUTE],
        mutation_rules=_mutation_rules(config),
        allow_mode_override=True,
        failure_mode_allow=_opens(config) or _outlived(config),
    )
    name = "envoy.filters.http.ext_proc"
    return _unless_unseen(_extension(name, made)) if config.unseen_answers else _http_filter(name, made)


def _unless_unseen(inner: core.TypedExtensionConfig) -> hcm.HttpFilter:
    """The filter is not shown the good answers of requests that it has marked: a message and a reply less for each."""
    # The status first: as long as there is none, Envoy asks again.
    good = xds_matcher.MatcherMatcherListPredicateSinglePredicate(
        input=_xds_extension("envoy.matching.inputs.status_code_class_input", matcher.HttpResponseStatusCodeClassMatchInput()),
        value_match=xds_matcher.StringMatcher(exact="2xx"),
    )
    both = xds_matcher.MatcherMatcherListPredicatePredicateList(
        predicate=[
            xds_matcher.MatcherMatcherListPredicate(single_predicate=good),
            xds_matcher.MatcherMatcherListPredicate(single_predicate=_marked(UNSEEN_KEY)),
        ]
    )
    rule = xds_matcher.MatcherMatcherListFieldMatcher(
        predicate=xds_matcher.MatcherMatcherListPredicate(and_matcher=both),
        on_match=xds_matcher.MatcherOnMatch(action=_xds_extension("skip", actions.SkipFilter())),
    )
    return _http_filter(
        inner.name,
        matching.ExtensionWithMatcher(
            extension_config=inner,
            xds_matcher=xds_matcher.Matcher(matcher_list=xds_matcher.MatcherMatcherList(matchers=[rule])),
        ),
    )


def _marked(key: str) -> xds_matcher.MatcherMatcherListPredicateSinglePredicate:
    """The filter has noted ``1`` under this key for the request."""
    return xds_matcher.MatcherMatcherListPredicateSinglePredicate(
        input=_xds_extension(
            "envoy.matching.inputs.dynamic_metadata",
            inputs.DynamicMetadataInput(filter=TAGS_NAMESPACE, path=[inputs.DynamicMetadataInputPathSegment(key=key)]),
        ),
        custom_match=_xds_extension(
            "envoy.matching.matchers.metadata_matcher",
            input_matchers.Metadata(value=matcher.ValueMatcher(string_match=matcher.StringMatcher(exact="1"))),
        ),
    )


def _watch_filter() -> hcm.HttpFilter:
    """Shows the chunks of the answers that the filter marked to the process that watches them."""
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    watch = ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=WATCH_CLUSTER)),
        stat_prefix="watch",
        observability_mode=True,
        failure_mode_allow=True,
        deferred_close_timeout=_WATCH_CLOSE_TIMEOUT,
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=skip,
            request_trailer_mode=skip,
            response_header_mode=send,
            response_body_mode=ext_proc.ProcessingModeBodySendMode.STREAMED,
            response_trailer_mode=skip,
        ),
        metadata_options=ext_proc.MetadataOptions(
            forwarding_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[TAGS_NAMESPACE])
        ),
    )
    return _for_marked("watch", WATCH_KEY, _extension("envoy.filters.http.ext_proc", watch))


def _for_marked(name: str, key: str, inner: core.TypedExtensionConfig) -> hcm.HttpFilter:
    """A filter that exists only for requests that the ext_proc filter has marked; for others this is one look-up."""
    rule = xds_matcher.MatcherMatcherListFieldMatcher(
        predicate=xds_matcher.MatcherMatcherListPredicate(single_predicate=_marked(key)),
        on_match=xds_matcher.MatcherOnMatch(action=_xds_extension(name, composite.ExecuteFilterAction(typed_config=inner))),
    )
    return _http_filter(
        f"envoy.filters.http.composite.{name}",
        matching.ExtensionWithMatcher(
            extension_config=_extension("envoy.filters.http.composite", composite.Composite()),
            xds_matcher=xds_matcher.Matcher(matcher_list=xds_matcher.MatcherMatcherList(matchers=[rule])),
        ),
    )


def _xds_extension(name: str, message: betterproto2.Message) -> xds_core.TypedExtensionConfig:
    return xds_core.TypedExtensionConfig(name=name, typed_config=protobuf.Any.pack(message))


def _counts_tokens(settings: Envoy) -> bool:
    return settings.stream_tokens and (settings.stats or settings.access_log)


def _usage() -> hcm.HttpFilter:
    """Token counts of a streamed answer, where it states them, as metadata."""
    source = core.DataSource(inline_string=stream_tokens.script())
    return _for_marked("stream_tokens", USAGE_KEY, _extension("envoy.filters.http.lua", lua.Lua(default_source_code=source)))


def _mutation_rules(config: Config) -> mutation_rules.HeaderMutationRules:
    traced = _MUTABLE_TRACE if config.tracing.endpoint is not None else ""
    replaced = _MUTABLE_CREDENTIALS if config.workers.replace_credentials else ""
    return mutation_rules.HeaderMutationRules(
        disallow_all=True,
        allow_expression=matcher.RegexMatcher(regex=_MUTABLE_HEADERS + traced + replaced),
        disallow_is_error=True,
    )


def _longer_expressions() -> bootstrap.LayeredRuntime:
    """Envoy refuses a regular expression of more than 100 RE2 instructions, which the filter's own headers about need."""
    layer = bootstrap.RuntimeLayer(
        name="expressions", static_layer=protobuf.Struct.from_dict({"re2.max_program_size.error_level": _EXPRESSION_SIZE})
    )
    return bootstrap.LayeredRuntime(layers=[layer])


# --- the listener that only the filter connects to --------------------------------------------------------------------


def _prefill_loop(config: Config, address: Address) -> listener.Listener:
    origin = _set_header(ORIGIN_HEADER, "envoy")
    prefill = route.Route(
        name=PREFILL_CLUSTER,
        match=route.RouteMatch(prefix="/"),
        request_body_buffer_limit=config.limits.max_body_bytes + BODY_HEADROOM_BYTES,
        response_headers_to_remove=[ORIGIN_HEADER],
        route=route.RouteAction(
            cluster=PREFILL_CLUSTER,
            timeout=_seconds(config.prefill.timeout_s),
            idle_timeout=timedelta(0),
        ),
    )
    connections = hcm.HttpConnectionManager(
        stat_prefix="prefill_loop",
        generate_request_id=False,
        stream_idle_timeout=timedelta(0),
        local_reply_config=hcm.LocalReplyConfig(
            mappers=[hcm.ResponseMapper(filter=_cel("response.code >= 100"), headers_to_add=[origin])]
        ),
        route_config=_routes(*_pool_routes(prefill, config)),
        http_filters=[_destination_to_metadata(), _router()],
    )
    bind = _listen_address("prefill.via", address, loopback_only=True)
    return _listener("prefill_loop", bind, connections, internal=True)


def _destination_to_metadata() -> hcm.HttpFilter:
    rule = header_to_metadata.ConfigRule(
        header=DESTINATION_HEADER,
        on_header_present=header_to_metadata.ConfigKeyValuePair(
            metadata_namespace=LB_NAMESPACE,
            key=DESTINATION_HEADER,
            type=header_to_metadata.ConfigValueType.STRING,
        ),
        remove=True,
    )
    return _http_filter("envoy.filters.http.header_to_metadata", header_to_metadata.Config(request_rules=[rule]))


# --- the listener that Prometheus connects to --------------------------------------------------------------------------


def _stats_page(listen: str) -> listener.Listener:
    page = route.Route(
        name=ADMIN_CLUSTER,
        match=route.RouteMatch(
            path="/stats/prometheus",
            headers=[route.HeaderMatcher(name=":method", string_match=matcher.StringMatcher(exact="GET"))],
        ),
        route=route.RouteAction(cluster=ADMIN_CLUSTER, timeout=_STATS_TIMEOUT),
    )
    connections = hcm.HttpConnectionManager(
        stat_prefix="stats",
        request_headers_timeout=_HEADERS_TIMEOUT,
        stream_idle_timeout=_STATS_TIMEOUT,
        route_config=_routes(page),
        http_filters=[_router()],
    )
    return _listener("stats", _listen_address("envoy.stats_listen", Address.parse(listen)), connections)


def _admin_cluster(config: Config) -> cluster.Cluster:
    target = endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=_address(Address.parse(config.envoy.admin))))
    return cluster.Cluster(
        name=ADMIN_CLUSTER,
        type=cluster.ClusterDiscoveryType.STATIC,
        connect_timeout=_CONNECT_TIMEOUT,
        load_assignment=endpoint.ClusterLoadAssignment(
            cluster_name=ADMIN_CLUSTER, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=[target])]
        ),
        # A page costs the main thread of Envoy tens of milliseconds.
        circuit_breakers=_circuit_breaker(_STATS_AT_ONCE, _STATS_AT_ONCE, _STATS_AT_ONCE),
    )


# --- clusters ---------------------------------------------------------------------------------------------------------


def _lb_metadata(key: str) -> metadata.MetadataKey:
    return metadata.MetadataKey(key=LB_NAMESPACE, path=[metadata.MetadataKeyPathSegment(key=key)])


def _pools_of_workers(role: str, config: Config) -> list[cluster.Cluster]:
    """The workers of one role, a cluster a pool; the default one first."""
    made = [_workers(role, config)]
    for rule in config.pools:
        own = _workers(cluster_of(role, rule.name), config)
        limits = (rule.max_connections, rule.max_pending, rule.max_requests)
        general = (config.envoy.max_connections, config.envoy.max_pending, config.envoy.max_requests)
        own.circuit_breakers = _circuit_breaker(
            *(most if each is None else each for each, most in zip(limits, general, strict=True))
        )
        made.append(own)
    return made


def _workers(name: str, config: Config) -> cluster.Cluster:
    protocol = upstreams.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=_WORKER_IDLE_TIMEOUT),
        explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=core.Http1ProtocolOptions()),
    )
    made = cluster.Cluster(
        name=name,
        connect_timeout=_CONNECT_TIMEOUT,
        per_connection_buffer_limit_bytes=_CONNECTION_BUFFER_BYTES,
        circuit_breakers=_worker_circuit_breaker(config.envoy),
        upstream_connection_options=cluster.UpstreamConnectionOptions(tcp_keepalive=_keepalive()),
        typed_extension_protocol_options=_protocol(protocol),
        transport_socket=envoy_tls.to_workers(config),
    )
    if config.envoy.pin == "original_dst":
        made.type = cluster.ClusterDiscoveryType.ORIGINAL_DST
        made.lb_policy = cluster.ClusterLbPolicy.CLUSTER_PROVIDED
        made.original_dst_lb_config = cluster.ClusterOriginalDstLbConfig(metadata_key=_lb_metadata(DESTINATION_HEADER))
    else:
        made.type = cluster.ClusterDiscoveryType.EDS
        made.eds_cluster_config = cluster.ClusterEdsClusterConfig(eds_config=_endpoints_source(name, config.envoy))
        made.load_balancing_policy = _exact_pin()
    return made


def _any_decode_worker(config: Config) -> cluster.Cluster:
    made = _workers(DECODE_CLUSTER, config)
    made.name = ANY_DECODE_CLUSTER
    assert made.eds_cluster_config is not None
    made.eds_cluster_config.service_name = DECODE_CLUSTER
    made.load_balancing_policy = _policy("envoy.load_balancing_policies.round_robin", round_robin.RoundRobin())
    return made


def _asks_filter(config: Config) -> bool:
    """Whether Envoy learns the workers from the filter's gRPC server."""
    return config.envoy.pin == "exact" and _endpoints_directory(config.envoy) is None


def _endpoints_directory(settings: Envoy) -> Path | None:
    """Where Envoy reads the endpoints; None: it asks the filter."""
    return None if settings.eds == "grpc" or settings.eds_dir is None else Path(settings.eds_dir)


def _endpoints_source(name: str, settings: Envoy) -> core.ConfigSource:
    directory = _endpoints_directory(settings)
    if directory is None:
        return core.ConfigSource(
            resource_api_version=core.ApiVersion.V3,
            ads=core.AggregatedConfigSource(),
            initial_fetch_timeout=_FIRST_ENDPOINTS_TIMEOUT,
        )
    path = core.PathConfigSource(
        path=str(endpoints_file(directory, name)), watched_directory=core.WatchedDirectory(path=str(directory))
    )
    return core.ConfigSource(resource_api_version=core.ApiVersion.V3, path_config_source=path)


def _ads() -> bootstrap.BootstrapDynamicResources:
    back_off = core.BackoffStrategy(base_interval=_seconds(0.2), max_interval=_seconds(2.0))
    service = core.GrpcService(
        envoy_grpc=core.GrpcServiceEnvoyGrpc(
            cluster_name=EXTPROC_CLUSTER, retry_policy=core.RetryPolicy(retry_back_off=back_off)
        )
    )
    return bootstrap.BootstrapDynamicResources(
        ads_config=core.ApiConfigSource(
            api_type=core.ApiConfigSourceApiType.DELTA_GRPC,
            transport_api_version=core.ApiVersion.V3,
            grpc_services=[service],
            set_node_on_first_message_only=True,
        )
    )


def _exact_pin() -> cluster.LoadBalancingPolicy:
    nobody = subset.Subset(
        fallback_policy=subset.SubsetLbSubsetFallbackPolicy.NO_FALLBACK,
        subset_lb_policy=_policy("envoy.load_balancing_policies.round_robin", round_robin.RoundRobin()),
    )
    return _policy(
        "envoy.load_balancing_policies.override_host",
        override_host.OverrideHost(
            override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=_lb_metadata(DESTINATION_HEADER))],
            selected_host_key=_lb_metadata(SERVED_KEY),
            fallback_policy=_policy("envoy.load_balancing_policies.subset", nobody),
        ),
    )


def _grpc_cluster(name: str, *listens: Address, replicas: bool = False) -> cluster.Cluster:
    """Of gRPC servers of the filter, one or several that are as good as each other. ``replicas``: a name stands for several."""
    addresses = [_dial(listen) for listen in listens]
    named = any(bool(each.host) and _ip(each) is None for each in addresses)
    several = len(addresses) > 1 or (named and replicas)
    protocol = upstreams.HttpProtocolOptions(
        explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(
                connection_keepalive=_PINGS if several and not addresses[0].path else None
            )
        )
    )
    targets = [endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=_address(address))) for address in addresses]
    return cluster.Cluster(
        name=name,
        load_balancing_policy=_least_request() if several else None,
        outlier_detection=_dead_ones(max(len(targets), 2)) if several else None,
        type=cluster.ClusterDiscoveryType.STRICT_DNS if named else cluster.ClusterDiscoveryType.STATIC,
        connect_timeout=_CONNECT_TIMEOUT,
        load_assignment=endpoint.ClusterLoadAssignment(
            cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=targets)]
        ),
        circuit_breakers=_no_circuit_breaker(),
        typed_extension_protocol_options=_protocol(protocol),
    )


def _least_request() -> cluster.LoadBalancingPolicy:
    """Of a few endpoints all are looked at, not two that are drawn: one of them may well be the busier one twice."""
    scan = least_request.LeastRequest(selection_method=least_request.LeastRequestSelectionMethod.FULL_SCAN)
    return _policy("envoy.load_balancing_policies.least_request", scan)


def _dead_ones(count: int) -> cluster.OutlierDetection:
    """Leave out who refuses a connection, before two health checks have failed: with nothing to do it would be chosen first.

    A health check that goes well ends it. So it may be long, and must not be short: one that comes back before its checks have
    failed would be tried again. It holds at once only with `update_merge_window: 0`; by default the load balancer may hear of
    it a second later.
    """
    return cluster.OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
        enforcing_success_rate=0,
        interval=_seconds(0.5),
        base_ejection_time=_EJECTION,
        max_ejection_time=_EJECTION,
        max_ejection_percent=100 * (count - 1) // count,
    )


def _watch_cluster(config: Config) -> cluster.Cluster:
    made = _grpc_cluster(WATCH_CLUSTER, *config.watchers, replicas=True)
    made.transport_socket = envoy_tls.to_filter(config, config.watchers[0])
    return made


def _extproc(config: Config) -> cluster.Cluster:
    check = core.HealthCheck(
        timeout=_HEALTH_INTERVAL,
        interval=_HEALTH_PAUSE,
        no_traffic_interval=_HEALTH_PAUSE,
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=core.HealthCheckGrpcHealthCheck(service_name="envoy.service.ext_proc.v3.ExternalProcessor"),
    )
    made = _grpc_cluster(EXTPROC_CLUSTER, *config.filters, replicas=bool(config.envoy.filters))
    made.health_checks = [check]
    made.transport_socket = envoy_tls.to_filter(config, config.filters[0])
    made.common_lb_config = cluster.ClusterCommonLbConfig(
        healthy_panic_threshold=types.Percent(value=0.0), update_merge_window=timedelta(0)
    )
    return made


def _collector(settings: Tracing) -> cluster.Cluster:
    assert settings.endpoint is not None
    where = collector(settings.endpoint, settings.protocol)
    made = _grpc_cluster(COLLECTOR_CLUSTER, Address.parse(where.authority))
    if settings.protocol == "http":
        made.typed_extension_protocol_options = {}
    return made


def _no_circuit_breaker() -> cluster.CircuitBreakers:
    return _circuit_breaker(_MAX_CONNECTIONS, _MAX_CONNECTIONS, _MAX_CONNECTIONS)


def _worker_circuit_breaker(settings: Envoy) -> cluster.CircuitBreakers:
    return _circuit_breaker(settings.max_connections, settings.max_pending, settings.max_requests)


def _circuit_breaker(connections: int, pending: int, requests: int) -> cluster.CircuitBreakers:
    threshold = cluster.CircuitBreakersThresholds(
        max_connections=connections,
        max_pending_requests=pending,
        max_requests=requests,
        max_retries=_MAX_CONNECTIONS,
    )
    return cluster.CircuitBreakers(thresholds=[threshold])


# --- traces -----------------------------------------------------------------------------------------------------------


def _traces(config: Config) -> bool:
    """Whether Envoy sends spans of its own."""
    return config.tracing.endpoint is not None and config.tracing.envoy


def _request_id() -> hcm.RequestIdExtension:
    config = request_id.UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
    return hcm.RequestIdExtension(typed_config=protobuf.Any.pack(config))


def _tracing(settings: Tracing) -> hcm.HttpConnectionManagerTracing:
    assert settings.endpoint is not None
    where = collector(settings.endpoint, settings.protocol)
    sends = tracers.OpenTelemetryConfig(service_name="baton-envoy", sampler=_sampler(settings.sample_ratio))
    timeout = _seconds(settings.timeout_s)
    if settings.protocol == "grpc":
        target = core.GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR_CLUSTER)
        sends.grpc_service = core.GrpcService(envoy_grpc=target, timeout=timeout)
    else:
        uri = core.HttpUri(uri=f"http://{where.authority}{where.path}", cluster=COLLECTOR_CLUSTER, timeout=timeout)
        sends.http_service = core.HttpService(http_uri=uri)
    return hcm.HttpConnectionManagerTracing(
        provider=tracers.TracingHttp(name="envoy.tracers.opentelemetry", typed_config=protobuf.Any.pack(sends)),
        spawn_upstream_span=True,
        max_path_tag_length=256,
        custom_tags=[
            tracing.CustomTag(tag="http.url", value="%PATH(NQ):256%"),
            tracing.CustomTag(tag="baton.request_id", value="%REQ(x-request-id):128%"),
        ],
    )


def _sampler(ratio: float) -> core.TypedExtensionConfig:
    share = types.FractionalPercent(numerator=round(ratio * 1e6), denominator=types.FractionalPercentDenominatorType.MILLION)
    drawn = _extension(
        "envoy.tracers.opentelemetry.samplers.trace_id_ratio_based",
        samplers.TraceIdRatioBasedSamplerConfig(sampling_percentage=share),
    )
    return _extension(
        "envoy.tracers.opentelemetry.samplers.parent_based", samplers.ParentBasedSamplerConfig(wrapped_sampler=drawn)
    )


# --- logs and statistics ----------------------------------------------------------------------------------------------

_TTFT_MS, _TTFT_US = (f"%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:{unit})%" for unit in ("ms", "us"))
_GENERATION_MS, _GENERATION_US = (f"%COMMON_DURATION(US_RX_BODY_BEG:US_RX_END:{unit})%" for unit in ("ms", "us"))

_HISTOGRAMS = {"ttft_ms": _TTFT_MS, "generation_ms": _GENERATION_MS}

_TAGS = ("model", "policy", "mode")

_LOG_FIELDS = {
    "time": "%START_TIME%",
    "request_id": "%REQ(x-request-id):128%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "protocol": "%PROTOCOL%",
    "method": "%REQ(:method)%",
    # No query: clients put keys there.
    "path": "%PATH(NQ):256%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "decode": "%UPSTREAM_HOST%",
    "kv_transfer": f"%REQ({KV_TRANSFER_HEADER})%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "held_ms": "%COMMON_DURATION(DS_RX_END:US_TX_BEG:ms)%",
    "ttft_ms": _TTFT_MS,
    "generation_ms": _GENERATION_MS,
    "duration_ms": "%DURATION%",
}


def _access_log(*, traced: bool) -> accesslog.AccessLog:
    fields = {**_LOG_FIELDS, **({"trace_id": "%TRACE_ID%"} if traced else {})}
    log_format = core.SubstitutionFormatString(json_format=protobuf.Struct.from_dict(fields))
    return accesslog.AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=protobuf.Any.pack(stream.StdoutAccessLog(log_format=log_format)),
    )


def _log_service() -> accesslog.AccessLog:
    times = {TTFT_TAG: _TTFT_US, GENERATION_TAG: _GENERATION_US}
    common = grpc_log.CommonGrpcAccessLogConfig(
        log_name=STATS_PREFIX,
        grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER)),
        transport_api_version=core.ApiVersion.V3,
        buffer_flush_interval=_LOG_FLUSH,
        custom_tags=[tracing.CustomTag(tag=name, value=value) for name, value in times.items()],
    )
    config = grpc_log.HttpGrpcAccessLogConfig(common_config=common, additional_response_headers_to_log=["content-type"])
    return accesslog.AccessLog(name="envoy.access_loggers.http_grpc", typed_config=protobuf.Any.pack(config))


def _stats_logs(*, tokens: bool) -> list[accesslog.AccessLog]:
    whole = "response.code_details == 'via_upstream'"
    streamed = "response.headers['content-type'].startsWith('text/event-stream')"
    times = [
        stats.ConfigHistogram(stat=_stat(name), unit=stats.ConfigHistogramUnit.Milliseconds, value_format=value)
        for name, value in _HISTOGRAMS.items()
    ]
    stated = [
        stats.ConfigCounter(stat=_stat(key), value_format=f"%DYNAMIC_METADATA({USAGE_NAMESPACE}:{key})%") for key in USAGE_KEYS
    ]
    requests = stats.ConfigCounter(
        stat=_stat("requests", stats.ConfigTag(name="code", value_format="%RESPONSE_CODE%")), value_fixed=1
    )
    return [
        _stats_log("times", f"{whole} && {streamed}", stats.Config(histograms=times)),
        *(
            [_stats_log("tokens", f"'{USAGE_NAMESPACE}' in metadata.filter_metadata", stats.Config(counters=stated))]
            if tokens
            else []
        ),
        _stats_log("requests", None, stats.Config(counters=[requests])),
    ]


def _stats_log(name: str, when: str | None, config: stats.Config) -> accesslog.AccessLog:
    config.stats_scope = types.Scope(prefix=STATS_PREFIX)
    return accesslog.AccessLog(
        name=f"envoy.access_loggers.stats.{name}",
        filter=None if when is None else _cel(when),
        typed_config=protobuf.Any.pack(config),
    )


def _stat(name: str, *more: stats.ConfigTag) -> stats.ConfigStat:
    tags = [stats.ConfigTag(name=tag, value_format=f"%DYNAMIC_METADATA({TAGS_NAMESPACE}:{tag})%") for tag in _TAGS]
    return stats.ConfigStat(name=name, tags=[*tags, *more])


def _stats_config() -> metrics.StatsConfig:
    settings = metrics.HistogramBucketSettings(
        match=matcher.StringMatcher(prefix=f"{STATS_PREFIX}."), buckets=[float(bound) for bound in _BUCKETS_MS]
    )
    return metrics.StatsConfig(histogram_bucket_settings=[settings])


def _overload_manager(config: Config) -> overload.OverloadManager:
    limit = downstream_connections.DownstreamConnectionsConfig(max_active_downstream_connections=2 * config.limits.max_streams)
    monitor = overload.ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections", typed_config=protobuf.Any.pack(limit)
    )
    return overload.OverloadManager(resource_monitors=[monitor])


# --- small parts ------------------------------------------------------------------------------------------------------


def _listener(
    name: str, address: core.Address, connections: hcm.HttpConnectionManager, *, internal: bool = False
) -> listener.Listener:
    network_filter = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=protobuf.Any.pack(connections)
    )
    return listener.Listener(
        name=name,
        address=address,
        per_connection_buffer_limit_bytes=_CONNECTION_BUFFER_BYTES,
        bypass_overload_manager=internal,
        tcp_keepalive=None if internal else _keepalive(),
        filter_chains=[listener.FilterChain(filters=[network_filter])],
    )


def _routes(*routes: route.Route) -> route.RouteConfiguration:
    host = route.VirtualHost(name="all", domains=["*"], routes=list(routes))
    return route.RouteConfiguration(name=routes[-1].name, virtual_hosts=[host])


def _router() -> hcm.HttpFilter:
    return _http_filter("envoy.filters.http.router", router.Router())


def _http_filter(name: str, message: betterproto2.Message) -> hcm.HttpFilter:
    return hcm.HttpFilter(name=name, typed_config=protobuf.Any.pack(message))


def _extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    return core.TypedExtensionConfig(name=name, typed_config=protobuf.Any.pack(message))


def _policy(name: str, message: betterproto2.Message) -> cluster.LoadBalancingPolicy:
    policy = cluster.LoadBalancingPolicyPolicy(typed_extension_config=_extension(name, message))
    return cluster.LoadBalancingPolicy(policies=[policy])


def _protocol(options: upstreams.HttpProtocolOptions) -> dict[str, protobuf.Any]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protobuf.Any.pack(options)}


def _cel(expression: str) -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(
        extension_filter=accesslog.ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=protobuf.Any.pack(cel.ExpressionFilter(expression=expression)),
        )
    )


def _set_header(name: str, value: str) -> core.HeaderValueOption:
    return core.HeaderValueOption(
        header=core.HeaderValue(key=name, value=value),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _keepalive() -> core.TcpKeepalive:
    return core.TcpKeepalive(keepalive_time=30, keepalive_interval=10, keepalive_probes=3)


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# --- addresses --------------------------------------------------------------------------------------------------------


def _ip(address: Address) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(address.host.strip("[]"))
    except ValueError:
        return None


def _listen_address(field: str, address: Address, *, loopback_only: bool = False) -> core.Address:
    """An address Envoy can bind. Raises ConfigError for a name, and for what others could reach if they must not."""
    if address.host:
        ip = _ip(address)
        if ip is None:
            raise ConfigError(f"{field}: {address}: Envoy listens on an IP address or a unix socket, not on a name")
        if loopback_only and not ip.is_loopback:
            raise ConfigError(f"{field}: {address}: this port is unprotected and must be on a loopback address")
    return _address(address, mode=_SOCKET_MODE)


def _dial(address: Address) -> Address:
    """Where to connect to reach what listens at this address: all interfaces means this machine."""
    ip = _ip(address)
    if ip is None or not ip.is_unspecified:
        return address
    return Address(host="127.0.0.1" if ip.version == 4 else "::1", port=address.port)


def _address(address: Address, *, mode: int = 0) -> core.Address:
    if address.path:
        return core.Address(pipe=core.Pipe(path=address.path, mode=mode))
    return core.Address(socket_address=core.SocketAddress(address=address.host.strip("[]"), port_value=address.port))
