"""The prefill client over TLS: connections are kept, faults have words, nothing hangs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.config import Prefill
from extproc.errors import ApiError
from extproc.prefill import PrefillClient
from extproc.tls.settings import ClientTls
from extproc.tls.workers import WorkerLink
from tests.certificates import Authority
from tests.stack.fake_worker import FakeWorker, prefill_answer
from workers.ready import free_ports

NAME = "workers.baton.test"


class Peer:
    """A worker with TLS, and who calls it."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.pair = self.authority.issue("worker", [NAME])
        self.caller = self.authority.issue("baton")
        (port,) = free_ports(1)
        self.worker = FakeWorker("prefill", port, prefill_answer, tls=self.pair.server(clients=self.authority.ca))

    def link(self, **changes: object) -> WorkerLink:
        settings = {
            "ca_file": str(self.authority.ca),
            "server_name": NAME,
            "cert_file": str(self.caller.cert),
            "key_file": str(self.caller.key),
            **changes,
        }
        return WorkerLink(ClientTls(**settings))  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    made = Peer(tmp_path)
    async with made.worker:
        yield made


async def call(client: PrefillClient, peer: Peer, body: bytes = b"{}") -> bytes:
    async with asyncio.timeout(20):
        return await client.run(peer.worker.address, "/v1/completions", body, {})


async def test_a_connection_is_kept_and_its_handshake_is_paid_once(peer: Peer) -> None:
    """Session tickets come after the handshake, and are no reason to give a connection up."""
    async with PrefillClient(Prefill(), peer.link()) as client:
        seen = set()
        for _ in range(5):
            assert b"kv_transfer_params" in await call(client, peer)
            (connection,) = client.pool._open
            seen.add(id(connection))
            assert client.pool.idle_connections == 1
    assert len(seen) == 1
    assert peer.worker.named == ["baton"] * 5


async def test_a_large_body_goes_whole(peer: Peer) -> None:
    body = b'{"prompt":"' + b"x" * (3 << 20) + b'"}'
    async with PrefillClient(Prefill(), peer.link()) as client:
        await call(client, peer, body)
    assert peer.worker.last.body == body


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_name": "elsewhere.test"}, "certificate is not valid for 'elsewhere.test'"),
        ({"cert_file": None, "key_file": None}, "does it want a certificate of ours"),
    ],
)
async def test_what_does_not_fit_is_said(peer: Peer, changes: dict[str, object], words: str) -> None:
    async with PrefillClient(Prefill(), peer.link(**changes)) as client:
        with pytest.raises(ApiError) as refused:
            await call(client, peer)
    assert refused.value.code == "prefill_unreachable"
    assert words in refused.value.message


async def test_a_peer_that_never_answers_the_handshake_is_given_up() -> None:
    """As one that does not take the connection at all: within the time for connecting."""
    silent = await asyncio.start_server(lambda _r, _w: asyncio.sleep(3600), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    link = WorkerLink(ClientTls(insecure_skip_verify=True))
    try:
        async with PrefillClient(Prefill(connect_timeout_s=0.2), link) as client, asyncio.timeout(20):
            with pytest.raises(ApiError, match=r"no connection within 0\.2 s"):
                await client.run(f"127.0.0.1:{port}", "/v1/completions", b"{}", {})
    finally:
        silent.close()


async def test_new_connections_use_the_files_of_now(peer: Peer) -> None:
    link = peer.link()
    async with PrefillClient(Prefill(), link) as client:
        await call(client, peer)
        peer.authority.issue("baton-2", replace=peer.caller)
        (followed,) = link.followed
        before = link.context
        assert followed.look() == "reloaded"
        assert link.context is not before
        for connection in tuple(client.pool._open):
            connection.cancel()
        await call(client, peer)
    assert peer.worker.named == ["baton", "baton-2"]


def test_context_trusts_nobody_but_the_authority_given(peer_files: Peer) -> None:
    """None of the system's authorities, and no protocol before TLS 1.2."""
    context = peer_files.link().context
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


@pytest.fixture
def peer_files(tmp_path: Path) -> Peer:
    return Peer(tmp_path)
