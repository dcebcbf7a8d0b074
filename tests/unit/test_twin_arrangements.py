"""What tells arrangements of workers apart in the twin: whole prompts, shared links, a shared cache; against cases by hand."""

import hashlib
from dataclasses import replace

import pytest
from test_replay import conversations
from test_twin import BLOCK, CoreEngine, run, workload

from extproc.replay import Placed, Setup, replay
from extproc.replay_peers import CacheAware, Turns
from extproc.routing.job import Aims
from workers.sim.timing import Profile
from workers.sim.twin import Done, Gaps, Pulled, TwinConfig, TwinEngine
from workers.sim.twin_link import Arrived, Wires
from workers.sim.twin_tier import TierConfig, TwinTier
from workers.traces import Request

PROFILE = Profile(handshake_s=0.0)


def prefill_s(*prompts, profile=PROFILE):
    return profile.step_s(
        prefill_tokens=sum(prompts), prefill_context_tokens=sum(n * n // 2 for n in prompts), decodes=0, decode_context_tokens=0
    )


def decode_s(*contexts, profile=PROFILE):
    return profile.step_s(
        prefill_tokens=0, prefill_context_tokens=0, decodes=len(contexts), decode_context_tokens=sum(contexts)
    )


# -- what was there before -------------------------------------------------------------------------------------------------


class Whole(Turns):
    def poll(self, now_s):
        return [(ticket, Placed(None, placed.decode)) for ticket, placed in super().poll(now_s)]


ROOMY = Setup(prefill=3, decode=5)
TIGHT = Setup(prefill=2, decode=2, engine=TwinConfig(num_blocks=420, max_num_seqs=16, max_num_batched_tokens=2048))


@pytest.mark.parametrize(
    ("policy", "setup", "digest"),
    [
        (Turns, ROOMY, "44158abb1fc08242"),
        (Turns, TIGHT, "326bfbf58a738439"),
        (CacheAware, ROOMY, "f753d9dfb1f31edd"),
        (CacheAware, TIGHT, "8121087bfba8c611"),
        (Whole, ROOMY, "eacb3aebeb5e6f0e"),
        (Whole, TIGHT, "e083307049e7f6cf"),
    ],
)
def test_without_the_new_settings_a_replay_is_the_same_to_the_last_digit(policy, setup, digest):
    """The digests are of what came out before the settings were there."""
    dispatcher = policy(setup.prefill_addresses, setup.decode_addresses)
    outcomes = replay(conversations(200), dispatcher, setup, lambda _: Aims()).outcomes
    text = "\n".join(f"{o.arrived_s!r} {o.ttft_s!r} {o.itl_p99_s!r} {o.cached_tokens} {o.wait_s!r}" for o in outcomes)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


# -- whole prompts ---------------------------------------------------------------------------------------------------------

WHOLE = TwinConfig(chunked=False, max_num_batched_tokens=40_000)


def by_name(events):
    return {event.name: event for event in events if isinstance(event, Done)}


def test_a_whole_prompt_stalls_the_stream_for_all_of_its_prefill():
    """A stream of 4 tokens; a prompt of 30,000 comes within its second decode step, and takes the next step for itself."""
    twin = TwinEngine("w", WHOLE, PROFILE)
    twin.gaps = []
    twin.submit_whole("stream", [], 1000, 4, 0.0)
    first_s = prefill_s(1000)
    second_s = first_s + decode_s(1001)
    third_s = second_s + decode_s(1002)
    assert twin.advance(second_s + 0.001) == []
    twin.submit_whole("prompt", [], 30_000, 2, second_s + 0.001)
    done = by_name(twin.advance(100.0))
    stalled_s = third_s + prefill_s(30_000)
    end_s = stalled_s + decode_s(1003, 30_001)
    assert done["prompt"].first_token_s == pytest.approx(stalled_s, rel=1e-12)
    assert done["stream"].at_s == pytest.approx(end_s, rel=1e-12)
    assert done["prompt"].at_s == pytest.approx(end_s, rel=1e-12)
    assert done["stream"].itl_p99_s == pytest.approx(end_s - third_s, rel=1e-12)
    assert done["prompt"].itl_p99_s == pytest.approx(end_s - stalled_s, rel=1e-12)
    assert sum(gap.streams for gap in twin.gaps) == 3 + 1
    assert sorted(twin.gaps)[-1] == Gaps(pytest.approx(end_s - third_s), 1)
    assert twin.load().gaps == 4
    assert twin.load().gaps_s == pytest.approx(sum(gap.gap_s * gap.streams for gap in twin.gaps), rel=1e-12)
    assert twin.busy_s == pytest.approx(end_s, rel=1e-12)


def test_in_chunks_the_same_stream_waits_for_a_chunk_at_a_time():
    twin = TwinEngine("w", TwinConfig(max_num_batched_tokens=2048), PROFILE)
    twin.submit_whole("stream", [], 1000, 400, 0.0)
    twin.advance(1.0)
    twin.submit_whole("prompt", [], 30_000, 2, 1.0)
    done = by_name(twin.advance(100.0))
    chunks_s = [
        PROFILE.step_s(prefill_tokens=n, prefill_context_tokens=n * (2 * at + n) // 2, decodes=1, decode_context_tokens=1100)
        for at, n in ((at, min(2047, 30_000 - at)) for at in range(0, 30_000, 2047))
    ]
    # Of 399 gaps, the 396th: the fourth largest. A prefill step is bound by arithmetic: what the decode reads does not count.
    assert done["stream"].itl_p99_s == pytest.approx(sorted(chunks_s)[-4], rel=1e-9)


def test_whole_prompts_share_a_step_as_long_as_they_fit_and_the_next_one_goes_before_the_decodes():
    twin = TwinEngine("w", WHOLE, PROFILE)
    for name, tokens in (("one", 25_000), ("two", 14_000), ("three", 10_000)):
        twin.submit_whole(name, [], tokens, 2, 0.0)
    done = by_name(twin.advance(100.0))
    together_s = prefill_s(25_000, 14_000)
    third_s = together_s + prefill_s(10_000)
    assert done["one"].first_token_s == done["two"].first_token_s == pytest.approx(together_s, rel=1e-12)
    assert done["three"].first_token_s == pytest.approx(third_s, rel=1e-12)
    end_s = third_s + decode_s(25_001, 14_001, 10_001)
    assert [event.at_s for event in done.values()] == pytest.approx([end_s] * 3, rel=1e-12)
    assert done["one"].itl_p99_s == pytest.approx(end_s - together_s, rel=1e-12)


def test_what_is_cached_of_a_prompt_takes_no_room_in_a_step_of_whole_prompts():
    twin = TwinEngine("w", WHOLE, PROFILE)
    twin.submit_whole("before", range(50), 50 * 512 + 10, 1, 0.0)
    (before,) = twin.advance(100.0)
    twin.submit_whole("same", range(50), 50 * 512 + 10, 1, before.at_s)
    twin.submit_whole("other", [], 30_000, 1, before.at_s)
    done = by_name(twin.advance(100.0))
    assert done["same"].at_s == done["other"].at_s
    assert done["same"].cached_tokens == 50 * 512


def test_a_prompt_that_is_longer_than_a_step_of_whole_prompts_is_refused():
    with pytest.raises(ValueError, match="39999 tokens and the answer are more than the 40000 of a step of w"):
        TwinEngine("w", WHOLE, PROFILE).submit_whole("long", [], 39_999, 2, 0.0)


def test_whole_prompts_and_preemption_leave_nothing_behind():
    """Streams that join while others are stalled, and grow until some are thrown out: all gaps are counted once."""
    twin = TwinEngine("w", TwinConfig(block_tokens=16, num_blocks=60, chunked=False, max_num_batched_tokens=1024), PROFILE)
    twin.gaps = []
    answers = [30 + 7 * number for number in range(12)]
    for number, answer in enumerate(answers):
        twin.submit_whole(str(number), [], 100 + number, answer, 0.0)
    done = by_name(twin.advance(1e3))
    assert twin.preemptions > 0
    assert len(done) == 12
    assert sum(gap.streams for gap in twin.gaps) == sum(answer - 1 for answer in answers)
    assert all(gap.gap_s > 0 for gap in twin.gaps)
    spans_s = sum(event.at_s - event.first_token_s for event in done.values())
    assert sum(gap.gap_s * gap.streams for gap in twin.gaps) == pytest.approx(spans_s, rel=1e-9)
    assert twin.cache.held_blocks == 0


def test_all_gaps_of_chunked_streams_add_up_to_their_times():
    twin = TwinEngine("w", TwinConfig(block_tokens=16, num_blocks=60, max_num_batched_tokens=256), PROFILE)
    twin.gaps = []
    for number in range(12):
        twin.submit_whole(str(number), [], 100 + number, 30 + 7 * number, 0.0)
    done = by_name(twin.advance(1e3))
    assert twin.preemptions > 0
    spans_s = sum(event.at_s - event.first_token_s for event in done.values())
    assert sum(gap.gap_s * gap.streams for gap in twin.gaps) == pytest.approx(spans_s, rel=1e-9)


def test_kernels_one_after_the_other_add_up_in_a_mixed_step_and_change_nothing_else():
    """1,000 prefill tokens that attend to 20,000 each, with 50 decodes of 28,000: by hand."""
    apart = Profile(
        parameters=70e9,
        weight_bytes=70e9,
        flops_a_s=7e15,
        memory_bytes_a_s=20e12,
        kv_bytes_a_token=300_000,
        step_overhead_s=0.002,
        attention_apart=True,
    )
    together = replace(apart, attention_apart=False)
    mixed = {"prefill_tokens": 1000, "prefill_context_tokens": 20_000_000, "decodes": 50, "decode_context_tokens": 1_400_000}
    linear_s, prefill_s, decode_s = 2 * 70e9 * 1050 / 7e15, 4 * 80 * 8192 * 20e6 / 7e15, 300_000 * 1.4e6 / 20e12
    assert apart.step_s(**mixed) == pytest.approx(0.002 + linear_s + prefill_s + decode_s)
    assert together.step_s(**mixed) == pytest.approx(0.002 + linear_s + prefill_s)  # reading is hidden behind arithmetic
    alone = ("prefill_tokens", "prefill_context_tokens"), ("decodes", "decode_context_tokens")
    for fields in alone:
        only = {key: value if key in fields else 0 for key, value in mixed.items()}
        assert apart.step_s(**only) == pytest.approx(together.step_s(**only), rel=1e-12)


# -- links -----------------------------------------------------------------------------------------------------------------


def test_two_transfers_through_one_port_have_half_of_it_each():
    """100 bytes alone for 2 s at 10 bytes/s leave 80; 40 come in: both at 5, the 40 end at 10 s, the rest is alone again."""
    wires = Wires({"p out": 10.0, "d in": 100.0, "e in": 100.0})
    wires.begin("d", "long", ("p out", "d in"), 100, 0.0)
    wires.begin("e", "short", ("p out", "e in"), 40, 2.0)
    assert wires.next_event_s() == 0.0
    assert wires.advance(9.9) == []
    assert wires.advance(50.0) == [Arrived("e", "short", pytest.approx(10.0)), Arrived("d", "long", pytest.approx(14.0))]
    assert wires.next_event_s() == float("inf")
    assert wires.carried_bytes == {"p out": 140, "d in": 100, "e in": 40}


def test_what_one_transfer_cannot_use_goes_to_the_others():
    """Three leave a port of 12, one of them for a port of 2: it gets 2, the others 5 each."""
    wires = Wires({"p out": 12.0, "slow in": 2.0, "a in": 50.0, "b in": 50.0})
    for to in ("slow", "a", "b"):
        wires.begin(to, "x", ("p out", f"{to} in"), 10, 0.0)
    arrived = {each.to: each.at_s for each in wires.advance(100.0)}
    assert arrived == {"a": pytest.approx(2.0), "b": pytest.approx(2.0), "slow": pytest.approx(5.0)}


def test_a_port_that_carries_nothing_is_an_error():
    with pytest.raises(ValueError, match="d in: 0 bytes/s"):
        Wires({"d in": 0.0})


def next_s(engine):
    found_s = engine.next_event_s()
    return float("inf") if found_s is None else found_s


def drive(engines, wires, until_s=1e3):
    """Advance all together; the events by engine."""
    events = []
    while True:
        now_s = min(wires.next_event_s(), *map(next_s, engines))
        if now_s > until_s:
            return events
        for to, name, at_s in wires.advance(now_s):
            next(each for each in engines if each.name == to).arrived(name, at_s)
        for each in engines:
            events += [(each.name, event) for event in each.advance(now_s)]


def test_a_pull_alone_on_the_link_takes_what_the_profile_says_and_two_at_once_twice_as_long():
    rate = PROFILE.transfer_bytes_a_s
    for count in (1, 2, 3):
        wires = Wires({"p out": rate, "d in": rate})
        twin = TwinEngine("d", TwinConfig(), PROFILE, wires=wires)
        for number in range(count):
            twin.submit_decode(str(number), [], 20_000, 2, 1.0, peer="p")
        pulled = [event for _, event in drive([twin], wires) if isinstance(event, Pulled)]
        flow_s = 20_000 * PROFILE.kv_bytes_a_token / rate
        assert [each.transfer_s for each in pulled] == pytest.approx([PROFILE.transfer_overhead_s + count * flow_s] * count)
        assert twin.load().transfers == count
        assert (twin.load().waiting, twin.load().running) == (0, 0)


def test_one_decode_worker_that_pulls_from_two_and_two_that_pull_from_one_share_alike():
    rate = PROFILE.transfer_bytes_a_s
    flow_s = 20_000 * PROFILE.kv_bytes_a_token / rate
    ports = dict.fromkeys(("p out", "q out", "d in", "e in"), rate)
    for pairs in ([("d", "p"), ("d", "q")], [("d", "p"), ("e", "p")]):
        wires = Wires(ports)
        twins = {name: TwinEngine(name, TwinConfig(), PROFILE, wires=wires) for name in ("d", "e")}
        for number, (to, peer) in enumerate(pairs):
            twins[to].submit_decode(str(number), [], 20_000, 2, 0.0, peer=peer)
        took_s = [event.transfer_s for _, event in drive(list(twins.values()), wires) if isinstance(event, Pulled)]
        assert took_s == pytest.approx([PROFILE.transfer_overhead_s + 2 * flow_s] * 2)


def test_half_the_bytes_a_token_are_half_the_transfer_and_half_of_what_decodes_read():
    """FP8 KV: the same tokens, half the bytes."""
    half = Profile(handshake_s=0.0, kv_bytes_a_token=PROFILE.kv_bytes_a_token // 2)
    took_s = []
    for profile in (PROFILE, half):
        wires = Wires({"p out": profile.transfer_bytes_a_s, "d in": profile.transfer_bytes_a_s})
        twin = TwinEngine("d", TwinConfig(), profile, wires=wires)
        twin.submit_decode("a", [], 28_000, 3, 0.0, peer="p")
        events = [event for _, event in drive([twin], wires)]
        took_s.append((events[0].transfer_s - profile.transfer_overhead_s, events[1].itl_p99_s - profile.step_overhead_s))
    (transfer_s, gap_s), (half_transfer_s, half_gap_s) = took_s
    assert half_transfer_s == pytest.approx(transfer_s / 2)
    weights_s = PROFILE.weight_bytes / PROFILE.memory_bytes_a_s
    assert half_gap_s - weights_s == pytest.approx((gap_s - weights_s) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_over_wires_that_cost_nothing_all_is_as_on_the_real_core(seed):
    """Links without a limit: shared or not is the same, and so the engine's own core says when everything ends."""
    cases, config = workload(seed, 50), TwinConfig(block_tokens=BLOCK, num_blocks=4_000)

    class Wired(TwinEngine):
        def __init__(self, name, config, profile):
            super().__init__(name, config, profile, wires=Wires({"p out": 1e30, "d in": 1e30}))

        def next_event_s(self):
            own_s = super().next_event_s()
            wires_s = self._wires.next_event_s()
            return own_s if wires_s == float("inf") else wires_s if own_s is None else min(own_s, wires_s)

        def advance(self, now_s):
            for _, name, at_s in self._wires.advance(now_s):
                self.arrived(name, at_s)
            return super().advance(now_s)

    free = Profile(handshake_s=0.0, transfer_bytes_a_s=1e30)
    core, twin = run(CoreEngine, cases, config, free), run(Wired, cases, config, free)
    assert core.keys() == twin.keys()
    for key, expected in core.items():
        assert twin[key].at_s == pytest.approx(expected.at_s, rel=1e-6), key
        assert twin[key].cached_tokens == expected.cached_tokens, key


# -- the shared cache ------------------------------------------------------------------------------------------------------

TIER = TierConfig(num_blocks=200, bytes_a_s=50e9, total_bytes_a_s=80e9, overhead_s=0.003)
KEYS = tuple(range(1000, 1054))
"""Of a prompt of 54 blocks and some tokens."""


def two_with_a_tier(tier=TIER):
    wires = Wires({"tier": tier.total_bytes_a_s, "p load": tier.bytes_a_s, "q load": tier.bytes_a_s})
    shared = TwinTier(tier)
    return [TwinEngine(name, TwinConfig(), PROFILE, wires=wires, tier=shared) for name in ("p", "q")], wires


def test_a_prefix_that_another_worker_computed_is_loaded_and_only_the_rest_is_computed():
    (p, q), wires = two_with_a_tier()
    p.submit_prefill("first", KEYS, 54 * 512 + 100, 0.0)
    ((_, first),) = drive([p, q], wires)
    q.submit_prefill("again", KEYS[:50], 50 * 512 + 400, first.at_s)
    ((_, again),) = drive([p, q], wires)
    load_s = TIER.overhead_s + 50 * 512 * PROFILE.kv_bytes_a_token / TIER.bytes_a_s
    step_s = PROFILE.step_s(
        prefill_tokens=400, prefill_context_tokens=400 * (2 * 50 * 512 + 400) // 2, decodes=0, decode_context_tokens=0
    )
    assert first.cached_tokens == 0
    assert again.cached_tokens == 50 * 512
    assert again.at_s - first.at_s == pytest.approx(load_s + step_s, rel=1e-9)
    assert again.scheduled_s == first.at_s


def test_what_the_worker_has_itself_is_not_loaded():
    (p, q), wires = two_with_a_tier()
    p.submit_prefill("first", KEYS, 54 * 512 + 100, 0.0)
    ((_, first),) = drive([p, q], wires)
    p.submit_prefill("again", KEYS, 54 * 512 + 100, first.at_s)
    ((_, again),) = drive([p, q], wires)
    assert again.cached_tokens == 54 * 512
    assert wires.carried_bytes["tier"] == 0


def test_two_that_load_at_once_share_what_the_tier_gives():
    (p, q), wires = two_with_a_tier()
    for number in range(2):  # two prefixes, each computed elsewhere than where it is asked for
        (p, q)[number].submit_prefill(f"first {number}", [key + 5000 * number for key in KEYS], 54 * 512 + 1, 0.0)
    drive([p, q], wires)
    q.submit_prefill("again 0", KEYS, 54 * 512 + 1, 100.0)
    p.submit_prefill("again 1", [key + 5000 for key in KEYS], 54 * 512 + 1, 100.0)
    events = drive([p, q], wires)
    load_s = TIER.overhead_s + 2 * 54 * 512 * PROFILE.kv_bytes_a_token / TIER.total_bytes_a_s
    step_s = PROFILE.step_s(prefill_tokens=1, prefill_context_tokens=54 * 512, decodes=0, decode_context_tokens=0)
    assert [event.at_s - 100.0 for _, event in events] == pytest.approx([load_s + step_s] * 2, rel=1e-9)


def test_a_full_tier_forgets_what_was_not_asked_for_for_longest_and_the_end_of_a_prompt_first():
    tier = TwinTier(TierConfig(num_blocks=5, bytes_a_s=1.0, total_bytes_a_s=1.0))
    tier.store([1, 2, 3])
    tier.store([11, 12])
    tier.touch([1, 2, 3, 4])
    tier.store([21])
    assert (tier.match([1, 2, 3]), tier.match([11, 12]), tier.match([21])) == (3, 1, 1)
    tier.store([31, 32])
    assert (tier.match([1, 2, 3]), tier.match([11]), tier.match([31, 32])) == (2, 0, 2)


def test_a_tier_without_wires_is_read_by_one_prompt_after_the_other():
    tier = TwinTier(TIER)
    for start in (0, 5000):
        tier.store([key + start for key in KEYS])
    p = TwinEngine("p", TwinConfig(), PROFILE, tier=tier)
    p.submit_prefill("first", KEYS, 54 * 512 + 1, 1.0)
    p.submit_prefill("second", [key + 5000 for key in KEYS], 54 * 512 + 1, 1.0)
    done = [event.at_s - 1.0 for event in p.advance(100.0)]
    load_s = TIER.overhead_s + 54 * 512 * PROFILE.kv_bytes_a_token / TIER.bytes_a_s
    step_s = PROFILE.step_s(prefill_tokens=1, prefill_context_tokens=54 * 512, decodes=0, decode_context_tokens=0)
    assert done == pytest.approx([load_s + step_s, 2 * load_s + step_s], rel=1e-9)


@pytest.mark.parametrize("given", [{"shared_links": False, "tier_each": False}, {"shared_links": True, "tier_each": True}])
def test_a_tier_for_all_needs_links_that_are_shared_and_one_for_each_has_none(given):
    with pytest.raises(ValueError, match="shared_links"):
        Setup(tier=TIER, **given)


# -- in a replay -----------------------------------------------------------------------------------------------------------


def one_by_one(setup, requests):
    dispatcher = Turns(setup.prefill_addresses, setup.decode_addresses)
    return replay(requests, dispatcher, setup, lambda _: Aims())


def prompts(count, every_s, tokens=28_000):
    blocks = -(-tokens // 512)
    return [Request(number * every_s, tokens, 20, tuple(range(number * 100, number * 100 + blocks))) for number in range(count)]


def test_a_replay_with_a_slow_link_waits_for_it_and_with_shared_ones_the_longer():
    """Two prefill workers that end at the same time, one decode worker with a link of 5 GB/s."""
    profile = Profile(handshake_s=0.0, transfer_bytes_a_s=5e9)
    flow_s = 28_000 * profile.kv_bytes_a_token / 5e9
    compute_s = one_by_one(
        Setup(prefill=2, decode=1, profile=Profile(handshake_s=0.0, transfer_bytes_a_s=1e30)), prompts(2, 0.0)
    )
    for shared, times in ((False, 1), (True, 2)):
        setup = Setup(prefill=2, decode=1, profile=profile, shared_links=shared)
        found = one_by_one(setup, prompts(2, 0.0))
        for outcome, before in zip(found.outcomes, compute_s.outcomes, strict=True):
            assert outcome.ttft_s - before.ttft_s == pytest.approx(times * flow_s, rel=1e-3)
        decode = found.worked[setup.decode_addresses[0]]
        assert decode.transferred_bytes == 2 * 28_000 * profile.kv_bytes_a_token


def test_each_role_has_its_own_engine_in_a_replay():
    fast = Profile(handshake_s=0.0, flops_a_s=4 * PROFILE.flops_a_s)
    one = one_by_one(Setup(prefill=1, decode=1, profile=PROFILE), prompts(1, 1.0)).outcomes[0]
    two = one_by_one(Setup(prefill=1, decode=1, profile=PROFILE, prefill_profile=fast), prompts(1, 1.0)).outcomes[0]

    def in_chunks_s(profile):
        steps = [(start, min(8192, 28_000 - start)) for start in range(0, 28_000, 8192)]
        return sum(
            profile.step_s(prefill_tokens=n, prefill_context_tokens=n * (2 * at + n) // 2, decodes=0, decode_context_tokens=0)
            for at, n in steps
        )

    assert one.ttft_s - two.ttft_s == pytest.approx(in_chunks_s(PROFILE) - in_chunks_s(fast), rel=1e-9)
    assert one.itl_p99_s == pytest.approx(two.itl_p99_s, rel=1e-9)
    with pytest.raises(ValueError, match="do not fit"):
        one_by_one(Setup(prefill=1, decode=1, prefill_engine=TwinConfig(num_blocks=20)), prompts(1, 1.0))


def test_prefill_workers_of_a_replay_share_a_tier_and_by_turns_each_has_what_the_other_computed():
    tier = TierConfig(num_blocks=1000, bytes_a_s=50e9, total_bytes_a_s=100e9)
    same = [Request(number * 10.0, 28_000, 5, tuple(range(55))) for number in range(3)]
    apart = one_by_one(Setup(prefill=3, decode=1), same)
    shared = one_by_one(Setup(prefill=3, decode=1, shared_links=True, tier=tier), same)
    assert [outcome.cached_tokens for outcome in apart.outcomes] == [0, 0, 0]
    assert [outcome.cached_tokens for outcome in shared.outcomes] == [0, 54 * 512, 54 * 512]
    assert shared.outcomes[1].ttft_s < 0.3 * apart.outcomes[1].ttft_s
