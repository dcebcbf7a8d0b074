"""Baton as an endpoint picker behind an Envoy that is not ours: configured as a mesh configures it for an InferencePool.

Three shapes. ``istio``: the filter of the listener is off, each route turns it on (ExtProcPerRoute), the cluster balances by
`override_host` with a policy that takes anybody where the pin cannot be kept, and `envoy.lb` alone passes both ways.
``header``: Envoy AI Gateway and llm-d's chart: a cluster of the type ORIGINAL_DST that connects to what the header says.
``buffered``: the same with whole bodies of requests and streamed answers, as an EnvoyExtensionPolicy can have it.

All: bodies FULL_DUPLEX_STREAMED both ways but in the last one, trailers too, default rules of header mutation, no mode
overrides, TLS to the picker without a look at its certificate, no access log service, no `baton` metadata.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from extproc.config import Config
from extproc.stack import envoy_command, filter_command, find_envoy
from tests.stack.envoy_sees import until_answers
from tests.stack.fake_worker import FakeWorker, decode_answer, prefill_answer
from tests.stack.harness import TRANSPORT
from tests.stack.logged import lines, until_logged
from workers.process import Child
from workers.ready import free_ports

Shape = Literal["istio", "header", "buffered"]

READY_S = 20.0
DESTINATION = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy.extensions"
HEADER, METADATA = "x-test-header", "x-test-metadata"
"""On answers: what the picker told Envoy in either way."""
_BATON = (sys.executable, "-m", "extproc", "epp")
_OPEN = ("baton_streams", "baton_endpoint_in_flight", "baton_endpoint_tokens")
BODY = {"model": "m", "messages": [{"role": "user", "content": "Where do the wagons go?"}], "max_tokens": 8}


class Mesh:
    """Envoy, Baton, and fake workers. ``strangers`` are in the gateway's cluster and none of Baton's workers."""

    def __init__(
        self,
        shape: Shape = "istio",
        *,
        prefill: int = 1,
        decode: int = 2,
        strangers: int = 0,
        transport: str = TRANSPORT,
        settings: Mapping[str, Any] | None = None,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        """``settings`` overrides fields of Baton's configuration, by section. ``tls``: what else there is of Envoy's TLS to the
        picker."""
        front, admin, listen, health, metrics, own_admin, *rest = free_ports(6 + prefill + decode + strangers)
        self.prefill = [FakeWorker(f"prefill-{i}", port, prefill_answer) for i, port in enumerate(rest[:prefill])]
        self.decode = [
            FakeWorker(f"decode-{i}", port, decode_answer) for i, port in enumerate(rest[prefill : prefill + decode])
        ]
        self.strangers = [FakeWorker(f"stranger-{i}", port, decode_answer) for i, port in enumerate(rest[prefill + decode :])]
        self.shape: Shape = shape
        self.directory = Path(tempfile.mkdtemp(prefix="baton-"))
        self.base, self.envoy_admin = f"http://127.0.0.1:{front}", f"http://127.0.0.1:{admin}"
        self.listen, self.health, self.metrics_at = f"127.0.0.1:{listen}", f"127.0.0.1:{health}", f"127.0.0.1:{metrics}"
        self.admin = f"http://127.0.0.1:{own_admin}"
        self._front, self._admin = front, admin
        self._tls = dict(tls or {})
        self.hosts: list[str] = [each.address for each in (*self.prefill, *self.decode, *self.strangers)]
        """What the gateway's cluster holds: an InferencePool selects the pods of both roles."""
        self.subset: Sequence[Any] | None = None
        """The gateway's hint for every request; None: it gives none."""
        self.retry: Mapping[str, Any] | None = None
        """Retry policy of the route."""
        self.fail_open = False
        self.options: list[str] | None = None
        """Options of `baton epp`; None: `baton serve` with the configuration."""
        tree: dict[str, Any] = {
            "workers": {"prefill": [w.address for w in self.prefill], "decode": [w.address for w in self.decode]},
            "listen": self.listen,
            "transport": transport,
            "admin": f"127.0.0.1:{own_admin}",
            "epp": {"enabled": True, "health_listen": self.health, "metrics_listen": self.metrics_at},
            "prefill": {"timeout_s": 20.0},
            "policies": [{"name": "default", "mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"}],
            "health": {"interval_s": 0.1, "unhealthy_threshold": 2},
            "handoff": {"release_delay_s": 0.2},
            "drain": {"delay_s": 0.2, "timeout_s": 10.0},
            "warm_up": {"enabled": False},  # tests count requests
        }
        for section, values in (settings or {}).items():
            tree[section] = values if isinstance(values, (list, str)) else {**tree.get(section, {}), **values}
        self.config = msgspec.convert(tree, Config)
        self._config_file = self.directory / "baton.yaml"

    # -- its life --------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Mesh:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for worker in (*self.prefill, *self.decode, *self.strangers):
                await parts.enter_async_context(worker)
            self._parts = parts
            self._config_file.write_bytes(msgspec.json.encode(self.config))
            await self.start_picker()
            envoy_file = self.directory / "envoy.json"
            envoy_file.write_text(json.dumps(self.envoy_config()), encoding="utf-8")
            self.envoy = self._child("envoy", *envoy_command(find_envoy(), envoy_file))
            await until_answers(self.envoy, f"{self.envoy_admin}/ready", READY_S)
            self.http = await parts.enter_async_context(
                aiohttp.ClientSession(
                    self.base, connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=40)
                )
            )
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def start_picker(self) -> None:
        """Baton, until it is ready."""
        argv = filter_command(self._config_file) if self.options is None else [*_BATON, *self.options]
        self.picker = self._child("baton", *argv)
        await until_answers(self.picker, f"{self.admin}/healthz", READY_S)

    async def stop_picker(self) -> None:
        await asyncio.to_thread(self.picker.stop)

    def _child(self, name: str, *argv: str) -> Child:
        child = Child(name, argv, log=self.directory / f"{name}.log", grace_s=25.0)
        self._parts.push_async_callback(asyncio.to_thread, child.stop)
        return child

    # -- what there is to see --------------------------------------------------------------------------------------------------

    async def metrics(self) -> dict[str, float]:
        """Sample (name with labels) -> value, from the picker's metrics port."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.metrics_at}/metrics") as response:
            text = await response.text()
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def metric(self, name: str) -> float:
        return (await self.metrics()).get(name, 0.0)

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(15):
            while await self.metric(name) != value:
                await asyncio.sleep(0.05)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not holds():
                await asyncio.sleep(0.02)

    async def at_rest(self) -> None:
        """No request is open, and nothing counts on any worker."""
        async with asyncio.timeout(15):
            while True:
                found = await self.metrics()
                counts = {
                    name: v for name, v in found.items() if name.startswith(("baton_streams", "baton_endpoint_in_flight"))
                }
                counts |= {name: v for name, v in found.items() if name.startswith("baton_endpoint_tokens")}
                assert len(counts) > 3
                if not any(counts.values()):
                    return
                await asyncio.sleep(0.05)

    def log_lines(self) -> list[dict[str, Any]]:
        return lines(self.picker.log)

    async def logged(self, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        return await until_logged(self.picker.log, event, count, **fields)

    async def ask(self, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, str, Mapping[str, str]]:
        headers = more.pop("headers", {})
        async with self.http.post(path, json={**BODY, **more}, headers=headers) as response:
            return response.status, await response.text(), response.headers

    # -- Envoy -----------------------------------------------------------------------------------------------------------------

    def envoy_config(self) -> dict[str, Any]:
        return {
            "node": {"id": "gateway", "cluster": "gateway"},
            "admin": {"address": _address(self._admin)},
            "static_resources": {"listeners": [self._listener()], "clusters": [self._workers(), self._picker()]},
        }

    def _listener(self) -> dict[str, Any]:
        hint = {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": f"{TYPE}.filters.http.set_metadata.v3.Config",
                "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{DESTINATION}-subset": self.subset}}],
            },
        }
        connections = {
            "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "gateway",
            "use_remote_address": True,
            "generate_request_id": True,
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [self._route()]}]},
            "http_filters": [
                *([] if self.subset is None else [hint]),
                {"name": "envoy.filters.http.ext_proc", "typed_config": self._ext_proc()},
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"},
                },
            ],
        }
        chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": connections}]}
        return {
            "name": "gateway",
            "address": _address(self._front),
            "per_connection_buffer_limit_bytes": 32768,
            "filter_chains": [chain],
        }

    def _route(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.shape == "istio":
            overrides = {"processing_mode": _BOTH_WAYS, "grpc_service": _SERVICE, "failure_mode_allow": self.fail_open}
            own["envoy.filters.http.ext_proc"] = {
                "@type": f"{TYPE}.filters.http.ext_proc.v3.ExtProcPerRoute",
                "overrides": overrides,
            }
        return {
            "match": {"prefix": "/"},
            "route": {
                "cluster": "workers",
                "timeout": "0s",
                **({} if self.retry is None else {"retry_policy": self.retry}),
            },
            "typed_per_filter_config": own,
            "request_body_buffer_limit": 1 << 20,
            "response_headers_to_add": [
                {"header": {"key": HEADER, "value": f"%REQ({DESTINATION})%"}},
                {"header": {"key": METADATA, "value": f"%DYNAMIC_METADATA(envoy.lb:{DESTINATION})%"}},
            ],
        }

    def _ext_proc(self) -> dict[str, Any]:
        shown = ["envoy.lb", *([] if self.subset is None else ["envoy.lb.subset_hint"])]
        off = {
            "request_header_mode": "SKIP",
            "response_header_mode": "SKIP",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        }
        return {
            "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "none"}} if self.shape == "istio" else _SERVICE,
            "processing_mode": {"istio": off, "header": _BOTH_WAYS, "buffered": _WHOLE}[self.shape],
            "failure_mode_allow": self.fail_open,
            "message_timeout": "1000s" if self.shape == "istio" else "300s",
            "metadata_options": {
                "forwarding_namespaces": {"untyped": shown},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        }

    def _workers(self) -> dict[str, Any]:
        made: dict[str, Any] = {"name": "workers", "connect_timeout": "2s"}
        if self.shape != "istio":
            made |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
            made["original_dst_lb_config"] = {"use_http_header": True, "http_header_name": DESTINATION}
            return made
        any_of_them = {"@type": f"{TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}
        pinned = {
            "@type": f"{TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
            "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
            "fallback_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.round_robin",
                            "typed_config": any_of_them,
                        }
                    }
                ]
            },
        }
        name = "envoy.load_balancing_policies.override_host"
        made["load_balancing_policy"] = {"policies": [{"typed_extension_config": {"name": name, "typed_config": pinned}}]}
        made["load_assignment"] = _assignment("workers", *(int(each.rpartition(":")[2]) for each in self.hosts))
        return made

    def _picker(self) -> dict[str, Any]:
        tls = {
            "@type": f"{TYPE}.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"alpn_protocols": ["h2"], **self._tls},
        }
        protocol = {
            "@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
        made = {
            "name": "picker",
            "connect_timeout": "2s",
            "load_assignment": _assignment("picker", int(self.listen.rpartition(":")[2])),
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol},
        }
        if self.config.tls_mode != "none":
            made["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": tls}
        return made


_SERVICE = {"envoy_grpc": {"cluster_name": "picker", "authority": "picker.default.svc"}}

_BOTH_WAYS = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


_WHOLE = {**_BOTH_WAYS, "request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _assignment(cluster: str, *ports: int) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
