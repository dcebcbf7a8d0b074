"""``baton explain``: asks a running filter or a stored snapshot, and shows the answer as a table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from extproc.admin_client import CommandError, call
from extproc.config import Config
from extproc.errors import ApiError
from extproc.explain import Explainer, Question, Report, SavedSnapshot
from extproc.routing.decision import Terms
from extproc.routing.explain import Weighed

_SHOWN_LEFT_OUT = 50

_TERMS = tuple(name for name in Terms.__struct_fields__ if name.endswith("_s"))

_LEGEND = "times in milliseconds; cached: tokens that the prefill/decode worker holds"

_T = TypeVar("_T")


def question(body: bytes, *, source: str, path: str | None, headers: Sequence[str]) -> Question:
    """What the command line asks. ``headers`` are ``name=value``. Raises CommandError."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{source}: not a JSON body: {error}") from None
    split = [header.partition("=") for header in headers]
    for name, equals, _ in split:
        if not (name.strip() and equals):
            raise CommandError(f"--header {name!r}: it is name=value")
    return Question(path=path, headers={name.strip().lower(): value for name, _, value in split}, body=msgspec.Raw(body))


def ask_filter(admin: str, asked: Question) -> Report:
    """The answer of a running filter. ``admin``: ``http://host:port`` or ``unix:/path``. Raises CommandError."""
    answer = asyncio.run(call(admin, "POST", "/debug/explain", msgspec.json.encode(asked)))
    return _decoded(answer, Report, admin)


def fetch_snapshot(admin: str) -> bytes:
    """What a running filter knows, with its prefix index. Raises CommandError."""
    answer = asyncio.run(call(admin, "GET", "/debug/snapshot?index=1", None))
    _decoded(answer, SavedSnapshot, admin)
    return answer


def ask_snapshot(path: Path, config: Config, asked: Question) -> Report:
    """The answer from a stored snapshot. Raises CommandError."""
    try:
        saved = _decoded(path.read_bytes(), SavedSnapshot, str(path))
        return Explainer(config, block_tokens=saved.settings.block_tokens).by_snapshot(asked, saved)
    except OSError as error:
        raise CommandError(str(error)) from None
    except ApiError as error:
        raise CommandError(f"the client would be told {error.status} {error.code}: {error.message}") from None
    except ValueError as error:
        raise CommandError(f"{path}: the snapshot contradicts itself: {error}") from None


def _decoded(text: bytes, kind: type[_T], source: str) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        what = "snapshot" if kind is SavedSnapshot else "answer"
        raise CommandError(f"{source}: not a {what} of this version of Baton: {error}") from None


def as_json(report: Report) -> bytes:
    """For programs."""
    return msgspec.json.encode(report)


# -- the table -------------------------------------------------------------------------------------------------------------


def as_table(report: Report) -> RenderableType:
    """For people: what would happen, what was weighed, who was left out."""
    parts: list[RenderableType] = [_head(report), ""]
    if report.decision.candidates:
        parts += [_candidates(report), Text(_LEGEND), ""]
    if report.decision.left_out:
        parts += [_left_out(report), ""]
    hidden = report.decision.not_shown
    notes = [*report.notes, *(f"{count:,} more {what.replace('_', ' ')} are not shown" for what, count in hidden.items())]
    return Group(*parts, *(Text(f"note: {note}") for note in notes))


def _head(report: Report) -> Table:
    policy, prompt, decision = report.policy, report.prompt, report.decision
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, text: str) -> None:
        table.add_row(name, Text(text))

    row("would", outcome_words(report))
    row("request", report.path)
    row("model", report.model if report.model == report.model_asked else f"{report.model}, for {report.model_asked}")
    row("prompt", f"{prompt.tokens:,} tokens ({'exact' if prompt.exact else 'estimated'}), {prompt.blocks:,} blocks")
    row("policy", f"{policy.name}: {policy.why}")
    for name, conditions in policy.passed_over.items():
        row("", f"not {name}, which asks for: {'; '.join(conditions)}")
    row("", f"mode {policy.mode}, objective {policy.objective}, dispatch {policy.dispatch}")
    if policy.pool is not None:
        row("pool", policy.pool)
    if policy.ignored_overrides:
        row("", f"ignores the client's x-baton-{', x-baton-'.join(policy.ignored_overrides)}")
    if report.whole_reason is not None:
        row("handoff", f"impossible: {report.whole_reason}")
    row("queue", f"{decision.queue_requests:,} prompts wait, {decision.queue_work_s:.1f} s of prefill")
    return table


def outcome_words(report: Report) -> str:
    """One line: what would happen."""
    decision = report.decision
    placed = decision.decision
    if placed is not None:
        if placed.prefill is None:
            return f"be placed now, all of it on {placed.decode} (reason: {placed.reason})"
        return f"be placed now: prefill on {placed.prefill}, decode on {placed.decode} (reason: {placed.reason})"
    error = report.error
    if error is not None:
        again = f", try again after {error.retry_after_s:.0f} s" if error.retry_after_s is not None else ""
        return f"be answered {error.status} {error.code}{again}: {error.message}"
    where = f"for {decision.waits_for}" if decision.waits_for is not None else "until a worker can take it"
    return f"wait {where}, behind {decision.behind:,} others, about {decision.expected_wait_s:.1f} s"


def _candidates(report: Report) -> Table:
    candidates = report.decision.candidates
    used = [name for name in _TERMS if any(getattr(each.terms, name) >= 5e-5 for each in candidates)]
    table = Table(pad_edge=False, header_style="")
    table.add_column("prefill", no_wrap=True)
    table.add_column("decode", no_wrap=True)
    for name in used:
        table.add_column(name.removesuffix("_s").replace("_", "\n"), justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    asked = any(each.cached_by != "predicted" or each.below_tokens for each in candidates)
    if asked:
        table.add_column("says", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    table.add_column("why not")
    for each in candidates:
        best = each.chosen
        table.add_row(
            Text(each.prefill or "-"),  # not as markup, which [fe80::1] could be taken for
            Text(each.decode),
            *(_ms(getattr(each.terms, name)) for name in used),
            f"{'-' if each.prefill is None else format(each.cached_prefill_tokens, ',')}/{each.cached_decode_tokens:,}",
            *((_says(each),) if asked else ()),
            _ms(each.cost),
            Text("<- it" if best else each.why),
            style="bold" if best else None,
        )
    return table


def _says(candidate: Weighed) -> str:
    """Who says that so much is cached where it would be computed, on which engine, and what of it must be loaded."""
    rank = () if candidate.rank is None else (f"rank {candidate.rank}",)
    below = (f"{tokens:,} in {tier}" for tier, tokens in candidate.below_tokens.items())
    return ", ".join((candidate.cached_by.replace("_", " "), *rank, *below))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.00995 or not seconds else f"{seconds * 1e3:.1f}"


def _left_out(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("left out", no_wrap=True)
    table.add_column("as")
    table.add_column("why")
    out = report.decision.left_out
    for each in out[:_SHOWN_LEFT_OUT]:
        table.add_row(Text(each.endpoint), each.role.value, Text(each.why))
    if len(out) > _SHOWN_LEFT_OUT:
        table.add_row(f"and {len(out) - _SHOWN_LEFT_OUT:,} more", "", "")
    return table
