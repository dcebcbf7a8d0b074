"""The clients of one round: streams that follow each other, and long prompts when they are due, sent without waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

from bench.interference.load import Ask, Script
from bench.interference.results import Answer, Round
from extproc.headers import KV_TRANSFER_HEADER

_PATIENCE = 4.0
"""A round is given up after so many times its length: the machine does not keep up with the long prompts."""
_SHOWN_CHARS = 200


class _Reply:
    """One request while its answer comes."""

    def __init__(self, ask: Ask, due_s: float) -> None:
        self.ask = ask
        self.due_s = due_s
        self.times_s: list[float] = []
        self.handed_over = False
        self.complete = False
        self.fault = ""

    def answer(self) -> Answer:
        came = len(self.times_s)
        fault = self.fault
        if self.complete and not fault and came != self.ask.answer_tokens:
            fault = f"{came} tokens, not {self.ask.answer_tokens}"
        return Answer(
            due_s=round(self.due_s, 5),
            first_s=round(self.times_s[0], 5) if came else None,
            gaps_ms=[round((later - earlier) * 1e3, 2) for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)],
            handed_over=self.handed_over,
            cut=not self.complete and not fault,
            fault=fault,
        )


class Clients:
    """Ask one address, ``http://HOST:PORT``, for completions."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._session = session

    async def ask(self, reply: _Reply, clock: Callable[[], float]) -> None:
        """Send it, and note when each token comes. What goes wrong is noted, too."""
        body = {
            "model": self._model,
            "prompt": reply.ask.prompt,
            "max_tokens": reply.ask.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            # So that tokens which come in one piece are counted as what they are.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        try:
            async with self._session.post(self._url, json=body) as response:
                reply.handed_over = "prefill=" in response.headers.get(KV_TRANSFER_HEADER, "")
                if response.status != 200:
                    text = (await response.text())[:_SHOWN_CHARS]
                    reply.fault = f"status {response.status}: {text}"
                    return
                async for line in response.content:
                    if line.startswith(b"data:"):
                        _take(reply, line[5:].strip(), clock)
                if not reply.complete and not reply.fault:
                    reply.fault = "the answer broke off"
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            reply.fault = f"{type(error).__name__}: {error}"


def _take(reply: _Reply, data: bytes, clock: Callable[[], float]) -> None:
    now_s = clock()
    if data == b"[DONE]":
        reply.complete = True
        return
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        reply.fault = json.dumps(chunk["error"])[:_SHOWN_CHARS]
        return
    if chunk.get("choices") and (usage := chunk.get("usage")):
        reply.times_s += [now_s] * (usage["completion_tokens"] - len(reply.times_s))


def once(url: str, model: str, ask: Ask, timeout_s: float) -> Answer:
    """One request by itself, for warming up."""

    async def run() -> Answer:
        reply, began_s = _Reply(ask, 0.0), time.monotonic()
        async with _session(timeout_s) as session:
            await Clients(url, model, session).ask(reply, lambda: time.monotonic() - began_s)
        return reply.answer()

    return asyncio.run(run())


def play(url: str, model: str, script: Script, arrangement: str, number: int, check: Callable[[], None]) -> Round:
    """One round. ``check`` is called all the while, and raises where a process has ended."""
    return asyncio.run(_play(url, model, script, arrangement, number, check))


async def _play(url: str, model: str, script: Script, arrangement: str, number: int, check: Callable[[], None]) -> Round:
    load = script.load
    streams: list[_Reply] = []
    prompts = [_Reply(ask, due_s) for ask, due_s in zip(script.prompts, script.due_s, strict=True)]
    began_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began_s

    async with _session(None) as session:
        clients = Clients(url, model, session)

        async def place(index: int) -> None:
            await asyncio.sleep(script.begins_s(index) - clock())
            for ask in script.streams(index):
                reply = _Reply(ask, clock())
                streams.append(reply)
                await clients.ask(reply, clock)
                if reply.fault:  # and not again at once
                    await asyncio.sleep(1.0)

        async def long(reply: _Reply) -> None:
            await asyncio.sleep(reply.due_s - clock())
            await clients.ask(reply, clock)

        writing = [asyncio.create_task(place(index)) for index in range(load.streams)]
        asked = [asyncio.create_task(long(reply)) for reply in prompts]
        try:
            while clock() < load.window_s or not all(task.done() for task in asked):
                check()
                if clock() > load.window_s * _PATIENCE:
                    break
                await asyncio.sleep(0.1)
            seconds = clock()
        finally:
            for task in (*writing, *asked):
                task.cancel()
            for task in (*writing, *asked):
                with suppress(asyncio.CancelledError):
                    await task
    for reply in prompts:
        if not reply.complete and not reply.fault:
            reply.fault = f"not answered within {seconds:.0f} s: too many long prompts for this machine (--every)"
    return Round(
        arrangement=arrangement,
        number=number,
        seconds=round(seconds, 3),
        loaded_s=round(script.due_s[0], 3),
        streams=[reply.answer() for reply in streams],
        prompts=[reply.answer() for reply in prompts],
    )


def _session(timeout_s: float | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    )
