"""docs/plan-ratio.md: the command prints what stands there, and the tables are those of the stored results."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.plan_rules import report
from bench.plan_rules.__main__ import RESULTS, main, run
from bench.plan_rules.cases import CASES, SMALL, Case
from extproc.cli import app
from extproc.plan.runs import Runner

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "plan-ratio.md").read_text()


def stored() -> report.Results:
    return msgspec.json.decode(RESULTS.read_bytes(), type=report.Results)


def consoles() -> list[tuple[str, str]]:
    """Commands and what they print."""
    return re.findall(r"```console\n\$ (baton plan ratio (?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_a_command_with_its_output() -> None:
    assert len(consoles()) == 1


@pytest.mark.timeout(600)  # fifteen seconds of CPU, on a machine that may have other work
@pytest.mark.parametrize(("command", "printed"), consoles())
def test_the_command_of_the_page_prints_what_stands_there_and_draws_the_same_picture(command, printed, tmp_path):
    _, *arguments = shlex.split(command.replace("\\\n", ""))
    picture = tmp_path / "plan-ratio.svg"
    place = arguments.index("--picture") + 1
    committed, arguments[place] = DOCS.parent / arguments[place], str(picture)
    found = CliRunner().invoke(app, [*arguments, "--processes", "1"])
    assert found.exit_code == 0, found.stderr
    assert found.stdout == printed
    assert picture.read_bytes() == committed.read_bytes()


def test_the_error_of_the_page_is_what_the_command_says():
    ((command, printed),) = re.findall(r"```\n\$ (baton plan ratio .*?)\n(.*?)```", PAGE, re.DOTALL)
    found = CliRunner().invoke(app, [*shlex.split(command)[1:], "--processes", "1"])
    assert found.exit_code == 1
    assert found.stderr == printed


def test_the_tables_of_the_page_are_those_of_the_stored_results():
    assert [row.name for row in stored().rows] == [case.name for case in CASES], "every case has been run"
    assert [row.command for row in stored().rows] == [case.command for case in CASES], "as it stands now"
    assert report.splits_table(CASES, stored()) in PAGE
    assert report.chunked_table(CASES, stored()) in PAGE


def test_the_picture_of_the_page_is_drawn_from_the_stored_results(tmp_path):
    report.draw(CASES, stored(), tmp_path / "plan-rules.svg")
    assert (tmp_path / "plan-rules.svg").read_bytes() == (DOCS / "plan-rules.svg").read_bytes()


def test_a_small_case_is_run_and_makes_a_row():
    case = Case(name="small", rule="chunked", isl=4_096, osl=4, gpus=4, ttft_s=2.0, tensor_parallel=(2,))
    row = run(case, replace(SMALL, counted_s=10.0), Runner(None))
    assert row.split == "1 x TP2 : 1 x TP2"
    assert row.chunked.startswith("2 x TP2, chunks of ")
    assert (row.gpus_prefill, row.gpus_decode) == (2, 2)
    assert row.gain is not None
    assert row.gain == pytest.approx(row.rate_per_s / row.chunked_per_s, rel=0.3)


def test_a_case_is_the_command_that_it_shows():
    case = CASES[0]
    assert case.command == (
        "baton plan ratio --model llama-3.3-70b --weight-dtype fp8 --gpu h200 --gpus 40 --isl lognormal:mean=32768,cv=0.2 "
        "--osl lognormal:mean=400,cv=0.2 --ttft-slo 5 --itl-slo 0.045 --arrangement nixl --prefill-tp 4 --decode-tp 4 "
        "--seeds 3 --all-splits"
    )
    assert case.question.prefill_tp == case.question.decode_tp == (4,)


def test_a_name_that_is_no_case_is_refused(capsys):
    assert main(["nonsense"]) == 2
    assert "there are long-in" in capsys.readouterr().err
