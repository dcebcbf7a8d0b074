"""Workloads of `baton plan`: lengths, shared prefixes, common random numbers, and the search for the highest good rate."""

import itertools
import json
import math

import pytest

from extproc.plan.errors import PlanError
from extproc.plan.goodput_search import Stretch, highest_rate, share_at
from extproc.plan.lengths import LONGEST_TOKENS, parse
from extproc.plan.workload import Workload, of_trace
from workers.goodput import Outcome


def test_a_distribution_has_the_mean_and_the_percentiles_that_it_was_given():
    assert parse("28000", "--isl").mean == parse("fixed:28000", "--isl").mean == 28_000
    assert parse("uniform:100-300", "--isl").mean == pytest.approx(200, rel=0.001)
    lognormal = parse("lognormal:mean=4000,cv=1", "--isl")
    assert lognormal.mean == pytest.approx(4_000, rel=0.01)
    second = lognormal.mean_of(lambda tokens: float(tokens) ** 2)
    assert math.sqrt(second / lognormal.mean**2 - 1) == pytest.approx(1, rel=0.1), "cv"
    assert lognormal.at(0.5) == pytest.approx(4_000 / math.sqrt(2), abs=1), "the median of a lognormal with cv 1"
    steps = parse("percentiles:p50=1000,p90=8000,p99=32000", "--isl")
    assert [steps.at(share) for share in (0.01, 0.5, 0.7, 0.9, 0.99, 0.9999)] == [1000, 1000, 2828, 8000, 32000, 32000]
    assert parse("lognormal:mean=4000,cv=3,max=9000", "--isl").longest == 9_000
    assert parse("lognormal:mean=1000000,cv=20", "--isl").longest == LONGEST_TOKENS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipf:3", "no distribution 'zipf'"),
        ("0", "whole tokens from 1"),
        ("12.5", "whole tokens from 1"),
        ("uniform:7", "a lower and an upper end"),
        ("uniform:9-7", "the upper end 7 is below the lower end 9"),
        ("lognormal:mean=5", "mean and cv are needed"),
        ("lognormal:mean=5,cv=x", "cv: 'x' is not a number"),
        ("lognormal:mean=5,cv=-1", "cv: from 0 to 20"),
        ("lognormal:mean=5,cv=1,cv=2", "cv is there twice"),
        ("percentiles:p50=10", "at least two percentiles"),
        ("percentiles:p50=10,p90=5", "p90 is less than p50"),
        ("percentiles:p50=10,p101=50", "from p0 to p100"),
        ("percentiles:median=10,p9=50", "'median' is no percentile"),
    ],
)
def test_a_faulty_distribution_is_refused_in_words_with_the_option_it_came_from(text, said):
    with pytest.raises(PlanError) as caught:
        parse(text, "--isl")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--isl: ")


def workload(**changes) -> Workload:
    return Workload(**{"inputs": parse("lognormal:mean=4000,cv=1", "in"), "outputs": parse("uniform:10-90", "out"), **changes})


def test_at_another_rate_the_same_requests_come_only_faster():
    slow, fast = workload(prefix_share=0.5).requests(2, 100, 7), workload(prefix_share=0.5).requests(4, 50, 7)
    assert len(slow) == len(fast) > 150
    for one, other in zip(slow, fast, strict=True):
        assert one.at_s == pytest.approx(2 * other.at_s)
        assert (one.input_tokens, one.output_tokens, one.hash_ids) == (other.input_tokens, other.output_tokens, other.hash_ids)
    assert workload().requests(2, 100, 8)[0].input_tokens != workload().requests(2, 100, 7)[0].input_tokens, "another seed"


def test_one_distribution_can_be_changed_without_a_change_of_what_else_is_drawn():
    before, after = workload().requests(2, 50, 1), workload(outputs=parse("500", "out")).requests(2, 50, 1)
    assert [(each.at_s, each.input_tokens) for each in before] == [(each.at_s, each.input_tokens) for each in after]


def test_requests_share_the_beginnings_of_their_prompts_as_far_as_they_were_told_and_no_further():
    requests = workload(inputs=parse("5120", "in"), prefix_share=0.5, prefix_groups=3).requests(5, 100, 0)
    heads = {each.hash_ids[:5] for each in requests}
    tails = [block for each in requests for block in each.hash_ids[5:]]
    assert len(heads) == 3
    assert len(tails) == len(set(tails)) == 5 * len(requests)


def test_arrivals_are_as_many_as_the_rate_says():
    assert len(workload().requests(20, 500, 3)) == pytest.approx(10_000, rel=0.03)


@pytest.mark.parametrize(("rate", "duration", "said"), [(0, 1, "rate"), (1, 0, "duration"), (1e6, 1e6, "at most")])
def test_a_rate_or_a_duration_that_makes_no_sense_is_refused(rate, duration, said):
    with pytest.raises(PlanError, match=said):
        workload().requests(rate, duration, 0)


def trace_file(tmp_path, count=100):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 5 + n, "hash_ids": [0, n + 1]} for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_seed_begins_elsewhere_in_a_trace_and_no_request_comes_twice(tmp_path):
    trace = of_trace(trace_file(tmp_path))
    first, other = trace.requests(2, 1_000, 0), trace.requests(2, 1_000, 1)
    assert [each.output_tokens for each in first] == list(range(5, 105))
    assert sorted(each.output_tokens for each in other) == list(range(5, 105))
    assert other[0].output_tokens != 5
    assert all(0 <= one.at_s <= next_.at_s for one, next_ in itertools.pairwise(other))
    assert other[-1].at_s == pytest.approx(99 / 2, abs=0.6), "at the rate it was asked for"
    assert len(trace.requests(2, 10, 1)) == 20
    assert trace.shared_tokens(first[3]) == 512, "the block that all have; the other one is nobody else's"


def test_a_rate_that_is_far_beyond_what_a_trace_can_show_is_refused_with_what_to_do(tmp_path):
    trace = of_trace(trace_file(tmp_path))
    with pytest.raises(PlanError, match=r"trace\.jsonl: at 5e\+04 requests/s its 100 requests come within .* a longer trace"):
        trace.requests(50_000, 50, 0)


def test_a_faulty_trace_is_refused_with_its_name_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    with pytest.raises(PlanError, match=r"bad\.jsonl: No such file"):
        of_trace(path)
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 0}\n')
    with pytest.raises(PlanError, match=r"bad\.jsonl: line 2"):
        of_trace(path)
    with pytest.raises(PlanError, match="at least two requests"):
        of_trace(trace_file(tmp_path, 1))


def test_the_highest_good_rate_is_found_from_above_and_from_below_to_the_resolution():
    for guess in (0.5, 9.9, 10.1, 700.0):
        found = highest_rate(lambda rate: 1.0 if rate <= 10 else 0.5, guess_per_s=guess, resolution=0.01)
        assert found.rate_per_s <= 10 < found.above_per_s <= found.rate_per_s * 1.01
        assert found.share == 1.0
        assert len(found.tried) < 20
    assert highest_rate(lambda rate: 1 - rate / 100, guess_per_s=3, share=0.8, resolution=0.001).rate_per_s == pytest.approx(
        20, rel=0.001
    )


def test_where_no_rate_is_good_the_search_says_so_and_ends():
    found = highest_rate(lambda _: 0.2, guess_per_s=10, lowest_per_s=0.1)
    assert (found.rate_per_s, found.above_per_s) == (0.0, 0.1)
    assert math.isnan(found.share)
    for wrong in ({"guess_per_s": 0.0}, {"guess_per_s": 1.0, "share": 0.0}, {"guess_per_s": 1.0, "resolution": 0.0}):
        with pytest.raises(PlanError):
            highest_rate(lambda _: 1.0, **wrong)


def test_only_requests_between_warm_up_and_cool_down_count():
    def run(requests):
        return [
            Outcome(arrived_s=each.at_s, ttft_s=0.1 if 10 <= each.at_s < 30 else 9.0, itl_p99_s=0.01, input_tokens=1)
            for each in requests
        ]

    slos = {"seed": 0, "ttft_slo_s": 1.0, "itl_slo_s": 0.1}
    exact = share_at(run, workload(), Stretch(warm_up_s=10, counted_s=20, cool_down_s=5), **slos)
    early = share_at(run, workload(), Stretch(warm_up_s=0, counted_s=20, cool_down_s=5), **slos)
    assert exact(3) == 1.0
    assert early(3) == pytest.approx(0.5, abs=0.1)
