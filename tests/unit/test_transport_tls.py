"""TLS at the gRPC port, on both transports: who gets in, what is said to whom does not, and certificates that change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from extproc.config import Tls
from extproc.tls.files import FAILED, RELOADED
from extproc.transport import grpc_server
from extproc.transport.call import Call, Server
from extproc.transport.choose import Kind, make_server
from extproc.transport.tls import door
from extproc.transport.tls.keys import KeysError
from extproc.transport.tls.ring import KeyRing
from tests.certificates import Authority, Pair

METHOD = "/x.Y/Echo"
SETUPS = ("lean", "lean-uvloop", "grpc")


def run(setup: str, work: Coroutine[Any, Any, None]) -> None:
    """On the event loop that the transport runs on."""
    if setup.endswith("uvloop"):
        uvloop.run(work)
    else:
        asyncio.run(work)


class Peer:
    """A server with TLS, and what it told of handshakes."""

    def __init__(self, setup: str, ring: KeyRing) -> None:
        self.told: list[tuple[str, str]] = []
        kind: Kind = "grpc" if setup == "grpc" else "lean"
        self.server: Server = make_server(
            kind,
            max_message_bytes=8 << 20,
            max_streams=100,
            on_shake=lambda outcome, why: self.told.append((outcome, why)),
            handshake_timeout_s=ring.handshake_timeout_s,
        )
        self.server.serve(METHOD, _echo)
        self.port = self.server.add_secure_port("127.0.0.1:0", ring)

    @property
    def failures(self) -> list[str]:
        return [outcome for outcome, _ in self.told if outcome != "ok"]


async def _echo(call: Call) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


@asynccontextmanager
async def serving(setup: str, ring: KeyRing) -> AsyncIterator[Peer]:
    peer = Peer(setup, ring)
    await peer.server.start()
    try:
        yield peer
    finally:
        await peer.server.stop(None)


def credentials(ca: Path | None, own: Pair | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        None if ca is None else ca.read_bytes(),
        None if own is None else own.key.read_bytes(),
        None if own is None else own.cert.read_bytes(),
    )


@asynccontextmanager
async def channel(port: int, ca: Path | None, own: Pair | None = None, *, plain: bool = False) -> AsyncIterator[Any]:
    where = f"localhost:{port}"
    # Each has a connection of its own.
    options = [("grpc.use_local_subchannel_pool", 1)]
    made = grpc.aio.insecure_channel(where, options) if plain else grpc.aio.secure_channel(where, credentials(ca, own), options)
    async with made as opened:
        yield opened


async def echoed(opened: Any, message: bytes = b"hello") -> bytes:
    call = opened.stream_stream(METHOD)(timeout=10)
    await call.write(message)
    await call.done_writing()
    answer: bytes = await call.read()
    return answer


async def refused(opened: Any) -> str:
    """The client's own words, which come at once and not when its patience ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(8):
            await echoed(opened)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def server(authority: Authority) -> Pair:
    return authority.issue("server", ["localhost"])


def ring_of(pair: Pair, clients: Path | None = None, *, handshake_timeout_s: float = 10.0) -> KeyRing:
    return KeyRing(
        Tls(
            mode="files",
            cert_file=str(pair.cert),
            key_file=str(pair.key),
            client_ca_file=None if clients is None else str(clients),
            handshake_timeout_s=handshake_timeout_s,
        ),
        from_files=True,
    )


@pytest.mark.parametrize("setup", SETUPS)
def test_a_client_that_trusts_the_authority_is_served_also_with_large_messages(
    setup: str, authority: Authority, server: Pair
) -> None:
    async def work() -> None:
        async with serving(setup, ring_of(server)) as peer, channel(peer.port, authority.ca) as opened:
            assert await echoed(opened) == b"hello"
            large = bytes(range(256)) * 8192  # 2 MiB: many records, and more than one window
            assert await echoed(opened, large) == large
            assert peer.failures == []

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_self_signed_certificate_serves_clients_that_do_not_verify(setup: str) -> None:
    """As gateways do with endpoint pickers: TLS, ALPN h2, no look at who signed."""

    async def work() -> None:
        async with serving(setup, KeyRing(Tls(), from_files=False)) as peer:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            _, writer = await asyncio.open_connection("127.0.0.1", peer.port, ssl=context)
            chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
            writer.close()
            assert chosen == "h2"

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_client_that_trusts_another_authority_hears_so_and_others_are_served(
    setup: str, tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async def work() -> None:
        stranger = Authority(tmp_path / "theirs")
        async with serving(setup, ring_of(server)) as peer:
            async with channel(peer.port, stranger.ca) as opened:
                assert "certificate" in (await refused(opened)).lower()
            async with channel(peer.port, authority.ca) as opened:
                assert await echoed(opened) == b"hello"
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.to_thread(_shake_hands, peer.port, ssl.create_default_context(cafile=stranger.ca))
            if setup != "grpc":  # gRPC's client closes without a word, OpenSSL says why
                await until(lambda: "not_trusted" in peer.failures)
                assert set(peer.failures) <= {"not_trusted", "gone"}

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(
    ("shown", "outcome"),
    [("nothing", "no_certificate"), ("another authority's", "bad_certificate"), ("an expired one", "bad_certificate")],
)
def test_with_a_client_ca_only_its_clients_get_in(
    setup: str, shown: str, outcome: str, tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async def work() -> None:
        own = {
            "nothing": None,
            "another authority's": Authority(tmp_path / "theirs").issue("client"),
            "an expired one": authority.issue("late", days=-1),
        }[shown]
        async with serving(setup, ring_of(server, authority.ca)) as peer:
            async with channel(peer.port, authority.ca, own) as opened:
                await refused(opened)
            async with channel(peer.port, authority.ca, authority.issue("client")) as opened:
                assert await echoed(opened) == b"hello"
            if setup != "grpc":
                assert set(peer.failures) <= {outcome, "gone"} and outcome in peer.failures

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_client_in_plaintext_is_cut_at_once(setup: str, authority: Authority, server: Pair) -> None:
    async def work() -> None:
        async with serving(setup, ring_of(server)) as peer:
            async with channel(peer.port, None, plain=True) as opened:
                await refused(opened)
            async with channel(peer.port, authority.ca) as opened:
                assert await echoed(opened) == b"hello"
            if setup != "grpc":
                assert "plaintext" in peer.failures

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_peer_that_says_nothing_is_cut_when_its_time_is_over(setup: str, server: Pair) -> None:
    async def work() -> None:
        async with serving(setup, ring_of(server, handshake_timeout_s=0.3)) as peer:
            reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
            async with asyncio.timeout(8):
                assert await reader.read() == b""
            writer.close()
            if setup != "grpc":
                await until(lambda: peer.failures == ["timeout"])

    run(setup, work())


@pytest.mark.parametrize("setup", ["lean", "lean-uvloop"])
def test_only_so_many_handshakes_are_under_way_at_once(
    setup: str, authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_HANDSHAKES", 3)

    async def work() -> None:
        async with serving(setup, ring_of(server, handshake_timeout_s=1.0)) as peer:
            silent = [await asyncio.open_connection("127.0.0.1", peer.port) for _ in range(5)]
            await until(lambda: peer.failures.count("too_many") == 2)
            await until(lambda: peer.failures.count("timeout") == 3)
            async with channel(peer.port, authority.ca) as opened:
                assert await echoed(opened) == b"hello"
            for _, writer in silent:
                writer.close()

    run(setup, work())


def test_grpc_has_only_so_many_connections(authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in their handshakes count."""
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 3)

    async def work() -> None:
        async with serving("grpc", ring_of(server, handshake_timeout_s=2.0)) as peer:
            silent = [await asyncio.open_connection("127.0.0.1", peer.port) for _ in range(6)]
            over = [asyncio.create_task(reader.read()) for reader, _ in silent]
            done, _ = await asyncio.wait(over, timeout=1.0)
            assert len(done) == 3
            await asyncio.wait(over, timeout=8.0)
            async with channel(peer.port, authority.ca) as opened:
                assert await echoed(opened) == b"hello"
            for _, writer in silent:
                writer.close()

    run("grpc", work())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_self_signed_server_can_want_client_certificates_and_their_authority_can_change(
    setup: str, tmp_path: Path, authority: Authority
) -> None:
    async def work() -> None:
        other, anchor = Authority(tmp_path / "theirs"), tmp_path / "clients.pem"
        anchor.write_bytes(authority.ca.read_bytes())
        ring = KeyRing(Tls(client_ca_file=str(anchor)), from_files=False)
        trusted = tmp_path / "self.pem"
        trusted.write_bytes(ring.keys.chain_pem)
        followed = ring.followed()
        async with serving(setup, ring) as peer:
            async with channel(peer.port, trusted, authority.issue("one")) as opened:
                assert await echoed(opened) == b"hello"
            async with channel(peer.port, trusted, other.issue("two")) as opened:
                await refused(opened)
            anchor.write_bytes(other.ca.read_bytes())
            assert followed.look() == RELOADED
            async with channel(peer.port, trusted, other.issue("two")) as opened:
                assert await echoed(opened) == b"hello"
            async with channel(peer.port, trusted, authority.issue("three")) as opened:
                await refused(opened)

    run(setup, work())


@pytest.mark.parametrize("setup", ["lean", "lean-uvloop"])
def test_a_server_that_stops_cuts_handshakes_and_ends(setup: str, server: Pair) -> None:
    async def work() -> None:
        async with asyncio.timeout(8):
            async with serving(setup, ring_of(server)) as peer:
                reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
                writer.write(b"\x16\x03\x01")  # the beginning of a handshake
                await asyncio.sleep(0.05)
            assert await reader.read() == b""
            writer.close()

    run(setup, work())


def _shake_hands(port: int, context: ssl.SSLContext) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=8) as plain:
        context.wrap_socket(plain, server_hostname="localhost").close()


def _serial(port: int) -> Callable[[], Awaitable[int]]:
    async def shown() -> int:
        from cryptography import x509

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(raw).serial_number

    return shown


@pytest.mark.parametrize("setup", SETUPS)
def test_new_certificates_hold_for_new_connections_and_drop_none(setup: str, authority: Authority, server: Pair) -> None:
    async def work() -> None:
        ring = ring_of(server)
        followed = ring.followed()
        async with serving(setup, ring) as peer, channel(peer.port, authority.ca) as before:
            serial = _serial(peer.port)
            call = before.stream_stream(METHOD)(timeout=20)
            await call.write(b"one")
            assert await call.read() == b"one"
            first = await serial()
            authority.issue("server", ["localhost"], replace=server)
            assert followed.look() == RELOADED
            assert await serial() != first
            await call.write(b"two")  # the call that was open, on the connection that was there
            assert await call.read() == b"two"

    run(setup, work())


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("fault", ["another key", "expired", "no PEM", "gone"])
def test_files_that_cannot_be_used_change_nothing(setup: str, fault: str, authority: Authority, server: Pair) -> None:
    async def work() -> None:
        ring = ring_of(server)
        followed = ring.followed()
        async with serving(setup, ring) as peer:
            serial = _serial(peer.port)
            first = await serial()
            if fault == "another key":
                server.key.write_bytes(authority.issue("other").key.read_bytes())
            elif fault == "expired":
                authority.issue("server", ["localhost"], days=-1, replace=server)
            elif fault == "no PEM":
                server.cert.write_bytes(b"")
            else:
                server.cert.unlink()
            assert followed.look() == FAILED
            assert followed.fault is not None
            assert followed.look() is None, "one state is one fault, however often it is looked at"
            assert await serial() == first
            authority.issue("server", ["localhost"], replace=server)
            assert followed.look() == RELOADED
            assert await serial() != first

    run(setup, work())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("expired", "expired on"),
        ("another key", "not the key of the certificate"),
        ("encrypted", "encrypted"),
        ("no PEM", "no certificate in PEM"),
        ("no key", "no private key"),
        ("no CA", "no certificate in PEM"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_with_their_names(
    fault: str, words: str, tmp_path: Path, authority: Authority, server: Pair
) -> None:
    clients: Path | None = None
    if fault == "expired":
        authority.issue("server", ["localhost"], days=-1, replace=server)
    elif fault == "another key":
        server.key.write_bytes(authority.issue("other").key.read_bytes())
    elif fault == "encrypted":
        key = load_pem_private_key(server.key.read_bytes(), None)
        locked = serialization.BestAvailableEncryption(b"secret")
        server.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    elif fault == "no PEM":
        server.cert.write_text("nothing")
    elif fault == "no key":
        server.key.write_text("nothing")
    else:
        clients = tmp_path / "ca.pem"
        clients.write_text("nothing")
    with pytest.raises(KeysError, match=words) as caught:
        ring_of(server, clients)
    wrong = clients if clients is not None else server.key if fault in ("another key", "encrypted", "no key") else server.cert
    assert str(wrong) in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def test_keys_are_for_no_log(server: Pair) -> None:
    assert "PRIVATE" not in repr(ring_of(server).keys)
