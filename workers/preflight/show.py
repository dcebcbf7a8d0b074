"""A report for people (tables) and for programs (JSON)."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from workers.preflight import numbers
from workers.preflight.findings import Finding, Measurement, Report, Severity

_COLOURS = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARN: "yellow", Severity.ERROR: "bold red"}


def as_json(report: Report) -> str:
    """The report with its verdict and counts; docs/preflight.md describes the shape."""
    shape = msgspec.to_builtins(report)
    shape["verdict"] = report.worst.value
    shape["counts"] = {severity.value: count for severity, count in report.counts.items()}
    if report.measurement is not None:
        shape["measurement"]["bytes_per_s"] = report.measurement.bytes_per_s
    return msgspec.json.format(msgspec.json.encode(shape), indent=2).decode()


def as_text(report: Report) -> RenderableType:
    """Findings worst first, the handoff table, what was measured, and one line that sums it up."""
    parts: list[RenderableType] = [_findings(report.findings)]
    if report.measurement is not None:
        parts += [Text(), *_measurement(report.measurement)]
    if report.handoffs:
        parts += [Text(), *_handoffs(report)]
    return Group(*parts, Text(), summary(report))


def summary(report: Report) -> Text:
    """One line."""
    names = {Severity.ERROR: "error", Severity.WARN: "warning", Severity.INFO: "note"}
    counts = ", ".join(
        f"{report.counts[severity]} {name}{'' if report.counts[severity] == 1 else 's'}" for severity, name in names.items()
    )
    verdict = {
        Severity.ERROR: "not ready: the errors above come first",
        Severity.WARN: "it will work; the warnings say what it costs",
        Severity.INFO: "ready",
        Severity.OK: "ready",
    }[report.worst]
    return Text(f"{verdict} ({counts}, {report.counts[Severity.OK]} fine)", style=_COLOURS[report.worst])


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        cell = Text(finding.found)
        if finding.severity is not Severity.OK:
            if finding.why:
                cell.append(f"\n{finding.why}", style="dim")
            if finding.fix:
                cell.append("\n→ ", style="bold")
                cell.append(finding.fix)
        table.add_row(Text(finding.severity.value, style=_COLOURS[finding.severity]), finding.id, cell)
    return table


def _handoffs(report: Report) -> tuple[RenderableType, ...]:
    route = report.route
    title = f"A handoff, by {route.name} at {numbers.rate(route.bytes_per_s)} ({route.source})"
    table = Table(box=None, pad_edge=False)
    for heading in ("tokens", "KV cache", "on this route", "through host memory", "400 Gb/s direct"):
        table.add_column(heading, justify="right")
    for row in report.handoffs:
        table.add_row(
            f"{row.tokens:,}",
            numbers.size(row.size_bytes),
            numbers.seconds(row.route_s),
            numbers.seconds(row.staged_s),
            numbers.seconds(row.direct_s),
        )
    return Text(title, style="bold"), table


def _measurement(measurement: Measurement) -> tuple[RenderableType, ...]:
    title = (
        f"Measured with {measurement.tool} to {measurement.peer}, {measurement.memory}, "
        f"blocks of {numbers.size(measurement.block_bytes)}"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("bytes", "blocks", "median", "bandwidth", "best"):
        table.add_column(heading, justify="right")
    for sample in measurement.samples:
        table.add_row(
            numbers.size(sample.size_bytes),
            f"{sample.descriptors:,}",
            numbers.seconds(sample.median_s),
            numbers.rate(sample.size_bytes / sample.median_s),
            numbers.rate(sample.best_bytes_per_s),
        )
    return Text(title, style="bold"), table
