"""The simulated engines of a bench: a process each, emptied between runs, and what their counters say about a run."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.routing.priority import Priority, starting
from workers.process import Child, stop_all
from workers.ready import free_ports, wait_ready

MODEL = "bench-model"
_START_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 60.0
_SAMPLE = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_SOURCE = re.compile(r'source="(\w+)"')


class EngineError(RuntimeError):
    """An engine does not do what the bench needs; the message says which one and what."""


@dataclass(frozen=True)
class EngineOptions:
    """What all engines of a bench have in common."""

    prefill: int = 3
    decode: int = 5
    speed: float = 3.0
    block_tokens: int = 128
    """Large blocks mean few hashes: the engines' own work must stay small beside what they simulate."""
    cache_tokens: int = 2_500_000
    """KV cache of one worker."""
    host_tokens: int = 0
    """KV that the host's memory keeps behind the cache of each prefill worker."""
    max_model_len: int = 200_000
    events: bool = False
    """They publish KV events."""


@dataclass(frozen=True)
class Counters:
    """One engine's, since it was started."""

    computed_tokens: int = 0
    """Prompt tokens that it prefilled itself."""
    cached_tokens: int = 0
    """Prompt tokens that it found in its prefix cache."""
    pulled_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""
    generated_tokens: int = 0
    preemptions: int = 0

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


class Engines:
    """Context manager: all engines, started together. The first ones are the prefill workers; the role is only in their use."""

    def __init__(self, options: EngineOptions, directory: Path) -> None:
        self.options = options
        count = options.prefill + options.decode
        ports = free_ports(3 * count)
        self._ports, self._event_ports, self._replay_ports = ports[:count], ports[count : 2 * count], ports[2 * count :]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self._directory = directory
        self.children: list[Child] = []

    @property
    def prefill(self) -> list[str]:
        """``host:port`` of the prefill workers."""
        return self.addresses[: self.options.prefill]

    @property
    def decode(self) -> list[str]:
        """``host:port`` of the decode workers."""
        return self.addresses[self.options.prefill :]

    @property
    def publishers(self) -> dict[str, str]:
        """Where each publishes KV events, by its address; empty where none does."""
        if not self.options.events:
            return {}
        return {address: f"tcp://127.0.0.1:{port}" for address, port in zip(self.addresses, self._event_ports, strict=True)}

    def __enter__(self) -> Engines:
        options = self.options
        with ExitStack() as parts:
            parts.callback(self._stop)
            for index, port in enumerate(self._ports):
                argv: tuple[str, ...] = (
                    *(sys.executable, "-m", "workers.sim", "--port", str(port)),
                    *("--served-model-name", MODEL),
                    *("--speed", f"{options.speed:g}"),
                    *("--block-size", str(options.block_tokens)),
                    *("--num-blocks", str(options.cache_tokens // options.block_tokens + 1)),
                    *("--max-model-len", str(min(options.max_model_len, options.cache_tokens))),
                    # The handshake of a pair happens once in an hour of service; in a run of minutes it would decide.
                    *("--handshake-s", "0"),
                    *("--kv-lease-duration-s", "120"),
                    "--enable-prompt-tokens-details",
                )
                if index < options.prefill and options.host_tokens:
                    argv += ("--host-cache-tokens", str(options.host_tokens))
                if options.events:
                    argv += ("--kv-events-port", str(self._event_ports[index]))
                    argv += ("--kv-events-replay-port", str(self._replay_ports[index]))
                name = f"engine-{index}"
                with starting(Priority.PREFILL if index < options.prefill else Priority.DECODE):
                    self.children.append(Child(name, argv, log=self._directory / f"{name}.log", grace_s=2.0))
            for child, address in zip(self.children, self.addresses, strict=True):
                wait_ready(child, f"http://{address}/health", _START_TIMEOUT_S)
            parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        stop_all(self.children)

    async def empty(self, http: aiohttp.ClientSession) -> None:
        """Wait until nothing runs any more, then forget all prefixes and handoffs. Raises EngineError."""
        async with asyncio.TaskGroup() as tasks:
            for address in self.addresses:
                tasks.create_task(_empty(http, address))

    async def counters(self, http: aiohttp.ClientSession) -> list[Counters]:
        """Of each engine, in the order of ``addresses``."""
        return list(await asyncio.gather(*(_counters(http, address) for address in self.addresses)))

    async def violations(self, http: aiohttp.ClientSession) -> dict[str, int]:
        """What was done wrong since they were emptied: kind -> how often, over all engines."""
        reports = await asyncio.gather(*(_get(http, f"http://{address}/sim/violations") for address in self.addresses))
        found: dict[str, int] = {}
        for report in reports:
            for kind, count in report["counts"].items():
                found[kind] = found.get(kind, 0) + count
        return found


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        return await response.json()


async def _empty(http: aiohttp.ClientSession, address: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
    while True:
        state = await _get(http, f"http://{address}/sim/state")
        if not state["requests"]:
            # Released handoffs and ended transfers give their blocks back at once, so that the cache can be cleared.
            async with http.post(f"http://{address}/sim/reset"):
                pass
            state = await _get(http, f"http://{address}/sim/state")
            if state["free_blocks"] == state["total_blocks"]:
                return
        if asyncio.get_running_loop().time() > deadline_s:
            raise EngineError(f"{address} still has work {_IDLE_TIMEOUT_S:g} s after the run: {state}")
        await asyncio.sleep(0.1)


async def _counters(http: aiohttp.ClientSession, address: str) -> Counters:
    async with http.get(f"http://{address}/metrics") as response:
        return parse_counters(await response.text())


def parse_counters(text: str) -> Counters:
    """From the text of ``/metrics``."""
    by_source = dict.fromkeys(("local_compute", "local_cache_hit", "external_kv_transfer"), 0)
    plain: dict[str, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        source = _SOURCE.search(labels)
        if name == "prompt_tokens_by_source_total" and source:
            by_source[source[1]] = int(float(value))
        elif name in ("generation_tokens_total", "num_preemptions_total"):
            plain[name] = int(float(value))
    return Counters(
        computed_tokens=by_source["local_compute"],
        cached_tokens=by_source["local_cache_hit"],
        pulled_tokens=by_source["external_kv_transfer"],
        generated_tokens=plain.get("generation_tokens_total", 0),
        preemptions=plain.get("num_preemptions_total", 0),
    )


def prefill_spread(computed_tokens: Sequence[int]) -> float:
    """How unevenly the prefill workers worked: the most over the mean; 1 is even. NaN where nothing was computed."""
    total = sum(computed_tokens)
    return max(computed_tokens) * len(computed_tokens) / total if total else float("nan")
