"""The routing bench: prompts share what the trace says, tokens are counted rightly, demands are judged rightly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.routing import client, engines, options, policies, prompts, report
from bench.routing.beliefs import Beliefs
from bench.routing.run import RunResult
from bench.routing.twin import Twin
from extproc.config import Config
from workers import trace_text
from workers.goodput import Outcome, Status, Summary, summary
from workers.sim import tokens
from workers.traces import BLOCK_TOKENS, Request


def test_every_block_is_512_tokens_of_the_simulated_engine() -> None:
    for hash_id in range(50):
        assert len(tokens.encode(trace_text.block_text(hash_id))) == BLOCK_TOKENS


def test_prompts_agree_exactly_as_far_as_their_hash_ids() -> None:
    one = tokens.encode(trace_text.prompt_text(Request(0.0, 1500, 1, (7, 8, 9))))
    other = tokens.encode(trace_text.prompt_text(Request(0.0, 2048, 1, (7, 8, 10, 11))))
    assert (len(one), len(other)) == (1500, 2048)
    shared = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    # The first tokens of two different blocks may be equal by chance; many of them are not.
    assert 2 * BLOCK_TOKENS <= shared < 2 * BLOCK_TOKENS + 3


def test_the_request_asks_for_exactly_the_tokens_of_the_trace() -> None:
    raw = prompts.http_request(Request(0.0, 600, 37, (1, 2)), model="m", host="h", headers={"x-tenant": "a"})
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert f"content-length: {len(body)}".encode() in head and b"x-tenant: a" in head
    assert (fields["max_tokens"], fields["ignore_eos"], fields["stream"]) == (37, True, True)


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def _replayed(answer: Answer, output_tokens: int = 3, speed: float = 1.0) -> client.Report:
    """One request against a server that answers like this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        planned = client.Planned(0.0, lambda: b"GET / HTTP/1.1\r\n\r\n", 100, output_tokens, "a")
        port = server.sockets[0].getsockname()[1]
        return await client.replay([planned], "127.0.0.1", [port], speed=speed, timeout_s=5.0)


def _stream(*pieces: bytes) -> Answer:
    """A chunked answer, sent in these pieces."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return answer


def _chunk(*texts: bytes) -> bytes:
    data = b"".join(b"data: " + text + b"\n\n" for text in texts)
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_a_token_is_counted_once_however_the_stream_is_cut() -> None:
    whole = _chunk(b"1") + _chunk(b"2", b"3") + _chunk(b"[DONE]") + b"0\r\n\r\n"
    for cut in range(1, len(whole)):
        (outcome,) = (await _replayed(_cut_at(whole, cut))).outcomes
        assert (outcome.status, outcome.output_tokens) == (Status.SERVED, 3), cut


def _cut_at(whole: bytes, cut: int) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + whole[:cut])
        await writer.drain()
        await asyncio.sleep(0.002)
        writer.write(whole[cut:])

    return answer


async def test_an_answer_with_a_token_missing_has_failed() -> None:
    found = await _replayed(_stream(_chunk(b"1"), _chunk(b"2"), _chunk(b"[DONE]") + b"0\r\n\r\n"))
    assert found.outcomes[0].status is Status.FAILED
    assert "3 events of 4" in found.errors[0]


async def test_an_answer_that_breaks_off_has_failed() -> None:
    found = await _replayed(_stream(_chunk(b"1"), _chunk(b"2")))
    assert found.outcomes[0].status is Status.FAILED


async def test_429_is_a_refusal_and_500_a_failure() -> None:
    for status, meaning in ((b"429", Status.REFUSED), (b"503", Status.REFUSED), (b"500", Status.FAILED)):
        found = await _replayed(_plain(b"HTTP/1.1 " + status + b" X\r\nContent-Length: 4\r\n\r\nbusy"))
        assert found.outcomes[0].status is meaning
        assert "busy" in found.errors[0]


def _plain(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


async def test_times_are_simulated_seconds() -> None:
    pieces = (_chunk(b"1"), _chunk(b"2"), _chunk(b"3"), _chunk(b"[DONE]") + b"0\r\n\r\n")
    (outcome,) = (await _replayed(_stream(*pieces), speed=1000.0)).outcomes
    # Ten real milliseconds between the pieces are ten simulated seconds.
    assert outcome.itl_p99_s is not None and outcome.itl_p99_s >= 9.0


async def test_what_baton_says_of_its_queue_is_the_wait() -> None:
    head = b'HTTP/1.1 200 OK\r\nX-Baton-Decision: aggregate;decode="d";queued-ms=250.0;prefill-ms=1\r\n'
    found = await _replayed(
        _plain(head + b"Transfer-Encoding: chunked\r\n\r\n" + _chunk(b"1", b"[DONE]") + b"0\r\n\r\n"), 1, 4.0
    )
    assert found.outcomes[0].wait_s == pytest.approx(1.0)
    assert found.whole == 1


def test_seconds_shrink_and_rates_grow_with_the_speed() -> None:
    tree = {"slo": {"ttft_s": 2.5}, "rates": [{"tokens_per_s": 10.0}], "queue_requests": 7, "timeout_s": 3.0, "on": True}
    assert policies.scaled(tree, 5.0) == {
        "slo": {"ttft_s": 0.5},
        "rates": [{"tokens_per_s": 50.0}],
        "queue_requests": 7,
        "timeout_s": 3.0,
        "on": True,
    }


@pytest.mark.parametrize("name", [name for name, each in policies.CONTESTANTS.items() if each.kind == "baton"])
def test_every_policy_is_one_that_the_filter_takes(name: str) -> None:
    sections = policies.sections(policies.CONTESTANTS[name], block_tokens=128, cache_tokens=2_500_000, speed=5.0)
    config = msgspec.convert({"workers": {"prefill": ["127.0.0.1:1"], "decode": ["127.0.0.1:2"]}, **sections}, Config)
    assert config.policies[0].name == "default"
    assert config.routing.prefill_tokens_per_s == 50_000


def test_counters_are_read_from_metrics() -> None:
    text = """# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 6112.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 5888.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 8.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
"""
    found = engines.parse_counters(text)
    assert found == engines.Counters(6112, 5888, 1_000_000, 8, 1)
    assert found - engines.Counters(6000, 5000, 0, 8, 0) == engines.Counters(112, 888, 1_000_000, 0, 1)


def test_spread_is_one_where_work_is_even() -> None:
    assert engines.prefill_spread([10, 10, 10]) == 1
    assert engines.prefill_spread([30, 0, 0]) == 3


def _summary(goodput: float, wait_s: float = 0.0) -> Summary:
    good, bad = round(goodput * 100), 100 - round(goodput * 100)
    made = [
        Outcome(arrived_s=float(i), ttft_s=1.0 if i < good else 9.0, itl_p99_s=0.02, input_tokens=10, wait_s=wait_s)
        for i in range(good + bad)
    ]
    return summary(made)


def _result(name: str, load: float, goodput: float, **changes: object) -> RunResult:
    made = RunResult(
        trace="t",
        contestant=name,
        load=load,
        rate_per_s=1.0,
        summary=_summary(goodput),
        in_time=goodput,
        steady=1.0,
        hit_ratio=0.2,
        spread=1.0,
        pulled_tokens=1,
        decode_computed_tokens=0,
        longest_ttft_s=9.0,
        whole=0,
        preemptions=0,
        beliefs=Beliefs(),
        violations={},
        errors=[],
        real_s=1.0,
        cores={},
        late_ms={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _met(results: list[RunResult]) -> dict[str, bool | None]:
    return {verdict.text.split(":")[0]: verdict.met for verdict in report.verdicts(results)}


def test_the_better_of_the_peers_is_the_one_to_beat() -> None:
    runs = [_result("baton", 0.9, 0.8), _result("smg", 0.9, 0.3), _result("vllm-router", 0.9, 0.65)]
    assert _met(runs)["t, load 0.9"] is False
    assert _met([runs[0], runs[1], _result("vllm-router", 0.9, 0.6)])["t, load 0.9"] is True


def test_what_was_not_run_is_neither_met_nor_missed() -> None:
    assert _met([_result("baton", 0.9, 0.8)])["t, load 1.1"] is None


def test_one_load_below_round_robin_is_enough_to_miss() -> None:
    runs = [_result(name, load, good) for name, load, good in (("baton", 0.5, 0.9), ("round-robin", 0.5, 0.91))]
    assert _met(runs)["t, every load"] is False


def test_a_wait_past_the_limit_is_missed() -> None:
    run = _result("baton", 0.5, 0.9, summary=_summary(0.9, wait_s=70.0))
    assert next(v for v in report.verdicts([run]) if "past its limit" in v.text).met is False


def test_one_violation_is_missed() -> None:
    run = _result("baton", 0.5, 0.9, violations={"leaked_blocks": 1})
    assert next(v for v in report.verdicts([run]) if "done wrong" in v.text).met is False


def test_the_modest_tenant_counts_not_the_flood() -> None:
    run = _result("baton", 1.8, 0.3, by_tenant={"modest": _summary(0.9), "flood": _summary(0.1)})
    assert [verdict.met for verdict in report.tenant_verdicts([run], "modest", 0.6)] == [True]


@pytest.mark.parametrize(
    ("goodput", "hit_ratio", "met"),
    [
        (0.73, 0.2, True),
        (0.71, 0.2, False),
        (0.8, 0.219, True),
        (0.8, 0.225, False),  # two points and a half, but an eighth of it
    ],
)
def test_the_twin_may_be_a_tenth_of_the_figure_off_in_goodput_and_in_hit_ratio(
    goodput: float, hit_ratio: float, met: bool
) -> None:
    run = _result("baton", 0.9, 0.8)  # its hit ratio is 0.2
    twin = Twin((goodput - 0.001, goodput, goodput + 0.001), (hit_ratio - 0.001, hit_ratio, hit_ratio + 0.001))
    assert [verdict.met for verdict in report.twin_verdicts([(run, twin)])] == [met]


def test_the_twin_agrees_where_its_own_replays_are_further_apart_than_it_and_the_run() -> None:
    run = _result("round-robin", 1.1, 0.05)
    twin = Twin((0.04, 0.07, 0.11), (0.19, 0.2, 0.21))
    assert [verdict.met for verdict in report.twin_verdicts([(run, twin)])] == [True]


def test_every_run_has_a_line_in_the_table() -> None:
    results = [_result("baton", 0.9, 0.8), _result("smg", 0.9, 0.3)]
    assert report.table(results).row_count == 2


def test_missing_traces_are_explained(tmp_path: Path) -> None:
    with pytest.raises(options.OptionsError, match="kvcache-ai/Mooncake"):
        options.parse(["--traces-dir", str(tmp_path)])


def test_unknown_policies_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(options.OptionsError, match="no luck; there are baton"):
        options.parse(["--traces-dir", str(tmp_path), "--policies", "luck"])


def test_quick_is_two_policies_at_one_load(tmp_path: Path) -> None:
    (tmp_path / "mooncake_conversation.jsonl").write_text("")
    chosen = options.parse(["--quick", "--traces-dir", str(tmp_path)])
    assert chosen.policies_at(0.9) == ("baton", "round-robin") and chosen.loads == (0.9,)
