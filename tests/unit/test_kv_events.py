"""The simulated engine's publisher, real ZMQ between, and what is known here of its cache afterwards."""

from __future__ import annotations

import asyncio
import io
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from extproc.observe.kv_events.addresses import NoPublisherError, Publisher, by_settings, told
from extproc.observe.kv_events.decode import Decoder, time_of
from extproc.observe.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, NotABatchError
from extproc.observe.kv_events.sequence import Sequence, Step
from extproc.observe.kv_events.settings import EventPorts, KvEvents
from extproc.observe.kv_events.subscriber import Subscriber
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from workers.ready import free_ports
from workers.sim import events as sim
from workers.sim.blocks import Cleared, Removed, Stored
from workers.sim.hashing import block_hash, root_hash, wire_hash

BLOCK = 16
encode = msgspec.msgpack.encode


def _ids(blocks: int, first: int = 0) -> list[int]:
    return [first * 1000 + at for at in range(blocks * BLOCK)]


def _digests(ids: list[int]) -> tuple[bytes, ...]:
    parent, found = root_hash(), []
    for start in range(0, len(ids), BLOCK):
        parent = block_hash(parent, ids[start : start + BLOCK])
        found.append(parent)
    return tuple(found)


def _named(ids: list[int]) -> list[int]:
    """As they are on the wire."""
    return [wire_hash(digest) for digest in _digests(ids)]


def _stored(ids: list[int], medium: str = "GPU", start: int = 0) -> Stored:
    digests = _digests(ids)
    return Stored(
        digests[start:],
        digests[start - 1] if start else None,
        tuple(ids[start * BLOCK :]),
        "",
        (None,) * (len(digests) - start),
        medium,
    )


class World:
    """A publisher as of a worker, and a subscriber that is told its ports."""

    def __init__(self, *, replay: bool = True, **settings: Any) -> None:
        self.port, self.replay_port, http = free_ports(3)
        self.address = f"127.0.0.1:{http}"
        self.replay = replay
        ports = EventPorts(port=self.port, replay_port=self.replay_port if replay else None)
        given = {"find": "ports", "ports": {"decode": ports}, "check_interval_s": 0.2, "replay_timeout_s": 1.0, **settings}
        self.settings = KvEvents(enabled=True, **given)
        self.pool = Pool(EndpointSet(decode=(EndpointSpec(address=self.address),)))
        self.pool.set_live(self.pool.endpoints[0], True)
        self.holdings = Holdings(100_000)
        self.metrics = Metrics()
        self.out = io.StringIO()
        self.subscriber = Subscriber(
            self.settings, self.pool, self.holdings, metrics=self.metrics, log=make_logger(stream=self.out), own_headers={}
        )
        self.publisher: sim.Publisher

    def open(self) -> sim.Publisher:
        self.publisher = sim.Publisher(
            f"tcp://127.0.0.1:{self.port}",
            f"tcp://127.0.0.1:{self.replay_port}" if self.replay else None,
            topic="",
            block_size=BLOCK,
        )
        return self.publisher

    def publish(self, *events: Stored | Removed | Cleared) -> None:
        for event in events:
            self.publisher.add(event)
        self.publisher.flush()

    def held(self, ids: list[int]) -> int:
        held = self.holdings.held(TokenChain(array("I", ids)), self.address)
        return held.tokens if held else 0

    @property
    def in_step(self) -> bool:
        return self.holdings.in_step(self.address)

    @property
    def counts(self) -> Any:
        counts = self.subscriber.counts(self.address)
        assert counts is not None
        return counts

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.subscriber.status()["workers"][self.address]
        return found


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Soon it must hold."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def world(*, publishing: bool = True, **settings: Any) -> AsyncIterator[World]:
    made = World(**settings)
    async with AsyncExitStack() as parts:
        if publishing:
            parts.push_async_callback(made.open().close)
        task = asyncio.create_task(made.subscriber.run())
        try:
            if publishing and made.replay:
                await until(lambda: made.in_step)
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# -- over ZMQ --------------------------------------------------------------------------------------------------------------


async def test_what_an_engine_stores_and_removes_is_known() -> None:
    async with world() as made:
        ids = _ids(6)
        made.publish(_stored(ids))
        await until(lambda: made.held(ids) == 96)
        made.publish(Removed(_digests(ids)[4:5]), _stored(_ids(3, 1)))
        await until(lambda: made.held(ids) == 64 and made.held(_ids(3, 1)) == 48)
        made.publish(_stored(ids[:80], start=4))
        await until(lambda: made.held(ids) == 96)
        made.publish(Cleared())
        await until(lambda: made.held(ids) == 0)
        assert made.in_step and made.counts.cleared == 1


async def test_tiers_are_kept_apart() -> None:
    async with world() as made:
        ids = _ids(6)
        made.publish(
            _stored(ids),
            _stored(ids, "CPU"),
            Removed(_digests(ids)[2:]),
            _stored(ids, "STORAGE"),
            Removed(_digests(ids)[5:], "CPU"),
        )
        chain = TokenChain(array("I", ids))
        await until(lambda: made.holdings.held(chain, made.address) == Held(32, 48, 16))
        made.publish(_stored(_ids(1, 3), "TAPE"))
        await until(lambda: made.counts.other_tiers == 1)


async def test_host_memory_tells_of_the_blocks_of_one_copy_in_any_order() -> None:
    async with world() as made:
        ids = _ids(6)
        made.publish(*[_stored(ids[: (at + 1) * BLOCK], "CPU", start=at) for at in (3, 0, 5, 1, 4, 2)])
        chain = TokenChain(array("I", ids))
        await until(lambda: made.holdings.held(chain, made.address) == Held(0, 96))
        assert made.holdings.seen.orphans == 0


async def test_legacy_arrays_are_read() -> None:
    async with world() as made:
        made.publisher.legacy = True
        made.publisher.lose(1)
        made.publish(_stored(_ids(2, 7)))
        ids = _ids(4)
        made.publish(_stored(ids), Removed(_digests(ids)[3:]))
        await until(lambda: made.held(ids) == 48)
        made.publish(Cleared())
        await until(lambda: made.held(ids) == 0 and made.counts.cleared == 1)
        assert made.counts.faulty == 0
        assert (made.counts.gaps_filled, made.counts.replays_failed) == (1, 0), "old replays have a frame less"


async def test_a_late_start_is_filled_from_replay() -> None:
    made = World()
    made.open()
    ids = _ids(200)
    for blocks in range(1, 201):
        made.publish(_stored(ids[: blocks * BLOCK], start=blocks - 1))
    task = asyncio.create_task(made.subscriber.run())
    try:
        await until(lambda: made.held(ids) == 3200)
        assert made.in_step and made.counts.replayed == 200
        made.publish(Removed(_digests(ids)[100:]))
        await until(lambda: made.held(ids) == 1600)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.publisher.close()


async def test_what_a_replay_does_not_reach_back_to_leaves_the_worker_out_of_step() -> None:
    made = World()
    made.open()
    made.publish(_stored(_ids(2)))
    made.publisher.lose(1, forgotten=True)
    made.publish(_stored(_ids(2, 1)))
    made.publish(_stored(_ids(2, 2)))
    task = asyncio.create_task(made.subscriber.run())
    try:
        await until(lambda: made.held(_ids(2, 2)) == 32)
        assert not made.in_step
        made.publish(Cleared(), _stored(_ids(3, 3)))
        await until(lambda: made.in_step and made.held(_ids(3, 3)) == 48)
        assert made.held(_ids(2, 2)) == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.publisher.close()


async def test_a_lost_batch_is_asked_for_again() -> None:
    async with world() as made:
        ids = _ids(6)
        made.publish(_stored(ids))
        await until(lambda: made.held(ids) == 96)
        made.publisher.lose(1)
        made.publish(Removed(_digests(ids)[3:]))
        made.publish(_stored(_ids(1, 9)))
        await until(lambda: made.held(_ids(1, 9)) == 16)
        assert made.held(ids) == 48 and made.in_step
        assert (made.counts.gaps_filled, made.counts.gaps_lost, made.counts.restarts) == (1, 0, 0)


async def test_a_lost_last_batch_is_found_though_nothing_follows() -> None:
    async with world() as made:
        ids = _ids(4)
        made.publish(_stored(ids))
        await until(lambda: made.held(ids) == 64)
        made.publisher.lose(1)
        made.publish(Removed(_digests(ids)[2:]))
        await until(lambda: made.held(ids) == 32)
        assert made.in_step


async def test_a_batch_that_is_not_to_be_had_costs_all_that_was_known() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        made.publisher.lose(1, forgotten=True)
        made.publish(Removed(_digests(_ids(4))[2:]))
        made.publish(_stored(_ids(1, 9)))
        await until(lambda: made.held(_ids(1, 9)) == 16)
        assert made.held(_ids(4)) == 0 and not made.in_step
        assert (made.counts.gaps_lost, made.counts.dropped) == (1, 4)


async def test_without_a_replay_socket_a_gap_costs_all_and_clearing_heals() -> None:
    async with world(replay=False) as made:
        await until(lambda: made.subscriber.counts(made.address) is not None and "state" in made.state())
        async with asyncio.timeout(10):
            while not made.in_step:  # ZMQ may lose what is published before it is connected
                made.publish(Cleared())
                await asyncio.sleep(0.02)
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        made.publisher.lose(1)
        made.publish(_stored(_ids(2, 8)))
        made.publish(_stored(_ids(1, 9)))
        await until(lambda: made.held(_ids(1, 9)) == 16)
        assert made.held(_ids(4)) == 0 and not made.in_step
        made.publish(Cleared())
        await until(lambda: made.in_step)


async def test_a_restart_that_publishes_is_noticed() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        made.publish(_stored(_ids(4, 1)))
        await until(lambda: made.held(_ids(4, 1)) == 64)
        made.publisher.restart()
        made.publish(_stored(_ids(2, 2)))
        await until(lambda: made.held(_ids(2, 2)) == 32)
        assert made.held(_ids(4)) == made.held(_ids(4, 1)) == 0
        assert made.in_step and made.counts.restarts == 1


async def test_a_restart_is_noticed_though_it_publishes_nothing() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        made.publisher.restart()
        await until(lambda: made.held(_ids(4)) == 0 and made.in_step)
        assert made.counts.restarts == 1


async def test_a_restart_whose_numbers_have_caught_up_is_noticed() -> None:
    """While we were not connected the new engine may have published as much as the old one."""
    async with world() as made:
        made.publish(_stored(_ids(4)))
        made.publish(_stored(_ids(4, 1)))
        await until(lambda: made.held(_ids(4, 1)) == 64)
        made.publisher.restart()
        made.publisher.lose(3)
        for at in range(2, 5):
            made.publish(_stored(_ids(2, at)))
        await until(lambda: made.held(_ids(2, 4)) == 32)
        assert made.held(_ids(4)) == 0 and made.held(_ids(2, 2)) == made.held(_ids(2, 3)) == 32
        assert made.in_step and made.counts.restarts == 1


async def test_while_a_restart_is_suspected_nothing_counts() -> None:
    async with world(check_interval_s=60.0) as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        made.subscriber.restarted(made.address)
        assert made.held(_ids(4)) == 0 and not made.in_step
        await until(lambda: made.held(_ids(4)) == 64 and made.in_step)
        made.publisher.restart()
        made.subscriber.restarted(made.address)
        await until(lambda: made.in_step)
        assert made.held(_ids(4)) == 0 and made.counts.restarts == 1


async def test_what_has_proved_wrong_is_read_again() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        made.holdings.source(made.address).removed(_named(_ids(4)))
        assert made.held(_ids(4)) == 0
        made.subscriber.distrusted(made.address)
        assert not made.in_step
        await until(lambda: made.in_step and made.held(_ids(4)) == 64)


async def test_a_publisher_that_is_away_does_not_count_until_it_answers() -> None:
    async with world(replay_timeout_s=0.3) as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        await made.publisher.close()
        await until(lambda: not made.in_step and made.held(_ids(4)) == 0)
        await until(lambda: made.state()["state"] == "silent")
        made.open()
        made.publish(_stored(_ids(2, 1)))
        await until(lambda: made.in_step and made.held(_ids(2, 1)) == 32)
        assert made.held(_ids(4)) == 0
        await made.publisher.close()


async def test_a_worker_that_goes_is_forgotten() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        page = (await made.metrics.render()).decode()
        assert made.address in page
        made.pool.replace(EndpointSet())
        made.pool.sweep()
        made.subscriber.sync()
        assert made.holdings.addresses() == [] and made.subscriber.counts(made.address) is None
        await until(lambda: made.holdings.blocks == 0, "the memory is given back")
        assert made.address not in (await made.metrics.render()).decode()


async def test_garbage_costs_what_was_known_and_no_more() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        number = made.publisher._sequence
        for payload in (b"", b"\xc1", encode([1.0]), encode("x"), b"\x93" * 5000):
            made.publisher._publish.send_multipart((b"", number.to_bytes(8, "big"), payload))
            number += 1
        made.publisher._sequence = number
        made.publisher._publish.send_multipart((b"", b"short", b""))
        made.publisher._publish.send_multipart((b"one frame",))
        await until(lambda: made.counts.faulty == 7)
        assert made.held(_ids(4)) == 0
        made.publish(Cleared(), _stored(_ids(3)))
        await until(lambda: made.held(_ids(3)) == 48 and made.in_step)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [-5] * 16, "block_size": 16},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1 << 50] * 16, "block_size": 16},
        {"type": "BlockStored", "block_hashes": "no", "parent_block_hash": None, "token_ids": [], "block_size": 16},
        {"type": "BlockRemoved", "block_hashes": [1.5]},
        {"type": 7},
        [["BlockStored"]],
        "BlockRemoved",
    ],
)
async def test_an_event_that_matters_and_cannot_be_read_drops_the_worker(event: Any) -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        payload = encode([time.time(), [event], 0])
        made.publisher._publish.send_multipart((b"", made.publisher._sequence.to_bytes(8, "big"), payload))
        await until(lambda: made.counts.faulty == 1)
        assert made.held(_ids(4)) == 0 and not made.in_step


async def test_long_events_do_not_hold_the_loop() -> None:
    """A batch of 64k tokens is entered in pieces, with turns of the loop between."""
    async with world() as made:
        seen = set()

        async def look() -> None:
            while True:
                seen.add(made.holdings.source(made.address).blocks(Tier.GPU))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        ids = _ids(4096)
        made.publish(_stored(ids))
        await until(lambda: made.held(ids) == 65_536)
        looking.cancel()
        assert any(0 < stored < 4096 for stored in seen), "others had their turn when some of it was entered"
        assert made.holdings.source(made.address).blocks(Tier.GPU) == 4096


async def test_metrics_and_status_say_what_is_going_on() -> None:
    async with world() as made:
        made.publish(_stored(_ids(4)), Removed(_digests(_ids(4))[3:]))
        made.publisher.lose(1)
        made.publish(_stored(_ids(2, 1)))
        made.publish(_stored(_ids(2, 2)))
        await until(lambda: made.held(_ids(2, 2)) == 32)

        def read() -> dict[str, float]:
            found = {}
            for line in page.splitlines():
                if line.startswith("baton_kv_") and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name] = float(value)
            return found

        async with asyncio.timeout(15):
            while True:
                page = (await made.metrics.render()).decode()
                if read().get(f'baton_kv_index_blocks{{endpoint="{made.address}",tier="gpu"}}') == 7:
                    break
                await asyncio.sleep(0.05)
        at = f'endpoint="{made.address}"'
        values = read()
        assert values[f"baton_kv_in_step{{{at}}}"] == 1
        assert values[f'baton_kv_event_blocks_total{{{at},kind="stored"}}'] == 8
        assert values[f'baton_kv_event_gaps_total{{{at},outcome="filled"}}'] == 1
        assert values["baton_kv_index_bytes"] > 0
        assert values["baton_kv_event_lag_seconds_count"] >= 1
        assert made.state() == {
            "state": "following",
            "in_step": True,
            "ranks": 1,
            "blocks": {"gpu": 7, "cpu": 0, "disk": 0, "lmcache": 0},
        }
        assert "kv_events_followed" in made.out.getvalue()


# -- payloads --------------------------------------------------------------------------------------------------------------


def test_a_batch_in_either_form_gives_the_same_events() -> None:
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1, b"\x02"],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": 3,
        "medium": "GPU",
        "lora_name": "x",
        "extra_keys": [["x", ["image", 4]], None],
        "group_idx": 2,
        "kv_cache_spec_kind": "mamba",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU", "group_idx": 1}
    maps = [fields, removed, {"type": "AllBlocksCleared"}]
    decoder = Decoder()
    expected = [
        BlockStored([1, b"\x02"], None, [1, 2], 1, 3, "GPU", "x", [["x", ["image", 4]], None], 2, "mamba"),
        BlockRemoved([9], "CPU", 1),
        AllBlocksCleared(),
    ]
    for _ in range(2):  # the first batch goes another way
        assert decoder.decode(encode([5.0, maps, 0])) == (5.0, expected)
        assert decoder.decode(encode([5.0, [list(each.values()) for each in maps]])) == (5.0, expected)
    assert not decoder.unknown
    assert time_of(encode([5.0, maps, 0])) == 5.0


def test_old_arrays_may_be_short() -> None:
    batch = Decoder().decode(
        encode([1.0, [["BlockStored", [1], None, [2], 1, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]])
    )
    assert batch.events == [BlockStored([1], None, [2], 1), BlockRemoved([1]), AllBlocksCleared()]


def test_unknown_kinds_and_fields_are_passed_over_and_counted() -> None:
    decoder = Decoder()
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [2], "block_size": 1}
    events = [{"type": "BlockPinned", "x": 1}, {**stored, "colour": "red", "session_id": "s"}, ["Other", 1]]
    for _ in range(2):
        assert decoder.decode(encode([1.0, events, 0, "more"])).events == [BlockStored([1], None, [2], 1)]
    assert decoder.unknown == {"BlockPinned": 2, "BlockStored.colour": 1, "Other": 2}
    for number in range(500):
        decoder.decode(encode([1.0, [{"type": f"K{number}"}]]))
    assert len(decoder.unknown) <= 100


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", encode({}), encode([]), encode(["x", []]), encode([1.0, 5]), b"\x91" * 100_000]
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(NotABatchError):
        Decoder().decode(payload)


# -- numbers ---------------------------------------------------------------------------------------------------------------


def test_the_order_of_batches() -> None:
    order = Sequence()
    assert (order.live(0, 1.0), order.live(5, 1.0)) == (Step.BEGIN, Step.LATE)
    order.took(5, 10.0)
    assert [order.live(number, 11.0) for number in (6, 7, 5, 0)] == [Step.NEXT, Step.GAP, Step.RESTART, Step.RESTART]
    assert [order.live(number, 10.0) for number in (5, 0)] == [Step.OLD, Step.OLD]
    assert order.ask_from() == 5
    assert order.replayed(5, 10.0, first=True) is Step.OLD
    assert order.replayed(5, 12.0, first=True) is Step.RESTART
    assert order.replayed(6, 12.0, first=True) is Step.LOST
    assert order.replayed(6, 12.0, first=False) is Step.NEXT
    assert order.replayed(8, 12.0, first=False) is Step.LOST
    assert (order.ended(shown=True), order.ended(shown=False)) == (Step.NEXT, Step.RESTART)
    order.forget()
    assert (order.ask_from(), order.ended(shown=False), order.replayed(3, 1.0, first=True)) == (0, Step.EMPTY, Step.LATE)


# -- where it publishes ----------------------------------------------------------------------------------------------------


def _told(**ranks: Any) -> list[Publisher]:
    return told("10.0.0.7:8000", json.dumps({rank.strip("_"): each for rank, each in ranks.items()}).encode())


def test_a_worker_tells_ports_and_never_another_host() -> None:
    found = _told(
        _0={"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv@x", "hwm": 1},
        _1={"endpoint": "tcp://203.0.113.9:5558", "replay_endpoint": None},
    )
    assert found == [
        Publisher(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657", "kv@x"),
        Publisher(1, "tcp://10.0.0.7:5558", None, ""),
    ]
    assert told("[::1]:8000", b'{"0":{"endpoint":"tcp://*:5557"}}')[0].events == "tcp://[::1]:5557"


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"_0": {"endpoint": "ipc:///tmp/x"}},
        {"_0": {"endpoint": "tcp://*:0"}},
        {"_0": {"endpoint": "tcp://*:99999"}},
        {"_0": {"endpoint": "tcp://*:5557", "enable_kv_cache_events": False}},
        {"_0": {"endpoint": "tcp://*:5557", "publisher": "null"}},
        {"_x": {"endpoint": "tcp://*:5557"}},
        {"_99999": {"endpoint": "tcp://*:5557"}},
        {"_0": 5},
        {"_65536": {"endpoint": "tcp://*:5557"}},
        {"_" + 5_000 * "1": {"endpoint": "tcp://*:5557"}},
        {"_0": {"endpoint": "tcp://*:" + 5_000 * "1"}},
        {"_0": {"endpoint": "tcp://*:5557"}, "_00": {"endpoint": "tcp://*:5558"}},
        {f"_{rank}": {"endpoint": f"tcp://*:{5557 + rank}"} for rank in range(65)},
        {"_0": {"endpoint": "tcp://*:5557"}, "_1": {"endpoint": "tcp://*:5557"}},
        {"_0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}, "_1": {"endpoint": "tcp://*:5558"}},
        {"_0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}},
    ],
)
def test_what_cannot_be_followed_is_said(ranks: dict[str, Any]) -> None:
    with pytest.raises(NoPublisherError):
        _told(**ranks)


def test_an_answer_in_a_thousand_brackets_is_no_publisher() -> None:
    with pytest.raises(NoPublisherError):
        told("10.0.0.7:8000", b'{"0": {"endpoint": "tcp://*:5557", "more": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}")


def test_ranks_that_are_counted_through_several_hosts_are_followed() -> None:
    ranks = {str(64 + at): {"endpoint": f"tcp://*:{5557 + at}"} for at in range(8)}
    assert [each.rank for each in told("10.0.0.7:8000", json.dumps(ranks).encode())] == list(range(64, 72))


def test_a_label_comes_before_the_configuration() -> None:
    settings = KvEvents(find="ports", ports={"prefill": EventPorts(port=5557, replay_port=5657)}, ranks=2)

    def found(**labels: str) -> list[Publisher] | None:
        pool = Pool(EndpointSet(prefill=(EndpointSpec(address="10.0.0.7:8000", labels=labels),)))
        return by_settings(settings, pool.endpoints[0])

    assert found() == [
        Publisher(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657", ""),
        Publisher(1, "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5658", ""),
    ]
    assert found(**{"kv-events": "7000"})[1] == Publisher(1, "tcp://10.0.0.7:7001", None, "")  # type: ignore[index]
    assert found(**{"kv-events": "7000-7100"}) == found(**{"kv-events": "7000/7100"})
    for label in ("x", "1/2/3", "0", "70000", "", "/", "7000-", 5_000 * "1", "65535", "7000-7001"):
        with pytest.raises(NoPublisherError):
            found(**{"kv-events": label})
    assert by_settings(KvEvents(), Pool(EndpointSet(decode=(EndpointSpec(address="h:1"),))).endpoints[0]) is None


def test_zmq_is_recent_enough_to_be_asked_for_its_descriptor() -> None:
    assert zmq.zmq_version_info() >= (4, 2)
