"""``make bench-routing``: routing policies and peers on real request traces, with simulated engines and all else real.

Envoy and the filter, or a peer in their place, are processes; the engines are too. Requests come when the trace says,
``--speed`` times faster, whatever became of those before them. All printed times are simulated seconds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from bench.peers import MissingPeerError
from bench.routing import report
from bench.routing.client import Planned, replay
from bench.routing.engines import MODEL, EngineError, EngineOptions, Engines
from bench.routing.options import TRACES, Options, OptionsError, parse
from bench.routing.policies import CONTESTANTS
from bench.routing.priority import Priority, take
from bench.routing.prompts import http_request
from bench.routing.run import RunResult, plan, run
from bench.routing.twin import Twin, twin, twin_setup
from extproc.config import ConfigError
from extproc.replay import capacity
from workers.ready import PartError
from workers.sim.timing import Profile
from workers.traces import BLOCK_TOKENS, Request, at_rate, load

_PROGRESS_S = 15.0
_LONE_TOKENS = 300
_LONE_PROMPT_TOKENS = 4096
_FLOOD, _MODEST = "flood", "modest"
_FLOOD_LOAD, _MODEST_LOAD = 1.5, 0.3
"""Half of the capacity is each tenant's share: one sends three times as much, the other stays below."""
_MODEST_GOODPUT = 0.6
_LATE_LIMIT_S = 0.01
_INTERRUPTED = 130


class Bench:
    """What was run so far, and what is left to say about it."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.console = console
        self.results: list[RunResult] = []
        self.twins: list[tuple[RunResult, Twin]] = []
        self.failures: list[str] = []
        self._told_s = 0.0

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False)

    async def run(self, engines: Engines, directory: Path, traces: Sequence[str]) -> None:
        """All of it on some traces, in order."""
        await self._lone_stream(engines)
        for trace in traces:
            await self._trace(trace, engines, directory)

    def batches(self) -> Iterator[tuple[EngineOptions, tuple[str, ...]]]:
        """Engines, and the traces that they are for: all, or one whose working set their caches hold a share of."""
        options = self.options
        base = replace(
            EngineOptions(),
            speed=options.speed,
            block_tokens=options.block_tokens,
            cache_tokens=options.cache_tokens,
            events=options.precise,
        )
        base = replace(base, host_tokens=round(options.host_cache * base.cache_tokens))
        if options.cache_share is None:
            yield base, options.traces
            return
        for trace in options.traces:
            sent = self._requests(trace)[: round(options.requests * max(options.loads))]
            working = BLOCK_TOKENS * len({block for each in sent for block in each.hash_ids})
            longest = max(each.input_tokens + each.output_tokens for each in sent)
            wanted = round(options.cache_share * working / base.prefill)
            cache = -(-max(wanted, longest + options.block_tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
            self.say(
                f"{trace}: the prompts of {len(sent)} requests are {working:,} different tokens, in blocks of {BLOCK_TOKENS}; "
                f"each worker's cache holds {cache:,}, those of {base.prefill} prefill workers "
                f"{base.prefill * cache / working:.1%} of that"
                + (": the longest request must fit" if cache > wanted + BLOCK_TOKENS else "")
            )
            host = round(options.host_cache * cache)
            if host:
                self.say(f"  and behind each of those the host's memory holds {host:,}")
            yield replace(base, cache_tokens=cache, host_tokens=host), (trace,)

    def _requests(self, trace: str) -> list[Request]:
        """Those of a trace that may be sent. Raises EngineError, OSError, ValueError."""
        options = self.options
        offset = TRACES[trace] if options.offset is None else options.offset
        requests = load(options.path(trace), offset=offset)
        if options.longest_tokens is not None:
            requests = [each for each in requests if each.input_tokens <= options.longest_tokens]
        needed = round(options.requests * (_FLOOD_LOAD + _MODEST_LOAD if options.tenants else max(1.0, *options.loads)))
        if len(requests) < needed:
            raise EngineError(f"{trace} has {len(requests)} requests from number {offset} on, and {needed} are needed")
        return requests

    async def _lone_stream(self, engines: Engines) -> None:
        """The self-check of engines and load generator: one stream alone must have the profile's step time."""
        speed = self.options.speed
        address = engines.decode[0]
        request = Request(0.0, _LONE_PROMPT_TOKENS, _LONE_TOKENS, tuple(range(_LONE_PROMPT_TOKENS // 512)))
        planned = Planned(
            0.0, lambda: http_request(request, model=MODEL, host=address), request.input_tokens, request.output_tokens
        )
        host, _, port = address.partition(":")
        outcome = (await replay([planned], host, [int(port)], speed=speed, timeout_s=120.0)).outcomes[0]
        step_s = Profile().step_s(
            prefill_tokens=0, prefill_context_tokens=0, decodes=1, decode_context_tokens=_LONE_PROMPT_TOKENS + _LONE_TOKENS
        )
        if outcome.itl_p99_s is None:
            raise EngineError(f"{address} does not answer")
        off_s = outcome.itl_p99_s - step_s
        verdict = "good" if off_s < _LATE_LIMIT_S else "this machine is too busy, or --speed too high"
        self.say(
            f"self-check at {speed:g} times: ITL p99 of one stream alone {outcome.itl_p99_s * 1e3:.1f} ms, "
            f"the profile's step {step_s * 1e3:.1f} ms: {verdict}"
        )

    async def _trace(self, trace: str, engines: Engines, directory: Path) -> None:
        options = self.options
        requests = await asyncio.to_thread(self._requests, trace)
        setup = twin_setup(engines.options)
        limit_per_s = await asyncio.to_thread(capacity, requests[: options.requests], setup)
        self.say(
            f"\n{trace}: under round robin the {engines.options.prefill} prefill workers are through with "
            f"{limit_per_s:.2f} requests/s (by the engines' arithmetic, {options.requests} requests from empty caches)"
        )
        for share in () if options.tenants else options.loads:
            count = round(options.requests * share)
            chosen = at_rate(requests[:count], share * limit_per_s)
            for name in options.policies_at(share):
                result = await self._one(plan(chosen), name, engines, trace, share, directory)
                if result is not None and options.twin:
                    late_s = {f"{kind}_s": result.late_ms[kind] / 1e3 * options.speed for kind in ("prefill", "decode")}
                    found = await asyncio.to_thread(twin, name, chosen, setup, options.routers, **late_s)
                    if found is not None:
                        self.twins.append((result, found))
        if options.tenants:
            share = _FLOOD_LOAD + _MODEST_LOAD
            for name in options.policies_at(share):
                await self._one(self._tenants(requests, limit_per_s), name, engines, trace, share, directory)

    def _tenants(self, requests: list[Request], limit_per_s: float) -> list[Planned]:
        flood, modest = (round(self.options.requests * load) for load in (_FLOOD_LOAD, _MODEST_LOAD))
        both = plan(at_rate(requests[:flood], _FLOOD_LOAD * limit_per_s), tenant=_FLOOD)
        both += plan(at_rate(requests[flood : flood + modest], _MODEST_LOAD * limit_per_s), tenant=_MODEST)
        return sorted(both, key=lambda each: each.at_s)

    async def _one(
        self, planned: list[Planned], name: str, engines: Engines, trace: str, share: float, directory: Path
    ) -> RunResult | None:
        title = f"{trace}, load {share:g}, {name}"

        def progress(sent: int, done: int, total: int) -> None:
            if time.monotonic() - self._told_s > _PROGRESS_S:
                self._told_s = time.monotonic()
                self.say(f"  {title}: {sent} of {total} sent, {done} answered")

        self._told_s = time.monotonic()
        try:
            result = await run(
                planned,
                CONTESTANTS[name],
                engines,
                trace=trace,
                load=share,
                directory=directory,
                peers=self.options.peers,
                routers=self.options.routers,
                progress=progress,
            )
        except (PartError, EngineError, MissingPeerError, ConfigError, OSError, aiohttp.ClientError) as error:
            self.failures.append(f"{title}: {error}")
            self.say(f"{title}: did not run: {error}")
            return None
        self.results.append(result)
        numbers, late = result.summary, result.late_ms
        slow = max(late.values()) / 1e3 * self.options.speed > 2 * _LATE_LIMIT_S
        self.say(
            f"{title}: goodput {numbers.goodput:.1%} (in time {result.in_time:.1%}, steady {result.steady:.1%}), "
            f"TTFT p50 {numbers.ttft_p50_s:.2f} p99 {numbers.ttft_p99_s:.1f} s, ITL p99 {numbers.itl_p99_s * 1e3:.0f} ms, "
            f"hit {result.hit_ratio:.1%}; {result.real_s:.0f} s, {sum(result.cores.values()):.2f} cores; "
            f"late (p99, real ms): {', '.join(f'{part} {ms:.1f}' for part, ms in late.items())}"
            + (": the machine did not keep up" if slow else "")
        )
        if result.beliefs.prompt_tokens:
            self.say(f"  {result.beliefs}")
        for tenant, own in result.by_tenant.items():
            self.say(
                f"  tenant {tenant}: {own.requests} requests, goodput {own.goodput:.1%}, TTFT p50 {own.ttft_p50_s:.2f} s, "
                f"ITL p99 {own.itl_p99_s * 1e3:.0f} ms"
            )
        for problem in result.errors[:2]:
            self.say(f"  not served: {problem}")
        if result.violations:
            self.say(f"  done wrong to the engines: {result.violations}")
        if not result.pulled_tokens:
            self.failures.append(f"{title}: no KV was handed over at all")
        return result

    def end(self) -> None:
        """The table, the demands, the file."""
        if not self.results:
            for failure in self.failures:
                self.say(f"failed: {failure}")
            return
        self.console.print()
        self.console.print(report.table(self.results))
        tenants = report.tenant_verdicts(self.results, _MODEST, _MODEST_GOODPUT)
        demands = [
            *(() if self.options.tenants or self.options.precise else report.verdicts(self.results)),
            *(report.precise_verdicts(self.results, self.twins) if self.options.precise else ()),
            *tenants,
            *report.twin_verdicts(self.twins),
        ]
        self.say("")
        for verdict in demands:
            self.say(str(verdict))
        for failure in self.failures:
            self.say(f"failed: {failure}")
        if self.options.out is not None:
            tree = {
                "options": {name: str(value) for name, value in vars(self.options).items()},
                "runs": report.as_json(self.results),
                "demands": [{"text": verdict.text, "met": verdict.met} for verdict in demands],
                "failures": self.failures,
            }
            self.options.out.write_bytes(msgspec.json.format(msgspec.json.encode(tree)))


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 if all ran, whatever came of it; 1 if something did not; 2 for options; 130 for Ctrl-C."""
    console = Console(width=170, soft_wrap=True)
    try:
        options = parse(arguments)
    except (OptionsError, ValueError) as error:
        console.print(f"bench: {error}", highlight=False, markup=False, style="red")
        return 2
    bench = Bench(options, console)
    if options.realtime and not take(Priority.LOAD):
        bench.say("no real-time priority: whatever else runs here will show in the gaps between tokens")
    status = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        try:
            for engine_options, traces in bench.batches():
                with Engines(engine_options, directory) as engines:
                    uvloop.run(bench.run(engines, directory, traces))
        except KeyboardInterrupt:
            bench.say("\ninterrupted; what there is:")
            status = _INTERRUPTED
        except (PartError, EngineError, OSError, ValueError) as error:
            bench.failures.append(str(error))
        bench.end()
    return status or (1 if bench.failures else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
