"""Traces as they are loaded, and what is counted as served as promised."""

import gzip
import json
import math

import pytest

from workers import goodput, traces
from workers.goodput import Outcome, Status


def line(timestamp=0, tokens=600, output=5, ids=(1, 2), **more):
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": list(ids), **more})


def write(tmp_path, *lines, zipped=False):
    path = tmp_path / ("trace.jsonl.gz" if zipped else "trace.jsonl")
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_becomes_a_request_zipped_or_not(tmp_path, zipped):
    path = write(tmp_path, line(), "", line(1500, 513, 7, (1, 3), type="chat"), zipped=zipped)
    assert traces.load(path) == [
        traces.Request(0.0, 600, 5, (1, 2)),
        traces.Request(1.5, 513, 7, (1, 3)),
    ]


def test_requests_of_one_tick_are_spread_to_the_next(tmp_path):
    path = write(tmp_path, line(), line(), line(), line(3000), line(5000), line(5000))
    assert [round(request.at_s, 6) for request in traces.load(path)] == [0, 1, 2, 3, 5, 6]


def test_a_cut_through_a_tick_moves_nobody(tmp_path):
    path = write(tmp_path, *[line() for _ in range(3)], line(3000))
    assert [request.at_s for request in traces.load(path, offset=1, limit=2)] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2"),
        (line(tokens=0, ids=()), "at least 1"),
        (line(tokens=600, ids=(1,)), "2 blocks of 512, not 1"),
        (line(timestamp=-1), "before"),
        (json.dumps({"timestamp": 1}), "line 2.*input_length"),
        (line(ids=("a", "b")), "line 2.*hash_ids"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, bad, says):
    path = write(tmp_path, line(), bad)
    with pytest.raises(ValueError, match=says):
        traces.load(path)
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 2"):
        traces.load(path)


def test_a_broken_gzip_file_is_a_value_error(tmp_path):
    path = write(tmp_path, *[line(i) for i in range(100)], zipped=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"trace\.jsonl\.gz"):
        traces.load(path)


def test_time_is_scaled_to_the_rate():
    requests = [traces.Request(at_s, 10, 1, (1,)) for at_s in (5.0, 6.0, 9.0)]
    assert [request.at_s for request in traces.at_rate(requests, 4.0)] == [0.0, 0.125, 0.5]
    with pytest.raises(ValueError, match="rate"):
        traces.at_rate(requests, 0)
    with pytest.raises(ValueError, match="at once"):
        traces.at_rate([requests[0], requests[0]], 1.0)


def outcome(**more):
    return Outcome(**{"arrived_s": 0.0, "ttft_s": 1.0, "itl_p99_s": 0.02, "input_tokens": 100, **more})


def test_only_what_was_served_within_both_limits_is_good():
    outcomes = [
        outcome(),
        outcome(itl_p99_s=None),  # a single token has no gaps
        outcome(ttft_s=2.6),
        outcome(itl_p99_s=0.05),
        outcome(status=Status.REFUSED, ttft_s=None, itl_p99_s=None),
        outcome(status=Status.FAILED),
        outcome(arrived_s=10.0, cached_tokens=50, wait_s=3.0),
        outcome(ttft_s=None),
    ]
    result = goodput.summary(outcomes)
    assert (result.goodput, result.goodput_per_s) == (3 / 8, 0.3)
    assert (result.refused, result.failed, result.longest_wait_s) == (1, 1, 3.0)
    assert result.hit_ratio == 50 / 600
    assert result.ttft_p50_s == 1.0
    assert result.ttft_p99_s == 2.6
    assert goodput.summary(outcomes, ttft_slo_s=3.0, itl_slo_s=0.1).goodput == 5 / 8


def test_nothing_served_gives_no_number_and_no_error():
    assert math.isnan(goodput.summary([]).goodput)
    assert math.isnan(goodput.summary([outcome(status=Status.REFUSED)]).ttft_p50_s)
