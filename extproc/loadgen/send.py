"""One request and its streamed answer, timed; every way in which it can end badly has a name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from extproc.loadgen.answer import Answer, error_of
from extproc.loadgen.own import now_s
from extproc.loadgen.sample import REFUSALS, Kind, Sample

_ERROR_BYTES = 64 << 10


async def send(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    sample: Sample,
    due_at_s: float,
    *,
    answer_header: str | None = None,
) -> None:
    """Fill in ``sample``; ``due_at_s`` on the clock of :data:`now_s`. Raises only CancelledError, with what there is then."""
    answer = Answer()
    sample.sent_s = sample.due_s + now_s() - due_at_s
    try:
        async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
            sample.status = response.status
            if answer_header is not None:
                sample.groups[answer_header] = response.headers.get(answer_header, "-")
            if response.status != 200:
                sample.kind = Kind.REFUSED if response.status in REFUSALS else Kind.ERROR
                sample.code, sample.message = error_of(await response.content.read(_ERROR_BYTES))
                return
            async for data in response.content.iter_any():
                answer.feed(data, now_s())
        sample.kind, sample.code, sample.message = _ended(answer)
    except TimeoutError:  # aiohttp's are of this kind, too
        sample.kind, sample.code = Kind.TIMEOUT, "timeout"
        sample.message = "no whole answer in time"
    except (aiohttp.ClientError, OSError) as error:
        begun = sample.status == 200
        sample.kind = Kind.BROKEN if begun else Kind.CONNECTION
        sample.code, sample.message = type(error).__name__, str(error)[:200]
    except asyncio.CancelledError:
        sample.kind = Kind.CANCELLED
        raise
    finally:
        sample.read(answer, due_at_s)
        sample.end_s = now_s() - due_at_s


def _ended(answer: Answer) -> tuple[Kind, str, str]:
    if answer.fault is not None:
        return Kind.BROKEN, *answer.fault
    if not answer.done and answer.finish_reason is None:
        return Kind.BROKEN, "cut", "the stream ended before the answer did"
    if not answer.times_s and answer.finish_reason is None:
        return Kind.BROKEN, "empty", "the answer is empty"
    return Kind.SERVED, "", ""
