"""Where the filter's port has TLS, so has that of the process that watches streams, and each of several processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.stack.harness import Stack
from workers.ready import free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"model": "m", "messages": [{"role": "user", "content": "Where do the wagons go?"}], "max_tokens": 8, "stream": True}


@pytest.mark.parametrize("mode", ["self_signed", "files"])
async def test_streams_are_watched_over_tls(mode: str, tmp_path: Path) -> None:
    listen, watch = free_ports(2)
    tls: dict[str, str] = {"mode": mode}
    envoy: dict[str, Any] = {}
    if mode == "files":
        authority = Authority(tmp_path / "ca")
        pair = authority.issue("filter", ["filter.test"])
        tls |= {"cert_file": str(pair.cert), "key_file": str(pair.key)}
        trusted = {"ca_file": str(authority.ca), "server_name": "filter.test"}
        envoy = {"extproc_tls": trusted, "secrets_dir": str(tmp_path / "secrets")}
    stack = Stack(
        settings={
            "listen": f"127.0.0.1:{listen}",
            "tls": tls,
            "observe": {"sample": 1.0, "listen": f"127.0.0.1:{watch}"},
            "envoy": envoy,
        }
    )
    async with stack:
        name = 'baton_watched_streams_total{outcome="whole"}'
        async with asyncio.timeout(20):
            while not (await stack.metrics()).get(name):
                async with stack.http.post("/v1/chat/completions", json=BODY) as response:
                    assert response.status == 200
                    await response.read()
                await asyncio.sleep(0.1)


async def test_several_processes_have_tls_each() -> None:
    (first,) = free_ports(1)  # the one after it is free too, or the start says so
    stack = Stack(settings={"listen": f"127.0.0.1:{first}", "tls": {"mode": "self_signed"}, "processes": 2})
    async with stack:
        for _ in range(20):
            async with stack.http.post("/v1/chat/completions", json=BODY) as response:
                assert response.status == 200
                await response.read()
        if stack.config.transport == "lean":
            found = await stack.metrics()
            assert all(found[f'baton_tls_handshakes_total{{outcome="ok",process="{each}"}}'] > 0 for each in (0, 1))
