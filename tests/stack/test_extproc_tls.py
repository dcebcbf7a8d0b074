"""TLS between the real Envoy and the filter: everything that Envoy asks of it goes over it, and certificates are renewed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.certificates import Authority, Pair
from tests.stack.harness import Stack
from workers.ready import free_ports

NAME = "filter.baton.test"
BODY = {"model": "m", "prompt": "a prompt that is long enough", "max_tokens": 3}


class Site:
    """An authority, the filter's certificate and Envoy's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.filter = self.authority.issue("filter", [NAME])
        self.envoy = self.authority.issue("envoy")
        (self.port,) = free_ports(1)

    def stack(self, transport: str, *, server: Pair | None = None, **envoy: Any) -> Stack:
        shown = server or self.filter
        return Stack(
            settings={
                "listen": f"127.0.0.1:{self.port}",
                "transport": transport,
                "tls": {
                    "mode": "files",
                    "cert_file": str(shown.cert),
                    "key_file": str(shown.key),
                    "client_ca_file": str(self.authority.ca),
                },
                "envoy": {
                    "eds": "grpc",
                    "extproc_tls": {
                        "ca_file": str(self.authority.ca),
                        "server_name": NAME,
                        "cert_file": str(self.envoy.cert),
                        "key_file": str(self.envoy.key),
                        **envoy,
                    },
                    "secrets_dir": str(self.directory / "secrets"),
                },
            }
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "tls")


async def ask(stack: Stack) -> tuple[int, dict[str, Any]]:
    async with stack.http.post("/v1/completions", json=BODY) as response:
        return response.status, await response.json()


async def stat(stack: Stack, name: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/stats?filter=^{name}$") as response:
        return int((await response.text()).rpartition(":")[2] or 0)


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_requests_health_workers_and_log_go_over_mtls(site: Site, transport: str) -> None:
    """ext_proc, health checks, ADS and the access log go by the one port, which speaks no plaintext."""
    async with site.stack(transport) as stack:
        await served(stack)
        async with asyncio.timeout(10):
            while not (await stack.metrics())["baton_access_log_lines_total"]:
                await asyncio.sleep(0.05)
        assert await stat(stack, "cluster.extproc.ssl.handshake") >= 1
        assert await stat(stack, "cluster.extproc.ssl.no_certificate") == 0
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{site.port}/") as response:
                await response.read()


async def served(stack: Stack) -> None:
    """Until Envoy has its workers, and a request is served."""
    async with asyncio.timeout(20):
        while (await ask(stack))[0] != 200:
            await asyncio.sleep(0.05)


async def test_certificates_of_both_are_renewed_without_a_restart_or_an_error(site: Site) -> None:
    """New ones of the same authority, while requests go on; then the filter is restarted, so that the new ones are needed."""
    async with site.stack("lean") as stack:
        await served(stack)
        before = await stat(stack, "cluster.extproc.client_ssl_socket_factory.ssl_context_update_by_sds")
        site.authority.issue("filter", [NAME], replace=site.filter)
        site.authority.issue("envoy-2", replace=site.envoy)
        async with asyncio.timeout(20):
            while True:
                assert (await ask(stack))[0] == 200
                reloads = (await stack.metrics()).get('baton_secret_reloads_total{name="tls",outcome="reloaded"}', 0)
                fresh = await stat(stack, "cluster.extproc.client_ssl_socket_factory.ssl_context_update_by_sds")
                if reloads >= 1 and fresh > before:
                    break
                await asyncio.sleep(0.05)


async def test_filter_that_is_not_believed_is_a_503_and_no_hang(site: Site) -> None:
    """A certificate for another name, then one of the right name: Envoy finds it by itself."""
    wrong = site.authority.issue("wrong", ["elsewhere.test"])
    stack = site.stack("lean", server=wrong)
    seen = stack.ext_proc_seen

    async def not_seen() -> None:
        async with asyncio.timeout(20):
            while await stat(stack, "cluster.extproc.ssl.fail_verify_san") == 0:
                await asyncio.sleep(0.05)

    stack.ext_proc_seen = not_seen  # type: ignore[method-assign]
    async with stack:
        status, answer = await ask(stack)
        assert (status, answer["error"]["code"]) == (503, "filter_unavailable")
        assert stack.decode_received == []
        site.authority.issue("filter", [NAME], replace=wrong)
        await seen()
        await served(stack)


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_self_signed_filter_needs_nothing_of_envoy(site: Site, transport: str) -> None:
    """Encrypted and unchecked: what a private network may need, with no file at all."""
    stack = Stack(
        settings={
            "listen": f"127.0.0.1:{site.port}",
            "transport": transport,
            "tls": {"mode": "self_signed"},
            "envoy": {"eds": "grpc"},
        }
    )
    async with stack:
        await served(stack)
        assert await stat(stack, "cluster.extproc.ssl.handshake") >= 1
