"""What ``baton top`` shows: the document of ``/live`` as a screen that fits the terminal it is drawn on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from extproc.live_document import DecisionNow, Live, Quantiles, Target, WorkerNow

_BAR = 10
_WIDE, _WIDEST = 100, 150
"""Columns of a terminal from which there is room for more."""
_KV_WARN, _KV_BAD = 0.85, 0.95
_OLD_REPORT_S = 10.0
_DECISIONS_LEAST, _DECISIONS_MOST = 3, 8
_HEAD_LINES = 6
"""Of the state, the figures and their spacing."""
_TABLE_LINES = 3
"""Of a table beside its rows: its title, its headings, and an empty line."""

_STYLES = {"live": "green", "warming": "yellow", "leaving": "yellow", "failing": "red", "down": "bold red"}
_URGENT = {"down": 0, "failing": 1, "warming": 2, "leaving": 3, "live": 4}


class Screen:
    """Draws the newest document at the size that the terminal has at that moment."""

    def __init__(self, doc: Live, *, whole: bool = False) -> None:
        """``whole``: everything, however many lines that are."""
        self.doc = doc
        self.fault: str | None = None
        """Why there is no newer one."""
        self.since_s = time.monotonic()
        """When ``doc`` came."""
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = None if self._whole else options.height or console.height
        yield draw(self.doc, options.max_width, height, self.fault, time.monotonic() - self.since_s)


def draw(doc: Live, width: int, height: int | None, fault: str | None = None, age_s: float = 0.0) -> RenderableType:
    """One frame of ``width`` columns and at most ``height`` lines (None: as many as it takes)."""
    notices = _notices(doc, fault, age_s)
    decisions, workers = len(doc.decisions), len(doc.workers)
    if height is not None:
        room = height - _HEAD_LINES - len(notices) - 2 * _TABLE_LINES - 2
        decisions = min(decisions, _DECISIONS_MOST, max(_DECISIONS_LEAST, room - workers))
        workers = min(workers, max(1, room - decisions))
    parts: list[RenderableType] = [_state(doc), *notices, Text(), _figures(doc), Text()]
    parts.append(_workers(doc, workers, width))
    parts += [Text(), _decisions(doc.decisions[:decisions], width)]
    return Group(*parts)


def plain(text: str) -> str:
    """Without what a terminal would take for a command."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


# -- the head --------------------------------------------------------------------------------------------------------------


def _state(doc: Live) -> Text:
    filter_ = doc.filter
    word, style = (
        ("draining", "yellow") if filter_.draining else ("ready", "green") if filter_.ready else ("not ready", "bold red")
    )
    warm = filter_.warm_up
    return Text.assemble(
        ("baton ", "bold"),
        (word, style),
        f"  {time.strftime('%H:%M:%S', time.localtime(doc.at))}  up {_span(filter_.uptime_s)}  version {filter_.version}",
        f"  warm pairs {warm.pairs_warm:,}/{warm.pairs:,}" if warm.enabled else "",
        no_wrap=True,
        overflow="ellipsis",
    )


def _notices(doc: Live, fault: str | None, age_s: float) -> list[Text]:
    lines = []
    if fault is not None:
        lines.append((f"no answer for {age_s:.0f} s: {fault}", "bold red"))
    if not doc.filter.ready and doc.filter.why is not None:
        lines.append((f"not served: {doc.filter.why}", "red"))
    lines += [(f"{each.kind} {each.name}: {each.error}", "yellow") for each in doc.filter.discovery if each.error is not None]
    lines += [(f"does not work: {each}", "red") for each in doc.filter.warm_up.failing[:3]]
    return [Text(plain(words), style=style, no_wrap=True, overflow="ellipsis") for words, style in lines]


def _figures(doc: Live) -> Table:
    rates, queue = doc.rates, doc.queue
    table = Table.grid(padding=(0, 3), expand=False)
    for _ in range(2):
        table.add_column(no_wrap=True, overflow="ellipsis")
    lines = [
        (f"TTFT   {_times(doc.times.ttft)}", _goal(doc.targets, "ttft_s", doc.times.ttft)),
        (f"ITL    {_times(doc.times.itl)}", _goal(doc.targets, "itl_s", doc.times.itl)),
        (
            f"{rates.requests_per_s:.1f} requests/s",
            f"handed over {rates.handoffs_per_s:.1f}  whole {rates.whole_per_s:.1f}  "
            f"refused {rates.refused_per_s:.1f}  errors {rates.errors_per_s:.1f}",
        ),
        (f"queue {queue.requests:,}", f"{_time(queue.work_s)} of work, longest wait {_time(queue.longest_wait_s)}"),
    ]
    alarming = rates.refused_per_s > 0 or rates.errors_per_s > 0
    for first, second in lines:
        alarm = alarming and second.startswith("handed")
        table.add_row(Text(first, style="bold"), Text(second, style="red" if alarm else "dim"))
    return table


def _times(found: Quantiles | None) -> str:
    if found is None:
        return "-"
    if found.p50_s is None:
        return f"mean {_time(found.mean_s)}"
    return f"p50 {_time(found.p50_s)}  p90 {_time(found.p90_s)}  p99 {_time(found.p99_s)}"


def _goal(targets: Sequence[Target], field: str, found: Quantiles | None) -> str:
    goals = [(value, each.policy) for each in targets if (value := getattr(each, field)) is not None]
    goal = "" if not goals else f"SLO {_time(min(goals)[0])} ({plain(min(goals)[1])})"
    source = "" if found is None else "engines' report" if found.source == "engines" else "as clients see it"
    return ", ".join(each for each in (source, goal) if each)


# -- the tables ------------------------------------------------------------------------------------------------------------


def _workers(doc: Live, most: int, width: int) -> RenderableType:
    if not doc.workers:
        return Text('No workers. "baton check" shows where they are looked for.', style="yellow")
    shown = doc.workers
    if len(shown) > most:  # what needs somebody first, then who has most to do
        shown = sorted(shown, key=lambda each: (_URGENT[each.state], -each.backlog_s, -each.decode_requests))[:most]
        order = {each.address: number for number, each in enumerate(doc.workers)}
        shown.sort(key=lambda each: order[each.address])
    wide = width >= _WIDE
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold")
    left_out = len(doc.workers) - len(shown) + doc.workers_left_out
    table.title = f"workers{f' ({left_out:,} more are not shown)' if left_out else ''}"
    pools = any(each.pool is not None for each in shown)
    for name in (*(("pool",) if pools else ()), "role", "worker", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column("load", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    if wide:
        for name in ("running", "waiting", "ITL", "handoffs", "report"):
            table.add_column(name, justify="right", no_wrap=True)
    longest_s = max(1.0, *(each.backlog_s for each in doc.workers))
    most_requests = max(8, *(each.decode_requests for each in doc.workers))
    for worker in shown:
        pool = [Text(plain(worker.pool or "-"))] if pools else []
        table.add_row(*pool, *_worker(worker, longest_s, most_requests, wide=wide))
    return table


def _worker(worker: WorkerNow, longest_s: float, most_requests: int, *, wide: bool) -> list[Text]:
    cells = [
        Text("+".join(worker.roles), style="blue" if worker.roles == ["prefill"] else "cyan"),
        Text(plain(worker.address)),
        Text(worker.state, style=_STYLES[worker.state]),
        _load(worker, longest_s, most_requests),
        _kv(worker.kv_usage),
    ]
    if wide:
        age = worker.report_age_s
        old = age is None or age > _OLD_REPORT_S
        cells += [
            Text(_count(worker.running)),
            Text(_count(worker.waiting)),
            Text(_time(worker.itl_s)),
            Text(f"{worker.handoffs:,}"),
            Text("never" if age is None else f"{age:.1f} s", style="yellow" if old else ""),
        ]
    return cells


def _load(worker: WorkerNow, longest_s: float, most_requests: int) -> Text:
    if "decode" in worker.roles:
        share = worker.decode_requests / most_requests
        words = f"{worker.decode_requests + worker.prefill_requests:,} req"
    else:
        share = worker.backlog_s / longest_s
        words = f"{worker.prefill_requests:,} req {_time(worker.backlog_s)}"
    return Text.assemble(_bar(share, "blue" if worker.roles == ["prefill"] else "cyan"), f" {words}")


def _kv(usage: float | None) -> Text:
    if usage is None:
        return Text("-")
    style = "red" if usage >= _KV_BAD else "yellow" if usage >= _KV_WARN else "white"
    return Text.assemble(_bar(usage, style), f" {usage * 100:.0f} %")


def _bar(share: float, style: str) -> Text:
    filled = round(min(1.0, max(0.0, share)) * _BAR)
    return Text.assemble(("█" * filled, style), ("░" * (_BAR - filled), "dim"))


def _decisions(decisions: Sequence[DecisionNow], width: int) -> RenderableType:
    if not decisions:
        return Text("No prompt was placed yet.", style="dim")
    table = Table(
        box=None, pad_edge=False, header_style="dim", title="last decisions", title_justify="left", title_style="bold"
    )
    wide, widest = width >= _WIDE, width >= _WIDEST
    table.add_column("time", no_wrap=True, min_width=8)
    table.add_column("went to", no_wrap=True, overflow="ellipsis")
    if wide:
        table.add_column("policy, reason", no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "cached", "queued", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    if widest:
        table.add_column("next best", no_wrap=True, overflow="ellipsis")
    for each in decisions:
        where = f"{each.decode} alone" if each.prefill is None else f"{each.prefill} → {each.decode}"
        share = each.cached_tokens / each.prompt_tokens if each.prompt_tokens else 0.0
        row = [
            Text(time.strftime("%H:%M:%S", time.localtime(each.at))),
            Text(plain(where)),
            *([Text(plain(f"{each.policy}, {each.reason}"))] if wide else []),
            Text(f"{each.prompt_tokens:,}"),
            Text(f"{share * 100:.0f} %"),
            Text(_time(each.queued_ms / 1e3)),
            Text(_time(each.ttft_ms / 1e3)),
        ]
        if widest:
            other = each.candidates[1] if len(each.candidates) > 1 else None
            row.append(Text("" if other is None or other.why is None else plain(other.why), style="dim"))
        table.add_row(*row)
    return table


# -- numbers ---------------------------------------------------------------------------------------------------------------


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0995 or seconds < 5e-5 else f"{seconds * 1e3:.1f} ms"


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
