"""The one typed configuration tree, read from YAML.

Every field has its unit in its name and its meaning in a comment beside it; unknown keys are refused. Nothing here does I/O
but :func:`load`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from extproc.discovery.kubernetes.settings import KubernetesWorkers
from extproc.discovery.kubernetes.settings import check as check_kubernetes
from extproc.discovery.listing import ListingError, endpoint_set, name_server
from extproc.handoff.remote_hosts import RemoteHosts
from extproc.models import Models
from extproc.next_turn.settings import NextTurn
from extproc.next_turn.settings import faults as next_turn_faults
from extproc.observe.kv_events.settings import KvEvents
from extproc.observe.kv_events.settings import faults as kv_event_faults
from extproc.observe.load import Scraping
from extproc.policy_config import PolicyRule, check_policies
from extproc.pools.settings import PoolRule, Routes, check_pools, pooled_labels
from extproc.replicas.settings import ReplicaSettings
from extproc.replicas.settings import faults as replica_faults
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.settings import Routing
from extproc.tls.settings import ClientTls
from extproc.tls.settings import faults as tls_faults
from extproc.tokens.settings import TokenSettings
from extproc.tokens.settings import faults as token_faults
from workers import yaml_lines

_HOST_PORT = re.compile(r"^(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})$")


BODY_HEADROOM_BYTES = 1 << 20
"""How much larger than `limits.max_body_bytes` Envoy lets a body be, for what the filter adds to it: block ids, token ids."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which file, which field and why."""


class Address(msgspec.Struct, frozen=True):
    """Where something listens or is reached: `host:port`, or `unix:/path` (then `path` is set and `host` empty)."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """`"10.0.0.1:8100"`, `"[::1]:8100"` or `"unix:/run/x.sock"` -> Address. Raises ValueError."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            # sun_path holds 108 bytes with its terminating NUL (unix(7)).
            if not path.startswith("/") or len(path.encode()) > 107:
                raise ValueError(f"{text!r}: a unix address is unix: and an absolute path of at most 107 bytes")
            return cls(path=path)
        match = _HOST_PORT.match(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"{text!r} is neither host:port nor unix:/path")
        return cls(host=match["host"], port=int(match["port"]))

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class DnsWorkers(_Section, frozen=True, kw_only=True):
    """Workers of one role behind a DNS name: `name` and `port` (A and AAAA records), or `srv` (SRV records)."""

    role: Literal["prefill", "decode", "both"]
    """What they do."""
    name: str | None = None
    """Name whose A and AAAA records are the workers."""
    port: int | None = None
    """HTTP port of all of them; goes with `name`."""
    srv: str | None = None
    """Name whose SRV records are the workers. Every target counts the same: priorities and weights are ignored."""
    refresh_s: float = 5.0
    """Longest time between two look-ups. A shorter TTL of the answer shortens it, to no less than 1 s."""
    labels: dict[str, str] = {}
    """Labels of all of them, which policies select by."""


class Workers(_Section, frozen=True, kw_only=True):
    """The workers, by role, from several sources at once: the lists here, `file`, `dns`, `kubernetes`. An item of a list is the
    `ip:port` of the worker's HTTP server (Envoy pins by address, so no names), or an object: `address`, and if wanted
    `labels`, `models`, `max_seqs`, `kv_tokens`, `prefill_tokens_per_s`, `max_batched_tokens`."""

    prefill: Sequence[str | EndpointSpec] = ()
    """Started with a NixlConnector; they take the prompts."""
    decode: Sequence[str | EndpointSpec] = ()
    """Started with a NixlConnector; they stream the answers."""
    both: Sequence[str | EndpointSpec] = ()
    """Started with a NixlConnector; they take prompts and stream answers."""
    file: str | None = None
    """YAML or JSON file with `prefill`, `decode` and `both` like here. It is watched; a faulty one changes nothing."""
    dns: list[DnsWorkers] = []
    """DNS names, each with `role`, `name` and `port` or `srv`, `refresh_s` and `labels`."""
    dns_servers: list[str] = []
    """Name servers to ask, as `ip` or `ip:port`; none: those of the system."""
    kubernetes: KubernetesWorkers | None = None
    """Pods, InferencePools and Services of Kubernetes, which the filter watches."""
    api_key_file: str | None = None
    """File with the key that the workers want (`--api-key`), for what the filter asks of them by itself: their models, first
    handoffs, releases. Clients' requests keep the credentials that they come with. null, or an empty file: they want none.
    It is read again when it changes."""
    replace_credentials: bool = False
    """Clients' requests go to the workers with the key of `api_key_file` in place of `authorization` and `x-api-key` that they
    came with. Only where clients are checked before the filter, by Envoy for example: see [security](security.md#api-keys)."""
    tls: ClientTls | None = None
    """HTTPS to all workers, from the filter and from Envoy. null: plain HTTP. See [security](security.md#workers)."""
    networks: list[str] = []
    """Networks (`10.0.0.0/8`) in which every worker from `file`, `dns` or elsewhere must be; others are left out, named in the
    log and counted. Empty: any but the addresses where clouds keep credentials, and those that are nobody's."""

    def endpoint_set(self) -> EndpointSet:
        """What stands in the configuration itself. Raises ListingError."""
        return endpoint_set(self.prefill, self.decode, self.both)

    @property
    def all_listed(self) -> bool:
        """No worker comes from elsewhere."""
        return self.file is None and not self.dns and self.kubernetes is None

    @property
    def prefill_addresses(self) -> list[str]:
        """Of the workers in the configuration itself that take prompts."""
        found = self.endpoint_set()
        return [spec.address for spec in (*found.prefill, *found.both)]

    @property
    def decode_addresses(self) -> list[str]:
        """Of the workers in the configuration itself that stream answers."""
        found = self.endpoint_set()
        return [spec.address for spec in (*found.decode, *found.both)]


class Prefill(_Section, frozen=True, kw_only=True):
    """How the filter makes prefill calls, and what happens when they fail."""

    via: str = "direct"
    """`direct`: straight to the worker. `unix:/path` or `host:port`: through Envoy's loopback listener there."""
    timeout_s: float = 120.0
    """One deadline for everything up to the handoff, retries included. A request may shorten it with the header
    `x-request-timeout-ms`."""
    attempt_timeout_s: float | None = None
    """One call, where a slow worker shall not use up the whole deadline. null: only the deadline counts."""
    connect_timeout_s: float = 2.0
    """To the worker, or to Envoy's loopback listener."""
    retries: int = 1
    """How many other prefill workers are tried after a failure. Never after a 4xx about the request. 0 forbids it."""
    fallback: Literal["fail", "aggregate"] = "fail"
    """When no prefill could be had: `fail` answers 502, 503 or 504; `aggregate` lets the decode worker do it all."""
    tokenise_once: bool = True
    """Take the prompt's token ids from the prefill's reply and give them to the decode worker (chat and completions)."""
    max_concurrent: int = 10_000
    """Prefill calls in flight; one more is answered 429."""
    max_reply_bytes: int = 16 << 20
    """A prefill reply is small (block and token ids); a larger one is an error."""


class PushPeer(_Section, frozen=True, kw_only=True):
    """A prefill worker with a NixlPushConnector, as the decode worker must know it."""

    engine_id: str
    """`engine_id` of its `--kv-transfer-config`; left to chance there, it would change at every start."""
    host: str
    """Its `VLLM_NIXL_SIDE_CHANNEL_HOST`."""
    port: int = 5600
    """Its `VLLM_NIXL_SIDE_CHANNEL_PORT`."""
    tp_size: int = 1
    """Its tensor parallel size."""
    pp_size: int = 1
    """Its pipeline parallel size."""


class LmcachePeer(_Section, frozen=True, kw_only=True):
    """A decode worker with LMCache as receiver (`pd_role: receiver`)."""

    host: str
    """Its `pd_peer_host`."""
    init_ports: list[int]
    """Its `pd_peer_init_port`, one a tensor parallel rank."""
    alloc_ports: list[int]
    """Its `pd_peer_alloc_port`, one a tensor parallel rank."""


class Handoff(_Section, frozen=True, kw_only=True):
    """How long KV blocks may wait on the prefill worker, and how they are given back."""

    connector: Literal["nixl_pull", "nixl_push", "lmcache", "llmd_sidecar"] = "nixl_pull"
    """`nixl_pull`: vLLM's NixlConnector, alone or with LMCache in a MultiConnector. `nixl_push`: NixlPushConnector, both legs
    at once, experimental. `lmcache`: LMCache's own protocol. `llmd_sidecar`: llm-d's sidecar makes the prefill call."""
    nixl_push: dict[str, PushPeer] = {}
    """For `nixl_push`: `ip:port` of each prefill worker -> `engine_id`, `host`, `port`, `tp_size`, `pp_size`."""
    lmcache: dict[str, LmcachePeer] = {}
    """For `lmcache`: `ip:port` of each decode worker -> `host`, `init_ports`, `alloc_ports`."""
    lease_s: float = 30.0
    """The engine's `kv_lease_duration`: after it, blocks are reused while a late decode would still read them."""
    max_age_share: float = 0.5
    """A handoff older than this share of the lease is not used: the prompt is prefilled again, within the deadline."""
    release: bool = True
    """Give back the blocks of a handoff that no decode worker will fetch, instead of leaving them to the lease."""
    release_delay_s: float = 3.0
    """How long a release waits where a decode worker may have got the request just before its client left: time for it to
    finish reading. Well below the lease."""
    release_queue: int = 1024
    """Releases waiting at once; one more is dropped, counted, and left to the lease."""
    release_timeout_s: float = 5.0
    """One release call."""
    next_turn: NextTurn = NextTurn()
    remote_hosts: list[str] = []
    """Where a prefill worker's reply may say that its KV blocks are: networks (`10.1.0.0/16`), host names, or `worker`: the
    address that the worker has itself. A reply that names another host is not used. Empty: any host, as workers may have a
    network of their own for it."""


class Health(_Section, frozen=True, kw_only=True):
    """How the filter finds out which workers are live: `GET path` on each of them."""

    path: str = "/health"
    """200 means live."""
    interval_s: float = 1.0
    """From the end of one probe to the next."""
    timeout_s: float = 2.0
    """A probe without an answer by then has failed."""
    unhealthy_threshold: int = 3
    """Failed probes in a row after which a worker gets no more requests."""
    healthy_threshold: int = 1
    """Good probes in a row after which it gets requests again."""


class WarmUp(_Section, frozen=True, kw_only=True):
    """The first KV transfer between two workers takes seconds to tens of seconds: the filter makes it, before a client has to.
    [Operations](operations.md) says what that means for each state of a worker."""

    enabled: bool = True
    """Make a handoff between every prefill and every decode worker that have not met, and keep clients off until then."""
    prompt_tokens: int = 160
    """Least length of its prompt: more than one KV block of the workers, so that blocks really move."""
    answer_tokens: int = 4
    """Tokens that the decode worker answers."""
    timeout_s: float = 60.0
    """One such handoff, from the prefill call to the end of the answer."""
    attempts: int = 3
    """Failures in a row after which a pair is given up: counted, and named at `/healthz`."""
    retry_s: float = 60.0
    """About so long after that, it is tried again, and so on."""
    concurrency: int = 8
    """Such handoffs at once, in all; a worker has no more than one at a time."""
    partners: int = 16
    """With at most so many workers in each role, a worker must have met all warm ones of the other role before it is used. In a
    larger pool one is enough; a decode worker then meets so many, and clients' requests the rest."""
    background_per_s: float = 2.0
    """In such a larger pool: handoffs a second between workers that are in use already."""
    when_cold: Literal["wait", "serve"] = "wait"
    """A prompt that comes while no pair it could have is warm: `wait` until one is, within the request's deadline, or `serve`
    it at once, at the price of the first transfer."""
    give_up_s: float = 180.0
    """A worker that could not be warmed for so long is used all the same, where no other can."""


class Limits(_Section, frozen=True, kw_only=True):
    """Upper bounds. Each is a clear error when it is met, never a hang."""

    max_body_bytes: int = 64 << 20
    """A larger request body is answered 413, by Envoy and by the filter alike."""
    max_held_bytes: int = 2 << 30
    """Bodies of all requests that wait for their prefill, together; one more is answered 429. A body takes about four times its
    size while it is worked on."""
    max_streams: int = 20_000
    """Requests open at once, from their headers to the end of their answers; one more is answered 429."""


class Drain(_Section, frozen=True, kw_only=True):
    """What happens at SIGTERM: health goes NOT_SERVING, `delay_s` passes for Envoy to notice, streams finish, exit."""

    delay_s: float = 3.0
    """Requests that come in the meantime are served."""
    timeout_s: float = 600.0
    """After this the remaining streams are cut."""


class Tls(_Section, frozen=True, kw_only=True):
    """TLS at `listen`, the gRPC port. See [endpoint picker](endpoint-picker.md#tls)."""

    mode: Literal["none", "self_signed", "files"] | None = None
    """`none`: plaintext. `self_signed`: a certificate made at the start, kept in memory, for peers that do not verify. `files`:
    `cert_file` and `key_file`. null: `self_signed` with `epp.enabled`, else `none`."""
    cert_file: str | None = None
    """PEM: the server's certificate, then those between it and its CA. Read again when it changes; connections stay."""
    key_file: str | None = None
    """PEM: its private key, not encrypted."""
    client_ca_file: str | None = None
    """PEM: the CAs of clients. Set: a client without a certificate of one of them is refused (mTLS)."""
    handshake_timeout_s: float = 10.0
    """A client that has not finished its handshake by then is cut."""


class Epp(_Section, frozen=True, kw_only=True):
    """Baton as the endpoint picker of a Gateway API InferencePool (`endpointPickerRef`): endpoint picker protocol 1.0. See
    [endpoint picker](endpoint-picker.md)."""

    enabled: bool = False
    """Be one. Then `listen` is `0.0.0.0:9002` and `admin` `127.0.0.1:9091` unless they are given, `tls` is `self_signed` unless
    it says otherwise, nothing is expected of Envoy that only `baton envoy-config` gives: its access log, streams watched."""
    health_listen: str | None = "0.0.0.0:9003"
    """gRPC health in plaintext, as kubelets and gateways ask for it, and nothing else. null: only at `listen`."""
    health_services: list[str] = msgspec.field(default_factory=lambda: ["inference-extension"])
    """More names for readiness there, beside those of the protocol: what probes of common charts ask for."""
    ready_after_s: float = 30.0
    """Readiness there waits until both roles had a live and warm worker, but no longer than this; then it stays, and what is
    missing is said with a 503. A rollout so never replaces a picker that knows its workers by one that does not."""
    metrics_listen: str | None = "0.0.0.0:9090"
    """`/metrics`, and nothing else of the admin port. null: only at `admin`."""
    fallback_endpoints: int = 0
    """How many other decode workers are named behind the chosen one (`ip:port,ip:port`), for requests without a handoff: the
    gateway takes them if the first cannot be reached. Only where it balances by `override_host` (Istio): clusters of the type
    ORIGINAL_DST (Envoy AI Gateway, llm-d's chart) and agentgateway read one address only."""
    conformance_headers: bool = False
    """For the conformance suite only: `test-epp-endpoint-selection` on a request picks among the pool's decode workers, and the
    answer says in `x-conformance-test-…` which one was chosen and which one served. Any client could steer its requests."""


class ApiKeys(_Section, frozen=True, kw_only=True):
    """Envoy checks clients' API keys, and names the client to the filter. See [security](security.md#api-keys)."""

    file: str
    """The keys: a discovery response with the configuration of Envoy's filter `api_key_auth`, as in `envoy/api-keys.yaml`.
    Envoy reads it again when another is renamed into its place. Readable by Envoy only."""
    client_header: str = "x-tenant"
    """The header in which the file's `forwarding.header` names the client, for `tenant_header` of policies. A client's own is
    removed."""
    requests_per_s: float | None = None
    """How often each client may ask, on this Envoy; one more is answered 429. null: as often as it likes."""
    burst: int | None = None
    """Requests of a client at once, after a pause. null: those of one second."""


class Envoy(_Section, frozen=True, kw_only=True):
    """What `baton envoy-config` puts into Envoy's configuration, and where endpoint files go."""

    listen: str = "0.0.0.0:8000"
    """Clients connect here (plain HTTP/1.1 and HTTP/2)."""
    admin: str = "127.0.0.1:9901"
    """Envoy's own admin port: a loopback address, since whoever reaches it controls Envoy."""
    eds: Literal["file", "grpc"] | None = None
    """How Envoy learns the workers: `file` in `eds_dir`, on a disk that both share, or `grpc` from the filter's own server, as
    it does ext_proc. null: `file` if there is an `eds_dir`, else `grpc`."""
    eds_dir: str | None = None
    """`baton serve` writes `decode.json` and `prefill.json` here for Envoy to watch; null: it writes nothing."""
    body_mode: Literal["buffered", "full_duplex", "full_duplex_both"] = "buffered"
    """How bodies of requests come to the filter. `buffered`: whole, by Envoy. `full_duplex`: in pieces, as every Gateway API
    implementation sends them; requests are then sent on in chunks, without a content-length. `full_duplex_both`: those of
    answers, too, as such an implementation does it: for trying it out only, since every token then passes the filter."""
    filters: list[str] = []
    """Where Envoy reaches the filters, where there are several: `host:port` of each, or one name whose A records are all of
    them (a headless Service). A request goes to the one with the fewest open; one that is gone is left out. Empty: `listen`."""
    pin: Literal["exact", "original_dst"] = "exact"
    """How Envoy reaches the worker that the filter named. `exact`: only if it is one of the known ones. `original_dst`: any
    address that the filter names, with no list of workers in Envoy (and no use for `eds`)."""
    filter_down: Literal["refuse", "round_robin"] = "refuse"
    """What happens to requests while no filter is there. `refuse`: 503. `round_robin`: prompts in plain JSON go to decode
    workers in turn, which do all of the work; everything else is refused. No policy and no limit of the filter holds then."""
    max_connections: int = 100_000
    """From Envoy to the workers of one role together."""
    max_pending: int = 100_000
    """Requests that wait in Envoy for a connection to a worker of one role; one more is 503."""
    max_requests: int = 100_000
    """Requests in flight from Envoy to the workers of one role; one more is 503."""
    idle_timeout_s: float = 600.0
    """Longest silence on a request: covers the wait for the prefill and every gap between tokens."""
    stats: bool = True
    """TTFT, generation, tokens and requests by model, policy and mode, at Envoy's own `/stats/prometheus`. See
    [observe](observe.md)."""
    stats_listen: str | None = None
    """Where `GET /stats/prometheus` of Envoy's admin port is served to others, and nothing else of it: for a Prometheus that is
    elsewhere. null: nowhere."""
    access_log: bool = True
    """Envoy reports every request to the filter when it is over, in batches: its times, its end as the client saw it, its
    worker. The filter works without it, but then knows no TTFT and no client that left during an answer."""
    stream_tokens: bool = True
    """Read the token counts at the end of a streamed answer, where the client asks for them (`stream_options.include_usage`),
    for both of these. It touches every chunk of such a stream, and holds none."""
    debug_headers: bool = False
    """Add `x-kv-transfer` and `x-decode-endpoint` to responses. They name worker addresses: not for the internet."""
    api_keys: ApiKeys | None = None
    extproc_tls: ClientTls | None = None
    """How Envoy checks the filter, and shows itself to it, where the filter's port has TLS (`tls`). null: it encrypts and takes
    any certificate, which goes with a self-signed one only."""
    secrets_dir: str | None = None
    """Where Envoy finds which certificates to use, so that it reads them again when they change. `baton envoy-config` writes
    the files there: they name paths and hold no secret. Needed where Envoy uses certificates from files."""


class Observe(_Section, frozen=True, kw_only=True):
    """What is looked at beside what Envoy and the workers tell by themselves. See [observe](observe.md)."""

    sample: float = 0.01
    """Share of the streamed answers whose chunks are watched, for the times from token to token: 0 to 1. Policies can have an
    `observe.sample` of their own. With 0 here and in all of them, nothing is watched, and Envoy is given no filter for it."""
    max_streams: int = 64
    """Streams watched at once; one more is not, and is counted."""
    listen: str | None = None
    """Where the process that watches listens for Envoy. null: `watch.sock` beside the socket `listen`, or port 9004 beside a
    `host:port`."""


class Tracing(_Section, frozen=True, kw_only=True):
    """OpenTelemetry spans of each request, sent by OTLP. Off without an `endpoint`. See [observe](observe.md)."""

    endpoint: str | None = None
    """Collector: `http://host:port`, or `https://host:port` with `envoy: false`. null: no tracing, at no cost."""
    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC (port 4317 by custom), or over HTTP as protobuf (4318; the path is `/v1/traces` if none is given)."""
    sample_ratio: float = 1.0
    """Share of the requests that are traced, 0 to 1, where nobody before us has decided it."""
    from_clients: Literal["continue", "ignore"] = "continue"
    """A client's `traceparent`: `continue` its trace and its decision whether to sample, or `ignore` it and begin a new one."""
    envoy: bool = True
    """Have Envoy send its own spans to the same place (`baton envoy-config`)."""
    service_name: str | None = None
    """null: `OTEL_SERVICE_NAME`, or `baton`. Envoy's own is `baton-envoy`. More attributes: `OTEL_RESOURCE_ATTRIBUTES`."""
    headers_file: str | None = None
    """File with headers for the collector, such as a key, one `name: value` a line, read again when it changes; null:
    `OTEL_EXPORTER_OTLP_HEADERS`.
    Only with `envoy: false`: Envoy's configuration is no place for a secret."""
    timeout_s: float = 5.0
    """One export, repeats included."""
    interval_s: float = 1.0
    """Longest time that a span waits to be sent."""
    max_queued_spans: int = 8192
    """Spans that wait to be sent; more are dropped, and counted."""


_LISTEN = "unix:/run/baton/extproc.sock"
_ADMIN = "127.0.0.1:9003"
_EPP_LISTEN = "0.0.0.0:9002"
_EPP_ADMIN = "127.0.0.1:9091"

_WATCH_SOCKET = "watch.sock"
_WATCH_PORT = 9004

_MOST_FALLBACKS = 8

MOST_PROCESSES = 32
"""Each knows of all others what they do, so many would do little else."""

_MAX_CACHE_SERVERS = 256
"""Each is a label of its own in the metrics."""

_SECTIONS = (
    "cache_store",
    "prefill",
    "handoff",
    "health",
    "warm_up",
    "scrape",
    "limits",
    "drain",
    "observe",
    "tracing",
    "envoy",
    "tls",
    "epp",
)
"""Their numbers are positive."""

_MAY_BE_ZERO = (
    ("drain", "delay_s"),
    ("epp", "fallback_endpoints"),
    ("epp", "ready_after_s"),
    ("observe", "sample"),
    ("prefill", "retries"),
    ("tracing", "sample_ratio"),
)


class CacheStore(_Section, frozen=True, kw_only=True):
    """What LMCache servers hold counts for the prefill workers that use them. Needs `kv_events.enabled` and `tokens`."""

    enabled: bool = False
    """Count it."""
    label: str | None = None
    """Label of workers whose value names their server, as its `--name` does (LMCache: `--instance-id`); a worker without it has
    none. null: all prefill workers share one."""
    chunk_tokens: int = 256
    """`--chunk-size` of the servers."""
    capacity_tokens: int = 2_000_000
    """What one server holds, all tiers together. Beyond that what was stored longest ago is taken for evicted. Only where no
    directory says better."""
    directory: str | None = None
    """`host:port` of LMCache's coordinator (`baton cache-coordinator`), which knows what the servers hold if they report to it
    (`baton cache-server --coordinator`). null: what our own prefills have stored counts."""
    directory_timeout_s: float = 0.02
    """A prompt waits no longer for its answer; then what our own prefills have stored counts."""
    directory_max_tokens: int = 65_536
    """Of a longer prompt only the beginning is asked for."""
    world_size: int = 1
    """Parts in which the prefill workers store a chunk: tensor times pipeline parallel size; with multi-head latent attention
    (DeepSeek, Kimi), which has the same KV on all ranks, pipeline parallel size alone."""


def _check_cache_store(config: Config) -> None:
    """Raises ConfigError."""
    store = config.cache_store
    if not store.enabled:
        return
    for name, needed in (("kv_events.enabled", config.kv_events.enabled), ("tokens", config.tokens is not None)):
        if not needed:
            raise ConfigError(f"cache_store.enabled: needs {name}: servers hold tokens, which nobody knows without")
    if store.capacity_tokens < store.chunk_tokens:
        raise ConfigError("cache_store.capacity_tokens: less than cache_store.chunk_tokens, so nothing would be held")
    if store.directory is None:
        return
    if _address("cache_store.directory", store.directory).path:
        raise ConfigError(f"cache_store.directory: {store.directory!r} is not host:port")
    if store.directory_max_tokens < store.chunk_tokens:
        raise ConfigError("cache_store.directory_max_tokens: less than cache_store.chunk_tokens, so nothing would be asked for")


class Config(_Section, frozen=True, kw_only=True):
    """Everything `baton serve` and `baton envoy-config` need."""

    workers: Workers = Workers()
    listen: str = _LISTEN
    """The gRPC server that Envoy's ext_proc filter calls. With `epp.enabled` its default is `0.0.0.0:9002`."""
    transport: Literal["grpc", "lean"] = "lean"
    """What carries it. `lean`: a small HTTP/2 server of our own, for a tenth of the CPU. `grpc`: grpc.aio. Without `tls`, both
    are plaintext: for a socket that Envoy shares, or a network of your own."""
    tls: Tls = Tls()
    processes: int = 1
    """Processes that share the work, one core each; `baton serve --processes` says it too. With more than 1 they listen at
    `listen` and a suffix: `.0`, `.1` and so on after a path, and from the port upwards. See [operations](operations.md)."""
    admin: str = _ADMIN
    """`/metrics`, `/healthz`, and `/debug/…`, which shows decisions but no prompt. With `epp.enabled` its default is
    `127.0.0.1:9091`."""
    epp: Epp = Epp()
    admin_hosts: list[str] = []
    """Names by which the admin port may be called (the `Host` header), beside addresses, `localhost`, names without a dot and
    those of a cluster (`….svc`, `….cluster.local`, `….internal`). Others are refused: a page of somebody else could get at it
    with a name that it makes point here."""
    replicas: ReplicaSettings = ReplicaSettings()
    prefill: Prefill = Prefill()
    handoff: Handoff = Handoff()
    routing: Routing = Routing()
    tokens: TokenSettings | None = None
    """Token ids of prompts, to compare with what workers say they hold. null: prompts are compared by their text."""
    health: Health = Health()
    warm_up: WarmUp = WarmUp()
    scrape: Scraping = Scraping()
    kv_events: KvEvents = KvEvents()
    cache_servers: list[str] = []
    """`host:port` of the HTTP ports of the prefill workers' LMCache servers, to be watched: metrics and `/healthz` show them.
    No decision depends on it."""
    cache_store: CacheStore = CacheStore()
    limits: Limits = Limits()
    drain: Drain = Drain()
    observe: Observe = Observe()
    tracing: Tracing = Tracing()
    envoy: Envoy = Envoy()
    policies: list[PolicyRule] = []
    """What holds for which requests. The first that matches is the one; without any, the defaults of a policy hold."""
    models: Models = Models()
    pools: list[PoolRule] = []
    """Several pools of workers behind one gateway, the first that takes a worker has it. None: all workers serve each other."""
    routes: Routes = Routes()
    log_level: str = "info"
    """debug, info, warning or error; every request is one line at info."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or text for people, coloured on a terminal."""
    log_sample: float = 1.0
    """Share of the requests that went well which get their line, 0 to 1. Failed, refused and slow ones always do."""
    log_slow_s: float = 30.0
    """From here on a request counts as slow: from its headers to the end of its answer."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the field. Raises ConfigError."""
        if self.epp.enabled:
            for name, default, instead in (("listen", _LISTEN, _EPP_LISTEN), ("admin", _ADMIN, _EPP_ADMIN)):
                if getattr(self, name) == default:
                    msgspec.structs.force_setattr(self, name, instead)
        for field, text in (
            ("listen", self.listen),
            ("admin", self.admin),
            ("envoy.listen", self.envoy.listen),
            ("envoy.admin", self.envoy.admin),
            *((("envoy.stats_listen", self.envoy.stats_listen),) if self.envoy.stats_listen is not None else ()),
            *((("observe.listen", self.observe.listen),) if self.observe.listen is not None else ()),
            *((("prefill.via", self.prefill.via),) if self.prefill.via != "direct" else ()),
        ):
            _address(field, text)
        _check_processes(self)
        _check_replicas(self)
        _check_tls(self)
        _check_epp(self)
        _check_workers(self.workers, needed=not self.routes.only)
        _check_security(self)
        if len(self.cache_servers) > _MAX_CACHE_SERVERS:
            raise ConfigError(f"cache_servers: {len(self.cache_servers)} are more than {_MAX_CACHE_SERVERS}")
        for index, text in enumerate(self.cache_servers):
            if _address(f"cache_servers[{index}]", text).path:
                raise ConfigError(f"cache_servers[{index}]: {text!r} is not host:port")
        for fault in kv_event_faults(self.kv_events):
            raise ConfigError(f"kv_events.{fault}")
        _check_cache_store(self)
        for section in _SECTIONS:
            values: dict[str, Any] = msgspec.structs.asdict(getattr(self, section))
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    least = 0 if (section, name) in _MAY_BE_ZERO else 1e-3
                    if not least <= value < 1e12:
                        raise ConfigError(f"{section}.{name}: {value} is not a positive number")
        for connector, role, known in (
            ("nixl_push", "prefill", self.handoff.nixl_push),
            ("lmcache", "decode", self.handoff.lmcache),
        ):
            missing = [address for address in getattr(self.workers, f"{role}_addresses") if address not in known]
            if self.handoff.connector == connector and missing:
                raise ConfigError(f"handoff.{connector}: the {role} worker {missing[0]} is missing there")
        if self.handoff.release_delay_s >= self.handoff.lease_s:
            raise ConfigError("handoff.release_delay_s: not below handoff.lease_s, so it would always come too late")
        if self.envoy.eds == "file" and self.envoy.eds_dir is None:
            raise ConfigError("envoy.eds: file needs envoy.eds_dir, where the files are")
        if self.envoy.filter_down == "round_robin" and self.envoy.pin == "original_dst":
            raise ConfigError("envoy.filter_down: round_robin needs envoy.pin: exact, with which Envoy knows the workers")
        if self.limits.max_held_bytes < self.limits.max_body_bytes:
            raise ConfigError(
                "limits.max_held_bytes: less than limits.max_body_bytes, so the largest body could never be served"
            )
        _check_tracing(self.tracing)
        if not 0 <= self.log_sample <= 1:
            raise ConfigError(f"log_sample: {self.log_sample:g} is not 0 to 1")
        if not 0 <= self.log_slow_s < 1e12:
            raise ConfigError(f"log_slow_s: {self.log_slow_s:g} is not a number of seconds")
        if self.observe.sample > 1:
            raise ConfigError(f"observe.sample: {self.observe.sample:g} is over 1, which is every stream")
        if self.handoff.max_age_share > 1:
            raise ConfigError(f"handoff.max_age_share: {self.handoff.max_age_share:g} is over 1: such a handoff has no lease")
        if self.envoy.idle_timeout_s <= self.prefill.timeout_s:
            raise ConfigError(
                f"envoy.idle_timeout_s ({self.envoy.idle_timeout_s:g} s) must be longer than prefill.timeout_s "
                f"({self.prefill.timeout_s:g} s): Envoy's idle timer runs while a prefill is awaited"
            )
        _check_tokens(self)
        _check_next_turn(self)
        _check_routes(self)
        _check_policies(self)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level: {self.log_level!r} is not one of debug, info, warning, error")

    @property
    def listens(self) -> list[Address]:
        """Where Envoy reaches the processes, one each."""
        address = Address.parse(self.listen)
        if self.processes == 1:
            return [address]
        if address.path:
            return [Address(path=f"{address.path}.{index}") for index in range(self.processes)]
        return [Address(host=address.host, port=address.port + index) for index in range(self.processes)]

    @property
    def filters(self) -> list[Address]:
        """Where Envoy reaches the filter: all replicas of it, all processes."""
        return [Address.parse(text) for text in self.envoy.filters] or self.listens

    @property
    def watchers(self) -> list[Address]:
        """Where Envoy reaches the processes that watch streams, one a replica."""
        watch = Address.parse(self.watch_listen)
        if not self.envoy.filters:
            return [watch]
        if self.filters[0].path:
            name = Path(watch.path).name if watch.path else _WATCH_SOCKET
            return list(dict.fromkeys(Address(path=str(Path(each.path).with_name(name))) for each in self.filters))
        port = watch.port or _WATCH_PORT
        return list(dict.fromkeys(Address(host=each.host, port=port) for each in self.filters))

    @property
    def unseen_answers(self) -> bool:
        """Whether Envoy is told not to show good answers where the filter marks it so: then its log must tell of them."""
        return self.access_log and self.envoy.body_mode != "full_duplex_both"

    @property
    def access_log(self) -> bool:
        """Whether Envoy reports requests to the filter when they are over."""
        return self.envoy.access_log and not self.epp.enabled and not self.routes.only

    @property
    def tls_mode(self) -> Literal["none", "self_signed", "files"]:
        """What holds at `listen`."""
        return self.tls.mode or ("self_signed" if self.epp.enabled else "none")

    @property
    def names_pools(self) -> bool:
        """Whether `x-baton-pool` is set."""
        wanted = self.routes.pool_header
        return bool(self.pools) and not self.epp.enabled if wanted is None else wanted

    @property
    def watches(self) -> bool:
        """Whether any stream may be watched."""
        if self.epp.enabled or self.routes.only:
            return False
        allowed = any("observe" in rule.allow_overrides for rule in self.policies)
        return bool(self.observe.sample) or allowed or any(rule.observe.sample for rule in self.policies)

    @property
    def watch_listen(self) -> str:
        """Where the process that watches streams listens."""
        if self.observe.listen is not None:
            return self.observe.listen
        address = Address.parse(self.listen)
        if address.path:
            return str(Address(path=str(Path(address.path).with_name(_WATCH_SOCKET))))
        return str(Address(host=address.host, port=_WATCH_PORT))


def _check_replicas(config: Config) -> None:
    """Raises ConfigError."""
    settings = config.replicas
    fault = replica_faults(settings)
    if fault is not None:
        raise ConfigError(f"replicas.{fault}")
    if settings.listen is not None:
        for field, text in (("listen", settings.listen), *((f"peers[{i}]", text) for i, text in enumerate(settings.peers))):
            if _address(f"replicas.{field}", text).path:
                raise ConfigError(f"replicas.{field}: {text!r} is not host:port: replicas are on different hosts")
        if config.processes > 1:
            raise ConfigError(
                f"replicas.listen: with processes: {config.processes} not possible: a replica is one process. "
                "Run more replicas instead"
            )
        if settings.listen in (config.listen, config.admin):
            raise ConfigError(f"replicas.listen: {settings.listen}, where something else listens")
    filters = [_address(f"envoy.filters[{i}]", text) for i, text in enumerate(config.envoy.filters)]
    if any(each.path for each in filters) and not all(each.path for each in filters):
        raise ConfigError("envoy.filters: sockets and host:port do not go together")
    if len(set(map(str, filters))) < len(filters):
        raise ConfigError("envoy.filters: an address stands there twice")


def _check_tokens(config: Config) -> None:
    settings = config.tokens
    if settings is None:
        return
    fault = token_faults(settings)
    if fault is not None:
        raise ConfigError(f"tokens.{fault}")
    if not config.prefill.tokenise_once and not settings.models and settings.ask_workers == "off":
        raise ConfigError("tokens.learn: needs prefill.tokenise_once, with which replies bring token ids")


def _check_next_turn(config: Config) -> None:
    """Raises ConfigError."""
    fault = next_turn_faults(config.handoff.next_turn)
    if fault is not None:
        raise ConfigError(f"handoff.next_turn.{fault}")
    if not config.handoff.next_turn.enabled:
        return
    needs = "handoff.next_turn.enabled: needs"
    if config.handoff.connector != "nixl_pull":
        raise ConfigError(f"{needs} handoff.connector: nixl_pull, whose workers can read both ways")
    if config.tokens is None:
        raise ConfigError(f"{needs} tokens: blocks are given only to a prompt whose token ids are known to continue theirs")
    if not config.tokens.models and config.tokens.ask_workers == "off":
        raise ConfigError(
            f"{needs} tokens.models or tokens.ask_workers: what replies teach never knows all token ids of a turn that is new"
        )
    if not config.prefill.tokenise_once:
        raise ConfigError(f"{needs} prefill.tokenise_once, so that both workers work on the token ids that were compared")
    if config.envoy.body_mode == "full_duplex":
        raise ConfigError(
            f"{needs} envoy.body_mode: buffered or full_duplex_both: with full_duplex Envoy cannot be asked to show the body "
            "of an answer, in which the blocks are named"
        )


def _check_processes(config: Config) -> None:
    """Raises ConfigError."""
    if not 1 <= config.processes <= MOST_PROCESSES:
        raise ConfigError(f"processes: {config.processes} is not 1 to {MOST_PROCESSES}")
    taken = {str(Address.parse(text)) for text in (config.admin, config.watch_listen)}
    for address in config.listens:
        _address(f"listen with processes: {config.processes}", str(address))
        if str(address) in taken:
            raise ConfigError(f"listen: with processes: {config.processes} also {address}, where something else listens")


def _check_tls(config: Config) -> None:
    """Raises ConfigError."""
    tls = config.tls
    for name in ("cert_file", "key_file"):
        if config.tls_mode == "files" and not getattr(tls, name):
            raise ConfigError(f"tls.{name}: mode files needs it")
        if config.tls_mode != "files" and getattr(tls, name) is not None:
            raise ConfigError(f"tls.{name}: goes with mode: files")
    if config.tls_mode == "none" and tls.client_ca_file is not None:
        raise ConfigError("tls.client_ca_file: in plaintext no client shows a certificate; tls.mode is needed")
    if config.tls_mode != "none" and Address.parse(config.listen).path:
        raise ConfigError("tls.mode: on a unix socket nobody listens in; a TCP address at `listen` is needed, or mode: none")


def _check_epp(config: Config) -> None:
    """Raises ConfigError."""
    epp = config.epp
    if not epp.enabled:
        return
    if config.processes > 1:
        raise ConfigError(
            f"processes: {config.processes} listen at as many ports, and an endpoint picker has one: "
            "with epp.enabled, run replicas instead"
        )
    if Address.parse(config.listen).path:
        raise ConfigError("listen: epp.enabled needs a TCP port, which the gateway connects to")
    if epp.fallback_endpoints > _MOST_FALLBACKS:
        raise ConfigError(f"epp.fallback_endpoints: {epp.fallback_endpoints} are more than {_MOST_FALLBACKS}")
    taken: dict[int, str] = {}
    for field, text in (
        ("listen", config.listen),
        ("admin", config.admin),
        ("epp.health_listen", epp.health_listen),
        ("epp.metrics_listen", epp.metrics_listen),
    ):
        if text is None:
            continue
        port = _address(field, text).port
        if port and port in taken:
            raise ConfigError(f"{field}: port {port} is that of {taken[port]}")
        taken[port] = field


class Collector(msgspec.Struct, frozen=True):
    """Where spans go."""

    host: str
    """Without brackets."""
    port: int
    tls: bool
    path: str
    """Of OTLP over HTTP."""

    @property
    def authority(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_COLLECTOR_PORTS = {"grpc": 4317, "http": 4318}


def collector(endpoint: str, protocol: str) -> Collector:
    """`"http://10.0.0.9:4317"` -> Collector. Raises ValueError."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{endpoint!r} is not http://host:port")
    if url.username or url.password or url.query or url.fragment:
        raise ValueError("only http://host:port/path; keys go into tracing.headers_file")
    path = url.path.rstrip("/")
    if path and protocol == "grpc":
        raise ValueError(f"{endpoint!r}: gRPC has no path")
    return Collector(url.hostname, url.port or _COLLECTOR_PORTS[protocol], url.scheme == "https", path or "/v1/traces")


def _address(field: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _check_tracing(tracing: Tracing) -> None:
    if tracing.sample_ratio > 1:
        raise ConfigError(f"tracing.sample_ratio: {tracing.sample_ratio:g} is over 1, which is every request")
    if tracing.endpoint is None:
        return
    try:
        where = collector(tracing.endpoint, tracing.protocol)
    except ValueError as error:
        raise ConfigError(f"tracing.endpoint: {error}") from None
    if tracing.envoy and where.tls:
        raise ConfigError(
            "tracing.endpoint: with https, Envoy's part has to be off (tracing.envoy: false), or goes to a collector nearby"
        )
    if tracing.envoy and tracing.headers_file is not None:
        raise ConfigError(
            "tracing.headers_file: needs tracing.envoy: false, as the headers are kept out of Envoy's configuration; "
            "or send to a collector nearby, and let that add them"
        )


def _check_workers(workers: Workers, *, needed: bool) -> None:
    try:
        listed = workers.endpoint_set()
    except ListingError as error:
        raise ConfigError(f"workers.{error}") from error
    if needed and workers.all_listed:
        for role in ("prefill", "decode"):
            if not (getattr(listed, role) or listed.both):
                raise ConfigError(f"workers.{role}: at least one worker is needed, here or from `file`, `dns` or `kubernetes`")
    if workers.file == "":
        raise ConfigError("workers.file: an empty path")
    for index, entry in enumerate(workers.dns):
        where = f"workers.dns[{index}]"
        if (entry.name is None) == (entry.srv is None):
            raise ConfigError(f"{where}: either `name` and `port`, or `srv`")
        if (entry.name is None) != (entry.port is None):
            raise ConfigError(f"{where}: `port` goes with `name`; SRV records have their own")
        if entry.port is not None and not 0 < entry.port < 65536:
            raise ConfigError(f"{where}.port: {entry.port} is not 1 to 65535")
        if not (entry.name or entry.srv):
            raise ConfigError(f"{where}: an empty name")
        if not 1 <= entry.refresh_s < 1e6:
            raise ConfigError(f"{where}.refresh_s: {entry.refresh_s:g} is below 1 s, or endless")
    if workers.kubernetes is not None:
        try:
            check_kubernetes(workers.kubernetes)
        except ValueError as error:
            raise ConfigError(f"workers.kubernetes.{error}") from None
    for index, text in enumerate(workers.dns_servers):
        try:
            name_server(text)
        except ValueError as error:
            raise ConfigError(f"workers.dns_servers[{index}]: {error}") from None


def _check_security(config: Config) -> None:
    for field, tls in (("workers.tls", config.workers.tls), ("envoy.extproc_tls", config.envoy.extproc_tls)):
        fault = None if tls is None else tls_faults(tls)
        if fault is not None:
            raise ConfigError(f"{field}.{fault}")
    for index, text in enumerate(config.workers.networks):
        try:
            ip_network(text)
        except ValueError as error:
            raise ConfigError(f"workers.networks[{index}]: {error}") from None
    try:
        RemoteHosts(config.handoff.remote_hosts)
    except ValueError as error:
        raise ConfigError(f"handoff.remote_hosts: {error}") from None
    if config.workers.replace_credentials and config.envoy.filter_down == "round_robin":
        raise ConfigError(
            "workers.replace_credentials: does not go with envoy.filter_down: round_robin, where clients' own credentials "
            "would reach the workers"
        )
    if config.workers.replace_credentials and config.workers.api_key_file is None:
        raise ConfigError("workers.replace_credentials: needs workers.api_key_file, where the key is")
    keys = config.envoy.api_keys
    if keys is not None:
        if not keys.file:
            raise ConfigError("envoy.api_keys.file: an empty path")
        if re.fullmatch(r"[a-z0-9-]{1,64}", keys.client_header) is None:
            raise ConfigError(f"envoy.api_keys.client_header: {keys.client_header!r} is no header, in lower case")
        if keys.requests_per_s is not None and not 1e-3 <= keys.requests_per_s < 1e6:
            raise ConfigError(f"envoy.api_keys.requests_per_s: {keys.requests_per_s:g} is not 0.001 or more")
        if keys.burst is not None and not 1 <= keys.burst < 1e6:
            raise ConfigError(f"envoy.api_keys.burst: {keys.burst} is not 1 or more")
    for index, text in enumerate(config.admin_hosts):
        if not text or ":" in text or "/" in text or text != text.strip():
            raise ConfigError(f"admin_hosts[{index}]: {text!r} is not a name without port")


def _all_known(config: Config) -> bool:
    """Whether all workers there will be stand in the configuration."""
    return config.workers.all_listed and not config.routes.only


def _check_routes(config: Config) -> None:
    try:
        check_pools(config.pools, config.workers.endpoint_set() if _all_known(config) else None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.pools and config.envoy.filter_down == "round_robin":
        raise ConfigError(
            "envoy.filter_down: round_robin does not go with pools: without the filter nobody reads which pool a request is for"
        )
    if config.routes.pool_header and not config.pools:
        raise ConfigError("routes.pool_header: there are no pools")
    if config.routes.only and config.epp.enabled:
        raise ConfigError("routes.only: does not go with epp.enabled: an endpoint picker chooses workers, and this filter none")
    if config.routes.only and (config.workers.endpoint_set() != EndpointSet() or not config.workers.all_listed):
        raise ConfigError("routes.only: with workers beside it; such a filter chooses none, and goes by `pools` and `policies`")


def _check_policies(config: Config) -> None:
    listed, all_known = config.workers.endpoint_set(), _all_known(config)
    try:
        check_policies(
            config.policies,
            prefill_retries=config.prefill.retries,
            prefill_labels=pooled_labels(config.pools, (*listed.prefill, *listed.both)) if all_known else None,
            decode_labels=pooled_labels(config.pools, (*listed.decode, *listed.both)) if all_known else None,
            pools=[rule.name for rule in config.pools],
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse(text: str, *, source: str = "configuration") -> Config:
    """YAML text -> Config. Raises ConfigError: ``source:line: field: why``."""
    try:
        return yaml_lines.decode(text, Config, source=source)
    except yaml_lines.FaultError as error:
        raise ConfigError(str(error)) from error


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError, also when the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse(text, source=str(path))
