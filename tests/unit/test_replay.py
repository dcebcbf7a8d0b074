"""Traces replayed on a virtual clock: what comes out is what the queues make of it."""

import json
import math
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from extproc import cli
from extproc.replay import Placed, Refused, Setup, capacity, chain_of_ids, replay
from extproc.replay_command import POLICIES, ReplayOptions, as_json, routing_of, run_replay
from extproc.replay_index import Index, filters
from extproc.replay_peers import CacheAware, Turns
from extproc.routing.job import Aims, Mode, Objective
from extproc.routing.settings import Routing
from workers import goodput, traces
from workers.goodput import Status
from workers.traces import Request

SETUP = Setup(prefill=3, decode=5)


def no_aims(_):
    return Aims()


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
    return replay(requests, policy(setup.prefill_addresses, setup.decode_addresses), setup, no_aims)


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


def test_an_answer_of_one_token_is_the_decode_workers_alone_as_with_the_filter():
    """A handed-over one would also shift the turns of all that come after it."""
    requests = [Request(float(i), 2_000, 1 if i == 1 else 20, (4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3)) for i in range(4)]
    dispatcher, _ = filters(SETUP, routing_of(Routing(), SETUP), Index.PREDICTED, 1)
    turns = Aims(objective=Objective.ROUND_ROBIN, mode=Mode.DISAGGREGATE, held=False)
    replayed = replay(requests, dispatcher, SETUP, lambda _: turns)
    prefills = [placed.prefill for placed in replayed.placed if isinstance(placed, Placed)]
    assert prefills[1] is None and sorted(prefills[0::2] + prefills[3:]) == sorted(SETUP.prefill_addresses)


def test_chains_agree_as_far_as_the_ids():
    one, other = chain_of_ids((1, 2, 3), 1536), chain_of_ids((1, 2, 4), 1536)
    assert one.hashes[:2] == other.hashes[:2]
    assert one.hashes[2] != other.hashes[2]
    assert chain_of_ids((2, 1), 1024).hashes[1] != one.hashes[1]
    assert len(chain_of_ids((1, 2, 3), 1535).hashes) == 2  # the last block is not full


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "timestamp": request.at_s * 1000,
                    "input_length": request.input_tokens,
                    "output_length": request.output_tokens,
                    "hash_ids": request.hash_ids,
                }
            )
            for request in conversations(300)
        )
    )
    return path


def test_the_router_holds_the_queue_better_than_turns(trace_file):
    """The filter's own routing code, with the queue: more requests in time than by turns, none lost, none waiting too long."""
    found = run_replay(ReplayOptions(trace=trace_file, policies=("baton", "round-robin"), load=1.1))
    ours, turns = (line.summary for line in found.lines)
    assert ours.requests == turns.requests == 300
    assert (ours.refused, ours.failed) == (0, 0)
    assert ours.goodput > 1.5 * turns.goodput
    assert ours.longest_wait_s <= 60.5
    assert ours.hit_ratio > turns.hit_ratio


def test_the_same_replay_gives_the_same_numbers(trace_file):
    def numbers():
        found = run_replay(ReplayOptions(trace=trace_file, policies=POLICIES, requests=80))
        return [(line.policy, line.summary, line.whole) for line in found.lines]

    assert numbers() == numbers()


def test_what_waits_too_long_is_refused_and_counted(trace_file):
    aims = Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=2.5, max_wait_s=0.5)
    found = run_replay(ReplayOptions(trace=trace_file, policies=("baton",), load=1.5, aims=lambda _: aims))
    assert found.lines[0].summary.refused > 0
    assert found.lines[0].summary.longest_wait_s < 0.75


def test_the_command_prints_a_table_or_json_and_says_what_is_wrong(trace_file, tmp_path):
    def baton(*arguments):
        return CliRunner().invoke(cli.app, ["replay", *map(str, arguments)])

    shown = baton("--trace", trace_file, "--requests", 100, "--policy", "baton", "--policy", "random")
    assert shown.exit_code == 0
    assert "goodput" in shown.stdout
    assert "100 requests at" in shown.stdout

    of_hosts = {}
    for tokens in (0, 600_000):
        told = baton(
            *("--trace", trace_file, "--requests", 200, "--policy", "baton", "--cache-tokens", 200_000, "--json"),
            *("--host-cache-tokens", tokens, "--index", "events"),
        )
        assert told.exit_code == 0, told.output
        of_hosts[tokens] = json.loads(told.stdout)["lines"][0]["summary"]["hit_ratio"]
    assert of_hosts[600_000] > 1.1 * of_hosts[0], "what the caches have lost comes from the hosts' memory"

    told = baton("--trace", trace_file, "--requests", 100, "--policy", "round-robin", "--rate", 2.0, "--json")
    found = json.loads(told.stdout)
    assert found["rate_per_s"] == 2.0
    assert [line["policy"] for line in found["lines"]] == ["round-robin"]

    for wrong, says in (
        (("--trace", tmp_path / "none"), "No such file"),
        (("--trace", trace_file, "--policy", "best"), "no policy best; there are baton,"),
        (("--trace", trace_file, "--objective", "fast"), "objective: balanced,"),
        (("--trace", trace_file, "--dispatch", "later"), "dispatch: queue or immediate"),
        (("--trace", trace_file, "--rate", 0), "rate: more than 0"),
    ):
        refused = baton(*wrong)
        assert refused.exit_code == 1, wrong
        assert says in refused.output.replace("\n", ""), wrong


def test_policies_and_routing_can_come_from_a_configuration(trace_file, tmp_path):
    """By the size of the prompt, as in the filter: short ones are all done by decode workers, long ones never."""
    config = tmp_path / "baton.yaml"
    config.write_text(
        """
workers: {prefill: ["10.0.0.1:8000"], decode: ["10.0.1.1:8000"]}
policies:
- {name: short, match: {prompt_tokens: {max: 8000}}, mode: aggregate}
- {name: long, mode: disaggregate}
"""
    )
    told = CliRunner().invoke(
        cli.app, ["replay", "--trace", str(trace_file), "--policy", "baton", "--config", str(config), "--json"]
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["lines"][0]["whole"] == sum(request.input_tokens <= 8000 for request in traces.load(trace_file))


def test_a_refusal_of_one_policy_is_json_without_nan(trace_file):
    aims = Aims(mode=Mode.AGGREGATE, ttft_slo_s=2.5, max_in_flight=0)
    found = run_replay(ReplayOptions(trace=trace_file, policies=("baton",), requests=20, aims=lambda _: aims))
    assert json.loads(as_json(found))["lines"][0]["summary"]["ttft_p50_s"] is None


def hit_ratio(index, count, requests, host_tokens=0):
    """With caches that hold a small part of what comes, and hosts that hold more."""
    small = Setup.with_caches(300 * 512, host_tokens)
    dispatcher, watches = filters(small, routing_of(Routing(), small), index, count)
    found = replay(requests, dispatcher, small, no_aims, watches=watches).outcomes
    return sum(each.cached_tokens for each in found) / sum(each.input_tokens for each in found)


@pytest.mark.parametrize("host_tokens", [0, 900 * 512])
@pytest.mark.parametrize("count", [1, 2])
def test_who_hears_the_events_knows_as_much_as_who_looks_into_the_caches(count, host_tokens):
    requests = conversations(250, rate_per_s=1.5)
    events, oracle = (hit_ratio(index, count, requests, host_tokens) for index in (Index.EVENTS, Index.ORACLE))
    assert oracle > 0.05
    assert events == pytest.approx(oracle, rel=0.02)


def test_events_find_what_another_filter_has_put_there_and_nothing_that_it_drove_out():
    requests = conversations(250, rate_per_s=1.5)
    assert hit_ratio(Index.EVENTS, 2, requests) > 1.1 * hit_ratio(Index.PREDICTED, 2, requests)


def test_events_find_what_the_hosts_hold_which_nobody_can_predict_from_the_size_of_a_cache():
    requests = conversations(250, rate_per_s=1.5)
    predicted, events = (hit_ratio(index, 1, requests, 900 * 512) for index in (Index.PREDICTED, Index.EVENTS))
    assert events > 1.1 * predicted
