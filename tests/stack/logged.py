"""Lines of a log that a process writes a moment after the fact: its thread waits up to 50 ms between two writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

_WITHIN_S = 10.0
_TICK_S = 0.02


def lines(log: Path) -> list[dict[str, Any]]:
    """All that are JSON, so far."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


async def until_logged(log: Path, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """The lines of ``event`` with these fields, once there are ``count`` or more. Raises AssertionError with what there is."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _WITHIN_S
    while True:
        said = [line for line in lines(log) if line.get("event") == event]
        found = [line for line in said if all(line.get(key) == value for key, value in fields.items())]
        if len(found) >= count:
            return found
        assert loop.time() < end_s, f"{len(found)} lines of {event} with {fields}, not {count}, among {said}"
        await asyncio.sleep(_TICK_S)
