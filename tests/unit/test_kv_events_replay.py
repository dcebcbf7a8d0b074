"""Restarts that batch numbers do not show, and publishers whose replays are late, never come, or say more than was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.observe.kv_events.sequence import Sequence, Step
from tests.unit.test_kv_events import BLOCK, World, _ids, _named, _stored, until, world

END = (-1).to_bytes(8, "big", signed=True)
encode = msgspec.msgpack.encode


# -- restarts --------------------------------------------------------------------------------------------------------------


async def _another_engine(made: World, missed: int) -> None:
    """In place of the publisher that is there, one whose first batches nobody sees."""
    await made.publisher.close()
    made.open()
    made.publisher.lose(missed)


@pytest.mark.parametrize("seen_first", [1, 2, 3])
async def test_whatever_number_a_new_engine_is_first_seen_with_nothing_of_the_old_one_stays(seen_first: int) -> None:
    """The old one had published two batches: 2 is the number that was expected."""
    async with world(check_interval_s=60.0) as made:
        made.publish(_stored(_ids(4)))
        made.publish(_stored(_ids(4, 1)))
        await until(lambda: made.held(_ids(4, 1)) == 64)
        await _another_engine(made, seen_first)
        for at in range(seen_first):
            made.publish(_stored(_ids(2, 2 + at)))
        number = seen_first
        async with asyncio.timeout(15):
            while not made.held(_ids(2, 20 + number - 1)):
                made.publish(_stored(_ids(2, 20 + number)))
                number += 1
                await asyncio.sleep(0.05)
        await until(lambda: made.in_step)
        assert made.held(_ids(4)) == made.held(_ids(4, 1)) == 0, "the old one's"
        assert all(made.held(_ids(2, 2 + at)) == 32 for at in range(seen_first)), "what was missed is asked for"
        assert made.counts.restarts == 1
        made.subscriber.restarted(made.address)
        await until(lambda: made.in_step)
        assert made.held(_ids(4)) == 0, "what a probe says later does not bring it back"
        await made.publisher.close()


async def test_without_a_replay_nothing_stays_when_the_connection_was_made_anew() -> None:
    async with world(replay=False) as made:
        await until(lambda: made.subscriber.counts(made.address) is not None and "state" in made.state())
        async with asyncio.timeout(15):
            while not made.held(_ids(4)):  # ZMQ may lose what is published before it is connected
                made.publish(_stored(_ids(4)))
                await asyncio.sleep(0.02)
        await made.publisher.close()
        await until(lambda: made.held(_ids(4)) == 0)
        assert not made.in_step
        made.open()
        made.publisher._sequence = 1000
        async with asyncio.timeout(15):
            while not made.held(_ids(2, 1)):
                made.publish(_stored(_ids(2, 1)))
                await asyncio.sleep(0.02)
        assert made.held(_ids(4)) == 0 and not made.in_step
        await made.publisher.close()


async def test_the_same_engine_behind_a_new_connection_keeps_what_it_had() -> None:
    async with world(check_interval_s=60.0) as made:
        made.publish(_stored(_ids(4)))
        await until(lambda: made.held(_ids(4)) == 64)
        old = made.publisher
        await old.close()
        await until(lambda: made.held(_ids(4)) == 0, "while nobody is there nothing counts")
        again = made.open()
        again._buffer, again._sequence = old._buffer, old._sequence
        await until(lambda: made.held(_ids(4)) == 64 and made.in_step)
        assert made.counts.restarts == 0
        await again.close()


# -- replays ---------------------------------------------------------------------------------------------------------------

Replay = Callable[["Publisher", bytes, int], Awaitable[None]]


class Publisher:
    """Sends what it is told to, in any order."""

    def __init__(self, made: World) -> None:
        self.context = zmq.asyncio.Context()
        self.publish = self.context.socket(zmq.PUB)
        self.publish.bind(f"tcp://127.0.0.1:{made.port}")
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(f"tcp://127.0.0.1:{made.replay_port}")
        self.batches: list[tuple[int, bytes]] = []
        self.replay: Replay = as_asked
        self.tasks = {asyncio.create_task(self._serve())}

    async def _serve(self) -> None:
        while True:
            who, _, start = await self.router.recv_multipart()
            self.tasks.add(asyncio.create_task(self.replay(self, who, int.from_bytes(start, "big"))))  # type: ignore[arg-type]

    async def send(self, *events: dict[str, Any], lost: bool = False) -> None:
        number, payload = len(self.batches), encode([time.time(), events, 0])
        self.batches.append((number, payload))
        if not lost:
            await self.publish.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def again(self, who: bytes, number: int, payload: bytes) -> None:
        await self.router.send_multipart([who, b"", b"", number.to_bytes(8, "big"), payload])

    async def end(self, who: bytes) -> None:
        await self.router.send_multipart([who, b"", b"", END, b""])

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.publish.close(0)
        self.router.close(0)
        self.context.term()


def stored(first: int) -> dict[str, Any]:
    ids = _ids(1, first)
    return {
        "type": "BlockStored",
        "block_hashes": _named(ids),
        "parent_block_hash": None,
        "token_ids": ids,
        "block_size": BLOCK,
        "medium": "GPU",
    }


def removed(first: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": _named(_ids(1, first)), "medium": "GPU"}


async def as_asked(publisher: Publisher, who: bytes, start: int) -> None:
    for number, payload in publisher.batches:
        if number >= start:
            await publisher.again(who, number, payload)
    await publisher.end(who)


async def never(publisher: Publisher, who: bytes, start: int) -> None:
    """No answer."""


async def all_of_it_twice(publisher: Publisher, who: bytes, start: int) -> None:
    for number, payload in publisher.batches:
        await publisher.again(who, number, payload)
        await publisher.again(who, number, payload)
    await publisher.end(who)


@asynccontextmanager
async def by_hand(**settings: Any) -> AsyncIterator[tuple[World, Publisher]]:
    async with world(publishing=False, **settings) as made:
        publisher = Publisher(made)
        try:
            await until(lambda: made.in_step)
            await publisher.send(stored(0))
            await publisher.send(stored(1))
            await until(lambda: made.held(_ids(1, 1)) == 16 and made.in_step)
            yield made, publisher
        finally:
            await publisher.close()


async def test_a_replay_that_says_more_than_was_asked_is_no_restart() -> None:
    async with by_hand() as (made, publisher):
        publisher.replay = all_of_it_twice
        for at in range(2, 5):
            await publisher.send(stored(at), lost=True)
        await publisher.send(stored(5))
        await until(lambda: made.held(_ids(1, 5)) == 16 and made.in_step)
        replays = made.counts.replays
        await until(lambda: made.counts.replays > replays + 2, "it is asked whenever it is silent")
        assert all(made.held(_ids(1, at)) == 16 for at in range(6))
        assert (made.counts.restarts, made.counts.dropped) == (0, 0)


async def test_who_publishes_and_never_answers_counts_and_is_not_called_silent() -> None:
    async with by_hand(replay_timeout_s=0.2) as (made, publisher):
        publisher.replay = never
        failed = made.counts.replays_failed
        await until(lambda: made.counts.replays_failed > failed)
        assert made.state()["state"] == "silent" and not made.in_step
        await until(lambda: made.held(_ids(1)) == 0)
        number = 2
        async with asyncio.timeout(15):
            while made.state()["state"] != "no_replay":
                await publisher.send(stored(number))
                number += 1
                await asyncio.sleep(0.02)
        assert made.in_step and made.held(_ids(1)) == 16, "the same connection: it is the same engine"


async def test_what_is_missing_for_long_is_not_called_all_that_there_is() -> None:
    async with by_hand(replay_timeout_s=0.5) as (made, publisher):
        go_on = asyncio.Event()

        async def slow(publisher: Publisher, who: bytes, start: int) -> None:
            for number, payload in publisher.batches[start:]:
                await publisher.again(who, number, payload)
                if number >= 2:
                    while not go_on.is_set():
                        await publisher.again(who, number, payload)  # something comes all the time, and nothing new
                        await asyncio.sleep(0.05)
            await publisher.end(who)

        publisher.replay = slow
        for at in range(2, 6):
            await publisher.send(stored(at), lost=True)
        await publisher.send(removed(0), lost=True)
        await publisher.send(stored(7))
        await until(lambda: made.held(_ids(1, 1)) == 0, "what is known is not what there is")
        assert not made.in_step
        go_on.set()
        await until(lambda: made.held(_ids(1, 7)) == 16 and made.in_step)
        assert made.held(_ids(1)) == 0 and made.held(_ids(1, 1)) == 16
        assert (made.counts.gaps_filled, made.counts.gaps_lost) == (1, 0)


def test_what_comes_before_what_was_asked_for_shows_nothing() -> None:
    order = Sequence()
    order.took(5, 10.0)
    assert order.replayed(3, 99.0, first=True) is Step.OLD and not order.shows(3)
    assert order.shows(5) and order.shows(6)
    assert order.replayed(5, 99.0, first=True) is Step.RESTART
    order.forget()
    assert order.shows(0)


async def test_what_comes_behind_an_answer_is_not_taken_for_the_next_one() -> None:
    async with by_hand() as (made, publisher):

        async def and_more(publisher: Publisher, who: bytes, start: int) -> None:
            await publisher.send(stored(len(publisher.batches)))  # what is published is looked at first when the answer ends
            await as_asked(publisher, who, start)
            await publisher.again(who, len(publisher.batches) - 1, encode([time.time() + 1000, [], 0]))
            time.sleep(0.05)  # all of it is there before anything is read

        publisher.replay = and_more
        replays = made.counts.replays
        await until(lambda: made.counts.replays > replays + 3)
        publisher.replay = as_asked
        await until(lambda: made.in_step)
        assert made.held(_ids(1)) == 16 and (made.counts.restarts, made.counts.dropped) == (0, 0)
