"""What is weighed in one go, and once, says the same as each choice weighed by itself, as often as it takes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from extproc.routing.job import Aims, Job, Late, Mode, Objective
from extproc.routing.picker import FullError, NoEndpointError
from extproc.routing.router import Router
from extproc.routing.ticket import RejectedError
from extproc.routing.weighing import decode_sides, pairs, prefill_sides, wholes
from tests.unit.routing_world import World, pool_of, tailed

WEIGHED = (Objective.BALANCED, Objective.TTFT, Objective.THROUGHPUT)


def some_load(world: World, chance: random.Random) -> None:
    """Work on some workers, ours and others', and pairs that have met, have failed, and have rates of their own."""
    for endpoint in world.pool.endpoints:
        for leg in (endpoint.prefill, endpoint.decode):
            for _ in range(chance.choice([0, 0, 1, 3])):
                leg.claim(tokens=chance.randint(1, 9_000), work_s=chance.random(), now_s=world.now_s - chance.random(), turn=0)
            if chance.random() < 0.4:
                leg.external(chance.choice([0.0, 1.0, 4.0]), world.now_s - chance.choice([0.0, 1.0, 9.0]))
            if chance.random() < 0.2:
                leg.occupy(chance.random(), world.now_s)
    costs, prefills, decodes = world.router.costs, ("p0", "p1", "b0"), ("d0", "d1", "b0")
    for prefill in prefills:
        for decode in decodes:
            what = chance.randrange(4)
            if what == 1:
                costs.pairs.succeeded(prefill, decode)
            elif what == 2:
                costs.pairs.failed(prefill, decode, world.now_s - chance.choice([0, 100]))
            elif what == 3:
                costs.pairs.transferred(prefill, decode, 1e6, 0.01 * chance.random(), costs.transfer_rate(world[decode]))


@pytest.mark.parametrize("objective", WEIGHED)
def test_all_pairs_in_one_go_cost_what_each_costs_by_itself(objective: Objective) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        world = World(pool_of(2, 2, 1), worker_max_seqs=chance.choice([2, 256]), hold=chance.choice([0.0, 2.0]))
        some_load(world, chance)
        costs, now_s = world.router.costs, world.now_s
        job = world.job(chance.randint(1, 20_000), aims=Aims(objective=objective), answer_tokens=chance.choice([None, 5]))
        held = {each: chance.randrange(job.tokens) for each in ("p0", "d1", "b0") if chance.random() < 0.7}
        prefills, decodes = [world[each] for each in ("p0", "p1", "b0")], [world[each] for each in ("d0", "d1", "b0")]
        pressure = world.router.picker.pressure(prefills, now_s)

        sides = decode_sides(costs, job, decodes, held, now_s)
        found = pairs(costs, job, prefill_sides(costs, job, prefills, held, now_s), sides, now_s)
        assert len(found) == 3 * 3 - 1, "every pair, but none of a worker to itself"
        for each in found:
            assert each.prefill is not None
            prefill, decode = world[each.prefill], world[each.decode]
            cached = held.get(each.prefill, 0), held.get(each.decode, 0)
            terms = costs.apart(job, prefill, decode, *cached, now_s)
            assert each.cost == costs.total(job.aims, terms, pressure=pressure), seed
            assert each.terms == terms, seed
            assert (each.cached_prefill_tokens, each.cached_decode_tokens) == cached
        for each in wholes(costs, job, sides, now_s):
            terms = costs.whole(job, world[each.decode], held.get(each.decode, 0), now_s)
            assert each.cost == costs.total(job.aims, terms, pressure=0.0), seed
            assert each.terms == terms, seed
            assert each.cached_decode_tokens == held.get(each.decode, 0)


def story(seed: int, ways: Counter[tuple[str, bool]]) -> list[object]:
    """What a router decides in a random world, and what it counts meanwhile."""
    chance, told = random.Random(seed), []
    calm = chance.random() < 0.7
    world = World(
        pool_of(chance.randint(1, 5), chance.randint(1, 3), chance.choice([0, 0, 1])),
        worker_max_seqs=chance.choice([3, 256]),
        step_tokens=chance.choice([2_000, 8_192]),
        handshake_s=chance.choice([0.0, 0.5]),
    )
    router = world.router
    aims = [
        Aims(
            policy=f"policy-{number}",
            mode=chance.choice([Mode.AUTO, Mode.AUTO, Mode.AUTO, Mode.DISAGGREGATE]),
            objective=chance.choice(WEIGHED),
            ttft_slo_s=chance.choice([None, None, 0.3]),
            itl_slo_s=chance.choice([None, 0.05]),
            threshold_uncached_tokens=chance.choice([None, 1, 500]),
            late=chance.choice(list(Late)),
        )
        for number in range(3)
    ]
    taken = router._placed_at_once
    router._placed_at_once = lambda ticket, *rest: _counted(ways, ticket, taken(ticket, *rest))  # type: ignore[method-assign]
    tickets = []
    for step in range(60):
        world.now_s += chance.choice([0.0, 0.01, 0.1, 2.0 if calm else 0.2])
        what = chance.random()
        try:
            if what < 0.5:
                tokens, head = chance.choice([30, 1_000, 4_000, 9_000]), chance.randrange(4)
                job = Job(
                    model=None,
                    chain=tailed(head, chance.choice([0, 640, 3_200]), step, tokens),
                    tokens=tokens,
                    aims=chance.choice(aims),
                    arrived_s=world.now_s - chance.choice([0.0, 0.2]),
                    deadline_s=world.now_s + 600,
                    session=chance.choice(["", "one", "two"]),
                )
                tickets.append(router.submit(job, world.now_s))
                told.append((tickets[-1].state, tickets[-1].decision))
            elif what < 0.75 and tickets:
                ticket = chance.choice(tickets)
                if chance.random() < 0.9:
                    router.prefill_done(ticket, world.now_s, cached_tokens=chance.choice([None, 0]))
                else:
                    router.prefill_failed(ticket, world.now_s, blame=True)
            elif what < 0.9 and tickets:
                router.finish(tickets.pop(chance.randrange(len(tickets))), world.now_s)
            elif what < 0.93:
                world.reports(chance.choice(["d0", "p0"]), running=chance.choice([0, 2]), waiting=0, itl_s=0.03)
            else:
                told += [(each.state, each.decision, str(each.error)) for each in world.poll()]
        except (NoEndpointError, FullError, RejectedError) as error:
            told.append((type(error), str(error)))
        told.append((router.picker.panics, len(router.queue), router.index.blocks, router._turn, router.next_wake_s()))
    return told


def _counted(ways: Counter[tuple[str, bool]], ticket, taken: bool) -> bool:
    ways["apart" if ticket.whole_reason is None else "whole", taken] += 1
    return taken


def test_a_prompt_that_is_weighed_once_gets_the_decision_of_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, ways = range(120), Counter()
    once = [story(seed, ways) for seed in seeds]
    monkeypatch.setattr(Router, "_placed_at_once", lambda *_: False)
    for seed, told in zip(seeds, once, strict=True):
        assert told == story(seed, Counter()), f"the two ways differ in the world of seed {seed}"
    for way in ("apart", "whole"):
        assert ways[way, True] > 100 and ways[way, False] > 20, f"these worlds say little of {way}: {ways}"
