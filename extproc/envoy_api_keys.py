"""API keys of clients, checked by Envoy before the filter sees a request; and how often each client may ask.

The keys stand in a file of their own, the configuration of Envoy's filter `api_key_auth` as a discovery response: Envoy reads
it again when another one is renamed into its place, and no key is in Envoy's own configuration.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.common.ratelimit import v3 as ratelimit
from envoy_data_plane.envoy.extensions.filters.http.local_ratelimit import v3 as local_ratelimit
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.type import v3 as types
from envoy_data_plane.google import protobuf

from extproc.config import ApiKeys

_NAME: Final = "envoy.filters.http.api_key_auth"
_TYPE: Final = "type.googleapis.com/envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth"
_CLIENT: Final = "client"
_MOST_FILLS_PER_S: Final = 20
_MOST_CLIENTS: Final = 10_000
"""Token buckets that Envoy keeps; the one that was not used for longest goes."""


def filters(settings: ApiKeys) -> list[hcm.HttpFilter]:
    """What goes before everything else on a request's way."""
    made = [_keys(settings)]
    if settings.requests_per_s is not None:
        made.append(_rate(settings, settings.requests_per_s))
    return made


def _keys(settings: ApiKeys) -> hcm.HttpFilter:
    path = core.PathConfigSource(
        path=settings.file, watched_directory=core.WatchedDirectory(path=str(Path(settings.file).parent))
    )
    source = core.ConfigSource(resource_api_version=core.ApiVersion.V3, path_config_source=path)
    return hcm.HttpFilter(name=_NAME, config_discovery=core.ExtensionConfigSource(config_source=source, type_urls=[_TYPE]))


def _rate(settings: ApiKeys, requests_per_s: float) -> hcm.HttpFilter:
    burst = max(1, round(requests_per_s if settings.burst is None else settings.burst))
    # Envoy fills a bucket at most every 50 ms.
    at_once = 1 if requests_per_s <= _MOST_FILLS_PER_S else round(requests_per_s)
    interval = timedelta(seconds=at_once / requests_per_s)
    each = types.TokenBucket(max_tokens=burst, tokens_per_fill=at_once, fill_interval=interval)
    always = core.RuntimeFractionalPercent(default_value=types.FractionalPercent(numerator=100))
    limit = local_ratelimit.LocalRateLimit(
        stat_prefix="clients",
        # For requests without a name there are none; each client has a bucket of its own below.
        token_bucket=types.TokenBucket(max_tokens=1, tokens_per_fill=1, fill_interval=interval),
        filter_enabled=always,
        filter_enforced=always,
        always_consume_default_token_bucket=False,
        rate_limits=[
            route.RateLimit(
                actions=[
                    route.RateLimitAction(
                        request_headers=route.RateLimitActionRequestHeaders(
                            header_name=settings.client_header, descriptor_key=_CLIENT
                        )
                    )
                ]
            )
        ],
        descriptors=[
            ratelimit.LocalRateLimitDescriptor(
                # No value: one bucket for each that comes.
                entries=[ratelimit.RateLimitDescriptorEntry(key=_CLIENT)],
                token_bucket=each,
            )
        ],
        max_dynamic_descriptors=_MOST_CLIENTS,
    )
    return hcm.HttpFilter(name="envoy.filters.http.local_ratelimit", typed_config=protobuf.Any.pack(limit))
