"""Where endpoints come from: a change is taken whole, a fault keeps what was known and says where it is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from extproc.config import ConfigError, parse
from extproc.discovery.choose import sources
from extproc.discovery.dns import MAX_ADDRESSES, Dns, resolver
from extproc.discovery.listing import MAX_ENDPOINTS, ListingError, endpoint_set
from extproc.discovery.merge import Discovery, merge
from extproc.discovery.source import Source, SourceError
from extproc.discovery.static import Static
from extproc.discovery.watched_file import WatchedFile, read_listing
from extproc.observe.logs import make_logger
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec


def specs(*addresses: str) -> tuple[EndpointSpec, ...]:
    return tuple(EndpointSpec(address=address) for address in addresses)


def addresses(found: tuple[EndpointSpec, ...]) -> list[str]:
    return [spec.address for spec in found]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


# --- what an operator writes down ---------------------------------------------------------------------------------------


def test_a_worker_is_an_address_or_an_object_with_facts() -> None:
    found = read_listing(
        "prefill: ['10.0.0.1:8100', {address: '[fd00::1]:8100', labels: {tier: gold}, prefill_tokens_per_s: 9000.5}]\n"
        "both: [{address: '10.0.0.2:8100', models: [m, m-lora], max_seqs: 64, kv_tokens: 100000}]\n",
        source="w.yaml",
    )
    assert addresses(found.prefill) == ["10.0.0.1:8100", "[fd00::1]:8100"]
    assert (found.prefill[1].labels, found.prefill[1].prefill_tokens_per_s) == ({"tier": "gold"}, 9000.5)
    assert (found.both[0].models, found.both[0].max_seqs, found.both[0].kv_tokens) == (["m", "m-lora"], 64, 100_000)
    assert found.decode == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "w.yaml"),
        ("prefill: [", "w.yaml:"),
        ("decode:\n- '10.0.0.1:1'\n- gpu-3:1", "w.yaml:3: decode[1]: 'gpu-3:1': a worker is ip:port"),
        (
            "decode:\n- {address: '10.0.0.1:1'}\n- {address: '10.0.0.2:1', weight: 3}",
            "w.yaml:3: decode[1].weight: unknown field",
        ),
        ("decode: ['10.0.0.1:99999']", "a port is 1 to 65535"),
        ("decode: ['10.0.0.1:0']", "a port is 1 to 65535"),
        ("decode: ['010.0.0.1:1']", "a worker is ip:port"),
        ("decode: ['[::0:1]:80']", "write it as '[::1]:80'"),
        ("decode: ['10.0.0.1:1', '10.0.0.1:1']", "decode[1]: 10.0.0.1:1 stands there twice, first at decode[0]"),
        ("both: ['10.0.0.1:1']\nprefill: ['10.0.0.1:1']", "w.yaml:2: prefill[0]: 10.0.0.1:1 stands under `both` already"),
        ("both: ['10.0.0.1:1']\ndecode: ['10.0.0.1:1']", "decode[0]: 10.0.0.1:1 stands under `both` already"),
        ("decode: [{address: '10.0.0.1:1', max_seqs: 0}]", "decode[0].max_seqs: 0 is not a positive number"),
        ("decode: [{address: '10.0.0.1:1', prefill_tokens_per_s: .inf}]", "prefill_tokens_per_s: inf"),
        ("decode: [{address: '10.0.0.1:1', models: []}]", "decode[0].models: names at least one"),
        ("decodes: []", "decodes: unknown field"),
        ("decode: {a: b}", "decode"),
    ],
)
def test_a_faulty_list_is_refused_with_its_line_and_field(text: str, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_listing(text, source="w.yaml")
    assert message in str(caught.value)


def test_one_source_has_an_upper_bound() -> None:
    many = [f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}:1" for i in range(MAX_ENDPOINTS + 1)]
    assert len(endpoint_set([], many[:-1], []).decode) == MAX_ENDPOINTS
    with pytest.raises(ListingError, match="more than 4096"):
        endpoint_set([], many, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: {}", "workers.prefill: at least one worker is needed"),
        ("workers: {both: ['10.0.0.1:1'], prefill: ['10.0.0.1:1']}", "stands under `both`"),
        ("workers: {dns: [{role: decode}]}", "workers.dns[0]: either `name` and `port`, or `srv`"),
        ("workers: {dns: [{role: decode, name: a, srv: b}]}", "workers.dns[0]: either `name` and `port`, or `srv`"),
        ("workers: {dns: [{role: decode, name: a}]}", "workers.dns[0]: `port` goes with `name`"),
        ("workers: {dns: [{role: decode, srv: a, port: 1}]}", "workers.dns[0]: `port` goes with `name`"),
        ("workers: {dns: [{role: decode, name: a, port: 0}]}", "workers.dns[0].port: 0"),
        ("workers: {dns: [{role: decode, name: '', port: 1}]}", "workers.dns[0]: an empty name"),
        ("workers: {dns: [{role: decode, srv: a, refresh_s: 0.5}]}", "workers.dns[0].refresh_s: 0.5"),
        ("workers: {dns: [{role: all, srv: a}]}", "role"),
        ("workers: {file: w.yaml, dns_servers: [dns.example]}", "workers.dns_servers[0]: 'dns.example'"),
        ("workers: {file: w.yaml, dns_servers: ['10.0.0.1:0']}", "workers.dns_servers[0]: '10.0.0.1:0'"),
        ("workers: {file: ''}", "workers.file: an empty path"),
    ],
)
def test_workers_that_cannot_be_found_are_refused_at_start(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_a_worker_of_both_roles_is_enough() -> None:
    workers = parse("workers: {both: ['10.0.0.1:1']}").workers
    assert workers.prefill_addresses == workers.decode_addresses == ["10.0.0.1:1"]


def test_the_configuration_comes_before_the_file_and_the_file_before_dns() -> None:
    config = parse(
        "workers: {decode: ['10.0.0.1:1'], file: w.yaml, dns_servers: ['127.0.0.1:5353', '::1'],"
        " dns: [{role: prefill, srv: _http._tcp.p.example}, {role: both, name: b.example, port: 8000}]}"
    )
    assert [(source.kind, source.name) for source in sources(config.workers, lambda *_: None)] == [
        ("static", "configuration"),
        ("file", "w.yaml"),
        ("dns", "_http._tcp.p.example"),
        ("dns", "b.example"),
    ]


# --- several sources ----------------------------------------------------------------------------------------------------


def test_where_two_sources_name_one_worker_the_first_one_counts() -> None:
    gold = EndpointSpec(address="10.0.0.1:1", labels={"tier": "gold"})
    merged, ignored = merge([EndpointSet(decode=(gold,)), EndpointSet(decode=specs("10.0.0.1:1", "10.0.0.2:1"))])
    assert merged == EndpointSet(decode=(gold, *specs("10.0.0.2:1")))
    assert ignored == []


def test_a_role_that_contradicts_an_earlier_source_is_left_out_and_named() -> None:
    merged, ignored = merge(
        [
            EndpointSet(prefill=specs("10.0.0.1:1"), both=specs("10.0.0.2:1")),
            EndpointSet(decode=specs("10.0.0.2:1"), both=specs("10.0.0.1:1", "10.0.0.3:1")),
        ]
    )
    assert merged == EndpointSet(prefill=specs("10.0.0.1:1"), both=specs("10.0.0.2:1", "10.0.0.3:1"))
    assert ignored == [("decode", "10.0.0.2:1"), ("both", "10.0.0.1:1")]


class Running:
    """A Discovery under way, and all that it said."""

    def __init__(self, *given: Source) -> None:
        self.sets: list[EndpointSet] = []
        self.outcomes: list[tuple[str, str]] = []
        self.discovery = Discovery(
            given,
            on_change=self.sets.append,
            on_outcome=lambda kind, outcome: self.outcomes.append((kind, outcome)),
            log=make_logger("critical"),
        )

    async def __aenter__(self) -> Running:
        self._task = asyncio.create_task(self.discovery.run())
        await self.discovery.first_look(10)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Scripted:
    """A source that says what the test wants, when the test wants it."""

    kind, name = "dns", "scripted"

    def __init__(self, first: EndpointSet | SourceError) -> None:
        self.next = first
        self.turn = asyncio.Event()

    async def look(self) -> EndpointSet:
        if isinstance(self.next, SourceError):
            raise self.next
        return self.next

    async def pause(self) -> None:
        await self.turn.wait()
        self.turn.clear()

    def say(self, what: EndpointSet | SourceError) -> None:
        self.next = what
        self.turn.set()


async def test_a_source_that_fails_keeps_what_it_said_and_shows_its_error() -> None:
    source = Scripted(EndpointSet(decode=specs("10.0.0.1:1")))
    async with Running(Static(EndpointSet(prefill=specs("10.0.0.9:1"))), source) as running:
        source.say(SourceError("no name server answers"))
        await until(lambda: ("dns", "failed") in running.outcomes)
        assert running.discovery.current == EndpointSet(prefill=specs("10.0.0.9:1"), decode=specs("10.0.0.1:1"))
        [_, shown] = running.discovery.status()
        assert (shown["endpoints"], shown["error"]) == (1, "no name server answers")
        calls = len(running.sets)
        source.say(EndpointSet(decode=specs("10.0.0.1:1")))
        await until(lambda: running.discovery.status()[1]["error"] is None)
        assert len(running.sets) == calls, "the same endpoints are no change"
        source.say(EndpointSet())
        await until(lambda: running.discovery.current.decode == ())
        assert running.outcomes[1:] == [("dns", "changed"), ("dns", "failed"), ("dns", "unchanged"), ("dns", "changed")]


async def test_start_does_not_wait_for_a_source_that_hangs() -> None:
    class Hanging(Scripted):
        async def look(self) -> EndpointSet:
            await asyncio.Event().wait()
            raise AssertionError

    running = Running(Static(EndpointSet(decode=specs("10.0.0.1:1"))), Hanging(EndpointSet()))
    task = asyncio.create_task(running.discovery.run())
    await running.discovery.first_look(0.05)
    assert running.discovery.current.decode == specs("10.0.0.1:1")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_bug_in_a_source_ends_the_run_instead_of_going_unseen() -> None:
    class Broken(Scripted):
        async def look(self) -> EndpointSet:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await Running(Broken(EndpointSet())).discovery.run()
    assert caught.group_contains(ZeroDivisionError)


# --- the watched file ---------------------------------------------------------------------------------------------------


def rewrite(path: Path, text: str) -> None:
    temporary = path.with_name("new")
    temporary.write_text(text)
    temporary.replace(path)


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Running]:
    async with Running(WatchedFile(path, poll_s=0.02)) as running:
        yield running


async def test_a_replaced_file_is_taken_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("decode: ['10.0.0.1:1']")
    async with watching(file) as running:
        assert running.discovery.current.decode == specs("10.0.0.1:1")
        rewrite(file, "decode: ['10.0.0.1:1', '10.0.0.2:1']")
        await until(lambda: running.discovery.current.decode == specs("10.0.0.1:1", "10.0.0.2:1"))
        rewrite(file, "prefill: []\ndecode: ['10.0.0.3:1', nonsense]")
        await until(lambda: ("file", "failed") in running.outcomes)
        assert running.discovery.current.decode == specs("10.0.0.1:1", "10.0.0.2:1")
        [shown] = running.discovery.status()
        assert shown["error"] == f"{file}:2: decode[1]: 'nonsense': a worker is ip:port, not a name or a unix socket"
        rewrite(file, "decode: []")
        await until(lambda: running.discovery.current == EndpointSet())


async def test_a_file_written_in_place_is_read_when_its_writer_is_done(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("decode: ['10.0.0.1:1']")
    lines = [f"- '10.0.0.{i}:1'\n" for i in range(1, 30)]
    async with watching(file) as running:
        with file.open("w") as writer:
            for line in ["decode:\n", *lines]:
                writer.write(line)
                writer.flush()
                await asyncio.sleep(0.005)
        await until(lambda: len(running.discovery.current.decode) == 29)
    sizes = [len(found.decode) for found in running.sets]
    assert sizes[0] == 1
    assert sizes[-1] == 29


async def test_a_switched_symbolic_link_is_a_change(tmp_path: Path) -> None:
    # A ConfigMap is mounted like this: the file is a link through a folder link that is switched.
    for name, address in (("one", "10.0.0.1:1"), ("two", "10.0.0.2:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.yaml").write_text(f"decode: ['{address}']")
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "w.yaml").symlink_to("data/w.yaml")
    async with watching(tmp_path / "w.yaml") as running:
        (tmp_path / "data.new").symlink_to("two")
        (tmp_path / "data.new").replace(tmp_path / "data")
        await until(lambda: running.discovery.current.decode == specs("10.0.0.2:1"))


async def test_a_file_that_vanishes_keeps_its_workers_and_one_that_comes_late_is_found(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    async with watching(file) as running:
        assert "No such file" in str(running.discovery.status()[0]["error"])
        rewrite(file, "decode: ['10.0.0.1:1']")
        await until(lambda: running.discovery.current.decode == specs("10.0.0.1:1"))
        file.unlink()
        await until(lambda: running.discovery.status()[0]["error"] is not None)
        assert running.discovery.current.decode == specs("10.0.0.1:1")


@pytest.mark.parametrize(
    ("content", "why"), [(b"decode:\n- '\xff'", ":2: not UTF-8"), (b"#" * (8 << 20) + b"\n", "larger than")]
)
async def test_a_file_that_is_no_list_at_all_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "w.yaml"
    file.write_bytes(content)
    with pytest.raises(SourceError, match=why):
        await WatchedFile(file).look()


async def test_a_change_of_the_same_length_within_one_clock_tick_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("decode: ['10.0.0.1:1']")
    before = file.stat()
    async with watching(file) as running:
        rewrite(file, "decode: ['10.0.0.2:1']")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        await until(lambda: running.discovery.current.decode == specs("10.0.0.2:1"))


# --- DNS: a small real name server --------------------------------------------------------------------------------------


class NameServer(asyncio.DatagramProtocol):
    """Answers from ``zone`` over UDP: (name, type) -> rdata texts, an rcode, or None for silence."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str] | dns.rcode.Rcode | None] = {}
        self.ttl_s = 30
        self.port = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        [question] = query.question
        key = (str(question.name).rstrip("."), question.rdtype.name)
        found = self.zone.get(key, dns.rcode.NXDOMAIN)
        if found is None:
            return
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        if isinstance(found, list):
            if found:
                reply.answer.append(dns.rrset.from_text(question.name, self.ttl_s, "IN", key[1], *found))
        else:
            reply.set_rcode(found)
        self._transport.sendto(reply.to_wire(max_size=65535), peer)


@pytest.fixture
async def name_server() -> AsyncIterator[NameServer]:
    server = NameServer()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, sock=sock)
    server.port = sock.getsockname()[1]
    yield server
    transport.close()


def dns_source(server: NameServer, name: str, port: int | None = None, *, refresh_s: float = 5.0) -> Dns:
    ask = resolver([("127.0.0.1", server.port)])
    ask.lifetime = 0.5
    return Dns(ask, role="decode", name=name, port=port, refresh_s=refresh_s, labels={"zone": "a"})


async def test_addresses_of_both_families_are_workers_in_a_steady_order(name_server: NameServer) -> None:
    name_server.zone = {("w.example", "A"): ["10.0.0.2", "10.0.0.1"], ("w.example", "AAAA"): ["fd00::1"]}
    source = dns_source(name_server, "w.example", 8000)
    found = await source.look()
    assert addresses(found.decode) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert found.decode[0].labels == {"zone": "a"}
    name_server.zone[("w.example", "A")] = ["10.0.0.1", "10.0.0.2"]
    assert await source.look() == found


async def test_srv_records_give_host_and_port_and_weights_do_not_matter(name_server: NameServer) -> None:
    name_server.zone = {
        ("_http._tcp.w.example", "SRV"): ["10 90 8000 a.example.", "20 10 8001 b.example.", "10 0 8002 a.example."],
        ("a.example", "A"): ["10.0.0.1"],
        ("b.example", "A"): ["10.0.0.2"],
        ("a.example", "AAAA"): [],
        ("b.example", "AAAA"): [],
    }
    found = await dns_source(name_server, "_http._tcp.w.example").look()
    assert addresses(found.decode) == ["10.0.0.1:8000", "10.0.0.1:8002", "10.0.0.2:8001"]


async def test_srv_that_says_there_is_no_service_is_an_empty_role(name_server: NameServer) -> None:
    name_server.zone = {("s.example", "SRV"): ["0 0 0 ."]}
    assert await dns_source(name_server, "s.example").look() == EndpointSet()


@pytest.mark.parametrize(
    ("ttl_s", "refresh_s", "pause_s"), [(30, 5.0, 5.0), (3, 5.0, 3.0), (0, 5.0, 1.0)], ids=["long", "short", "none"]
)
async def test_the_ttl_is_kept_within_bounds(name_server: NameServer, ttl_s: int, refresh_s: float, pause_s: float) -> None:
    name_server.zone = {("w.example", "A"): ["10.0.0.1"], ("w.example", "AAAA"): []}
    name_server.ttl_s = ttl_s
    source = dns_source(name_server, "w.example", 1, refresh_s=refresh_s)
    await source.look()
    assert source.pause_s() == pause_s


async def test_a_name_without_records_is_scaled_to_zero(name_server: NameServer) -> None:
    name_server.zone = {("w.example", "A"): [], ("w.example", "AAAA"): []}
    source = dns_source(name_server, "w.example", 1)
    assert await source.look() == EndpointSet()
    assert source.pause_s() == 5.0


@pytest.mark.parametrize("failure", [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL, dns.rcode.REFUSED, None])
async def test_a_failure_is_no_answer_and_is_named(name_server: NameServer, failure: dns.rcode.Rcode | None) -> None:
    name_server.zone = {("w.example", "A"): failure, ("w.example", "AAAA"): failure}
    with pytest.raises(SourceError, match=r"w\.example"):
        await dns_source(name_server, "w.example", 1).look()


async def test_one_family_that_fails_keeps_its_addresses_and_does_not_hide_the_other(name_server: NameServer) -> None:
    name_server.zone = {("w.example", "A"): ["10.0.0.1"], ("w.example", "AAAA"): dns.rcode.SERVFAIL}
    source = dns_source(name_server, "w.example", 1)
    assert addresses((await source.look()).decode) == ["10.0.0.1:1"]
    name_server.zone[("w.example", "AAAA")] = ["fd00::1"]
    assert addresses((await source.look()).decode) == ["10.0.0.1:1", "[fd00::1]:1"]
    name_server.zone[("w.example", "AAAA")] = dns.rcode.SERVFAIL
    assert addresses((await source.look()).decode) == ["10.0.0.1:1", "[fd00::1]:1"]


async def test_half_of_the_targets_of_a_service_is_no_answer(name_server: NameServer) -> None:
    name_server.zone = {
        ("s.example", "SRV"): ["0 0 1 a.example.", "0 0 1 b.example."],
        ("a.example", "A"): ["10.0.0.1"],
        ("a.example", "AAAA"): [],
    }
    with pytest.raises(SourceError, match=r"b\.example"):
        await dns_source(name_server, "s.example").look()


async def test_a_flood_of_addresses_is_refused(name_server: NameServer) -> None:
    # 1025 AAAA records still fit into one datagram of the loopback interface.
    many = [f"fd00::{i:x}" for i in range(MAX_ADDRESSES + 1)]
    name_server.zone = {("w.example", "A"): [], ("w.example", "AAAA"): many}
    with pytest.raises(SourceError, match="1025 addresses, more than 1024"):
        await dns_source(name_server, "w.example", 1).look()


async def test_a_name_server_that_goes_away_leaves_the_workers_in_place(name_server: NameServer) -> None:
    name_server.zone = {("w.example", "A"): ["10.0.0.1"], ("w.example", "AAAA"): []}
    source = dns_source(name_server, "w.example", 1, refresh_s=1.0)
    async with Running(source) as running:
        name_server.zone = dict.fromkeys(name_server.zone)
        await until(lambda: ("dns", "failed") in running.outcomes)
        assert addresses(running.discovery.current.decode) == ["10.0.0.1:1"]
        name_server.zone = {("w.example", "A"): ["10.0.0.2"], ("w.example", "AAAA"): []}
        await until(lambda: addresses(running.discovery.current.decode) == ["10.0.0.2:1"])
