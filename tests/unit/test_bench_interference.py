"""The interference bench: its requests, its arrangements, its client, its arithmetic. Nothing is measured here."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from bench.interference import __main__ as command
from bench.interference import client, options, picture, pollers, report, results
from bench.interference.arrangements import ARRANGEMENTS, Arrangement, Setting, arrangement
from bench.interference.interrupts import Interrupts
from bench.interference.load import LOADS, Ask, Load, Script, changed
from bench.interference.numbers import row
from bench.interference.options import OptionsError, parse
from bench.interference.results import Answer, Results, Round
from bench.interference.session import rotated
from extproc.pictures import PictureError

LOAD = LOADS["cpu"]
ROOT = Path(__file__).parents[2]


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_requests_of_a_round_depend_on_its_seed_and_number_and_on_nothing_else() -> None:
    def asked(seed: int, number: int) -> tuple[object, ...]:
        script = Script(LOAD, seed, number)
        return script.due_s, script.prompts, [list(islice(script.streams(place), 3)) for place in range(LOAD.streams)]

    assert asked(1, 1) == asked(1, 1)
    assert asked(1, 1) != asked(1, 2) != asked(2, 1)


def test_no_prompt_of_a_bench_comes_twice_so_that_no_cache_helps() -> None:
    prompts = []
    for number in (0, 1, 2):
        script = Script(LOAD, 1, number)
        prompts += [ask.prompt for ask in (*script.prompts, *islice(script.warm_up(), 3))]
        prompts += [ask.prompt for place in range(LOAD.streams) for ask in islice(script.streams(place), 5)]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {LOAD.prompt_tokens, LOAD.stream_prompt_tokens}


@pytest.mark.parametrize("name", list(LOADS))
def test_long_prompts_come_after_the_quiet_time_and_early_enough_to_be_answered(name: str) -> None:
    load = LOADS[name]
    for number in range(1, 20):
        due_s = Script(load, 1, number).due_s
        assert due_s[0] == load.quiet_s, "the first one ends the quiet time"
        assert due_s == sorted(due_s)
        assert max(due_s) <= load.window_s - 0.5 * load.every_s
    assert load.prompts >= 3, "a round has several of them"


def test_streams_begin_and_end_at_different_times() -> None:
    script = Script(LOAD, 1, 1)
    assert len({script.begins_s(place) for place in range(LOAD.streams)}) == LOAD.streams
    firsts = [next(script.streams(place)).answer_tokens for place in range(LOAD.streams)]
    assert len(set(firsts)) == LOAD.streams and max(firsts) == LOAD.stream_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": 0}, "streams: 0 is less than 1"),
        ({"every_s": 0.0}, "every_s: 0 is not above 0"),
        ({"window_s": 5.0}, "window_s: in 5 s no long prompt comes"),
        ({"chunk_tokens": 4096}, "chunk_tokens: 4096 do not cut a prompt of"),
    ],
)
def test_a_load_that_shows_nothing_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(LOAD, changes)


def test_every_arrangement_is_first_equally_often() -> None:
    orders = [rotated(ARRANGEMENTS, number) for number in range(3)]
    assert {order[0] for order in orders} == {order[2] for order in orders} == set(ARRANGEMENTS)


# --- the arrangements -------------------------------------------------------------------------------------------------


def made(name: str, **changes: object) -> Arrangement:
    setting = Setting(engine="vllm", device="cpu", model="/m", served_model_name="m", local_model=True, cores=(0, 1))
    return arrangement(name, replace(setting, **changes), LOAD)


def flag(each: Arrangement, name: str, worker: int = 0) -> str | None:
    argv = each.workers[worker].command.argv
    return argv[argv.index(name) + 1] if name in argv else None


def test_colocated_prompts_are_computed_whole_and_chunked_ones_in_steps() -> None:
    whole, chunked = made("colocated"), made("chunked")
    assert "--no-enable-chunked-prefill" in whole.workers[0].command.argv
    assert "--no-enable-chunked-prefill" not in chunked.workers[0].command.argv
    assert int(flag(whole, "--max-num-batched-tokens") or 0) >= LOAD.longest_tokens + LOAD.streams
    assert flag(chunked, "--max-num-batched-tokens") == str(LOAD.chunk_tokens)
    for each in (whole, chunked):
        limits = [int(flag(each, name) or 0) for name in ("--max-num-batched-tokens", "--max-num-seqs", "--max-model-len")]
        assert limits[1] <= limits[0], "else vLLM does not start"
    assert int(flag(whole, "--max-num-batched-tokens") or 0) >= int(flag(whole, "--max-model-len") or 0), "likewise"


def test_the_colocated_engine_has_all_cores_and_no_connector_and_each_of_two_has_its_own() -> None:
    for name in ("colocated", "chunked"):
        each = made(name)
        assert [worker.cores for worker in each.workers] == [(0, 1)]
        assert each.workers[0].command.env["OMP_NUM_THREADS"] == "2"
        assert flag(each, "--kv-transfer-config") is None
    apart = made("apart")
    assert [worker.cores for worker in apart.workers] == [(0,), (1,)]
    roles = [json.loads(flag(apart, "--kv-transfer-config", worker) or "")["kv_role"] for worker in (0, 1)]
    assert roles == ["kv_producer", "kv_consumer"]
    assert {worker.command.env["OMP_NUM_THREADS"] for worker in apart.workers} == {"1"}


def test_on_gpus_both_sides_have_two_of_them() -> None:
    colocated = made("colocated", device="gpu")
    assert flag(colocated, "--data-parallel-size") == "2" and flag(colocated, "--device-ids") == "0,1"
    apart = made("apart", device="gpu")
    assert [flag(apart, "--device-ids", worker) for worker in (0, 1)] == ["0", "1"]
    assert {worker.cores for worker in (*colocated.workers, *apart.workers)} == {()}, "a GPU's engine is not pinned"


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--only apart,nothing", "--only: no nothing; there are colocated, chunked, apart"),
        ("--rounds 0", "--rounds 0: 1 to 100"),
        ("--cores 1000", "--cores 1000: this process may use"),
        ("--window 1", "--window: in 1 s no long prompt comes"),
        ("--json nowhere/numbers.json", "--json nowhere/numbers.json: there is no folder nowhere"),
        ("--threshold-tokens 9999", "--threshold-tokens 9999: the long prompts, of 768 tokens"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "gpus", lambda: 0)
    with pytest.raises(OptionsError, match=message):
        parse(arguments.split())


def test_two_gpus_are_used_where_there_are_two_and_everything_is_then_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "gpus", lambda: 2)
    assert (parse([]).device, parse([]).fresh, parse([]).load) == ("gpu", True, LOADS["gpu"])
    assert parse(["--device", "cpu"]).device == "cpu"
    assert parse(["--engine", "sim"]).load == LOADS["sim"]
    monkeypatch.setattr(options, "gpus", lambda: 1)
    assert (parse([]).device, parse([]).fresh) == ("cpu", False)


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{}")
    assert command.main(["--from", str(tmp_path / "broken.json")]) == 2
    assert "missing required field" in capsys.readouterr().out
    assert command.main(["--from", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().out
    assert command.main(["--engine", "sim", "--out", "picture.gif"]) == 2
    assert "picture.gif" in capsys.readouterr().out


# --- threads that poll ---------------------------------------------------------------------------------------------


_POLLS = """
import threading, sys
def poll():
    while True:
        pass
threading.Thread(target=poll, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""


def test_a_thread_that_polls_is_found_and_comes_after_the_main_thread() -> None:
    process = subprocess.Popen([sys.executable, "-c", _POLLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        found: list[int] = []
        while not found:  # it may wait long for a core of a machine that is busy
            found = pollers.polling([process.pid], 0.3)
        assert len(found) == 1 and found[0] != process.pid
        assert pollers.put_behind(found) == 1
        assert os.getpriority(os.PRIO_PROCESS, found[0]) >= 10
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0), "only that thread"
    finally:
        process.kill()
        process.communicate()
    assert pollers.put_behind(found) == 0, "it is gone, which is no error"


# --- the client -------------------------------------------------------------------------------------------------------


def chunk(tokens: int) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}}).encode()


Handler = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler, headers: dict[str, str] | None = None) -> AsyncIterator[str]:
    """An address whose completions ``handler`` writes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await handler(request, response)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def asked(url: str, tokens: int) -> Answer:
    """One request, on a clock that ticks a second each time it is read."""
    ticks = iter(range(1, 1000))
    async with aiohttp.ClientSession() as session:
        reply = client._Reply(Ask((5, 6), tokens), 0.0)
        await client.Clients(url, "m", session).ask(reply, lambda: float(next(ticks)))
    return reply.answer()


async def test_tokens_that_come_in_one_piece_are_counted_as_what_they_are() -> None:
    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        body = await request.json()
        assert body["prompt"] == [5, 6] and body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"]
        for tokens in (1, 3, 4):
            await response.write(chunk(tokens))
        await response.write(b"data: [DONE]\n\n")

    async with server(handler, {"x-kv-transfer": 'prefill="127.0.0.1:1"'}) as url:
        answer = await asked(url, 4)
    assert (answer.first_s, answer.gaps_ms) == (1.0, [1000.0, 0.0, 1000.0])
    assert answer.handed_over and not answer.fault and not answer.cut


async def test_answers_that_are_short_or_broken_or_errors_are_faults() -> None:
    async def short(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(chunk(1) + b"data: [DONE]\n\n")

    async def broken(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(chunk(1))

    async def error(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(b'data: {"error": {"message": "no room"}}\n\n')

    for handler, message in ((short, "1 tokens, not 2"), (broken, "broke off"), (error, "no room")):
        async with server(handler) as url:
            answer = await asked(url, 2)
        assert message in answer.fault
    assert "status 404" in (await asked_elsewhere(short)).fault
    assert "Cannot connect" in (await asked("http://127.0.0.1:9", 2)).fault


async def asked_elsewhere(handler: Handler) -> Answer:
    async with server(handler) as url:
        return await asked(f"{url}/nowhere", 2)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def stream(due_s: float, first_s: float, gaps_ms: Sequence[float]) -> Answer:
    return Answer(due_s=due_s, first_s=first_s, gaps_ms=list(gaps_ms))


def a_round(name: str = "colocated", number: int = 1, *, stall_ms: float = 1000.0, handed_over: bool = False) -> Round:
    """Quiet until 2 s with gaps of 100 ms; then gaps of 100 ms, and a stall."""
    return Round(
        arrangement=name,
        number=number,
        seconds=6.0,
        loaded_s=2.0,
        streams=[
            stream(0.5, 1.0, [100.0] * 9),  # the last one ends at 1.9 s
            stream(1.5, 1.95, [100.0] * 10 + [stall_ms]),
            stream(2.5, 2.75, [100.0] * 9),
        ],
        prompts=[Answer(due_s=2.0, first_s=3.5, gaps_ms=[100.0], handed_over=handed_over)],
    )


def test_the_row_of_a_round_is_what_its_tokens_say() -> None:
    found = row("colocated", [a_round()], 400)
    assert found.gaps == 20 and (found.itl_p50_s, found.itl_p99_s, found.longest_s) == (0.1, 1.0, 1.0)
    assert found.quiet_p50_s == pytest.approx(0.1), "before the first long prompt only"
    assert found.stalled == pytest.approx(1.0 / (19 * 0.1 + 1.0)), "one gap of 1 s among 19 of 0.1 s"
    assert found.stalled_else == 0.0
    assert found.prompt_ttft_p50_s == 1.5, "from when it was due"
    assert (found.starts, found.stream_ttft_p50_s) == (1, 0.25), "only what began after the first long prompt"
    assert found.tokens_a_s == pytest.approx((20 + 1) / 4.0)
    assert found.prompt_tokens_a_s == pytest.approx(400 / 4.0)
    assert found.itl_p99_stream_s == pytest.approx(0.1), "the median of 1 s and 0.1 s, the lower one"


def test_a_gap_that_is_usual_for_the_arrangement_is_no_stall() -> None:
    assert row("apart", [a_round(stall_ms=250.0)], 400).stalled == 0.0
    assert row("apart", [a_round(stall_ms=350.0)], 400).stalled > 0.1


def test_a_stall_with_no_long_prompt_about_is_not_blamed_on_one() -> None:
    prompts = [Answer(due_s=2.0, first_s=2.5), Answer(due_s=5.0, first_s=5.5)]
    found = row("colocated", [msgspec.structs.replace(a_round(), prompts=prompts)], 400)
    assert (found.stalled, found.stalled_else) == (0.0, pytest.approx(1.0 / 2.9)), "it was between 2.95 and 3.95 s"


def test_rounds_are_pooled_and_their_spread_is_kept() -> None:
    found = row("colocated", [a_round(), a_round(number=2, stall_ms=500.0)], 400)
    assert found.itl_p99_rounds_s == (1.0, 0.5) and found.rounds == 2 and found.gaps == 40


def test_what_was_not_measured_is_no_number() -> None:
    empty = Round(arrangement="apart", number=1, seconds=1.0, loaded_s=0.5, streams=[], prompts=[])
    found = row("apart", [empty], 400)
    assert all(math.isnan(value) for value in (found.itl_p50_s, found.stalled, found.prompt_ttft_p50_s))
    text = report.markdown(some_results(rounds=[empty]))
    assert "nan" not in text and "| prefill/decode, Baton | – | – |" in text


def test_faults_are_counted_by_kind() -> None:
    bad = Round(
        arrangement="apart",
        number=1,
        seconds=1.0,
        loaded_s=0.5,
        streams=[Answer(due_s=0.0, fault="broke off"), Answer(due_s=0.0, fault="broke off"), Answer(due_s=0.0, cut=True)],
        prompts=[Answer(due_s=0.0, fault="status 503: no")],
    )
    assert row("apart", [bad], 400).faults == ("2 × stream: broke off", "long prompt: status 503: no")


def some_results(load: Load = LOAD, **changes: object) -> Results:
    rounds = [a_round(name, number, handed_over=name == "apart") for number in (1, 2) for name in ARRANGEMENTS]
    plain: dict[str, object] = {
        "machine": {"cores": "2"},
        "versions": {"nixl": "1"},
        "command": "python -m bench.interference",
        "engine": "vllm",
        "device": "cpu",
        "model": "smollm2",
        "seed": 1,
        "load": asdict(load),
        "arrangements": {"colocated": "both cores"},
        "rounds": rounds,
    }
    return Results(**{**plain, **changes})  # type: ignore[arg-type]


def test_what_is_written_is_read_again_and_drawn_the_same(tmp_path: Path) -> None:
    before = some_results()
    results.write(before, tmp_path / "numbers.json")
    after = results.read(tmp_path / "numbers.json")
    assert after == before
    pictures = []
    for number, each in enumerate((before, after)):
        picture.draw(each, tmp_path / f"{number}.svg")
        pictures.append((tmp_path / f"{number}.svg").read_bytes())
    assert pictures[0] == pictures[1] and b"<svg" in pictures[0]
    with pytest.raises(PictureError):
        picture.draw(before, tmp_path / "picture.gif")


def test_tables_of_a_simulation_say_that_they_are_of_one() -> None:
    assert "The engines are simulated" in report.markdown(some_results(engine="sim"))
    assert "simulated" not in report.markdown(some_results())


def test_table_and_picture_of_the_document_are_what_the_measured_numbers_come_to(tmp_path: Path) -> None:
    measured = results.read(ROOT / "bench" / "interference" / "measured.json")
    text = (ROOT / "docs" / "interference.md").read_text(encoding="utf-8")
    assert report.markdown(measured) in text
    assert not measured.failures and not report.fault_lines(measured)
    assert measured.command in text and str(measured.seed) in measured.command
    picture.draw(measured, tmp_path / "interference.svg")
    assert (tmp_path / "interference.svg").read_bytes() == (ROOT / "docs" / "interference.svg").read_bytes()


def test_every_option_that_the_document_names_is_one() -> None:
    text = (ROOT / "docs" / "interference.md").read_text(encoding="utf-8")
    known = options._parser().format_help()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--no-enable-chunked-prefill", "--data-parallel-size"}
    assert named and all(name in known for name in named), named


class _Finaliser:
    """Whose end takes a signal, as the event loop's transports may."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_drops_in_a_finaliser_is_not_forgotten() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.check()
        _Finaliser()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        os.kill(os.getpid(), signal.SIGTERM)  # a second one, during the clean-up, changes nothing
    assert signal.getsignal(signal.SIGTERM) is before
