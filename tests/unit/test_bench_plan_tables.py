"""The bench of the published tables: its arithmetic by hand, its report, and that the committed numbers come out again."""

import os
import queue
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plan_tables import __main__ as command
from bench.plan_tables import published, report, results, running
from bench.plan_tables.cluster import LONG_CHUNKS, NOTHING_SHARED, Constants, rows
from bench.plan_tables.measure import measure, run_at
from bench.plan_tables.roofline import demand
from extproc.plan.goodput_search import Stretch, good_share
from workers.sim.timing import Profile

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "docs" / "plan-tables.json"
PAGE = ROOT / "docs" / "plan-tables.md"
BY_KEY = {row.key: row for row in published.ROWS}


def row_of(key, constants=None):
    return next(row for row in rows(constants or Constants()) if row.key == key)


def test_what_the_published_rate_over_nixl_asks_for_by_hand():
    """24.6 prompts of 28,000 a second, of a model of 70.55e9 parameters, 80 layers, hidden 8,192."""
    found = demand(BY_KEY["nixl"], Constants())
    prompt_flops = 2 * 70.5537e9 * 28_000 + 4 * 80 * 8192 * 28_000**2 / 2
    assert found.prompt_tokens_a_s == pytest.approx(688_800)
    assert found.fp8_share == pytest.approx(24.6 * prompt_flops / (64 * 1979e12), rel=1e-4)
    assert found.fp8_share == pytest.approx(0.967, abs=0.001)
    assert found.bf16_share == pytest.approx(2 * found.fp8_share, rel=0.001)
    read_bytes_a_s = 24.6 * 650 * (28_000 + 325) * 327_680
    assert found.kv_read_share == pytest.approx(read_bytes_a_s / (64 * 4.8e12))
    kept = 0.87**2
    left = 1 - found.kv_read_share / (0.9 * kept)
    able = left * 64 * 1979e12 * 0.6 * kept / prompt_flops
    assert found.cached_at_least == pytest.approx(1 - able / 24.6, rel=1e-4)


def test_fp8_kv_halves_what_is_read_and_the_last_row_is_above_the_peak():
    last, nixl = (demand(BY_KEY[key], Constants()) for key in ("lmcache", "nixl"))
    assert last.kv_read_share / 27.1 == pytest.approx(nixl.kv_read_share / 24.6 / 2)
    assert last.fp8_share > 1


def test_every_row_has_all_gpus_and_the_rows_differ_by_what_they_say():
    found = {row.key: row.arrangement for row in rows(Constants())}
    assert list(found) == [row.key for row in published.ROWS]
    assert {arrangement.gpus for arrangement in found.values()} == {published.GPUS}
    assert not found["colocated"].chunked
    assert (found["chunked"].chunked, found["chunked"].prefill) == (True, 0)
    assert found["tcp"].link.worker_bytes_a_s(4) == 5.0e9
    assert found["nixl"].link.worker_bytes_a_s(4) == pytest.approx(4 * 45e9)
    halves = found["lmcache"].decode_engine.profile.kv_bytes_a_token * 2
    assert halves == found["nixl"].decode_engine.profile.kv_bytes_a_token
    assert found["lmcache"].shared_cache is not None
    assert {each.arrangement.gpus for each in (*rows(NOTHING_SHARED), *rows(LONG_CHUNKS))} == {published.GPUS}


def test_a_whole_prompt_on_a_worker_takes_what_was_published_as_the_colocated_mean_ttft():
    """Why four GPUs a worker: chosen by this number."""
    profile = row_of("colocated").arrangement.decode_engine.profile
    step_s = profile.step_s(prefill_tokens=28_000, prefill_context_tokens=14_000 * 28_000, decodes=0, decode_context_tokens=0)
    assert step_s == pytest.approx(1.42, abs=0.02)


def test_not_more_than_two_rows_are_fitted():
    assert set(report.FITTED) <= set(Constants.__dataclass_fields__)
    assert set(report.FITTED.values()) <= set(BY_KEY)
    assert len(set(report.FITTED.values())) <= 2


def test_what_tcp_reaches_is_what_the_published_times_to_the_first_token_say():
    kv_bytes = 28_000 * row_of("nixl").arrangement.decode_engine.profile.kv_bytes_a_token
    longer_s = (BY_KEY["tcp"].ttft_mean_ms - BY_KEY["nixl"].ttft_mean_ms) / 1e3
    assert Constants().tcp_bytes_a_s == pytest.approx(kv_bytes / longer_s, rel=0.01)


def test_a_run_counts_what_comes_after_the_caches_are_warm():
    stretch = Stretch(warm_up_s=2, counted_s=10, cool_down_s=2)
    run = run_at(row_of("nixl"), 3.0, stretch, seed=0)
    assert 15 < run.requests < 50
    share = round(0.95 * 28_000) // 512 * 512 / 28_000
    assert run.cached_tokens / run.prompt_tokens == pytest.approx(share, abs=0.02)


def test_the_rate_without_the_itl_limit_is_never_the_lower_one_and_is_what_a_run_at_it_says():
    stretch, row = Stretch(warm_up_s=2, counted_s=15, cool_down_s=2), replace(row_of("colocated"), guess_per_s=6.0)
    lines = []
    found = measure(row, stretch, seed=0, resolution=0.2, say=lines.append)
    assert 0 < found.both.rate_per_s <= found.ttft_only.rate_per_s
    assert found.simulations == len(lines)
    again = run_at(row, found.both.rate_per_s, stretch, seed=0)
    assert good_share(again.outcomes, ttft_slo_s=2.5, itl_slo_s=0.045) == found.both.share >= 0.9


def test_every_search_is_made_once_and_each_row_gets_its_own(monkeypatch):
    measured, said = results.read(NUMBERS).first[0], []
    made = []

    def search(row, stretch, *, seed, resolution, say):
        made.append((row.key, seed))
        say(f"{row.key} goes on")
        return replace(measured, key=row.key)

    monkeypatch.setattr(running, "measure", search)
    with ThreadPoolExecutor(2) as executor:
        found = running.run(seeds=[4, 5], quick=True, executor=executor, lines=queue.Queue(), say=said.append)
    assert len(made) == 5 * 2 + 2 + 4
    assert [[each.key for each in row] for row in found.main] == [[key] * 2 for key in BY_KEY]
    assert [each.key for each in found.nothing_shared] == list(BY_KEY)
    assert {each.key for each in found.variants.values()} == {"chunked"}
    assert len(found.variants) == 2
    assert said[-1].endswith("0 searches left")
    assert any(line.endswith("goes on") for line in said)


def test_the_pool_runs_what_it_is_given_in_processes_that_can_say_something():
    with running.pool(1) as (executor, lines):
        assert executor.submit(os.getpid).result() != os.getpid()
        executor.submit(lines.put, "on the way").result()
        assert lines.get() == "on the way"


def test_what_was_written_is_read_again_and_reports_the_same(tmp_path):
    found = results.read(NUMBERS)
    results.write(found, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == NUMBERS.read_bytes()


def test_the_page_shows_the_tables_of_the_committed_numbers():
    tables = report.markdown(results.read(NUMBERS), Constants())
    for part in [each for each in tables.split("\n\n") if each[0] in "|*"]:
        assert part in PAGE.read_text(encoding="utf-8")


def test_the_page_says_the_seed_and_machine_of_the_committed_numbers():
    found, page = results.read(NUMBERS), PAGE.read_text(encoding="utf-8")
    assert not found.quick
    assert f"seeds {', '.join(map(str, found.seeds))}" in page
    assert found.machine["cpu"] in page
    assert f"{found.cpu_s} s of CPU time" in page


def test_a_committed_number_comes_out_again_to_the_last_digit():
    """Of workers that get requests by turns, which no change of the router's mind can move."""
    found = results.read(NUMBERS).first[0].both
    run = run_at(row_of("colocated"), found.rate_per_s, running.FULL, seed=0)
    assert good_share(run.outcomes, ttft_slo_s=2.5, itl_slo_s=0.045) == found.share
    assert run.ttft_s.mean == pytest.approx(found.ttft_mean_s, rel=1e-12)
    assert run.itl_s.p99 == pytest.approx(found.itl_p99_s, rel=1e-12)


def test_a_committed_number_of_a_routed_row_comes_out_again_but_for_what_the_router_has_learned_since():
    """If this fails, the router or the twin has changed by more than a little, and the tables have to be made again."""
    found = next(each for each in results.read(NUMBERS).nothing_shared if each.key == "nixl").both
    run = run_at(row_of("nixl", NOTHING_SHARED), found.rate_per_s, running.FULL, seed=0)
    assert good_share(run.outcomes, ttft_slo_s=2.5, itl_slo_s=0.045) == pytest.approx(found.share, abs=0.1)
    assert run.itl_s.p99 == pytest.approx(found.itl_p99_s, rel=0.1)


def test_the_command_reports_results_of_before_and_draws_them(tmp_path, capsys):
    for name in ("one.svg", "two.svg"):
        status = command.main(
            ["--from", str(NUMBERS), "--picture", str(tmp_path / name), "--markdown", str(tmp_path / "tables.md")]
        )
        assert status == 0
    assert capsys.readouterr().out.count("P/D over NIXL (fitted)") == 2
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.svg").read_bytes() == NUMBERS.with_suffix(".svg").read_bytes(), "what is committed"
    assert (tmp_path / "tables.md").read_text().startswith("| | published |")


def test_what_is_no_result_is_an_error_that_says_where(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    path.write_text('{"seed": 1}')
    assert command.main(["--from", str(path)]) == 1
    error = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "numbers.json: no results of this bench" in error
    assert command.main(["--from", str(tmp_path / "none.json")]) == 1
    assert command.main(["--from", str(NUMBERS), "--picture", "x.gif"]) == 1
    assert "x.gif" in capsys.readouterr().err


def test_zero_processes_are_refused_by_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--processes", "0"])
    assert "at least 1, not 0" in capsys.readouterr().err


def test_the_profile_of_planning_adds_up_what_a_mixed_step_does():
    """The row with chunks would come out too good if reading KV cost nothing beside a prefill."""
    assert row_of("chunked").arrangement.decode_engine.profile.attention_apart
    assert not Profile().attention_apart
