"""A client that leaves: whenever it does, the prefill worker's blocks are free within seconds, not when their lease ends.

The workers' lease is two minutes here, so that within three seconds it frees nothing.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.engine.front import Front, front, stopped
from tests.engine.kv_proof import KvUse, kv_use, kv_use_since
from tests.engine.metrics import Samples, kv_usage, running, scrape, until
from tests.engine.openai_api import PATHS, Endpoint, ask, body_of
from tests.engine.system import System, forget_prefixes

RELEASED_WITHIN_S = 3.0
LONG_TOKENS = 30_000
"""A prompt that takes the engine fifteen steps, and about a second."""
OTHER_TOKENS = 4000
SETTLED_S = 0.3
"""What an engine has answered before it was stopped is with the filter by then."""
STANDSTILL_S = 0.6
"""After so long the filter knows that it stood still, and looks whether the client is there before it hands over."""
LATE = {"handoff": {"lease_s": 7200.0, "release_delay_s": 3600.0}}
"""What may have been handed over when its client left is given back so late that no other test sees it."""
ENDPOINTS: list[Endpoint] = ["chat", "completions", "responses", "messages"]
TEXT = " ".join(f"Wagon {number} carries {number * 53 % 97} barrels." for number in range(30))


@pytest.fixture(scope="module")
def own_front(system: System) -> Iterator[Front]:
    workers = ([url.removeprefix("http://")] for url in (system.prefill_url, system.decode_url))
    with front(*workers, LATE) as running_:
        yield running_


@pytest.fixture(autouse=True)
def nothing_expires(system: System) -> Iterator[None]:
    """Neither worker has blocks in use before or after a test, and none are freed by the end of a lease."""
    urls = (system.prefill_url, system.decode_url)
    until(lambda: all(kv_usage(url) == 0 for url in urls))
    forget_prefixes(*urls)
    before = [faults(url) for url in urls]
    yield
    until(lambda: all(kv_usage(url) == 0 for url in urls))
    assert [faults(url) for url in urls] == before


def faults(url: str) -> dict[str, float]:
    samples = scrape(url)
    names = ("kv_expired_reqs", "failed_notifications", "failed_transfers")
    return {name: samples.total(f"vllm:nixl_num_{name}_total") for name in names}


class Client:
    """Sends one request and can leave at any time."""

    def __init__(self, url: str, endpoint: Endpoint, body: dict[str, object]) -> None:
        address = urlsplit(url)
        data = json.dumps(body).encode()
        head = f"POST {PATHS[endpoint]} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        self._socket = socket.create_connection((address.hostname, address.port), timeout=20)
        self._socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def read_until(self, what: bytes, times: int) -> None:
        read = b""
        while read.count(what) < times:
            piece = self._socket.recv(65536)
            assert piece, read
            read += piece

    def leave(self) -> None:
        self._socket.close()


Clients = Callable[[str, Endpoint, dict[str, object]], Client]


@pytest.fixture
def clients(nothing_expires: None) -> Iterator[Clients]:
    """Makes them. Whoever is still there at the end of a test leaves then, or the next one would not find the workers idle."""
    with ExitStack() as there:

        def come(url: str, endpoint: Endpoint, body: dict[str, object]) -> Client:
            client = Client(url, endpoint, body)
            there.callback(client.leave)
            return client

        yield come


def upstream(own_front: Front, cluster: str) -> float:
    """Requests that Envoy has sent to a worker and that are not answered yet."""
    return own_front.envoy().total("envoy_cluster_upstream_rq_active", envoy_cluster_name=cluster)


def gone(own_front: Front) -> bool:
    """Envoy and the filter have noticed that the client has left."""
    return own_front.clients() == 0 and own_front.metrics().total("baton_streams") == 0


def moved(own_front: Front, before: Samples, name: str, **labels: str) -> float:
    return own_front.metrics().total(name, **labels) - before.total(name, **labels)


def late_notifications(url: str) -> float:
    """How often a worker was told to free blocks that it had freed before."""
    return scrape(url).total("vllm:nixl_num_notifications_after_expiry_total")


def assert_both_serve(system: System, own_front: Front) -> None:
    expected = ask(system.prefill_url, "completions", "Still there?")
    assert ask(system.decode_url, "completions", "Still there?") == expected
    assert ask(own_front.url, "completions", "Still there?") == expected


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_client_that_leaves_between_prefill_and_decode(
    system: System, own_front: Front, clients: Clients, endpoint: Endpoint
) -> None:
    before, late_before = own_front.metrics(), late_notifications(system.prefill_url)
    prefill_before, decode_before = kv_use(system.prefill_url), kv_use(system.decode_url)
    with ExitStack() as prefill_held:
        prefill_held.enter_context(stopped(system.scheduler(system.prefill_url)))
        client = clients(own_front.url, endpoint, body_of(endpoint, TEXT))
        until(lambda: upstream(own_front, "prefill") == 1)
        with own_front.filter_stopped():
            stopped_at_s = time.monotonic()
            prefill_held.close()
            until(lambda: upstream(own_front, "prefill") == 0)  # the reply waits for the filter
            client.leave()
            until(lambda: own_front.clients() == 0)
            until(lambda: kv_usage(system.prefill_url) > 0)  # nobody has freed the blocks
            until(lambda: time.monotonic() - stopped_at_s > STANDSTILL_S)
    until(lambda: kv_usage(system.prefill_url) == 0, RELEASED_WITHIN_S)
    until(lambda: moved(own_front, before, "baton_releases_total") > 0)
    assert moved(own_front, before, "baton_releases_total", outcome="released") == 1
    assert moved(own_front, before, "baton_releases_total") == 1
    assert moved(own_front, before, "baton_handoffs_total") == 0
    assert moved(own_front, before, "baton_requests_total", outcome="cancelled") == 1
    prefill = kv_use(system.prefill_url) - prefill_before
    assert prefill.computed_tokens > 500  # it was prefilled,
    assert kv_use(system.decode_url) == decode_before  # and never decoded
    assert late_notifications(system.prefill_url) == late_before
    assert_both_serve(system, own_front)


def test_a_client_that_leaves_during_the_prefill(system: System, own_front: Front, clients: Clients) -> None:
    """Most of its prompt's steps are yet to come when it leaves; the last one is never run."""
    caught = any(leaves_during_the_prefill(system, own_front, clients, seed) for seed in range(10))
    assert caught, "ten prefills were over before the engine could be stopped"
    assert_both_serve(system, own_front)


def leaves_during_the_prefill(system: System, own_front: Front, clients: Clients, seed: int) -> bool:
    """False: the prefill was over before the engine could be stopped, and nothing has been shown."""
    draw = random.Random(seed)
    others, ours = ([draw.randrange(3, 300) for _ in range(tokens)] for tokens in (OTHER_TOKENS, LONG_TOKENS))
    before = own_front.metrics()
    prefill_before, decode_before = kv_use(system.prefill_url), kv_use(system.decode_url)
    computer = system.computer(system.prefill_url)  # finding it takes time, of which there is little below
    with stopped(system.scheduler(system.prefill_url)):
        # Ahead of ours in the engine's queue: when it is answered, ours has been begun.
        other = clients(system.prefill_url, "completions", body_of("completions", others, max_tokens=1))
        client = clients(own_front.url, "completions", body_of("completions", ours))
        until(lambda: upstream(own_front, "prefill") == 1)
    other.read_until(b'"usage"', 1)
    with stopped(computer):
        other.leave()
        time.sleep(SETTLED_S)
        caught = own_front.metrics().total("baton_prefills_in_flight") == 1
        if caught:
            client.leave()
            until(lambda: gone(own_front) and upstream(own_front, "prefill") == 0)
    if not caught:
        client.read_until(b'"usage"', 1)
        client.leave()
        until(lambda: gone(own_front) and running(system.decode_url) == 0)
    until(lambda: kv_usage(system.prefill_url) == 0, RELEASED_WITHIN_S)
    until(lambda: running(system.prefill_url) == 0)
    if caught:
        computed = kv_use(system.prefill_url) - prefill_before
        assert computed == KvUse(computed_tokens=OTHER_TOKENS), "ours was computed to its end"
        assert kv_use(system.decode_url) == decode_before
        assert moved(own_front, before, "baton_requests_total", outcome="cancelled") == 1
        assert moved(own_front, before, "baton_releases_total") == 0  # there was nothing to release
    return caught


def test_a_client_that_leaves_before_its_prefill_has_begun(system: System, own_front: Front, clients: Clients) -> None:
    prefill_before = kv_use(system.prefill_url)
    with stopped(system.scheduler(system.prefill_url)):
        client = clients(own_front.url, "chat", body_of("chat", TEXT))
        until(lambda: upstream(own_front, "prefill") == 1)
        client.leave()
        until(lambda: gone(own_front) and upstream(own_front, "prefill") == 0)
    expected = ask(system.prefill_url, "completions", "Next!")
    until(lambda: kv_usage(system.prefill_url) == 0, RELEASED_WITHIN_S)
    use = kv_use_since(system.prefill_url, prefill_before, prompt_tokens=expected.prompt_tokens)
    assert use.computed_tokens == expected.prompt_tokens
    assert_both_serve(system, own_front)


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_client_that_leaves_before_the_decode_worker_has_fetched(
    system: System, own_front: Front, clients: Clients, endpoint: Endpoint
) -> None:
    """The handoff is the decode worker's by then: it is that engine which tells the other to let go (and may do so twice)."""
    before = own_front.metrics()
    with stopped(system.scheduler(system.decode_url)):
        client = clients(own_front.url, endpoint, body_of(endpoint, TEXT))
        until(lambda: upstream(own_front, "decode") == 1)
        until(lambda: kv_usage(system.prefill_url) > 0)  # a worker counts just after it has answered
        client.leave()
        until(lambda: gone(own_front) and upstream(own_front, "decode") == 0)
        assert kv_usage(system.prefill_url) > 0
    until(lambda: kv_usage(system.prefill_url) == 0, RELEASED_WITHIN_S)
    until(lambda: running(system.decode_url) == 0)
    assert moved(own_front, before, "baton_handoffs_total") == 1
    assert moved(own_front, before, "baton_releases_total") == 0
    assert_both_serve(system, own_front)


@pytest.mark.parametrize("endpoint", ["completions", "messages"])
def test_a_client_that_leaves_during_the_answer(system: System, own_front: Front, clients: Clients, endpoint: Endpoint) -> None:
    """The decode worker stops; left alone it would go on for a minute or so."""
    before = scrape(system.decode_url)
    client = clients(own_front.url, endpoint, body_of(endpoint, TEXT, stream=True, max_tokens=LONG_TOKENS))
    client.read_until(b"data: ", 12)
    until(lambda: kv_usage(system.prefill_url) == 0, RELEASED_WITHIN_S)  # fetched, so free
    assert running(system.decode_url) == 1 and kv_usage(system.decode_url) > 0
    client.leave()
    until(lambda: running(system.decode_url) == 0 and kv_usage(system.decode_url) == 0, RELEASED_WITHIN_S)
    until(lambda: gone(own_front))
    generated = scrape(system.decode_url).total("vllm:generation_tokens_total")
    assert 0 < generated - before.total("vllm:generation_tokens_total") < LONG_TOKENS / 2
    assert_both_serve(system, own_front)
