"""The overhead bench: its bodies, its arithmetic, its bar. Nothing is measured here."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench.overhead import judge, picture, report, results, wrk
from bench.overhead.arrangements import ARRANGEMENTS, ROUTER, refused
from bench.overhead.bodies import MODEL, bodies
from bench.overhead.cells import CLIENT, WORKERS, Cell, Sample, Spot, faults, median_cell
from bench.overhead.cpu import process_cpu_s, spent
from bench.overhead.options import OptionsError, parse
from bench.overhead.plain_envoy import Answer, answering, passing
from bench.overhead.results import Results, ResultsError
from bench.overhead.stream_client import Report, Stream, arrivals, load, requests
from bench.overhead.stream_client import report as report_of
from bench.overhead.stream_worker import Clock, Connection, chunk, sent_ns
from bench.overhead.streams import WHOLE, StreamCell, StreamSample, StreamSpot, median_stream_cell
from bench.overhead.talk import Talk, TalkError
from bench.overhead.workers import DECODE_ANSWER, PREFILL_ANSWER
from extproc.handoff import Pair
from extproc.handoff.nixl_pull import NixlPull

SPOT = Spot(4, 1)
STREAM_SPOT = StreamSpot(150, 4, 300)


def a_load(**fields: object) -> wrk.Load:
    plain = wrk.Load(requests=100, seconds=1.0, errors={}, p50_s=0.001, p99_s=0.002, cpu_s=0.01)
    return replace(plain, **fields)


def a_cell(name: str, *, spot: Spot = SPOT, per_s: float = 100.0, p50_s: float = 0.01, cpu_s: float = 1e-3) -> Cell:
    sample = Sample(per_s=per_s, p50_s=p50_s, p99_s=2 * p50_s, cpu_s={ROUTER: cpu_s, CLIENT: 1.0}, memory_mb={ROUTER: 50.0})
    return median_cell(name, spot, [sample])


def a_stream_cell(name: str, *, spot: StreamSpot = STREAM_SPOT, itl_p99_s: float = 0.022, cpu_s: float = 1e-5) -> StreamCell:
    return StreamCell(
        name=name,
        spot=spot,
        rounds=1,
        itl_p50_s=0.02,
        itl_p99_s=itl_p99_s,
        itl_p99_rounds_s=(itl_p99_s,),
        delay_p50_s=1e-4,
        delay_p99_s=1e-3,
        ttft_p50_s=0.03,
        cpu_a_token_s={ROUTER: cpu_s, WORKERS: 1.0},
        cpu_a_request_s={ROUTER: cpu_s * spot.tokens, WORKERS: 1.0},
        memory_mb={ROUTER: 50.0, WORKERS: 10.0},
        faults=(),
    )


@pytest.mark.parametrize("kilobytes", [2, 4, 48, 128])
def test_every_body_has_the_size_that_was_asked_for_and_is_a_chat_request(kilobytes: int) -> None:
    found = bodies(kilobytes << 10, count=4)
    for body in found:
        text = body.numbered(123)
        tree = json.loads(text)
        assert len(text) == len(body) == kilobytes << 10
        assert tree["model"] == MODEL and tree["messages"][0]["role"] == "system" and tree["messages"][-1]["role"] == "user"
        assert "000000000123" in tree["messages"][-1]["content"]
    assert len({(body.head, body.tail) for body in found}) == 4, "they are different conversations"


def test_a_body_that_is_too_small_for_a_conversation_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        bodies(100)


def test_conversations_share_system_prompts_but_not_all_of_them() -> None:
    systems = [json.loads(body.numbered(1))["messages"][0]["content"] for body in bodies(4096)]
    assert 1 < len(set(systems)) < len(systems)


def test_bodies_come_back_from_their_file(tmp_path: Path) -> None:
    found = bodies(4096, count=3)
    wrk.write_bodies(found, tmp_path / "bodies")
    assert wrk.read_bodies(tmp_path / "bodies") == found


def test_the_fake_prefill_answer_is_a_handoff_that_the_filter_accepts() -> None:
    handoff = NixlPull().accept(PREFILL_ANSWER.encode(), Pair("127.0.0.1:1", "127.0.0.1:2", "id"))
    assert handoff.blocks > 0
    assert json.loads(DECODE_ANSWER)["choices"][0]["message"]["content"]


def test_the_result_of_wrk_is_read_and_kinds_of_errors_that_did_not_occur_are_left_out() -> None:
    output = (
        "Running 1s test\n"
        '{"requests":10,"duration_us":2000000,"bytes":5,"p50_us":1500.0,"p99_us":3000.0,"mean_us":1.0,'
        '"errors":{"connect":0,"read":0,"write":0,"status":3,"timeout":0}}\n'
    )
    assert wrk.parse(output, "", cpu_s=0.5) == wrk.Load(
        requests=10, seconds=2.0, errors={"status": 3}, p50_s=0.0015, p99_s=0.003, cpu_s=0.5
    )
    assert wrk.parse(output, "", cpu_s=0.5).per_s == 5.0


def test_a_wrk_that_prints_no_result_is_an_error_with_its_own_words() -> None:
    with pytest.raises(wrk.LoadError, match="cannot open"):
        wrk.parse("", "post.lua: cannot open file", cpu_s=0.0)


@pytest.mark.parametrize(
    ("load", "prefilled", "decoded", "apart", "word"),
    [
        (a_load(requests=0), 0, 0, True, "no request"),
        (a_load(errors={"status": 4}), 100, 100, True, "4 errors"),
        (a_load(), 99, 100, True, "99 requests reached prefill"),
        (a_load(), 100, 50, True, "50 decode"),
        (a_load(), 900, 100, False, "nothing to do"),
    ],
)
def test_a_cell_is_marked_when_it_did_not_do_what_it_is_to_show(
    load: wrk.Load, prefilled: int, decoded: int, apart: bool, word: str
) -> None:
    assert word in " ".join(faults(load, prefilled=prefilled, decoded=decoded, apart=apart))


@pytest.mark.parametrize(("prefilled", "apart"), [(100, True), (310, True), (12, False)])
def test_a_cell_is_not_marked_for_probes_and_what_a_router_asks_besides(prefilled: int, apart: bool) -> None:
    assert not list(faults(a_load(), prefilled=prefilled, decoded=108, apart=apart))


def test_each_number_of_a_cell_is_its_own_median_and_faults_are_named_once() -> None:
    samples = [
        Sample(per_s=rate, p50_s=1 / rate, p99_s=2 / rate, cpu_s={ROUTER: cpu}, memory_mb={ROUTER: rate}, faults=("bad",))
        for rate, cpu in ((10.0, 3.0), (30.0, 1.0), (20.0, 2.0))
    ]
    cell = median_cell("smg", Spot(4, 1), samples)
    assert (cell.per_s, cell.p50_s) == (20.0, 1 / 20)
    assert (cell.cpu_s, cell.memory_mb) == ({ROUTER: 2.0}, {ROUTER: 30.0}), "of memory, the most"
    assert cell.faults == ("bad",)
    assert cell.per_s_rounds == (10.0, 30.0, 20.0)


def test_processor_time_between_leaves_out_client_and_workers() -> None:
    assert a_cell("smg", cpu_s=0.25).between_cpu_s == 0.25
    assert a_stream_cell("smg", cpu_s=0.5).between_a_token_s == 0.5


def test_processor_time_grows_with_work_and_a_process_that_is_gone_has_none() -> None:
    before = process_cpu_s(os.getpid())
    sum(range(1_000_000))
    assert process_cpu_s(os.getpid()) > before
    assert process_cpu_s(2**22 + 1) == 0.0
    assert spent({"a": 1.0}, {"a": 3.0}) == {"a": 2.0}


def test_the_bar_is_met_where_baton_equals_envoy_and_smg_and_the_aim_is_not() -> None:
    found = judge.request_verdicts([a_cell("baton-lean"), a_cell("envoy+smg")])
    assert [(each.met, each.aim) for each in found] == [(True, False), (True, False), (False, True)]


def test_a_missed_bar_says_by_how_much() -> None:
    cells = [a_cell("baton-lean", per_s=80.0, p50_s=0.012), a_cell("envoy+smg")]
    lines = [str(each) for each in judge.request_verdicts(cells)]
    assert "0.80, at least 1: MISSED by 20%" in lines[0]
    assert "1.20, at most 1: MISSED by 20%" in lines[1]


def test_the_bar_against_vllm_router_is_1_6_times_its_rate() -> None:
    for rate, met in ((159.0, False), (160.0, True)):
        (verdict,) = judge.request_verdicts([a_cell("baton-lean", per_s=rate), a_cell("envoy+vllm-router")])
        assert verdict.met is met


def test_only_bodies_of_4_and_128_kb_are_judged() -> None:
    cells = [a_cell(name, spot=Spot(body_kb, 1)) for name in ("baton-grpc", "envoy+smg") for body_kb in (4, 32, 128, 512)]
    assert {each.text.rpartition(", ")[0].rpartition(", ")[2] for each in judge.request_verdicts(cells)} == {"4 KB", "128 KB"}


def test_the_lean_transport_is_judged_where_both_were_measured_and_nothing_without_baton() -> None:
    assert judge.judged([a_cell("baton-grpc"), a_cell("baton-lean")]) == "baton-lean"
    assert judge.judged([a_cell("baton-grpc")]) == "baton-grpc"
    assert judge.verdicts(Results(machine={}, cells=[a_cell("smg"), a_cell("envoy+smg")])) == []


def test_the_bars_of_streams() -> None:
    cells = [
        a_stream_cell("baton-lean", cpu_s=4e-5, itl_p99_s=0.023),
        a_stream_cell("envoy", itl_p99_s=0.0225),
        a_stream_cell("envoy+smg", cpu_s=1e-4, itl_p99_s=0.03),
        a_stream_cell("baton-lean", spot=WHOLE, cpu_s=2e-5),
        a_stream_cell("smg", spot=WHOLE, cpu_s=1e-5),
    ]
    found = judge.stream_verdicts(cells)
    assert [each.met for each in found] == [True, True, True, False]
    assert [round(each.ratio, 3) for each in found] == [0.4, 0.767, 1.022, 2.0]


def test_equal_within_noise_is_what_the_rounds_of_the_same_thing_differ_by_and_5_percent_in_any_case() -> None:
    assert judge.noise([0.02, 0.025]) == pytest.approx(0.25)
    assert judge.noise([0.02, 0.0201]) == 0.05
    assert judge.noise([]) == 0.05


def test_a_ratio_to_nothing_is_no_crash() -> None:
    assert judge.ratio(1.0, 0.0) == float("inf")


ALL = Results(
    machine={"cpu": "a <fast> one", "cores": "2"},
    cells=[
        replace(a_cell(name, spot=spot), faults=("3 errors",) if name == "smg" else ())
        for spot in (Spot(4, 1), Spot(4, 16), Spot(128, 16))
        for name in ("direct", "envoy", "baton-lean", "smg", "envoy+smg")
    ],
    stream_cells=[
        a_stream_cell(name, spot=spot)
        for spot in (StreamSpot(20, 4, 300), StreamSpot(150, 4, 300), WHOLE)
        for name in ("direct", "baton-lean", "smg")
    ],
    idle={"baton-lean": {"envoy": 0.001, ROUTER: 0.01}},
)


def test_the_tables_have_every_cell_and_mark_those_with_errors() -> None:
    console = Console(width=200, file=io.StringIO())
    for table in report.tables(ALL):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("Envoy + Baton (lean)") == 3 + 3 + 1
    assert text.count("SMG (!)") == 3
    assert "twice, one after the other" in text and "baton-lean over a peer" in text
    assert len(report.fault_lines(ALL)) == 3


def test_the_short_tables_are_markdown_with_equal_columns() -> None:
    blocks = report.markdown(ALL).split("\n\n")
    assert len(blocks) == 4
    for block in blocks[:3]:
        assert len({line.count("|") for line in block.strip().splitlines()}) == 1


def test_the_picture_is_well_formed_and_has_a_bar_for_each_value() -> None:
    tree = ElementTree.fromstring(picture.svg(ALL))
    bars = tree.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 1 + sum(len(panel.values) for panel in picture.panels(ALL))
    assert ElementTree.fromstring(picture.svg(Results(machine={}))) is not None, "of nothing, too"


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    results.write(ALL, [each.as_json() for each in judge.verdicts(ALL)], file)
    assert results.read(file) == ALL
    assert all({"text", "met", "ratio"} <= set(each) for each in json.loads(file.read_bytes())["verdicts"])
    file.write_text("{}")
    with pytest.raises(ResultsError, match="machine"):
        results.read(file)


def test_options_that_cannot_be_meant_are_refused_with_what_there_is() -> None:
    for arguments, word in (
        (["--only", "bato"], "baton-lean"),
        (["--parts", "all"], "streams"),
        (["--bodies", "4,x"], "whole numbers"),
        (["--connections", "0"], "each from 1"),
        (["--rounds", "101"], "1 to 100"),
    ):
        with pytest.raises(OptionsError, match=word):
            parse(arguments)


def test_a_full_run_has_every_cell_that_the_bar_needs() -> None:
    options = parse([])
    assert set(judge.BATON) | {"envoy", "smg", "envoy+smg", "envoy+vllm-router", "direct"} <= set(options.names)
    for name in ("baton-lean", "envoy+smg"):
        assert {Spot(body, connections) for body in (4, 128) for connections in (1, 16)} <= set(options.spots(name))
        assert StreamSpot(150, 4, 300) in options.stream_spots(name)
    assert WHOLE in options.stream_spots("smg") and WHOLE in options.stream_spots("baton-lean")
    assert options.rounds >= 5
    assert options.stream_spots("baton-lean-whole") == [] == options.stream_spots("fastapi")
    assert len(options.spots("fastapi")) < len(options.spots("smg")), "what is slow is measured in fewer cells"


def test_a_transport_that_the_configuration_does_not_know_is_left_out_with_the_reason() -> None:
    unknown = replace(ARRANGEMENTS["baton-grpc"], transport="pigeon")
    assert "pigeon" in str(refused(unknown))
    assert refused(ARRANGEMENTS["baton-grpc"]) is None
    assert refused(ARRANGEMENTS["smg"]) is None


def test_the_answering_envoy_reads_bodies_before_it_answers_and_the_passing_one_does_not() -> None:
    def filters(tree: dict[str, object]) -> list[str]:
        text = json.dumps(tree)
        return [name for name in ("envoy.filters.http.buffer", "envoy.filters.http.router") if name in text]

    assert len(filters(answering([(1, "prefill-0", [Answer("/", "{}")])], admin_port=2))) == 2
    plain = passing([(1, [5, 6])], admin_port=2)
    assert filters(plain) == ["envoy.filters.http.router"]
    endpoints = plain["static_resources"]["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [each["endpoint"]["address"]["socket_address"]["port_value"] for each in endpoints] == [5, 6]


def test_the_time_in_a_chunk_is_found_again_with_the_end_of_its_event() -> None:
    first, second = (f"data: … @{time:016d} …\n\n".encode() for time in (5, 7))
    assert list(sent_ns(b"data: {}\n\n" + first + second)) == [(10 + len(first), 5), (10 + len(first) + len(second), 7)]
    assert list(sent_ns(b"an @ sign, and @12 too few digits\n\n")) == []
    assert chunk(content="x").endswith(b"\n\n\r\n")


async def test_a_token_has_arrived_with_the_piece_that_ends_its_event() -> None:
    event = f"data: @{9:016d}\n\n".encode()
    stream = Stream(b"", asyncio.get_running_loop().create_future())
    stream.pieces = [event[:10], event[10:] + event, event]
    stream.times_ns.extend([100, 200, 300])
    assert arrivals(stream) == ([200, 200, 300], [9, 9, 9])


async def test_streams_of_the_worker_arrive_whole_at_the_client(tmp_path: Path) -> None:
    wrk.write_bodies(bodies(4096, stream=True, max_tokens=5, count=2), tmp_path / "bodies")
    clock = Clock(2)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(clock), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        made = requests(tmp_path / "bodies", 1, 3, port, ["x-bench-mode: aggregate"])
        found = report_of(await load(port, made, 0.01), 5)
        short = report_of(await load(port, made, 0.01), 6)
    assert (found.streams, found.tokens, found.faults) == (3, 15, [])
    assert found.itl_p50_s > 0 and found.delay_p50_s > 0 and found.ttft_p50_s > 0
    assert short.faults == ["3 streams: 5 tokens, not 6"]


async def test_a_stream_that_is_refused_or_cut_is_a_fault(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        refuse = "000000000001" in (await reader.read(5000)).decode() and "x-cut" not in head
        status = b"503 Service Unavailable" if refuse else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 100\r\n\r\nsome")
        writer.write(b"x" * 96 if refuse else b"")
        await writer.drain()
        writer.close()

    wrk.write_bodies(bodies(2048, count=1), tmp_path / "bodies")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        refused_ = report_of(await load(port, requests(tmp_path / "bodies", 1, 1, port, []), 0.0), 1)
        cut = report_of(await load(port, requests(tmp_path / "bodies", 1, 1, port, ["x-cut: 1"]), 0.0), 1)
    assert refused_.faults == ["1 streams: status 503"]
    assert cut.faults == ["1 streams: cut off"]


def test_streams_are_summed_up_per_token_and_per_request() -> None:
    found = Report(2, 600, 6.0, 0.02, 0.021, 1e-4, 1e-3, 0.03, [])
    cell = median_stream_cell("smg", StreamSpot(2, 4, 300), [StreamSample(report=found, cpu_s={ROUTER: 6.0}, memory_mb={})])
    assert (cell.cpu_a_token_s, cell.cpu_a_request_s) == ({ROUTER: 0.01}, {ROUTER: 3.0})


def test_a_program_is_talked_to_line_by_line_and_its_silence_is_an_error(tmp_path: Path) -> None:
    echo = "import sys; print('ready', flush=True); print(sys.stdin.readline().strip() + '!', flush=True); sys.stdin.read()"
    with Talk([sys.executable, "-c", echo], log=tmp_path / "log", patience_s=20) as program:
        program.expect("ready")
        program.say("go")
        assert program.line() == "go!"
        assert program.cpu_s > 0
    for words, patience_s, code in (
        ("broken", 20.0, "raise SystemExit('broken')"),
        ("in time", 0.1, "import sys; sys.stdin.read()"),
    ):
        with (
            Talk([sys.executable, "-c", code], log=tmp_path / "log", patience_s=patience_s) as program,
            pytest.raises(TalkError, match=words),
        ):
            program.line()
