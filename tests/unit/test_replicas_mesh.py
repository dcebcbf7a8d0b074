"""Connections between replicas, over real sockets and real TLS: who gets one, who does not, and how much goes over it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.processes.ledger import new_epoch
from extproc.processes.post import Sent
from extproc.replicas import handshake
from extproc.replicas.frames import Sealer
from extproc.replicas.keys import ReplicaKeys
from extproc.replicas.mesh import Mesh
from extproc.replicas.peers import Peers
from extproc.replicas.settings import ReplicaSettings, ReplicaTls
from tests.certificates import Authority
from tests.unit.processes_world import Nowhere
from tests.unit.test_discovery_sources import NameServer, name_server  # noqa: F401 (a fixture)
from workers.ready import free_ports


class Node:
    """One replica's connections, and what came over them."""

    def __init__(self, settings: ReplicaSettings, *, epoch: str | None = None, dns_servers: Sequence[str] = ()) -> None:
        self.log = Nowhere()
        self.metrics = Metrics()
        self.epoch = epoch or new_epoch()
        self.up: dict[int, str] = {}
        self.downs: list[str] = []
        self.got: list[bytes] = []
        log = make_logger("info", sink=self.log)
        keys = ReplicaKeys(settings)
        assert settings.listen is not None
        port = int(settings.listen.rpartition(":")[2])
        peers = Peers(settings, own_port=port, dns_servers=dns_servers, log=log, on_failure=lambda: None)
        self.mesh = Mesh(settings, epoch=self.epoch, keys=keys, peers=peers, metrics=self.metrics, log=log)
        self.mesh.on_up = self.up.__setitem__
        self.mesh.on_down = self._down
        self.mesh.on_data = lambda _index, data: self.got.append(data)

    def _down(self, index: int, why: str) -> None:
        del self.up[index]
        self.downs.append(why)

    def links(self, outcome: str) -> float:
        return self.metrics.replica_links.value(outcome)

    def why(self, event: str) -> list[str]:
        return [line["why"] for line in self.log.lines if line["event"] == event]


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    await node.mesh.open(1.0)
    task = asyncio.create_task(node.mesh.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        node.mesh.close()


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return written(tmp_path / "secret", b"a secret of replicas, thirty bytes\n")


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def plain(secret: str, own: int, *others: int, **more: Any) -> ReplicaSettings:
    """On loopback; everybody has the same list, itself included."""
    return ReplicaSettings(
        listen=f"127.0.0.1:{own}",
        peers=[f"127.0.0.1:{port}" for port in (own, *others)],
        secret_file=secret,
        plaintext=True,
        **more,
    )


async def test_two_that_dial_each_other_have_one_connection_and_leave_themselves_out(secret: str) -> None:
    one, other = free_ports(2)
    async with running(Node(plain(secret, one, other))) as first, running(Node(plain(secret, other, one))) as second:
        await until(lambda: first.up and second.up)
        # They go on looking; nothing more comes of it.
        await until(lambda: "itself" in first.mesh.status()["addresses"].values())
        await until(lambda: "itself" in second.mesh.status()["addresses"].values())
        await until(lambda: set(first.mesh.status()["addresses"].values()) == {"itself", "connected"})
        await until(lambda: set(second.mesh.status()["addresses"].values()) == {"itself", "connected"})
        assert (len(first.up), len(second.up)) == (1, 1)
        [to_second], [to_first] = first.up, second.up
        assert first.mesh.send(to_second, b"hello") is Sent.YES
        assert second.mesh.send(to_first, b"hello back") is Sent.YES
        await until(lambda: first.got and second.got)
        assert (first.got, second.got) == ([b"hello back"], [b"hello"])
        assert first.why("replica_refused") == second.why("replica_refused") == []
        assert first.metrics.replica_bytes.value("sent") > 100


@pytest.mark.parametrize("round_", range(8))
async def test_of_two_that_dial_at_the_same_time_one_connection_is_left(secret: str, round_: int) -> None:
    one, other = free_ports(2)
    nodes = [Node(plain(secret, one, other)), Node(plain(secret, other, one))]
    async with running(nodes[0]), running(nodes[1]):
        for node in nodes:
            node.mesh._look()  # both at once, as often as there is a chance
        await until(lambda: all(set(node.mesh.status()["addresses"].values()) == {"itself", "connected"} for node in nodes))
        await until(lambda: all(len(node.up) == 1 for node in nodes))
        for node in nodes:
            [index] = node.up
            assert node.mesh.send(index, b"x" * round_) is Sent.YES
        await until(lambda: all(node.got for node in nodes))


async def test_three_find_each_other_by_a_name_that_stands_for_all(secret: str, name_server: NameServer) -> None:  # noqa: F811
    [port] = free_ports(1)
    name_server.zone = {("filters.example", "A"): ["127.0.0.1"], ("filters.example", "AAAA"): []}
    name_server.ttl_s = 1

    def node(host: str) -> Node:
        settings = ReplicaSettings(
            listen=f"{host}:{port}", dns="filters.example", secret_file=secret, plaintext=True, refresh_s=1.0
        )
        return Node(settings, dns_servers=[f"127.0.0.1:{name_server.port}"])

    async with running(node("127.0.0.1")) as first:
        await until(lambda: first.mesh.status()["addresses"] == {f"127.0.0.1:{port}": "itself"})
        name_server.zone[("filters.example", "A")] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        async with running(node("127.0.0.2")) as second, running(node("127.0.0.3")) as third:
            await until(lambda: all(len(each.up) == 2 for each in (first, second, third)))
            name_server.zone[("filters.example", "A")] = ["127.0.0.1", "127.0.0.2"]
            third.mesh.close()
            await until(lambda: len(first.up) == len(second.up) == 1)
            await until(lambda: len(first.mesh.status()["addresses"]) == 2)


async def test_a_restarted_one_is_connected_again_under_another_index(secret: str) -> None:
    one, other = free_ports(2)
    async with running(Node(plain(secret, one, other))) as first:
        async with running(Node(plain(secret, other, one))):
            await until(lambda: first.up)
            [before] = first.up
        await until(lambda: first.downs)
        assert first.up == {}
        async with running(Node(plain(secret, other, one))):
            await until(lambda: first.up)
            assert before not in first.up


async def test_whoever_has_another_secret_is_refused_by_both_and_nothing_is_heard(secret: str, tmp_path: Path) -> None:
    one, other = free_ports(2)
    wrong = written(tmp_path / "wrong", b"something else of enough bytes")
    async with running(Node(plain(secret, one, other))) as first, running(Node(plain(wrong, other))) as second:
        await until(lambda: first.links("refused_secret") or second.links("refused_secret"))
        why = first.why("replica_not_connected") + second.why("replica_refused")
        assert any("does not know the secret" in each for each in why)
        assert first.up == second.up == {}


async def test_a_stranger_that_only_listens_and_repeats_gets_nowhere(secret: str) -> None:
    """It sends back what it is told, hello and proof alike."""
    [port] = free_ports(1)
    async with running(Node(plain(secret, port))) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        hello = await reader.readexactly(4)
        hello += await reader.readexactly(int.from_bytes(hello, "big"))
        said = handshake.read(hello[4:])
        writer.write(Sealer().seal(handshake.encode(handshake.Hello("baton-replica", 1, 1, "ffff", said.nonce, "stranger"))))
        proof = await reader.readexactly(4 + handshake.PROOF_BYTES)
        writer.write(proof)
        assert await reader.read() == b"", "and the connection is closed"
        writer.close()
        await until(lambda: node.links("refused_secret") == 1)
        assert node.up == {}


async def test_a_version_that_is_not_known_is_refused_with_both_versions_named(secret: str) -> None:
    one, other = free_ports(2)
    async with running(Node(plain(secret, one))) as first:
        upgraded = Node(plain(secret, other, one))
        made = handshake.hello(upgraded.epoch, "another host", "baton 99")
        upgraded.mesh._hello = lambda: handshake.Hello("baton-replica", 7, 9, made.epoch, made.nonce, made.name, made.software)
        async with running(upgraded):
            await until(lambda: first.links("refused_version") and upgraded.links("refused_version"))
            [why] = first.why("replica_refused")
            assert "it speaks versions 7 to 9 of the format (baton 99), this one 1 to 1" in why
            assert first.up == upgraded.up == {}
        async with running(Node(plain(secret, other, one))):  # rolled back, or the next of the old ones
            await until(lambda: first.up)


async def test_garbage_and_silence_are_let_go(secret: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("extproc.replicas.link.GREETING_TIMEOUT_S", 0.2)
    [port] = free_ports(1)
    async with running(Node(plain(secret, port))) as node:
        for said in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", os.urandom(5000), (9).to_bytes(4, "big") + b"not msgpk", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            with_hello = await reader.read()
            assert len(with_hello) < 400, "a hello, and no more"
            writer.close()
        await until(lambda: node.links("refused_timeout") >= 1 and node.links("refused_malformed") >= 1)
        assert node.up == {} and not node.mesh._unproved


def with_tls(
    authority: Authority, own: int, *others: int, name: str, names: Sequence[str] = (), **more: Any
) -> ReplicaSettings:
    pair = authority.issue(name)
    return ReplicaSettings(
        listen=f"127.0.0.1:{own}",
        peers=[f"127.0.0.1:{port}" for port in (own, *others)],
        tls=ReplicaTls(ca_file=str(authority.ca), cert_file=str(pair.cert), key_file=str(pair.key), names=list(names)),
        **more,
    )


async def test_with_certificates_of_one_authority_no_secret_is_needed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = free_ports(2)
    names = ["baton-1", "baton-2"]
    first_ = Node(with_tls(authority, one, other, name="baton-1", names=names))
    second_ = Node(with_tls(authority, other, one, name="baton-2", names=names))
    async with running(first_) as first, running(second_) as second:
        await until(lambda: len(first.up) == len(second.up) == 1)
        [index] = first.up
        assert first.mesh.send(index, b"hidden") is Sent.YES
        await until(lambda: second.got == [b"hidden"])


async def test_a_certificate_of_another_authority_or_none_or_another_name_is_refused(tmp_path: Path, secret: str) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    port, *others = free_ports(4)
    async with running(Node(with_tls(authority, port, name="baton", names=["baton"]))) as node:
        foreign = Node(with_tls(stranger, others[0], port, name="baton"))
        async with running(foreign):
            await until(lambda: foreign.links("refused_certificate"))
        workload = Node(with_tls(authority, others[1], port, name="some-other-workload"))
        async with running(workload):
            await until(lambda: node.links("refused_certificate"))
            assert any("its certificate is for some-other-workload" in why for why in node.why("replica_refused"))
        async with running(Node(plain(secret, others[2], port))) as bare:
            await until(lambda: bare.why("replica_not_connected"))
            assert bare.up == {}
        assert node.up == {}


async def test_a_renewed_certificate_is_shown_to_the_next_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = free_ports(2)
    pair = authority.issue("baton", days=-1)
    settings = with_tls(authority, one, name="other")
    settings = ReplicaSettings(
        listen=settings.listen,
        peers=settings.peers,
        tls=ReplicaTls(ca_file=str(authority.ca), cert_file=str(pair.cert), key_file=str(pair.key)),
    )
    keys: list[ReplicaKeys] = []
    node = Node(settings)
    keys.append(node.mesh._keys)
    async with running(node), running(Node(with_tls(authority, other, one, name="second"))) as second:
        await until(lambda: second.links("refused_certificate"))
        authority.issue("baton", replace=pair)
        assert keys[0].followed[0].look() == "reloaded"
        await until(lambda: second.up)


@pytest.mark.parametrize("content", [b"short", b"", b"x" * 5000])
def test_a_secret_that_is_none_is_refused_with_its_file(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path / "secret", content)
    with pytest.raises(OSError, match="secret"):
        ReplicaKeys(plain(path, 1))


async def test_one_that_does_not_read_costs_a_bounded_buffer(secret: str) -> None:
    one, other = free_ports(2)
    async with running(Node(plain(secret, one, other))) as first, running(Node(plain(secret, other, one))) as second:
        await until(lambda: first.up and second.up)
        [index] = first.up
        link = next(iter(second.mesh._links.values()))
        assert link._transport is not None
        link._transport.pause_reading()
        taken, batch = 0, b"x" * 40_000
        async with asyncio.timeout(20):
            while first.mesh.send(index, batch) is Sent.YES or taken == 0:
                taken += 1
                await asyncio.sleep(0)
        here = first.mesh._links[index]._transport
        assert here is not None and here.get_write_buffer_size() < 512 << 10
        link._transport.resume_reading()
        await until(lambda: len(second.got) == taken)
        assert first.mesh.send(index, b"again") is Sent.YES


async def test_no_more_bytes_a_second_than_allowed(secret: str) -> None:
    one, other = free_ports(2)
    slow = plain(secret, one, other, max_bytes_per_s=100_000)
    async with running(Node(slow)) as first, running(Node(plain(secret, other, one))) as second:
        await until(lambda: first.up and second.up)
        [index] = first.up
        begun_s = asyncio.get_running_loop().time()
        sent = 0
        while sent < 200_000:
            if first.mesh.send(index, b"x" * 5_000) is Sent.YES:
                sent += 5_000
            else:
                await asyncio.sleep(0.005)
        assert asyncio.get_running_loop().time() - begun_s >= 1.5
