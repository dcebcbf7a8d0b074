"""The requests of a run: when, how long, which prefixes they share, and their bodies. No I/O but the trace file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from extproc.loadgen.arrivals import Gaps, Stage, arrivals
from extproc.loadgen.errors import BenchError
from extproc.plan.errors import PlanError
from extproc.plan.workload import Workload
from workers import traces
from workers.trace_text import prompt_text
from workers.traces import Request

Api = Literal["chat", "completions"]
PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_OURS = ("model", "messages", "prompt", "stream")
"""Keys of a body that stay ours whatever ``--body`` says."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How an engine counts our text, as far as it is known: words and the tokens around them (chat template, begin of text)."""

    tokens_per_word: float = 1.0
    around_tokens: int = 0


def api_of(text: str) -> Api:
    """Raises BenchError."""
    for name in PATHS:
        if text == name:
            return name
    raise BenchError(f"api: {text!r} is not {' or '.join(PATHS)}")


def scheduled(workload: Workload, stages: Sequence[Stage], gaps: Gaps, *, seed: int, limit: int | None) -> list[Request]:
    """Requests of stated lengths at the times of the stages. Raises BenchError."""
    times_s = arrivals(stages, gaps, seed=seed, limit=limit)
    # So long that there are enough of them, whatever the draw: six standard deviations and some.
    count = len(times_s)
    try:
        drawn = workload.requests(1.0, count + 6 * math.sqrt(count) + 20, seed)
    except PlanError as error:
        raise BenchError(str(error)) from None
    return [replace(request, at_s=at_s) for request, at_s in zip(drawn, times_s, strict=False)]


def of_trace(
    path: Path,
    *,
    limit: int | None,
    offset: int,
    rate_per_s: float | None,
    duration_s: float | None,
    stages: Sequence[Stage] | None,
    gaps: Gaps,
    seed: int,
) -> list[Request]:
    """Requests of a trace file: at its own times, those scaled to a rate, or at the times of ``stages``. Raises BenchError."""
    try:
        requests = traces.load(path, limit=limit, offset=offset)
        if rate_per_s is not None:
            requests = traces.at_rate(requests, rate_per_s)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(str(error)) from None
    if stages is not None:
        times_s = arrivals(stages, gaps, seed=seed, limit=len(requests))
        requests = [replace(request, at_s=at_s) for request, at_s in zip(requests, times_s, strict=False)]
    if duration_s is not None:
        requests = [request for request in requests if request.at_s < duration_s]
    if not requests:
        raise BenchError(f"{path}: no request is left of it")
    return requests


def body(
    request: Request,
    *,
    api: Api,
    model: str,
    seed: int,
    scale: Scale,
    ignore_eos: bool,
    extra: Mapping[str, Any],
) -> bytes:
    """The JSON body: a stream of exactly the stated number of tokens, where the engine knows ``ignore_eos``.

    Another ``seed`` gives all blocks other texts, so that a run does not find in the cache what the run before it left.
    """
    wanted = max(1, request.input_tokens - scale.around_tokens)
    blocks = -(-wanted // traces.BLOCK_TOKENS)
    own = replace(request, input_tokens=wanted, hash_ids=tuple(hash_id + (seed << 64) for hash_id in request.hash_ids[:blocks]))
    text = prompt_text(own, tokens_per_word=scale.tokens_per_word)
    fields: dict[str, Any] = {"model": model}
    if api == "chat":
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    fields |= {"max_tokens": request.output_tokens, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        fields["ignore_eos"] = True
    return msgspec.json.encode({**fields, **extra})


def extra_fields(text: str | None) -> Mapping[str, Any]:
    """What ``--body`` adds to every body. Raises BenchError."""
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BenchError(f"body: not a JSON object: {error}") from None
    for name in _OURS:
        if name in fields:
            raise BenchError(f"body: {name} is the generator's own")
    return fields
