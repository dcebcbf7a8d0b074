"""The tables, in Markdown: published against simulated, and what the roofline says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean

from bench.plan_tables import published
from bench.plan_tables.cluster import NOTHING_SHARED, Constants
from bench.plan_tables.measure import Measured, Reading
from bench.plan_tables.published import ROWS
from bench.plan_tables.results import Results
from bench.plan_tables.roofline import demand

FITTED = {"prefix_share": published.BASE, "tcp_bytes_a_s": "tcp"}
"""Constant -> the row that it was fitted to."""

WITHIN = 0.25
"""How near a ratio of goodput is meant to come."""

_NAMES = {row.key: row.name for row in ROWS}


def markdown(results: Results, constants: Constants) -> str:
    """All tables."""
    return "\n\n".join(
        (
            _goodput(results),
            _latency(results),
            _verdict(results),
            "What the published rates ask of 64 GPUs:\n\n" + roofline_table(constants),
            "If no prompt shares anything (nothing fitted):\n\n" + _unshared(results),
            "Constants:\n\n" + constants_table(constants),
        )
    )


def _goodput(results: Results) -> str:
    """Rates, and ratios to the base row, by both ways to count."""
    base = next(each for each in results.main if each[0].key == published.BASE)
    base_row = next(row for row in ROWS if row.key == published.BASE)
    lines = [
        "| | published | simulated, both limits | simulated, TTFT limit only | published ratio | simulated ratio, both "
        "| TTFT only |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, found in zip(ROWS, results.main, strict=True):
        ratio = row.goodput_per_s / base_row.goodput_per_s
        both, base_both = ([each.both.rate_per_s for each in of] for of in (found, base))
        only, base_only = ([each.ttft_only.rate_per_s for each in of] for of in (found, base))
        cells = [
            row.name + (" (fitted)" if row.key in FITTED.values() else ""),
            f"{row.goodput_per_s:.1f}/s",
            _mean(both),
            _mean(only),
            f"{ratio:.2f}",
            _off(fmean(both) / fmean(base_both), ratio),
            _off(fmean(only) / fmean(base_only), ratio),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        f"| {title} | | {_mean([other.both.rate_per_s])} | {_mean([other.ttft_only.rate_per_s])} | | "
        f"{other.both.rate_per_s / base[0].both.rate_per_s:.2f} | "
        f"{other.ttft_only.rate_per_s / base[0].ttft_only.rate_per_s:.2f} |"
        for title, other in results.variants.items()
    ]
    return "\n".join(lines)


def _latency(results: Results) -> str:
    """p99 ITL and mean TTFT at the rates of the table above."""
    lines = [
        "| | p99 ITL published | at both | at TTFT only | mean TTFT published | at both | at TTFT only | from caches | "
        "prefill busy | link busy | decode KV at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [(row.name, f"{row.itl_p99_ms:g} ms", f"{row.ttft_mean_ms:,g} ms") for row in ROWS]
    measured = [*results.first, *results.variants.values()]
    rows += [(title, "", "") for title in results.variants]
    for (name, itl, ttft), found in zip(rows, measured, strict=True):
        both, only = found.both, found.ttft_only
        cells = (
            name,
            itl,
            _ms(both.itl_p99_s),
            _ms(only.itl_p99_s),
            ttft,
            _ms(both.ttft_mean_s),
            _ms(only.ttft_mean_s),
            _share(both.hits),
            _share(both.prefill_busy),
            _share(both.link_busy),
            _share(both.kv_peak),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(results: Results) -> str:
    """Whether order and ratios came out, in words."""
    lines = []
    for title, rates in (
        ("both limits", [fmean(each.both.rate_per_s for each in row) for row in results.main]),
        ("TTFT limit only", [fmean(each.ttft_only.rate_per_s for each in row) for row in results.main]),
    ):
        order = [_NAMES[key] for key in _ordered(rates)]
        same = order == [row.name for row in sorted(ROWS, key=lambda row: row.goodput_per_s)]
        lines.append(
            f"* {title}: order {'as published' if same else 'differs: ' + ' < '.join(order)}; "
            f"{_near(rates)} of the 4 ratios to `{_NAMES[published.BASE]}` within {WITHIN:.0%}."
        )
    return "\n".join(lines)


def _ordered(rates: Sequence[float]) -> list[str]:
    return [row.key for _, row in sorted(zip(rates, ROWS, strict=True), key=lambda pair: pair[0])]


def _near(rates: Sequence[float]) -> int:
    by_key = {row.key: (row.goodput_per_s, rate) for row, rate in zip(ROWS, rates, strict=True)}
    base_published, base_found = by_key.pop(published.BASE)
    return sum(
        abs(rate / base_found / (goodput / base_published) - 1) <= WITHIN for goodput, rate in by_key.values() if base_found
    )


def roofline_table(constants: Constants) -> str:
    """What each published rate asks for."""
    lines = [
        "| | prompt tokens/s | of the FP8 peak of 64 GPUs, nothing cached | of the BF16 peak | KV read, of the bandwidth of 64 "
        "GPUs | must come from caches, at least |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = demand(row, constants)
        lines.append(
            f"| {row.name} | {found.prompt_tokens_a_s:,.0f} | {found.fp8_share:.0%} | {found.bf16_share:.0%} | "
            f"{found.kv_read_share:.0%} | {found.cached_at_least:.0%} of the FLOP |"
        )
    return "\n".join(lines)


def _unshared(results: Results) -> str:
    split = NOTHING_SHARED.prefill
    workers = published.GPUS // NOTHING_SHARED.tensor_parallel
    lines = [
        f"| {split}:{workers - split} where there are two roles | published | both limits | TTFT limit only | p99 ITL | "
        "mean TTFT |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in zip(ROWS, results.nothing_shared, strict=True):
        lines.append(
            f"| {row.name} | {row.goodput_per_s:.1f}/s | {found.both.rate_per_s:.1f}/s | {found.ttft_only.rate_per_s:.1f}/s | "
            f"{_ms(found.both.itl_p99_s)} | {_ms(found.both.ttft_mean_s)} |"
        )
    return "\n".join(lines)


def constants_table(constants: Constants) -> str:
    """Every constant, and what it was fitted to."""
    lines = ["| constant | value | fitted to |", "|---|---|---|"]
    for each in fields(constants):
        value = getattr(constants, each.name)
        text = f"{value:,g}" if isinstance(value, int | float) else str(value)
        fitted = _NAMES[FITTED[each.name]] if each.name in FITTED else ""
        lines.append(f"| `{each.name}` | {text} | {fitted} |")
    return "\n".join(lines)


def summary(found: Measured) -> str:
    """One line for a terminal."""
    return f"{found.key}: {_rate(found.both)} within both limits, {_rate(found.ttft_only)} within that of TTFT"


def _rate(reading: Reading) -> str:
    return f"{reading.rate_per_s:.1f}/s (mean TTFT {_ms(reading.ttft_mean_s)}, p99 ITL {_ms(reading.itl_p99_s)})"


def _mean(rates: Sequence[float]) -> str:
    """The mean over the seeds, with the lowest and the highest."""
    between = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    return f"{fmean(rates):.1f}/s{between}"


def _off(found: float, wanted: float) -> str:
    return f"{found:.2f} ({found / wanted - 1:+.0%})"


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return ""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _share(share: float | None) -> str:
    return "" if share is None or math.isnan(share) else f"{share:.0%}"
