"""What a preflight finds on recorded nodes. Each case says in words what must be found; tests/unit/preflight_nodes/*.yaml.

The trees were written by hand after the formats of /proc, /sys and the commands: no such hardware was at hand.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.preflight_nodes import Case, load, names
from workers.preflight import Measurement, Outcome, Report, Severity, run
from workers.preflight.findings import Sample
from workers.preflight.runner import Output, SystemRunner


def report_of(case: Case, tmp_path: Path) -> Report:
    case.write(tmp_path)
    return run(case.ask, root=tmp_path, env=case.env, runner=case.runner)


def described(report: Report) -> str:
    return "\n".join(f"{each.severity} {each.id}: {each.found} | {each.why} | {each.fix}" for each in report.findings)


@pytest.mark.parametrize("name", names())
def test_a_recorded_node(name: str, tmp_path: Path) -> None:
    case = load(name)
    report = report_of(case, tmp_path)
    for wanted in case.expect:
        found = [each for each in report.findings if each.id == wanted.id and each.severity == wanted.severity]
        assert found, f"{case.words}\nno {wanted.severity} {wanted.id} in:\n{described(report)}"
        texts = [
            each
            for each in found
            if wanted.says in each.found and wanted.why in each.why and wanted.fix.lower() in each.fix.lower()
        ]
        assert texts, f"{case.words}\n{wanted} is not what is said:\n{found}"
    for absent in case.absent:
        assert all(each.id != absent for each in report.findings), f"{absent} is not to be found in:\n{described(report)}"
    assert report.worst == case.verdict, f"{case.words}\n{described(report)}"
    if case.route is not None:
        assert report.route.name == case.route.name
        assert report.route.bytes_per_s == pytest.approx(case.route.gb_per_s * 1e9)


@pytest.mark.parametrize("name", names())
def test_errors_come_first_and_each_says_why_and_what_to_do(name: str, tmp_path: Path) -> None:
    report = report_of(load(name), tmp_path)
    ranks = [finding.severity.rank for finding in report.findings]
    assert ranks == sorted(ranks, reverse=True)
    for finding in report.findings:
        if finding.severity in (Severity.ERROR, Severity.WARN):
            assert finding.why, finding
            assert finding.fix, finding


def test_every_finding_stands_in_the_docs(tmp_path: Path) -> None:
    text = Path("docs/preflight.md").read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for file in Path("workers/preflight/checks").glob("*.py")]
    named = {name for source in sources for name in re.findall(r'id="([a-z_0-9.]+)"', source)}
    for number, name in enumerate(names()):
        named |= {finding.id for finding in report_of(load(name), tmp_path / str(number)).findings}
    assert len(named) > 30
    assert [name for name in sorted(named) if f"| `{name}` |" not in text] == []


def test_a_bare_tree_is_no_crash_but_findings(tmp_path: Path) -> None:
    """Nothing can be read and no command is there: what is needed is missing, what cannot be told is left out."""
    case = load("h100_infiniband")
    report = run(case.ask, root=tmp_path, env={}, runner=type(case.runner)({}, frozenset(), "refused"))
    ids = {finding.id: finding.severity for finding in report.findings}
    assert ids["gpu.present"] is Severity.ERROR
    assert ids["nixl.installed"] is Severity.ERROR
    assert "host.memlock" not in ids


def test_a_measurement_of_one_link_counts_for_each_nic_and_a_slow_one_is_a_warning(tmp_path: Path) -> None:
    """Four GPUs with a NIC each: one process measured 5 GB/s on a link of 50, the worker gets four times that."""
    sample = Sample(size_bytes=1 << 30, descriptors=2048, median_s=(1 << 30) / 5e9, best_bytes_per_s=6e9, transfers=5)
    outcome = Outcome(
        measurement=Measurement(
            peer="gpu-8",
            tool="nixl",
            memory="cuda",
            block_bytes=524_288,
            first_transfer_s=3.0,
            latency_s=2e-5,
            samples=(sample,),
        ),
        reached_side_channel="timed out",
    )
    case = load("h100_infiniband")
    case.write(tmp_path)
    report = run(case.ask, root=tmp_path, env=case.env, runner=case.runner, measure=lambda _: outcome)
    found = {finding.id: finding for finding in report.findings}
    assert report.route.bytes_per_s == pytest.approx(20e9)
    assert found["handoff.bandwidth"].severity is Severity.WARN
    assert "10% of the link's 50 GB/s" in found["handoff.bandwidth"].why
    assert found["peer.reaches_us"].severity is Severity.ERROR


def test_a_cache_that_every_gpu_needs_whole_takes_longer(tmp_path: Path) -> None:
    """Multi-head latent attention on four GPUs: each fetches all of it."""
    case = load("h100_infiniband")
    case.write(tmp_path)
    assert case.ask.model is not None
    latent = msgspec.structs.replace(case.ask, model=msgspec.structs.replace(case.ask.model, kv_heads=1))
    usual, whole = (
        run(ask, root=tmp_path, env=case.env, runner=case.runner).handoffs[-1].route_s for ask in (case.ask, latent)
    )
    assert whole == pytest.approx(4 * usual)


def test_a_handoff_that_outlasts_its_lease_is_an_error(tmp_path: Path) -> None:
    """vLLM reads freed blocks without noticing: wrong text."""
    case = load("h100_infiniband")
    case.write(tmp_path)
    slow = msgspec.structs.replace(case.ask, bandwidth_bytes_per_s=0.1e9)
    found = {each.id: each for each in run(slow, root=tmp_path, env=case.env, runner=case.runner).findings}
    assert found["handoff.time"].severity is Severity.ERROR
    assert "wrong text" in found["handoff.time"].why
    assert "kv_lease_duration of at least 429 s" in found["handoff.time"].fix


GARBAGE = ("", "\n", ":", "0x", "-1", "unlimited", "a b c d e f g h i j k l", "\x00\xff", "9" * 400, "4: ", "::1 ::", "1-x,y-2")


@pytest.mark.parametrize("name", ["h100_infiniband", "roce_without_pfc", "cpu_small", "port_taken"])
def test_no_file_and_no_answer_of_a_command_can_make_it_crash(name: str, tmp_path: Path) -> None:
    """Each file and each answer in turn says something else than it should; every line of it, too."""
    case = load(name)
    case.write(tmp_path)
    for path in [path for path in case.files if (tmp_path / path).is_file()]:
        good = (tmp_path / path).read_text(encoding="utf-8")
        for bad in (*GARBAGE, *(f"{line.partition(':')[0]}: {bad}\n" for line in good.splitlines()[:3] for bad in GARBAGE)):
            (tmp_path / path).write_text(bad, encoding="utf-8")
            run(case.ask, root=tmp_path, env=case.env, runner=case.runner)
        (tmp_path / path).write_text(good, encoding="utf-8")
    for argv in case.runner.outputs:
        for bad in GARBAGE:
            runner = dataclasses.replace(case.runner, outputs={**case.runner.outputs, argv: bad})
            run(case.ask, root=tmp_path, env=case.env, runner=runner)


@pytest.mark.parametrize("mask", ["", ",", "-1", "GPU-", "0,0", "MIG-x", "0,1,2,3,4"])
def test_any_mask_of_gpus_is_read_as_cuda_reads_it(mask: str, tmp_path: Path) -> None:
    """Up to the first that does not exist or comes again."""
    case = load("h100_infiniband")
    case.write(tmp_path)
    report = run(case.ask, root=tmp_path, env={"CUDA_VISIBLE_DEVICES": mask}, runner=case.runner)
    wanted = {"": 0, ",": 0, "-1": 0, "GPU-": 1, "0,0": 1, "MIG-x": 0, "0,1,2,3,4": 4}[mask]
    assert len(report.identity.used_gpu_uuids) == wanted


def test_commands_end_with_their_time_and_those_that_are_not_there_say_nothing() -> None:
    runner = SystemRunner()
    assert runner.run(("no-such-command-anywhere",), timeout_s=5) is None
    assert runner.run((sys.executable, "-c", "import time; time.sleep(60)"), timeout_s=0.5) is None
    said = runner.run(
        (sys.executable, "-c", "import os, sys; print(os.environ['A']); sys.exit(3)"), timeout_s=30, env={"A": "b"}
    )
    assert said == Output(3, "b\n")


def test_a_name_that_is_none_and_a_port_that_nobody_has_are_told_apart() -> None:
    runner = SystemRunner()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert runner.dial("127.0.0.1", port, timeout_s=5).outcome == "refused"
        unused.listen()
        assert runner.dial("127.0.0.1", port, timeout_s=5).outcome == "connected"
    assert runner.addresses("127.0.0.1") == {"127.0.0.1"}
    assert runner.addresses("name.invalid") == frozenset()
