"""What the pool and the prompts that wait are told while workers meet; the meetings themselves are made up."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.config import Config, Workers
from extproc.config import WarmUp as Settings
from extproc.errors import ApiError
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.policy_config import Match, PolicyRule, WorkerLabels
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.pool import Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.warm_call import MeetingError
from extproc.warm_up import WarmUp, rules

GOLD = {"tier": "gold"}


class Meetings:
    """Takes note of who met; ``faults`` are those that go wrong."""

    def __init__(self) -> None:
        self.held: list[tuple[str, str, str | None]] = []
        self.faults: dict[str, str] = {}

    async def hold(self, prefill: str, decode: str, model: str | None) -> None:
        self.held.append((prefill, decode, model))
        await asyncio.sleep(0)
        if decode in self.faults:
            raise MeetingError(self.faults[decode])


class World:
    def __init__(self, decode: int = 1, **settings: Any) -> None:
        specs = [EndpointSpec(address=f"d{number}") for number in range(decode)]
        self.pool = Pool(EndpointSet(prefill=(EndpointSpec(address="p0"),), decode=tuple(specs)))
        self.now_s = 0.0
        self.metrics = Metrics()
        self.meetings = Meetings()
        self.router = Router(self.pool, Routing())
        config = Config(workers=Workers(prefill=["1.1.1.1:1"], decode=["1.1.1.1:2"]), warm_up=Settings(**settings))
        self.warm_up = WarmUp(
            config,
            SimpleNamespace(router=self.router, stir=lambda: None),  # type: ignore[arg-type]
            self.meetings,  # type: ignore[arg-type]
            metrics=self.metrics,
            log=make_logger("critical"),
            on_change=lambda: None,
            clock=lambda: self.now_s,
        )

    def live(self, *addresses: str, again: bool = False) -> None:
        for address in addresses:
            endpoint = self.pool.get(address)
            assert endpoint is not None
            self.pool.set_live(endpoint, True)
            self.pool.set_models(endpoint, {"m": b"{}"})
            self.warm_up.came(address, again=again)

    async def turn(self, seconds: float = 0.0) -> None:
        """Time passes, and all meetings come to their end."""
        self.now_s += seconds
        self.warm_up.sync()
        self.warm_up._start()
        while self.warm_up._tasks:
            await asyncio.sleep(0)

    def warming(self) -> list[str]:
        return [each.address for each in self.pool.endpoints if each.warming]

    def unwarmed(self) -> float:
        return self.metrics.registry.get_sample_value("baton_fallbacks_total", {"kind": "unwarmed"}) or 0.0


def job(**changes: Any) -> Job:
    chain = Chain(array("Q"), 64)
    return Job(model="m", chain=chain, tokens=100, aims=Aims(**changes), arrived_s=0.0, deadline_s=10.0)


async def test_a_pair_meets_once_by_the_model_that_both_serve() -> None:
    world = World()
    world.live("p0")
    assert world.warming() == [], "nobody is there to be met"
    world.live("d0")
    assert world.warming() == ["p0", "d0"]
    assert (world.warm_up.ready(), world.warm_up.summary()) == (False, "warming: 0 of 1 pairs")
    await world.turn()
    await world.turn(100)
    assert world.meetings.held == [("p0", "d0", "m")]
    assert world.warming() == []
    assert world.warm_up.ready()
    assert world.warm_up.took_transfer("d0"), "what it reports next is not about clients' transfers"
    assert not world.warm_up.took_transfer("d0")


async def test_a_worker_that_was_only_away_for_a_moment_does_not_meet_the_others_anew() -> None:
    world = World()
    world.live("p0", "d0")
    await world.turn()
    world.live("d0", again=True)
    assert world.warming() == ["d0"], "until it has reported, it may be a new engine"
    world.warm_up.reported("d0", same=True)
    assert world.warming() == []
    world.live("d0", again=True)
    world.warm_up.reported("d0", same=False)
    assert world.warming() == ["p0", "d0"]
    await world.turn()
    assert len(world.meetings.held) == 2
    world.live("d0", again=True)
    await world.turn(6)
    assert len(world.meetings.held) == 3, "one that does not report counts as a new one"


async def test_a_restart_that_the_router_is_told_of_is_seen_here_too() -> None:
    world = World()
    world.live("p0", "d0")
    await world.turn()
    world.router.restarted("d0")
    await asyncio.sleep(0)
    assert world.warming() == ["p0", "d0"]


async def test_prompts_wait_for_the_first_pair_but_not_those_that_one_worker_serves() -> None:
    world = World()
    world.live("p0", "d0")
    waiting = world.warm_up.admit(job())
    assert waiting is not None
    assert not waiting.done()
    assert world.warm_up.admit(job(mode=Mode.AGGREGATE)) is None
    whole = job()
    whole.handoff = False
    assert world.warm_up.admit(whole) is None
    await world.turn()
    assert waiting.done()
    assert world.warm_up.admit(job()) is None
    assert world.unwarmed() == 0


async def test_a_prompt_waits_no_longer_than_its_deadline() -> None:
    world = World()
    world.live("p0", "d0")
    world.now_s = 9.99
    waiting = world.warm_up.admit(job())
    assert waiting is not None
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(waiting, 5)
    assert (caught.value.code, caught.value.status) == ("warming", 503)
    await asyncio.sleep(0)
    assert world.warm_up.status()["waiting_requests"] == 0


async def test_a_pool_that_cannot_be_warmed_is_used_after_a_while_and_counted() -> None:
    world = World(give_up_s=30.0, attempts=2)
    world.meetings.faults = {"d0": "no NIXL there"}
    world.live("p0", "d0")
    waiting = world.warm_up.admit(job())
    assert waiting is not None
    await world.turn()
    await world.turn(29)
    assert not world.warm_up.ready()
    assert not waiting.done()
    assert world.warm_up.status()["warming"] == {"p0": "with d0: no NIXL there", "d0": "with p0: no NIXL there"}
    await world.turn(2)
    assert world.warm_up.ready()
    assert waiting.done()
    assert world.warm_up.admit(job()) is None
    assert world.unwarmed() == 2
    counted = [
        world.metrics.registry.get_sample_value("baton_warm_up_total", {"outcome": each}) for each in ("failed", "given_up")
    ]
    assert counted == [1, 1]


async def test_off_means_off() -> None:
    world = World(enabled=False)
    world.live("p0", "d0")
    assert world.warming() == []
    assert world.warm_up.ready()
    assert world.warm_up.admit(job()) is None
    assert world.warm_up.status() == {"enabled": False}


async def test_one_broken_worker_holds_up_nobody_else() -> None:
    world = World(decode=2)
    world.meetings.faults = {"d1": "broken"}
    world.live("p0", "d0", "d1")
    for _ in range(10):
        await world.turn(5)
    assert world.warming() == ["d1"]
    assert world.warm_up.ready()
    assert world.warm_up.admit(job()) is None
    assert [each.address for each in world.router.picker.group(Role.DECODE, "m", {})] == ["d0"]


def test_only_policies_that_hand_over_bring_workers_together() -> None:
    gold = PolicyRule(name="gold", match=Match(model="g"), workers=WorkerLabels(prefill=GOLD, decode=GOLD))
    never = PolicyRule(name="whole", mode=Mode.AGGREGATE)
    assert rules([]) == [WorkerLabels()]
    assert rules([gold]) == [gold.workers, WorkerLabels()], "what is not gold is served by anybody"
    assert rules([gold, never]) == [gold.workers]
    assert rules([never]) == []
    assert rules([PolicyRule(name="whole", mode=Mode.AGGREGATE, allow_overrides=["mode"])]) == [WorkerLabels()]


async def test_a_prompt_waits_for_the_workers_that_its_gateway_allows_and_for_no_others() -> None:
    """With none of them in the pool it does not wait at all: the answer is 503, at once."""
    world = World(decode=2)
    world.live("p0", "d0")
    await world.turn()
    world.meetings.faults["d1"] = "no route"
    world.live("d1")
    await world.turn()
    assert world.warming() == ["d1"]
    assert world.warm_up.admit(job()) is None, "a pair is warm"

    def among(*only: str) -> Job:
        asked = job()
        asked.only = frozenset(only)
        return asked

    assert world.warm_up.admit(among("d0")) is None
    assert world.warm_up.admit(among("10.9.9.9:1")) is None
    waiting = world.warm_up.admit(among("d1"))
    assert waiting is not None
    del world.meetings.faults["d1"]
    await world.turn(100)
    await asyncio.wait_for(waiting, 1)
