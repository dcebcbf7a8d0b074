"""What `baton bench` counts: tokens of a stream, failures by kind, goodput over all requests, headers, shared prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from extproc.loadgen import account, headers, prompts
from extproc.loadgen.answer import Answer, error_of
from extproc.loadgen.arrivals import Stage, parse_gaps
from extproc.loadgen.bench import Load
from extproc.loadgen.errors import BenchError
from extproc.loadgen.own import Own, Watch
from extproc.loadgen.run import Run
from extproc.loadgen.sample import Kind, Sample
from extproc.loadgen.target import base_of
from extproc.plan import lengths
from extproc.plan.workload import Workload
from workers.sim import tokens
from workers.traces import Request

ON_TIME = Own(send_late_p50_s=0, send_late_p99_s=0, send_late_max_s=0, loop_late_p99_s=0, cpu_share=0, cpu_s=0)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


CHAT = (
    event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    + event(choices=[{"delta": {"reasoning_content": "hm"}}])
    + b": a comment\r\n\r\n"
    + event(choices=[{"delta": {"content": "Grüße"}}])
    + event(choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}])
    + event(choices=[{"delta": {}, "finish_reason": "length"}])
    + event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}})
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_says_the_same_however_it_is_cut(size: int) -> None:
    answer = Answer()
    for at in range(0, len(CHAT), size):
        answer.feed(CHAT[at : at + size], float(at))
    assert len(answer.times_s) == 3  # neither the role, nor the end, nor the usage is a token
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (9, 3, 4)
    assert (answer.finish_reason, answer.done, answer.fault) == ("length", True, None)


def test_an_error_inside_of_a_stream_is_kept_with_its_code() -> None:
    answer = Answer()
    answer.feed(event(choices=[{"text": "a"}]) + event(error={"message": "gone", "code": 500}) + b"data: [DONE]\n\n", 1.0)
    assert answer.fault == ("500", "gone")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"error":{"message":"full","code":"no_capacity"}}', ("no_capacity", "full")),
        (b'{"error":{"message":"full","type":"BadRequest","code":null}}', ("BadRequest", "full")),
        (b'{"error":"no"}', ("", "no")),
        (b'{"object":"error","message":"bad","code":400}', ("400", "bad")),
        (b'{"detail":"Not Found"}', ("", '"Not Found"')),
        (b"upstream connect error", ("", "upstream connect error")),
    ],
)
def test_errors_of_all_kinds_of_servers_are_read(body: bytes, found: tuple[str, str]) -> None:
    assert error_of(body) == found


def served(due_s: float, ttft_s: float, *gaps_s: float, **more: object) -> Sample:
    sample = Sample(due_s=due_s, sent_s=due_s, kind=Kind.SERVED, ttft_s=ttft_s, gaps_s=list(gaps_s))
    sample.end_s = ttft_s + sum(gaps_s)
    sample.pieces = len(gaps_s) + 1
    sample.prompt_tokens, sample.output_tokens = 100, len(gaps_s) + 1
    sample.asked_input_tokens, sample.asked_output_tokens = 100, len(gaps_s) + 1
    for name, value in more.items():
        setattr(sample, name, value)
    return sample


def reported(*samples: Sample, interrupted: bool = False) -> account.Report:
    run = Run(samples=list(samples), own=ON_TIME, wall_s=20.0, interrupted=interrupted, peak_in_flight=2)
    what = {"target": "t", "model": "m", "api": "chat", "load": "l", "seed": 0}
    return account.report(run, **what, span_s=10.0, ttft_slo_s=1.0, itl_slo_s=0.05)  # type: ignore[arg-type]


def test_goodput_is_over_all_requests_those_that_failed_included() -> None:
    found = reported(
        served(0, 0.5, 0.01, 0.02),
        served(1, 1.5, 0.01),  # late
        served(2, 0.5, 0.01, 0.09),  # stalled once
        served(3, 0.5),  # a single token has no gap
        Sample(due_s=4, kind=Kind.TIMEOUT),
        Sample(due_s=5, kind=Kind.UNSENT),
        Sample(due_s=6, kind=Kind.REFUSED, status=429),
        Sample(due_s=7, kind=Kind.BROKEN, status=200, ttft_s=0.1, gaps_s=[0.01]),
    )
    assert (found.all.requests, found.all.served, found.all.good) == (8, 4, 2)
    assert (found.all.goodput, found.all.good_per_s) == (0.25, pytest.approx(0.2))
    assert found.all.ttft.count == 4 and found.all.ttft.max == 1.5  # nothing of what was broken
    assert found.all.itl.count == 5


def test_tokens_are_the_engines_and_whoever_does_not_count_is_named() -> None:
    found = reported(
        served(0, 0.1, 0.1, 0.1, cached_tokens=60),
        served(1, 0.1, prompt_tokens=None, output_tokens=None),
        Sample(due_s=2, kind=Kind.BROKEN, prompt_tokens=5, output_tokens=5),
    )
    assert (found.tokens.prompt, found.tokens.output, found.tokens.cached) == (100, 3, 60)
    assert found.tokens.output_per_s == pytest.approx(3 / 20)
    assert found.warnings == ["1 served requests have no usage: their tokens are not counted"]


def test_several_tokens_in_a_piece_are_noticed() -> None:
    sample = Sample(due_s=0)
    answer = Answer()
    for number in range(5):
        answer.feed(event(choices=[{"text": "four words are here"}]), 10.0 + 0.2 * number)
    answer.feed(event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 20}), 11.0)
    sample.read(answer, 9.5)
    assert (sample.ttft_s, sample.pieces) == (0.5, 5)
    assert sample.gaps_s == pytest.approx([0.2] * 4)  # what the reader waits
    assert sample.tpot_s == pytest.approx(0.8 / 16)  # four pieces of four tokens after the first
    sample.kind, sample.asked_input_tokens, sample.asked_output_tokens = Kind.SERVED, 1, 20
    assert "a piece of a stream has 4.00 tokens" in reported(sample).warnings[0]


def test_prompts_of_another_length_than_asked_for_are_noticed() -> None:
    (warning,) = reported(served(0, 0.1, 0.1, asked_input_tokens=50)).warnings
    assert warning == "prompts had 2.00 times the tokens that were asked for"


def test_failures_are_told_apart_by_kind_status_and_code() -> None:
    bad = [Sample(due_s=0, kind=Kind.REFUSED, status=503, code="a", message=f"first {n}") for n in range(3)]
    bad += [Sample(due_s=0, kind=Kind.REFUSED, status=503, code="b"), Sample(due_s=0, kind=Kind.TIMEOUT, code="timeout")]
    found = reported(*bad).failures
    assert [(each.kind, each.status, each.code, each.count) for each in found] == [
        ("refused", 503, "a", 3),
        ("refused", 503, "b", 1),
        ("timeout", None, "timeout", 1),
    ]
    assert found[0].example == "first 0"


def test_the_report_is_broken_down_by_header() -> None:
    gold, bronze = {"x-tenant": "gold"}, {"x-tenant": "bronze"}
    found = reported(
        served(0, 0.1, groups=gold), served(1, 3.0, groups=bronze), Sample(due_s=2, kind=Kind.TIMEOUT, groups=bronze)
    )
    assert {value: (some.requests, some.good) for value, some in found.groups["x-tenant"].items()} == {
        "gold": (1, 1),
        "bronze": (2, 0),
    }


def test_a_generator_that_does_not_keep_up_says_so() -> None:
    late = Own(send_late_p50_s=0, send_late_p99_s=0.03, send_late_max_s=1, loop_late_p99_s=0.02, cpu_share=0.95, cpu_s=9)
    assert [each.split(" ")[-2:] for each in late.warnings] == [["ms", "late"], ["ms", "late"], ["a", "processor"]]
    assert ON_TIME.warnings == []


def test_a_request_that_a_timer_sent_a_moment_early_is_on_time() -> None:
    own = Watch().own([-2e-5, -1e-5, 0.25])
    assert (f"{own.send_late_p50_s * 1e3:.1f}", own.send_late_max_s) == ("0.0", 0.25)


def test_values_are_drawn_as_often_as_their_weights_say_and_alike_for_a_seed() -> None:
    tenants = headers.parse_drawn("X-Tenant=gold:1, bronze:3")
    rows = headers.draw([tenants, headers.parse_drawn("x-b=0,1")], 4_000, 5)
    assert Counter(row["x-tenant"] for row in rows)["gold"] == pytest.approx(1_000, rel=0.1)
    assert Counter(row["x-b"] for row in rows)["0"] == pytest.approx(2_000, rel=0.1)
    assert [row["x-tenant"] for row in headers.draw([tenants], 4_000, 5)] == [row["x-tenant"] for row in rows]


@pytest.mark.parametrize("text", ["x", "a b=1", "x=", "x=a:0", "x=a:z", "x=a,a", "content-type=a", "x=a:inf"])
def test_headers_that_cannot_be_drawn_are_said(text: str) -> None:
    with pytest.raises(BenchError):
        headers.parse_drawn(text)


def test_no_error_about_a_header_or_a_key_has_its_value(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as fault:
        headers.parse_header("authorization=Bearer geheim\n")
    assert "geheim" not in str(fault.value)
    with pytest.raises(BenchError) as fault:
        headers.key_headers(key_file=None, key_env="KEY", environ={"KEY": "ge heim"})
    assert "heim" not in str(fault.value) and "KEY" in str(fault.value)
    file = tmp_path / "key"
    file.write_text("k1\n")
    assert headers.key_headers(key_file=str(file), key_env=None) == {"authorization": "Bearer k1"}
    assert headers.key_headers(key_file=None, key_env="KEY", environ={"KEY": "k2"}) == {"authorization": "Bearer k2"}
    for key_env in (None, "KEY"):
        with pytest.raises((BenchError, OSError), match=r"absent|not set|both"):
            headers.key_headers(key_file=None if key_env else str(tmp_path / "absent"), key_env=key_env, environ={})


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://gateway/v1/", "https://gateway"),
        ("http://[::1]:80/team/v1", "http://[::1]:80/team"),
    ],
)
def test_an_address_may_come_with_or_without_scheme_and_v1(given: str, base: str) -> None:
    assert base_of(given) == base


@pytest.mark.parametrize("given", ["ftp://x", "http://", "http://x:port", "http://x?y=1", "http://u:geheim@x"])
def test_addresses_that_cannot_be_are_said(given: str) -> None:
    with pytest.raises(BenchError, match="address") as error:
        base_of(given)
    assert "geheim" not in str(error.value)


def prompt_ids(request: Request, **how: object) -> list[int]:
    options = {"api": "completions", "model": "m", "seed": 0, "scale": prompts.Scale(), "ignore_eos": True, "extra": {}} | how
    return list(tokens.encode(json.loads(prompts.body(request, **options))["prompt"]))  # type: ignore[arg-type]


def test_prompts_share_exactly_what_their_hash_ids_share() -> None:
    one = prompt_ids(Request(0.0, 1_500, 8, (7, 8, 9)))
    other = prompt_ids(Request(0.0, 2_000, 8, (7, 8, 10, 11)))
    assert (len(one), len(other)) == (1_500, 2_000)
    assert one[:1_024] == other[:1_024] and one[1_024:1_500] != other[1_024:1_500]
    assert prompt_ids(Request(0.0, 1_500, 8, (7, 8, 9)), seed=1)[:100] != one[:100]  # no cache knows it


@pytest.mark.parametrize("scale", [prompts.Scale(tokens_per_word=1.6, around_tokens=30), prompts.Scale(tokens_per_word=2.9)])
def test_prompts_have_the_length_that_was_asked_for_by_the_engines_count(scale: prompts.Scale) -> None:
    for length in (40, 512, 513, 3_000):
        ids = tuple(range(-(-length // 512)))
        words = len(prompt_ids(Request(0.0, length, 1, ids), scale=scale))
        assert words * scale.tokens_per_word + scale.around_tokens == pytest.approx(length, abs=2 + 2 * len(ids))


def test_a_body_asks_for_exactly_the_tokens_and_for_the_usage() -> None:
    fields = json.loads(
        prompts.body(
            Request(0.0, 20, 37, (1,)),
            api="chat",
            model="m",
            seed=0,
            scale=prompts.Scale(),
            ignore_eos=False,
            extra=prompts.extra_fields('{"temperature": 0}'),
        )
    )
    assert {name: fields[name] for name in ("max_tokens", "stream", "temperature", "stream_options")} == {
        "max_tokens": 37,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    assert "ignore_eos" not in fields
    for bad in ("[]", "{", '{"model": "x"}'):
        with pytest.raises(BenchError, match="body"):
            prompts.extra_fields(bad)


WORKLOAD = Workload(inputs=lengths.parse("600", ""), outputs=lengths.parse("8", ""), prefix_share=0.9, prefix_groups=2)


def test_so_many_requests_come_in_the_time_that_the_rate_says() -> None:
    requests, span_s = Load(gaps=parse_gaps("gamma:3"), rate_per_s=4, limit=200, workload=WORKLOAD).requests()
    assert len(requests) == 200 and span_s > requests[-1].at_s
    requests, span_s = Load(gaps=parse_gaps("constant"), rate_per_s=4, duration_s=5, workload=WORKLOAD).requests()
    assert (len(requests), span_s) == (20, 5)
    assert len({request.hash_ids[0] for request in requests}) == 2  # 512 of 600 tokens are shared in two groups


def test_a_trace_keeps_its_times_or_takes_those_that_were_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1_000 * n**2, "input_length": 10, "output_length": 5, "hash_ids": [n]} for n in range(5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gaps = parse_gaps("constant")
    requests, _ = Load(gaps=gaps, trace=file).requests()
    assert [request.at_s for request in requests] == [0, 1, 4, 9, 16]
    requests, _ = Load(gaps=gaps, trace=file, rate_per_s=2).requests()
    assert requests[-1].at_s == pytest.approx(2)
    requests, _ = Load(gaps=gaps, trace=file, stages=(Stage(1, 1, 60),), offset=1).requests()
    assert [(request.at_s, request.hash_ids) for request in requests] == [(0, (1,)), (1, (2,)), (2, (3,)), (3, (4,))]
    requests, _ = Load(gaps=gaps, trace=file, duration_s=5).requests()
    assert len(requests) == 3
    for faulty in (Load(gaps=gaps, trace=tmp_path / "no"), Load(gaps=gaps, trace=file, offset=9)):
        with pytest.raises(BenchError, match=r"no: |no request"):
            faulty.requests()
    with pytest.raises(BenchError, match="stages have their own"):
        Load(gaps=gaps, trace=file, stages=(Stage(1, 1, 1),), rate_per_s=1).requests()
