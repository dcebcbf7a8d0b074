"""The routes of Istio and of the Gateway API, as their control planes give them to Envoy, in the real Envoy with real filters.

The control planes themselves do not run here: :mod:`tests.stack.route_rules` translates the files of ``envoy/``.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import betterproto2
import msgspec
import pytest

from extproc.config import Config
from extproc.envoy_config import build
from extproc.stack import envoy_command, filter_command, find_envoy
from tests.stack.envoy_sees import until_answers, until_filters_seen
from tests.stack.fake_worker import FakeWorker, decode_answer, prefill_answer
from tests.stack.harness import READY_S, TRANSPORT
from tests.stack.mesh import envoy_gateway
from tests.stack.mesh.bootstrap import quantity
from tests.stack.route_rules import EXT_PROC, documents, of_http_route, of_virtual_service, with_filter_patches
from tests.stack.test_errors import error_of
from workers.process import Child
from workers.ready import free_ports

_FORCED = {"mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"}
_TYPE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3"
PROMPT = "Once upon a time in a mesh. " * 10


class Pool:
    """A prefill and a decode worker that serve one model."""

    def __init__(self, name: str, model: str) -> None:
        self.name = name
        ports = free_ports(2)
        self.prefill = FakeWorker(f"prefill-{name}", ports[0], prefill_answer, models=(model,))
        self.decode = FakeWorker(f"decode-{name}", ports[1], decode_answer, models=(model,))

    def listed(self, role: str) -> dict[str, Any]:
        worker: FakeWorker = getattr(self, role)
        return {"address": worker.address, "labels": {"pool": self.name}}


class Mesh:
    """An Envoy that a control plane has configured: it strips no headers, and has nothing of `baton envoy-config` alone."""

    def __init__(self, *pools: Pool) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.directory = Path(tempfile.mkdtemp(prefix="baton-"))
        self.front, self.admin = free_ports(2)
        self.base = f"http://127.0.0.1:{self.front}"
        self._admins: dict[str, str] = {}
        self._clusters: list[Any] = []

    async def __aenter__(self) -> Mesh:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for pool in self.pools.values():
                await parts.enter_async_context(pool.prefill)
                await parts.enter_async_context(pool.decode)
            self.http = await parts.enter_async_context(
                aiohttp.ClientSession(self.base, connector=aiohttp.TCPConnector(force_close=True))
            )
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def baton(self, name: str, of: list[str], **more: Any) -> None:
        """A filter with the workers of these pools. Its clusters in Envoy: those of its workers, and ``baton-<name>``."""
        (admin,) = free_ports(1)
        workers = {role: [self.pools[pool].listed(role) for pool in of] for role in ("prefill", "decode")}
        tree: dict[str, Any] = {
            "listen": f"unix:{self.directory}/{name}.sock",
            "transport": TRANSPORT,
            "admin": f"127.0.0.1:{admin}",
            "policies": [{"name": "default", "allow_overrides": ["policy"], **_FORCED}],
            "health": {"interval_s": 0.1},
            "drain": {"delay_s": 0.1, "timeout_s": 10.0},
            "warm_up": {"enabled": False},
            "observe": {"sample": 0},
            "envoy": {
                "listen": f"127.0.0.1:{self.front}",
                "admin": f"127.0.0.1:{self.admin}",
                "eds_dir": f"{self.directory}/{name}",
                "access_log": False,
                "stats": False,
            },
            **more,
        }
        if of:
            tree["workers"] = workers
        config = msgspec.convert(tree, Config)
        file = self.directory / f"{name}.yaml"
        file.write_bytes(msgspec.json.encode(config))
        child = Child(name, filter_command(file), log=self.directory / f"{name}.log", grace_s=25.0)
        self._parts.push_async_callback(asyncio.to_thread, child.stop)
        await until_answers(child, f"http://127.0.0.1:{admin}/healthz", READY_S)
        self._admins[name] = f"http://127.0.0.1:{admin}"
        self._tree = build(config).to_dict(casing=betterproto2.Casing.SNAKE)
        for cluster in self._tree["static_resources"]["clusters"]:
            if cluster["name"] == "extproc":
                cluster["name"] = cluster["load_assignment"]["cluster_name"] = f"baton-{name}"
            elif of and not config.pools:
                cluster["eds_cluster_config"]["service_name"], cluster["name"] = cluster["name"], f"{cluster['name']}-{name}"
            elif not of:
                continue
            self._clusters.append(cluster)

    async def envoy(self, routes: list[Any], *filters: Any) -> None:
        """Start it. It has the listener of the last filter, with these routes and HTTP filters."""
        tree = self._tree
        (front,) = (each for each in tree["static_resources"]["listeners"] if each["name"] == "front")
        connections = front["filter_chains"][0]["filters"][0]["typed_config"]
        del connections["early_header_mutation_extensions"]
        connections["route_config"] = {
            "name": "routes",
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}],
        }
        connections["http_filters"] = [*filters, connections["http_filters"][-1]]
        tree["static_resources"]["clusters"] = self._clusters
        file = self.directory / "envoy.json"
        file.write_text(json.dumps(tree))
        child = Child("envoy", envoy_command(find_envoy(), file), log=self.directory / "envoy.log")
        self._parts.push_async_callback(asyncio.to_thread, child.stop)
        await until_answers(child, f"http://127.0.0.1:{self.admin}/ready", READY_S)

    def ext_proc(self, cluster: str) -> Any:
        """The filter as the last Baton's own configuration has it, for the one behind this cluster."""
        (front,) = (each for each in self._tree["static_resources"]["listeners"] if each["name"] == "front")
        found = front["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
        (made,) = (json.loads(json.dumps(each)) for each in found if each["name"] == EXT_PROC)
        made["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = cluster
        return made

    async def ask(
        self, model: str, *, prompt: str = PROMPT, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes, str | None]:
        """Status, body, and the pool that served it, with both of its workers."""
        for pool in self.pools.values():
            pool.prefill.reset()
            pool.decode.reset()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = io.BytesIO(json.dumps({"model": model, "prompt": prompt, "max_tokens": 5}).encode())
        sent["content-type"] = "application/json"
        async with self.http.post(path, data=body, headers=sent) as response:
            answer = await response.read()
        served = [pool for pool in self.pools.values() if pool.decode.received]
        assert len(served) <= 1
        if served and path == "/v1/completions":
            assert [pool for pool in self.pools.values() if pool.prefill.received] == served
            assert served[0].decode.last.json["prompt"] == prompt and "kv_transfer_params" in served[0].decode.last.json
        return response.status, answer, served[0].name if served else None


def overrides(cluster: str, processing_mode: Any = None) -> Any:
    """What a route says to the ext_proc filter: another server, and how."""
    said: dict[str, Any] = {"grpc_service": {"envoy_grpc": {"cluster_name": cluster}}}
    if processing_mode is not None:
        said["processing_mode"] = processing_mode
    return {"@type": f"{_TYPE}.ExtProcPerRoute", "overrides": said}


SPOOFED = {"x-gateway-model-name": "qwen", "x-baton-pool": "gold", "x-gateway-destination-endpoint": "127.0.0.1:1"}


async def still_there(mesh: Mesh) -> None:
    """Until Envoy's health checks have found the filters."""
    await until_filters_seen(f"http://127.0.0.1:{mesh.admin}", lambda cluster: cluster.startswith("baton-"), READY_S)


@pytest.mark.parametrize(
    ("file", "body_mode"),
    [("pools", "buffered"), ("pools", "full_duplex"), ("pools", "full_duplex_both"), ("models", "full_duplex_both")],
)
async def test_istio_with_one_filter_chooses_the_service_by_the_pool_or_the_model_that_the_filter_says(
    file: str, body_mode: str
) -> None:
    async with Mesh(Pool("llama", "llama-7b"), Pool("gold" if file == "pools" else "qwen", "qwen")) as mesh:
        names = list(mesh.pools)
        pools = [{"name": name, "labels": {"pool": name}} for name in names]
        pools[0]["models"], pools[1]["models"] = ["llama*"], ["qwen"]
        settings = {
            "listen": f"127.0.0.1:{mesh.front}",
            "admin": f"127.0.0.1:{mesh.admin}",
            "eds_dir": f"{mesh.directory}/one",
            "body_mode": body_mode,
            "access_log": False,
            "stats": False,
        }
        await mesh.baton("one", names, pools=pools, routes={"model_header": True}, envoy=settings)
        (document,) = documents(f"istio/routes/{file}.yaml", "VirtualService")
        await mesh.envoy(of_virtual_service(document), mesh.ext_proc("baton-one"))
        await still_there(mesh)
        for model, pool in (("llama-7b", names[0]), ("qwen", names[1])):
            for spoofed in ({}, SPOOFED):
                assert (await mesh.ask(model, **spoofed))[::2] == (200, pool)
                assert (await mesh.ask(model, path="/v1/embeddings", **spoofed))[::2] == (200, pool)
            assert (await mesh.ask(model, prompt="a long way to go, " * 40_000))[::2] == (200, pool)
        status, answer, served = await mesh.ask("gpt-oss", x_baton_pool="llama")
        assert (status, served, error_of(answer)["code"]) == (404, None, "model_not_found")


async def test_istio_with_a_filter_a_pool_chooses_the_filter_by_what_the_client_says() -> None:
    async with Mesh(Pool("default", "m"), Pool("gold", "m")) as mesh:
        gold = [{"name": "gold", "allow_overrides": ["policy"], **_FORCED}]
        await mesh.baton("gold", ["gold"], policies=gold)
        await mesh.baton("default", ["default"])
        (document,) = documents("istio/routes/clients.yaml", "VirtualService")
        (patch,) = documents("istio/routes/clients.yaml", "EnvoyFilter")
        routes = with_filter_patches(of_virtual_service(document), json.loads(named_here(json.dumps(patch))))
        for route in routes:
            route["route"]["cluster"] = "decode-gold" if route["route"]["cluster"] == "decode-gold" else "decode-default"
        await mesh.envoy(routes, mesh.ext_proc("baton-default"))
        await still_there(mesh)
        assert (await mesh.ask("m"))[::2] == (200, "default")
        for headers in ({"x-tenant": "acme"}, {"x-tier": "platinum"}, {"x-baton-policy": "gold"}):
            assert (await mesh.ask("m", **headers))[::2] == (200, "gold")
            assert (await mesh.ask("m", path="/tokenize", **headers))[::2] == (200, "gold")
        for headers in ({"x-tenant": "acme2"}, {"x-tier": "goldx"}, {"x-baton-policy": "acme"}, {"x-baton-pool": "gold"}):
            assert (await mesh.ask("m", **headers))[::2] == (200, "default")


def named_here(text: str) -> str:
    """Istio's name of the cluster of a Service -> ours."""
    return text.replace("outbound|9002||baton-gold.inference.svc.cluster.local", "baton-gold")


FULL_DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
"""As gateways call endpoint pickers."""


def picker(mesh: Mesh) -> Any:
    """The filter for endpoint pickers as Istio has it: off at the listener, and each route of a pool says whom to ask."""
    made = mesh.ext_proc("baton-of-no-pool")
    made["typed_config"]["processing_mode"] = {"request_header_mode": "SKIP", "response_header_mode": "SKIP"}
    made["typed_config"].pop("mutation_rules")
    return made


def reader_of(how: str) -> tuple[Any, int]:
    """The filter that reads the model, and how large a body may be for it, both as the files say."""
    if how == "envoy gateway":
        (policy,) = documents("gateway/routes/body-based-routing.yaml", "EnvoyExtensionPolicy")
        (client,) = documents("gateway/routes/body-based-routing.yaml", "ClientTrafficPolicy")
        (processor,) = policy["spec"]["extProc"]
        assert processor["backendRefs"] == [{"name": "baton-routes", "port": 9002}]
        name = f"{EXT_PROC}/envoyextensionpolicy/inference/{policy['metadata']['name']}/extproc/0"
        made = {"name": name, "typed_config": envoy_gateway.ext_proc(processor, "baton-routes")}
        return made, quantity(client["spec"]["connection"]["bufferLimit"])
    first, second = documents("istio/routes/body-based-routing.yaml", "EnvoyFilter")[0]["spec"]["configPatches"]
    whole = json.dumps(first["patch"]["value"])
    made = json.loads(whole.replace("outbound|9002||baton-routes.inference.svc.cluster.local", "baton-routes"))
    if how == "full duplex":  # as the pickers' own filter: two in a row
        without = {"response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SKIP"}
        made["typed_config"]["processing_mode"] = {**FULL_DUPLEX, **without}
    assert second["applyTo"] == "HTTP_ROUTE" and second["patch"]["operation"] == "MERGE"
    ((field, bytes_),) = second["patch"]["value"].items()
    assert field == "request_body_buffer_limit"
    return made, bytes_


@pytest.mark.parametrize("how", ["istio", "full duplex", "envoy gateway"])
async def test_inference_pools_by_model_the_route_is_chosen_from_the_body_before_the_picker_is_asked(how: str) -> None:
    async with Mesh(Pool("llama", "llama-7b"), Pool("qwen", "qwen")) as mesh:
        await mesh.baton("llama", ["llama"])
        await mesh.baton("qwen", ["qwen"])
        reader, largest_bytes = reader_of(how)
        pickers = picker(mesh)
        await mesh.baton(
            "routes",
            [],
            routes={"only": True},
            models={"aliases": {"chat": "qwen", "mixed": [{"model": "llama-7b"}, {"model": "qwen"}]}},
            policies=[{"name": "default", "session_header": "x-session"}],
        )
        (document,) = documents("gateway/routes/models.yaml", "HTTPRoute")
        said = {name: overrides(f"baton-{name}", FULL_DUPLEX) for name in mesh.pools}
        routes = of_http_route(document, said)
        for route in routes:
            route["route"]["cluster"] = f"decode-{route['route']['cluster']}"
            route["request_body_buffer_limit"] = largest_bytes
        mesh._clusters.append({"name": "baton-of-no-pool", "connect_timeout": "1s"})
        await mesh.envoy(routes, reader, pickers)
        await still_there(mesh)
        for model, pool in (("llama-7b", "llama"), ("qwen", "qwen"), ("chat", "qwen")):
            for spoofed in ({}, SPOOFED):
                assert (await mesh.ask(model, **spoofed))[::2] == (200, pool)
            assert (await mesh.ask(model, path="/v1/embeddings"))[::2] == (200, pool)
            assert (await mesh.ask(model, prompt="a long way to go, " * 80_000))[::2] == (200, pool)
        assert mesh.pools["qwen"].decode.last.json["model"] == "qwen"  # the picker behind the route is asked for what serves it
        drawn = {each: (await mesh.ask("mixed", x_session=f"s{each}"))[2] for each in range(16)}
        assert set(drawn.values()) == {"llama", "qwen"}
        assert drawn == {each: (await mesh.ask("mixed", x_session=f"s{each}"))[2] for each in range(16)}
        status, answer, served = await mesh.ask("gpt-oss", x_gateway_model_name="qwen")
        assert (status, served, error_of(answer)["code"]) == (404, None, "model_not_found")
        assert "llama-7b" in error_of(answer)["message"]  # the picker of the rule for everything says so
        async with mesh.http.post("/v1/completions", data=b"{") as response:
            assert response.status == 415
        async with mesh.http.post("/v1/completions", data=b"{", headers={"content-type": "application/json"}) as response:
            assert response.status == 400


async def test_inference_pools_by_tenant_and_tier_need_no_body_to_be_read_before_the_picker() -> None:
    async with Mesh(Pool("default", "m"), Pool("gold", "m")) as mesh:
        await mesh.baton("gold", ["gold"], policies=[{"name": "gold", "allow_overrides": ["policy"], **_FORCED}])
        await mesh.baton("default", ["default"])
        (document,) = documents("gateway/routes/clients.yaml", "HTTPRoute")
        routes = of_http_route(document, {name: overrides(f"baton-{name}", FULL_DUPLEX) for name in mesh.pools})
        for route in routes:
            route["route"]["cluster"] = f"decode-{route['route']['cluster']}"
        mesh._clusters.append({"name": "baton-of-no-pool", "connect_timeout": "1s"})
        await mesh.envoy(routes, picker(mesh))
        await still_there(mesh)
        assert (await mesh.ask("m"))[::2] == (200, "default")
        for headers in ({"x-tenant": "acme"}, {"x-tier": "gold"}, {"x-baton-policy": "gold"}):
            assert (await mesh.ask("m", **headers))[::2] == (200, "gold")
        assert (await mesh.ask("m", x_tenant="other", x_tier="silver"))[::2] == (200, "default")
