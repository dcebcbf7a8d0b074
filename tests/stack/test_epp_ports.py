"""The ports of an endpoint picker: TLS at 9002, health at 9003, metrics at 9090 by default, and what is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import Authority
from tests.stack.inference_pool import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
READY = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")


async def asked(mesh: Mesh, name: str) -> int:
    async with grpc.aio.insecure_channel(mesh.health) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(answer.status)


async def until_asked(mesh: Mesh, name: str, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await asked(mesh, name) != wanted:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_the_health_port_knows_the_names_and_nothing_else(transport: str) -> None:
    async with Mesh(transport=transport) as mesh:
        for name in (*READY, "liveness"):
            await until_asked(mesh, name, SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await asked(mesh, "of.nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        async with grpc.aio.insecure_channel(mesh.health) as channel:
            process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
            with pytest.raises(grpc.aio.AioRpcError) as closed:
                await process(timeout=5).read()
        assert closed.value.code() is grpc.StatusCode.UNIMPLEMENTED, "requests come by TLS only"


async def test_a_picker_that_lost_its_workers_stays_ready_and_says_503() -> None:
    """Nobody else could say what is missing; and a picker that has yet to find them is not ready."""
    mesh = Mesh(decode=1, settings={"epp": {"ready_after_s": 600}})
    async with mesh:
        await until_asked(mesh, "readiness", SERVING)
        mesh.decode[0].healthy = False
        await mesh.until_metric(f'baton_endpoint_live{{endpoint="{mesh.decode[0].address}",role="decode"}}', 0)
        assert await asked(mesh, "readiness") == SERVING
        assert (await mesh.ask())[0] == 503
        await mesh.stop_picker()
        restarting = asyncio.create_task(mesh.start_picker())
        await until_live(mesh)
        assert await asked(mesh, "liveness") == SERVING
        assert await asked(mesh, "readiness") == NOT_SERVING
        mesh.decode[0].healthy = True
        await restarting
        await until_asked(mesh, "readiness", SERVING)


async def until_live(mesh: Mesh) -> None:
    """The new process serves its health."""
    async with asyncio.timeout(15):
        while True:
            try:
                await asked(mesh, "liveness")
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)


async def test_a_picker_without_workers_is_ready_after_a_while() -> None:
    mesh = Mesh(decode=1, settings={"epp": {"ready_after_s": 0.5}})
    async with mesh:
        await mesh.stop_picker()
        mesh.decode[0].healthy = False
        restarting = asyncio.create_task(mesh.start_picker())
        await until_live(mesh)
        await until_asked(mesh, "readiness", SERVING)
        mesh.decode[0].healthy = True
        await restarting


async def test_a_picker_that_drains_is_alive_and_not_ready() -> None:
    async with Mesh(settings={"drain": {"delay_s": 3.0}}) as mesh:
        stopping = asyncio.create_task(mesh.stop_picker())
        await until_asked(mesh, "readiness", NOT_SERVING)
        assert await asked(mesh, "envoy.service.ext_proc.v3.ExternalProcessor") == NOT_SERVING
        assert await asked(mesh, "liveness") == SERVING
        await stopping


async def test_the_metrics_port_has_metrics_and_nothing_else_of_the_admin_port() -> None:
    async with Mesh() as mesh, aiohttp.ClientSession(f"http://{mesh.metrics_at}") as session:
        async with session.get("/metrics") as response:
            assert response.status == 200
            assert "baton_tls_certificate_expiry_timestamp_seconds" in await response.text()
        for path in ("/", "/healthz", "/debug/decisions", "/live"):
            async with session.get(path) as response:
                assert response.status == 404


def verifying(authority: Authority, **own: Any) -> dict[str, Any]:
    """Envoy's side: it looks at the certificate."""
    return {
        "validation_context": {
            "trusted_ca": {"filename": str(authority.ca)},
            "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "picker.test"}}],
        },
        **own,
    }


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_mounted_certificates_with_mtls_and_their_renewal_under_requests(transport: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, client = authority.issue("picker", ["picker.test"]), authority.issue("gateway")
    shown = {"certificate_chain": {"filename": str(client.cert)}, "private_key": {"filename": str(client.key)}}
    settings = {
        "tls": {
            "mode": "files",
            "cert_file": str(server.cert),
            "key_file": str(server.key),
            "client_ca_file": str(authority.ca),
        }
    }
    tls = verifying(authority, tls_certificates=[shown])
    async with Mesh(transport=transport, settings=settings, tls=tls) as mesh:
        assert (await mesh.ask())[0] == 200
        expiry = "baton_tls_certificate_expiry_timestamp_seconds"
        before = await mesh.metric(expiry)
        authority.issue("picker", ["picker.test"], days=9, replace=server)
        async with asyncio.timeout(15):
            while await mesh.metric(expiry) == before:
                assert (await mesh.ask())[0] == 200
        assert await mesh.metric('baton_secret_reloads_total{name="tls",outcome="reloaded"}') >= 1
        server.key.write_text("nothing")
        await mesh.until_metric('baton_secret_reloads_total{name="tls",outcome="failed"}', 1)
        assert (await mesh.ask())[0] == 200
        await mesh.at_rest()


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_an_envoy_that_shows_no_certificate_gets_an_error_and_nothing_hangs(transport: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server = authority.issue("picker", ["picker.test"])
    settings = {
        "tls": {
            "mode": "files",
            "cert_file": str(server.cert),
            "key_file": str(server.key),
            "client_ca_file": str(authority.ca),
        }
    }
    async with Mesh(transport=transport, settings=settings, tls=verifying(authority)) as mesh:
        async with asyncio.timeout(10):
            assert (await mesh.ask())[0] == 500
        if transport == "lean":
            assert await mesh.metric('baton_tls_handshakes_total{outcome="no_certificate"}') >= 1
            await mesh.logged("tls_handshake_failed")


async def test_an_envoy_that_trusts_another_authority_gets_an_error_and_the_picker_says_why(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server = authority.issue("picker", ["picker.test"])
    settings = {"tls": {"mode": "files", "cert_file": str(server.cert), "key_file": str(server.key)}}
    async with Mesh(transport="lean", settings=settings, tls=verifying(Authority(tmp_path / "other"))) as mesh:
        async with asyncio.timeout(10):
            assert (await mesh.ask())[0] == 500
        await mesh.logged("tls_handshake_failed")
        assert await mesh.metric('baton_tls_handshakes_total{outcome="not_trusted"}') >= 1
