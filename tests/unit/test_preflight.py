"""What a preflight finds on recorded nodes. Each case says in words what must be found; tests/cases/preflight/*.yaml.

The trees were written by hand after the formats of /proc, /sys and the commands: no such hardware was at hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.cases.preflight import Case, load, names
from workers.preflight import Measurement, Outcome, Report, Severity, run
from workers.preflight.findings import Sample


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
