"""Request traces: when each prompt came, how long it and its answer were, and which blocks of it others share."""

from __future__ import annotations

import gzip
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

BLOCK_TOKENS = 512
"""Tokens of a prompt that one hash id stands for; the last block of a prompt may be partial."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. Two requests share a prefix exactly as far as their ``hash_ids`` agree."""

    at_s: float
    """Since the first request of what was loaded."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load(path: Path | str, *, limit: int | None = None, offset: int = 0) -> list[Request]:
    """The trace in a file of JSON lines, gzipped or plain: ``limit`` requests after the first ``offset``.

    Requests that share a timestamp are spread evenly over the time to the next one: a trace with coarse ticks would otherwise
    come in bursts that nobody sent. Raises ValueError with the line number where the file is not a trace, and OSError.
    """
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError("limit and offset: 0 or more")
    path = Path(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            lines = _read(cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw)
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: {error}") from None
    # Ticks are judged on the whole file, so that a cut through one does not change when its requests come.
    times_s = _spread([line.timestamp / 1000 for line in lines])
    chosen = range(len(lines))[offset : None if limit is None else offset + limit]
    start_s = times_s[chosen[0]] if chosen else 0.0
    return [Request(times_s[i] - start_s, lines[i].input_length, lines[i].output_length, lines[i].hash_ids) for i in chosen]


def at_rate(requests: Sequence[Request], rate_per_s: float) -> list[Request]:
    """The same requests, their time scaled so that ``rate_per_s`` come on average. Raises ValueError where that cannot be."""
    if rate_per_s <= 0:
        raise ValueError(f"rate: more than 0 requests/s, not {rate_per_s}")
    if len(requests) < 2:
        return list(requests)
    first_s = requests[0].at_s
    span_s = requests[-1].at_s - first_s
    if span_s <= 0:
        raise ValueError("all requests of this trace come at once: it has no rate to scale")
    factor = (len(requests) - 1) / rate_per_s / span_s
    return [replace(request, at_s=(request.at_s - first_s) * factor) for request in requests]


def _read(file: Iterable[bytes]) -> list[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[_Line] = []
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"line {number}: {error}") from None
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if line.input_length < 1 or line.output_length < 1:
            raise ValueError(f"line {number}: input_length and output_length must be at least 1")
        if len(line.hash_ids) != blocks:
            raise ValueError(
                f"line {number}: {line.input_length} tokens are {blocks} blocks of {BLOCK_TOKENS}, "
                f"not {len(line.hash_ids)} hash_ids"
            )
        if lines and line.timestamp < lines[-1].timestamp:
            raise ValueError(f"line {number}: timestamp {line.timestamp:g} is before the one of the line above")
        lines.append(line)
    return lines


def _spread(times_s: Sequence[float]) -> list[float]:
    at_tick = Counter(times_s)
    ticks = sorted(at_tick)
    length_s = {tick: following - tick for tick, following in itertools.pairwise(ticks)}
    if len(ticks) > 1:  # nothing follows the last tick: it is taken to be as long as the one before
        length_s[ticks[-1]] = length_s[ticks[-2]]
    seen: Counter[float] = Counter()
    spread = []
    for time_s in times_s:
        spread.append(time_s + length_s.get(time_s, 0.0) * seen[time_s] / at_tick[time_s])
        seen[time_s] += 1
    return spread
