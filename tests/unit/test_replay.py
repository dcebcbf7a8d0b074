"""Traces replayed on a virtual clock: what comes out is what the queues make of it."""

import math
import random
from dataclasses import replace

import pytest

from extproc.replay import Placed, Refused, Setup, capacity, chain_of_ids, replay
from extproc.replay_peers import CacheAware, Turns
from extproc.routing.job import Aims
from workers import goodput, traces
from workers.goodput import Status
from workers.traces import Request

SETUP = Setup(prefill=3, decode=5)
AIMS = Aims()


def conversations(count, *, seed=1, rate_per_s=3.0):
    """Turns of growing conversations, a long prompt now and then."""
    rnd = random.Random(seed)
    at_s, fresh, history, requests = 0.0, 0, {}, []
    for _ in range(count):
        at_s += rnd.expovariate(rate_per_s)
        who = rnd.randrange(count // 8 + 1)
        grown = rnd.randrange(120, 200) if rnd.random() < 0.03 else rnd.randrange(4, 30)
        blocks = (*history.get(who, ()), *range(fresh, fresh + grown))
        fresh += grown
        history[who] = blocks if len(blocks) < 120 else ()
        requests.append(Request(at_s, len(blocks) * 512 - rnd.randrange(512), rnd.randrange(20, 400), blocks))
    return requests


def results(requests, policy=Turns, setup=SETUP):
    return replay(requests, policy(setup.prefill_addresses, setup.decode_addresses), setup, AIMS)


def test_on_idle_workers_the_time_is_that_of_the_work():
    (outcome,) = results([Request(3.0, 5_000, 100, tuple(range(10)))]).outcomes
    profile = SETUP.profile
    prefill_s = profile.step_s(prefill_tokens=5000, prefill_context_tokens=12_500_000, decodes=0, decode_context_tokens=0)
    expected_s = prefill_s + profile.transfer_s(5_000) + 4 * SETUP.hop_s
    assert outcome.ttft_s == pytest.approx(expected_s + 0.015, abs=0.005)  # and one decode step
    assert outcome.itl_p99_s == pytest.approx(0.0145, abs=0.001)
    assert (outcome.status, outcome.cached_tokens, outcome.wait_s) == (Status.SERVED, 0, 0.0)


def test_a_prompt_that_comes_again_is_cached_where_it_was():
    same = [Request(float(i), 5_000, 10, tuple(range(10))) for i in range(6)]
    assert [outcome.cached_tokens for outcome in results(same).outcomes] == [0, 0, 0, 4608, 4608, 4608]
    assert [outcome.cached_tokens for outcome in results(same, CacheAware).outcomes] == [0] + [4608] * 5


def test_under_capacity_the_queue_stays_and_over_it_grows():
    rnd = random.Random(3)
    lengths = [rnd.randrange(4, 40) for _ in range(500)]
    ids = iter(range(10**6))
    requests = [Request(float(i), n * 512, 20, tuple(next(ids) for _ in range(n))) for i, n in enumerate(lengths)]
    limit_per_s = capacity(requests, SETUP)
    halves = {}
    for load in (0.6, 1.3):
        outcomes = results(traces.at_rate(requests, load * limit_per_s)).outcomes
        first, second = outcomes[:250], outcomes[250:]
        halves[load] = [goodput.summary(half).ttft_p50_s for half in (first, second)]
    assert halves[0.6][1] < 2 * halves[0.6][0]
    assert halves[1.3][1] > 2 * halves[1.3][0]


def test_the_cache_is_worth_what_the_simulation_of_the_queue_says():
    """Round robin loses its hits and its goodput to a cache-aware choice, as it does without any of the engine's detail."""
    requests = conversations(600)
    requests = traces.at_rate(requests, 0.9 * capacity(requests, SETUP))
    turns, aware = (goodput.summary(results(requests, policy).outcomes) for policy in (Turns, CacheAware))
    assert aware.hit_ratio > 1.5 * turns.hit_ratio
    assert aware.goodput > 1.3 * turns.goodput


def test_capacity_grows_with_the_workers_and_is_nan_for_nothing():
    requests = conversations(300)
    assert capacity(requests, replace(SETUP, prefill=6)) == pytest.approx(2 * capacity(requests, SETUP), rel=0.2)
    assert math.isnan(capacity([], SETUP))


def test_what_is_refused_is_counted_and_what_is_never_decided_is_an_error():
    class Refuses(Turns):
        def poll(self, now_s):
            return [(ticket, Refused("full")) for ticket, _ in super().poll(now_s)]

    class Forgets(Turns):
        def poll(self, now_s):
            return []

    requests = conversations(5)
    refused = results(requests, Refuses).outcomes
    assert goodput.summary(refused).refused == 5
    with pytest.raises(RuntimeError, match="5 requests were never decided"):
        results(requests, Forgets)


def test_a_decode_worker_that_does_it_all_stalls_its_streams():
    class Whole(Turns):
        def poll(self, now_s):
            return [(ticket, Placed(None, placed.decode)) for ticket, placed in super().poll(now_s)]

    requests = conversations(200)
    whole, apart = (goodput.summary(results(requests, policy).outcomes) for policy in (Whole, Turns))
    assert whole.itl_p99_s > 5 * apart.itl_p99_s
    assert whole.hit_ratio > 0


def test_chains_agree_as_far_as_the_ids():
    one, other = chain_of_ids((1, 2, 3), 1536), chain_of_ids((1, 2, 4), 1536)
    assert one.hashes[:2] == other.hashes[:2]
    assert one.hashes[2] != other.hashes[2]
    assert chain_of_ids((2, 1), 1024).hashes[1] != one.hashes[1]
    assert len(chain_of_ids((1, 2, 3), 1535).hashes) == 2  # the last block is not full
