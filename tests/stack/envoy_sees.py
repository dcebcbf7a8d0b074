"""Waiting for parts of a stack: a process that answers, and filters that Envoy's health checks have found."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from workers.process import Child

_TICK_S = 0.05
_CHECKS = re.compile(r"^cluster\.(?P<cluster>.+)\.health_check\.(?P<outcome>success|failure): (?P<count>\d+)$", re.MULTILINE)


async def until_answers(child: Child, url: str, timeout_s: float, statuses: tuple[int, ...] = (200,)) -> None:
    """Until ``url`` answers with one of ``statuses``. Raises AssertionError with its last words for a process that ended."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
        while True:
            assert child.poll() is None, f"{child.name} ended:\n{child.tail()}"
            try:
                async with session.get(url) as response:
                    if response.status in statuses:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_TICK_S)


async def until_filters_seen(
    envoy_admin: str, is_filter: Callable[[str], bool], timeout_s: float, *, again: bool = False
) -> None:
    """Until every host of the clusters that ``is_filter`` names has passed Envoy's health checks, where there are any.

    ``again``: the filters were away for a while. That none is marked as failed says nothing then: Envoy may have missed one
    check of the two that it takes, and miss the other one. So there must be one more that succeeds, if any ever failed; Envoy
    may take a minute to its next one otherwise (`no_traffic_interval`).
    """
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession(envoy_admin) as session:
        before = await _checks(session, is_filter)
        while True:
            hosts = await _hosts(session, is_filter)
            failed = any(host["health_status"].get("failed_active_health_check") for host in hosts)
            now = await _checks(session, is_filter)
            fresh = not now["failure"] or now["success"] >= before["success"] + len(hosts)
            if hosts and not failed and (fresh or not again):
                return
            await asyncio.sleep(_TICK_S)


async def _hosts(session: aiohttp.ClientSession, is_filter: Callable[[str], bool]) -> list[dict[str, Any]]:
    async with session.get("/clusters?format=json") as response:
        clusters = (await response.json(content_type=None))["cluster_statuses"]
    return [host for each in clusters if is_filter(each["name"]) for host in each.get("host_statuses", [])]


async def _checks(session: aiohttp.ClientSession, is_filter: Callable[[str], bool]) -> Counter[str]:
    """How many health checks of them succeeded and failed so far."""
    async with session.get("/stats?filter=health_check") as response:
        found = _CHECKS.finditer(await response.text())
    counts: Counter[str] = Counter()
    for each in found:
        if is_filter(each["cluster"]):
            counts[each["outcome"]] += int(each["count"])
    return counts
