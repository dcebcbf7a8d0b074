"""The report for people, and each request as a line for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from extproc.loadgen.account import Numbers, Quantiles, Report, Tokens
from extproc.loadgen.sample import Sample

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


class _Line(msgspec.Struct, omit_defaults=True, kw_only=True):
    due_s: float
    sent_s: float | None
    kind: str
    status: int | None = None
    code: str = ""
    message: str = ""
    ttft_s: float | None = None
    end_s: float | None = None
    tpot_s: float | None = None
    gaps_s: list[float] = []
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    asked_input_tokens: int = 0
    asked_output_tokens: int = 0
    finish_reason: str | None = None
    groups: dict[str, str] = {}


def lines(samples: Iterable[Sample]) -> Iterator[bytes]:
    """Each request as a line of JSON."""
    for sample in samples:
        values = {name: getattr(sample, name) for name in _Line.__struct_fields__ if name != "kind"}
        yield msgspec.json.encode(_Line(kind=sample.kind.value, **values)) + b"\n"


def shown(found: Report) -> RenderableType:
    """Tables and sentences."""
    every = found.all
    rate = f" ({found.offered_per_s:.2f} requests/s)" if found.offered_per_s is not None else ""
    tokens = found.tokens
    parts: list[RenderableType] = [
        Text(f"{found.model} at {found.target}, {found.api}: {found.load}"),
        Text(
            f"{every.requests} requests in {found.span_s:.1f} s{rate}, all ended after {found.wall_s:.1f} s; "
            f"at most {found.peak_in_flight} in flight; {every.served} served, {every.requests - every.served} not"
        ),
        Text(),
        _latencies(every),
        Text(),
        Text(
            f"goodput  {every.goodput:.1%} of the requests"
            + (f", {every.good_per_s:.2f}/s" if every.good_per_s is not None else "")
            + f": first token within {found.ttft_slo_s:g} s, and each request's own p99 gap within {found.itl_slo_s * 1e3:g} ms"
        ),
        Text(
            f"tokens   {tokens.prompt:,} in (asked for {tokens.asked_prompt:,}{_cached(tokens)}), {tokens.output:,} out "
            f"(asked for {tokens.asked_output:,}); {tokens.output_per_s:,.0f} out/s; counted by the engine"
        ),
        Text(
            f"itself   sent late p50 {found.own.send_late_p50_s * 1e3:.1f} ms, p99 {found.own.send_late_p99_s * 1e3:.1f} ms, "
            f"max {found.own.send_late_max_s * 1e3:.1f} ms; saw tokens late p99 {found.own.loop_late_p99_s * 1e3:.1f} ms; "
            f"{found.own.cpu_share:.0%} of a processor"
        ),
    ]
    for name, values in found.groups.items():
        parts += [Text(), _groups(name, values)]
    if found.failures:
        parts += [Text(), _failures(found)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in found.warnings]
    return Group(*parts)


def _latencies(every: Numbers) -> Table:
    table = _table("ms", *_COLUMNS)
    for title, values in (
        ("TTFT", every.ttft),
        ("ITL", every.itl),
        ("ITL p99 of a request", every.itl_p99),
        ("TPOT", every.tpot),
        ("end to end", every.end_to_end),
    ):
        table.add_row(title, *(_ms(getattr(values, column)) for column in _COLUMNS))
    return table


def _groups(name: str, values: dict[str, Numbers]) -> Table:
    table = _table(name, "requests", "served", "goodput", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    for value, some in values.items():
        table.add_row(
            value,
            str(some.requests),
            str(some.served),
            f"{some.goodput:.1%}",
            *(_ms(each) for each in (*_two(some.ttft), *_two(some.itl))),
        )
    return table


def _failures(found: Report) -> Table:
    table = _table("not served", "status", "code", "requests")
    table.columns[2].justify = "left"
    table.add_column("for example")
    for each in found.failures:
        status = "" if each.status is None else str(each.status)
        table.add_row(each.kind, status, each.code, str(each.count), each.example)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _two(values: Quantiles) -> tuple[float | None, float | None]:
    return values.p50, values.p99


def _cached(tokens: Tokens) -> str:
    return "" if tokens.cached is None or not tokens.prompt else f", {tokens.cached / tokens.prompt:.1%} cached"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"
