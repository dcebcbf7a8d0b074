"""An arrangement in the twin: what comes out is what its parts add up to."""

from dataclasses import replace

import pytest

from extproc.plan.arrangement import Arrangement, SharedCache
from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.plan.links import LINKS, link
from extproc.plan.simulate import Quantiles, Slos, _quantiles, setup_of, simulate
from extproc.routing.job import Aims, Mode, Objective
from workers.sim.timing import Profile
from workers.traces import Request

PROFILE = Profile(attention_apart=True)
ENGINE = Engine(PROFILE, 400_000, 2)
SLOS = Slos(2.5, 0.045)
HOP_S = 0.002


def prompts(count, every_s, tokens=10_000, answer=50, shared=False):
    blocks = -(-tokens // 512)
    ids = [tuple(range(0 if shared else number * 1000, (0 if shared else number * 1000) + blocks)) for number in range(count)]
    return [Request(number * every_s, tokens, answer, ids[number]) for number in range(count)]


def colocated(**changes):
    fields = {"name": "one", "prefill": 0, "decode": 1, "prefill_engine": ENGINE, "decode_engine": ENGINE}
    return Arrangement(**(fields | changes))


def apart(**changes):
    return colocated(**({"prefill": 1, "link": link("ib-400")} | changes))


def in_steps_s(tokens, step_tokens):
    chunks = [(at, min(step_tokens, tokens - at)) for at in range(0, tokens, step_tokens)]
    return sum(
        PROFILE.step_s(prefill_tokens=n, prefill_context_tokens=n * (2 * at + n) // 2, decodes=0, decode_context_tokens=0)
        for at, n in chunks
    )


def decode_steps_s(context, steps):
    return [
        PROFILE.step_s(prefill_tokens=0, prefill_context_tokens=0, decodes=1, decode_context_tokens=context + number)
        for number in range(steps)
    ]


def test_one_request_over_a_link_takes_what_its_parts_take():
    found = simulate(apart(), prompts(1, 1.0), SLOS, seed=0)
    one = LINKS["ib-400"]
    transfer_s = one.overhead_s + 10_000 * PROFILE.kv_bytes_a_token / one.worker_bytes_a_s(2)
    last_token_s = PROFILE.step_s(prefill_tokens=1, prefill_context_tokens=9_999, decodes=0, decode_context_tokens=0)
    expected_s = 4 * HOP_S + in_steps_s(10_000, 8192) + transfer_s + last_token_s
    assert found.ttft_s.mean == pytest.approx(expected_s, rel=1e-4)
    gaps_s = decode_steps_s(10_001, 49)
    assert found.itl_s.mean == pytest.approx(sum(gaps_s) / 49, rel=1e-9)
    assert found.itl_s.p99 == pytest.approx(gaps_s[-1], rel=1e-9)
    assert found.prefill_busy == pytest.approx(in_steps_s(10_000, 8192) / found.virtual_s, rel=1e-9)
    assert found.decode_busy == pytest.approx((sum(gaps_s) + last_token_s) / found.virtual_s, rel=1e-9)
    moved_bytes = 10_000 * PROFILE.kv_bytes_a_token
    assert found.link_busy == pytest.approx(moved_bytes / one.worker_bytes_a_s(2) / found.virtual_s, rel=1e-9)
    assert (found.goodput, found.requests, found.prompt_tokens, found.output_tokens) == (1.0, 1, 10_000, 50)


def test_one_request_on_a_colocated_worker_takes_its_steps_and_two_hops():
    for chunked, tokens in ((True, 2048), (False, 20_000)):
        found = simulate(colocated(chunked=chunked, chunk_tokens=tokens), prompts(1, 1.0), SLOS, seed=0)
        assert found.ttft_s.mean == pytest.approx(2 * HOP_S + in_steps_s(10_000, tokens), rel=1e-9)
        assert found.prefill_busy is found.link_busy is None


def test_whole_prompts_stall_streams_chunks_less_and_apart_they_do_not():
    """A prompt of 10,000 every 0.9 s, on two workers: a stream of 80 meets another's prompt once, which is above its p99."""
    requests = prompts(40, 0.9, answer=80)
    whole = simulate(colocated(decode=2, chunked=False, chunk_tokens=20_000), requests, SLOS, seed=0)
    chunked = simulate(colocated(decode=2, chunk_tokens=512), requests, SLOS, seed=0)
    separate = simulate(apart(), requests, SLOS, seed=0)
    assert whole.itl_s.p99 > 5 * chunked.itl_s.p99 > 10 * separate.itl_s.p99
    assert whole.ttft_s.mean < chunked.ttft_s.mean


def test_every_gap_between_two_tokens_is_in_the_quantiles():
    requests = prompts(20, 0.2, answer=30)
    for arrangement in (colocated(), colocated(chunked=False, chunk_tokens=20_000), apart()):
        found = simulate(arrangement, requests, SLOS, seed=0)
        assert found.output_tokens == 20 * 30
        worst_s = max(outcome.itl_p99_s for outcome in found.outcomes)
        assert found.itl_s.p50 <= found.itl_s.p99 <= worst_s


def test_a_link_that_is_shared_makes_transfers_wait_for_each_other():
    slow = link("eth-10")
    one = simulate(apart(link=slow), prompts(1, 1.0), SLOS, seed=0)
    flow_s = 10_000 * PROFILE.kv_bytes_a_token / slow.worker_bytes_a_s(2)
    assert one.ttft_s.mean > flow_s > 2.5
    many = simulate(apart(link=slow, prefill=3, decode=1), prompts(3, 0.0), SLOS, seed=0)
    assert many.ttft_s.p99 > 3 * flow_s
    assert many.goodput == 0.0


def test_a_shared_cache_gives_each_prefill_worker_what_the_others_computed():
    cache = SharedCache(name="memory", capacity_tokens=100_000, bytes_a_s=50e9)
    turns = Aims(mode=Mode.DISAGGREGATE, objective=Objective.ROUND_ROBIN, held=False)
    requests = prompts(6, 2.0, shared=True)
    without = simulate(apart(prefill=3), requests, SLOS, seed=0, aims=turns)
    with_it = simulate(apart(prefill=3, shared_cache=cache), requests, SLOS, seed=0, aims=turns)
    blocks = (10_000 - 1) // 512 * 512
    assert without.cached_tokens == 3 * blocks
    assert with_it.cached_tokens == 5 * blocks


def test_only_what_is_counted_is_in_shares_and_times():
    requests = prompts(10, 2.0)
    found = simulate(apart(), requests, SLOS, seed=0, counted=lambda outcomes: outcomes[3:5])
    assert found.requests == 2
    assert [outcome.arrived_s for outcome in found.outcomes] == [6.0, 8.0]


def test_the_same_seed_gives_the_same_numbers():
    requests = prompts(30, 0.3)
    one, two = (simulate(apart(decode=3), requests, SLOS, seed=5) for _ in range(2))
    assert one == two


def test_engines_of_the_two_roles_are_their_own():
    """Twice the GPUs for prefills: only the time to the first token gets shorter, and twice the links are there."""
    twice = Engine(replace(PROFILE, flops_a_s=2 * PROFILE.flops_a_s), 800_000, 4)
    one, two = (simulate(apart(prefill_engine=each), prompts(1, 1.0), SLOS, seed=0) for each in (ENGINE, twice))
    assert two.ttft_s.mean < 0.6 * one.ttft_s.mean
    assert two.itl_s.p50 == one.itl_s.p50
    assert apart(prefill_engine=twice).gpus == 6
    setup = setup_of(apart(prefill_engine=twice))
    assert setup.prefill_engine.num_blocks == 800_000 // 512
    assert setup.prefill_profile.transfer_bytes_a_s == 2 * setup.profile.transfer_bytes_a_s


def test_quantiles_weigh_each_value_by_how_often_it_comes():
    assert _quantiles([(3.0, 1), (1.0, 98), (2.0, 1)]) == Quantiles(pytest.approx(1.03), 1.0, 1.0, 2.0)
    assert _quantiles([(3.0, 2), (1.0, 98)]).p99 == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: colocated(decode=0), "0 prefill and 0 decode workers"),
        (lambda: colocated(prefill=1), "need a link"),
        (lambda: colocated(chunk_tokens=100), r"chunk_tokens \(100\) must not be below max_num_seqs"),
        (
            lambda: apart(prefill_engine=Engine(replace(PROFILE, kv_bytes_a_token=163_840), 1, 2)),
            "163840 bytes on one side and 327680 on the other",
        ),
        (lambda: SharedCache(name="m", capacity_tokens=0, bytes_a_s=1.0), "capacity_tokens must be at least 1, not 0"),
        (lambda: SharedCache(name="m", capacity_tokens=1, bytes_a_s=0.0), "bytes_a_s must be above 0, not 0"),
        (lambda: SharedCache(name="m", capacity_tokens=1, bytes_a_s=1.0, overhead_s=-1.0), "overhead_s must be 0 or more"),
        (lambda: simulate(apart(), [], SLOS, seed=0), "no requests"),
        (lambda: simulate(apart(), prompts(1, 1.0, tokens=500_000), SLOS, seed=0), "'one'.*do not fit"),
        (
            lambda: simulate(colocated(chunked=False, chunk_tokens=8192), prompts(1, 1.0), SLOS, seed=0),
            "'one'.*does not cut prompts into chunks",
        ),
        (
            lambda: simulate(colocated(decode_engine=Engine(PROFILE, 500, 2)), prompts(1, 1.0), SLOS, seed=0),
            "500 tokens is less than one block",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_wrong(make, message):
    with pytest.raises(PlanError, match=message):
        make()
