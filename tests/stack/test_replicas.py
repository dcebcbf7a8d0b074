"""Two replicas behind the real Envoy: either may be killed, started again or drained under load; they know of each other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from dataclasses import dataclass

import aiohttp
import psutil
import pytest

from tests.stack.harness import BODY_MODE
from tests.stack.replicas import LEASE_S, Pair, Replica

_HUNG_S = 20.0
_DOCUMENT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 60


@dataclass
class Done:
    """One client's request."""

    name: str
    began_s: float
    ended_s: float
    status: int | None
    whole: bool
    """Its answer came to its end."""
    body: bytes

    @property
    def failed(self) -> bool:
        return not (self.status == 200 and self.whole)


def _dead(pid: int) -> float:
    """Kill it, and see that it is dead; when that was. Nothing else goes on in this process meanwhile."""
    os.kill(pid, signal.SIGKILL)
    process = psutil.Process(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            pass
    return time.time()


class Load:
    """Clients that ask without a pause, half of them for streams, until they are told to stop."""

    def __init__(self, pair: Pair, clients: int = 12) -> None:
        self.pair = pair
        self.done: list[Done] = []
        self.open: dict[str, float] = {}
        """Requests that have begun, and when."""
        self._number = itertools.count()
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def _client(self, number: int) -> None:
        while not self._stopping:
            await self.ask(f"load-{next(self._number)}", stream=number % 2 == 0)

    async def ask(self, name: str, *, stream: bool = False, prompt: str | None = None, tokens: int = 40) -> Done:
        text = prompt or f"{name} asks: " + "word " * (20 + 15 * (hash(name) % 20))
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": tokens, "stream": stream}).encode()
        began_s = self.open[name] = time.time()
        status, whole, got = None, False, b""
        try:
            async with (
                asyncio.timeout(_HUNG_S),
                self.pair.http.post(
                    "/v1/completions", data=body, headers={"content-type": "application/json", "x-request-id": name}
                ) as response,
            ):
                status = response.status
                async for chunk in response.content.iter_any():
                    got += chunk
                whole = got.rstrip().endswith(b"data: [DONE]") if stream else True
        except aiohttp.ClientError:
            pass
        del self.open[name]
        made = Done(name, began_s, time.time(), status, whole, got)
        self.done.append(made)
        return made

    async def more(self, count: int) -> None:
        """Until so many more have been answered."""
        goal = len(self.done) + count
        async with asyncio.timeout(60):
            while len(self.done) < goal:
                await asyncio.sleep(0.01)

    async def busy(self, replica: Replica, streams: int) -> None:
        """Until so many streams are open there."""
        async with asyncio.timeout(30):
            while await replica.metric("baton_streams") < streams:
                await asyncio.sleep(0.002)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


@pytest.mark.timeout(240)
async def test_killed_started_again_and_drained_under_load_only_what_the_killed_one_held_is_lost() -> None:
    async with Pair(prefill=3, decode=2) as pair:
        first, second = pair.first, pair.second
        load = Load(pair)
        kills: list[tuple[float, set[str]]] = []
        for _ in range(2):  # what Envoy makes of the second death of an endpoint is another thing
            await load.more(60)
            await load.busy(first, 2)
            kills.append((_dead(first.pid()), set(load.open)))  # in one turn of the loop: no client has gone on meanwhile
            await pair.gone(first)
            await load.more(80)
            assert await second.metric("baton_siblings") == 0
            served = len(first.served())
            await pair.start(first)
            await load.more(80)
            assert len(first.served()) > served, "Envoy sends it requests again"

        second.signal(signal.SIGTERM)
        await pair.gone(second)
        assert second.child is not None and second.child.poll() == 0, "it has finished what it had"
        await load.more(60)
        await pair.start(second)
        await load.more(60)
        await load.stop()

        assert await pair.empty(LEASE_S + 8.0) == {}
        failed = [each for each in load.done if each.failed]
        of_second, of_first = second.served(), first.served()
        for each in failed:
            held_then = any(each.name in held and each.began_s <= at_s <= each.ended_s for at_s, held in kills)
            # In full duplex Envoy asks nobody else for a stream that it has opened before it saw that the connection is over.
            just_then = BODY_MODE != "buffered" and any(at_s <= each.began_s < at_s + 0.2 for at_s, _ in kills)
            assert held_then or just_then, f"{each} was not held at any of {kills}"
            assert each.name not in of_second, f"{each} was the other one's, and failed"
            assert each.name not in of_first, f"{each} had come to its end"
        assert all(each.ended_s - each.began_s < _HUNG_S for each in load.done), "hung"
        # What was open there and is not lost: answers under way go on.
        held_by_first = [name for _, held in kills for name in held if name not in of_second and name not in of_first]
        assert sum(any(each.name in held for _, held in kills) for each in failed) <= len(held_by_first)
        for replica in pair.replicas:
            assert await replica.metric('baton_sibling_messages_total{outcome="malformed"') == 0
            assert not any("Traceback" in str(line) for line in replica.log())
        print(
            f"{BODY_MODE}: {len(load.done)} requests, {len(failed)} failed, {len(held_by_first)} were open at the killed one; "
            f"statuses of those: {sorted(str(each.status) for each in failed)}"
        )


@pytest.mark.timeout(120)
async def test_the_first_decision_of_a_restarted_one_hits_a_prefix_that_only_the_other_has_seen() -> None:
    async with Pair(prefill=4, decode=2) as pair:
        first, second = pair.first, pair.second
        asks = Load(pair, clients=0)
        await pair.kill(first)
        assert not (await asks.ask("seen", prompt=_DOCUMENT)).failed
        assert not (await asks.ask("seen again", prompt=f"{_DOCUMENT} And then?")).failed
        [holder] = [sim for sim in pair.prefill if sim.received]
        await pair.start(first)
        assert first.served() == {}
        second.signal(signal.SIGTERM)
        await pair.gone(second)
        for sim in pair.sims:
            sim.reset()
        for number in range(3):
            assert not (await asks.ask(f"of the restarted one {number}", prompt=f"{_DOCUMENT} Question {number}?")).failed
        async with asyncio.timeout(10):
            while len(first.served()) < 3:
                await asyncio.sleep(0.02)
        assert [len(sim.received) for sim in pair.prefill if sim is holder] == [3]
        assert [len(sim.received) for sim in pair.prefill if sim is not holder] == [0, 0, 0]


@pytest.mark.timeout(120)
async def test_load_of_one_is_seen_by_the_other_and_goes_with_it() -> None:
    async with Pair(prefill=2, decode=2) as pair:
        asks = Load(pair, clients=0)
        for sim in pair.prefill:
            sim.worker.inject(_slow())
        open_ = [asyncio.create_task(asks.ask(f"held {number}", prompt=f"{number} {_DOCUMENT}")) for number in range(6)]

        async def claims(replica: Replica) -> float:
            shown = (await replica.get("/healthz"))["replicas"]["connected"]
            return sum(each["claims"] for each in shown.values())

        async with asyncio.timeout(20):  # each knows of what the other has; which may be nothing but prompts that wait
            while True:
                own = [await each.metric("baton_endpoint_in_flight") for each in pair.replicas]
                told = [await claims(each) for each in pair.replicas]
                if max(own) >= 2 and told == own[::-1]:
                    break
                await asyncio.sleep(0.02)
        killed = pair.first if own[0] >= own[1] else pair.second
        await pair.kill(killed)
        async with asyncio.timeout(5):
            while (await pair.other(killed).get("/healthz"))["replicas"]["connected"]:
                await asyncio.sleep(0.01)
        await asyncio.gather(*open_)
        assert await pair.empty(LEASE_S + 8.0) == {}


def _slow():  # type: ignore[no-untyped-def]
    from workers.sim.faults import Fault

    return Fault(kind="slow", phase="prefill", duration_s=60.0, delay_s=4.0)


@pytest.mark.timeout(120)
async def test_lines_of_the_log_reach_the_replica_whose_request_it_was() -> None:
    async with Pair(prefill=2, decode=2) as pair:
        load = Load(pair, clients=6)
        await load.more(80)
        await load.stop()
        assert not any(each.failed for each in load.done)
        async with asyncio.timeout(15):
            while True:
                lines = [await each.metric("baton_access_log_lines_total") for each in pair.replicas]
                served = [await each.metric("baton_requests_total") for each in pair.replicas]
                if lines == served and min(served) > 10:
                    break
                await asyncio.sleep(0.1)
        assert [await each.metric("baton_access_log_lost_total") for each in pair.replicas] == [0, 0]


@pytest.mark.timeout(150)
async def test_a_replica_that_stands_still_holds_up_its_own_requests_for_seconds_and_no_other() -> None:
    """As one whose host has vanished: nobody says that its connections are over."""
    async with Pair(prefill=2, decode=2) as pair:
        first, second = pair.first, pair.second
        load = Load(pair)
        await load.more(30)
        pid = first.pid()
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.time()
        try:
            async with asyncio.timeout(5):
                while await second.metric("baton_siblings"):
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(30):  # Envoy's health checks, then its pings: from here on it has nothing there
                while any(began_s < stopped_s + 5.0 for began_s in load.open.values()) or time.time() < stopped_s + 5.0:
                    await asyncio.sleep(0.05)
            done_s = time.time()
            await load.more(60)
        finally:
            os.kill(pid, signal.SIGCONT)
        await load.stop()
        failed = [each for each in load.done if each.failed]
        assert all(each.began_s < stopped_s + 5.0 for each in failed), failed
        assert all(each.ended_s - each.began_s < 20.0 for each in load.done)
        assert not {each.name for each in failed} & second.served().keys()
        await pair.together()
        assert await pair.empty(LEASE_S + 8.0) == {}
        print(f"{len(failed)} of {len(load.done)} failed, the last one after {done_s - stopped_s:.1f} s")
