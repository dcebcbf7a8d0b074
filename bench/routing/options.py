"""The command line of the bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import default_peers
from bench.routing.policies import CONTESTANTS, IN_PRECISE_MODE

TRACES = {"conversation": 0, "synthetic": 3200}
"""Name -> how many requests are left out before the first. The start of the synthetic trace shares hardly anything: what its
later requests share, 64 % of all blocks, is first seen there. At its end a short run finds as much again as in service."""
_PREDICTING = tuple(name for name, each in CONTESTANTS.items() if not each.events)
_FULL = tuple(name for name in _PREDICTING if name not in ("random", "least-load", "prefix"))
_ONCE_LOAD = 0.9
"""Where the others run too, unless the policies are named: at every load they would add half an hour and tell little more."""
_PRESSURE = 0.1
_HOST_CACHE = 3.0
"""Two H200 have room for some 520,000 tokens of the profile's KV beside its weights; three times that is 510 GB, and hosts
of four such workers, of which one or two prefill, have 2 TB."""
_ROUTERS = 4
"""Gateways of a mesh: one for each zone or node, or as many as an autoscaler finds right."""
_PRECISE_TRACE, _PRECISE_OFFSET, _PRECISE_REQUESTS, _PRECISE_LOAD = "synthetic", 3330, 500, 1.1
"""What caches hold matters where prompts begin alike, and in runs that are long enough for it to be driven out again. Of the
first requests of the conversation trace 5 % of all tokens have been seen before, whatever is known of it."""
_PRECISE_LONGEST_TOKENS = 64_000
"""A tenth of what such a run uses has room for these."""
_PRECISE_SPEED = 2.0
"""Several gateways, each of which follows all events, are more work for the machine."""
_EVENT_BLOCK_TOKENS = 16
"""vllm-router takes no other for prefill workers that publish events."""
_TRACE_FOLDER = Path(__file__).parent.parent / "traces"
_WHERE = "the files mooncake_*.jsonl.gz are FAST25-release/traces of the repository kvcache-ai/Mooncake on GitHub, gzipped"


class OptionsError(ValueError):
    """The options cannot be what was meant; the message says why."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    policies: tuple[str, ...] | None
    """None: those that are there for comparison only, at one load only."""
    traces: tuple[str, ...]
    folder: Path
    loads: tuple[float, ...]
    requests: int
    offset: int | None
    """None: the trace's own."""
    speed: float
    cache_tokens: int
    cache_share: float | None
    """Of a run's working set, what all prefill caches hold together; None: ``cache_tokens`` it is."""
    host_cache: float
    """What the host's memory of each prefill worker keeps, in multiples of its KV cache."""
    longest_tokens: int | None
    """Requests with longer prompts are left out; None: none is."""
    block_tokens: int
    precise: bool
    """The engines publish KV events."""
    routers: int
    """So many of each contestant, which know nothing of each other, share the requests."""
    peers: Path
    tenants: bool
    twin: bool
    realtime: bool
    out: Path | None

    def policies_at(self, load: float) -> tuple[str, ...]:
        """Which run at this load."""
        if self.precise:
            return self.policies or IN_PRECISE_MODE
        return self.policies or (_PREDICTING if load == _ONCE_LOAD else _FULL)

    def path(self, trace: str) -> Path:
        """The file of a trace. Raises OptionsError."""
        for name in (f"mooncake_{trace}.jsonl.gz", f"mooncake_{trace}.jsonl", f"{trace}_trace.jsonl"):
            if (self.folder / name).is_file():
                return self.folder / name
        raise OptionsError(f"no trace {trace} in {self.folder}: {_WHERE}; --traces-dir names their folder")


def parse(arguments: Sequence[str]) -> Options:
    """Raises OptionsError, and SystemExit as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description="Routing policies on real request traces.")
    offsets = ", ".join(f"{name} {offset}" for name, offset in TRACES.items())
    only = f"default: {','.join(_FULL)} at every load, all at load {_ONCE_LOAD:g}"
    parser.add_argument("--policies", help=f"of {', '.join(CONTESTANTS)}; {only}")
    parser.add_argument("--traces", help=f"default: {','.join(TRACES)}, and {_PRECISE_TRACE} with --precise")
    parser.add_argument("--traces-dir", type=Path, help="default: bench/traces")
    parser.add_argument(
        "--loads",
        help=f"shares of the capacity under round robin; default: 0.5,0.7,0.9,1.1,1.2, and {_PRECISE_LOAD:g} with --precise",
    )
    parser.add_argument(
        "--requests",
        type=int,
        help=f"of a run at load 1; more at a higher load (default: 250, and {_PRECISE_REQUESTS} with --precise)",
    )
    parser.add_argument(
        "--offset",
        type=int,
        help=f"requests left out before the first (default: {offsets}, and {_PRECISE_OFFSET} with --precise alone)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        help=f"so many times faster than the engines' profile (default: 3, and {_PRECISE_SPEED:g} with --precise)",
    )
    parser.add_argument("--cache-tokens", type=int, default=2_500_000, help="KV cache of a worker (default: 2,500,000)")
    parser.add_argument(
        "--cache-share",
        type=float,
        help="KV cache by need: all prefill workers' together hold this share of the different prompt blocks of a run, but at "
        "least the longest request each; decode workers have as much each",
    )
    parser.add_argument(
        "--host-cache",
        type=float,
        help="KV that the memory of each prefill worker's host keeps, in multiples of its cache (default: 0, and "
        f"{_HOST_CACHE:g} with --precise)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        help=f"leave out longer prompts than so many tokens (default: none, and {_PRECISE_LONGEST_TOKENS:,} with --precise)",
    )
    parser.add_argument("--block-tokens", type=int, help="block size of the engines (default: 128, and 16 with --precise)")
    parser.add_argument(
        "--precise",
        action="store_true",
        help=f"the engines publish KV events; policies: {','.join(IN_PRECISE_MODE)}; --cache-share {_PRESSURE:g}",
    )
    parser.add_argument(
        "--routers",
        type=int,
        help=f"instances of each router that share the requests and do not talk (default: 1, and {_ROUTERS} with --precise)",
    )
    parser.add_argument("--peers", type=Path, default=default_peers(), help="virtual environment of the peers")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two policies, one trace, one load, 60 requests")
    parser.add_argument("--tenants", action="store_true", help="two tenants, one of which floods, in place of the loads")
    parser.add_argument("--no-twin", action="store_true", help="do not compare with `baton replay`")
    parser.add_argument(
        "--no-realtime", action="store_true", help="do not ask the system for real-time priority, which root gets"
    )
    parser.add_argument("--out", type=Path, help="write all numbers there, as JSON")
    given = parser.parse_args(arguments)
    if given.quick:
        given.policies, given.traces, given.loads, given.requests = "baton,round-robin", "conversation", "0.9", 67
    if given.precise and given.cache_share is None:
        given.cache_share = _PRESSURE
    if given.precise and given.traces is None and given.requests is None and given.offset is None:
        given.offset = _PRECISE_OFFSET
    given.traces = given.traces or (_PRECISE_TRACE if given.precise else ",".join(TRACES))
    if given.speed is None:
        given.speed = _PRECISE_SPEED if given.precise else 3.0
    if given.precise and given.longest is None:
        given.longest = _PRECISE_LONGEST_TOKENS
    if given.requests is None:
        given.requests = _PRECISE_REQUESTS if given.precise else 250
    if given.routers is None:
        given.routers = _ROUTERS if given.precise else 1
    if given.host_cache is None:
        given.host_cache = _HOST_CACHE if given.precise else 0.0
    given.loads = given.loads or (f"{_PRECISE_LOAD:g}" if given.precise else "0.5,0.7,0.9,1.1,1.2")
    given.block_tokens = given.block_tokens or (_EVENT_BLOCK_TOKENS if given.precise else 128)
    folder = given.traces_dir or _TRACE_FOLDER
    try:
        loads = tuple(float(load) for load in given.loads.split(","))
    except ValueError:
        raise OptionsError(f"--loads {given.loads}: numbers with commas between them") from None
    if not all(0 < load <= 10 for load in loads):
        raise OptionsError(f"--loads {given.loads}: above 0 and at most 10")
    if given.offset is not None and given.offset < 0:
        raise OptionsError("--offset: 0 or more")
    if given.requests < 10 or not 0 < given.speed <= 100:
        raise OptionsError("--requests: at least 10; --speed: above 0 and at most 100")
    if given.cache_share is not None and not 0 < given.cache_share <= 10:
        raise OptionsError("--cache-share: above 0 and at most 10")
    if not 0 <= given.host_cache <= 100:
        raise OptionsError("--host-cache: 0 to 100")
    if not 1 <= given.routers <= 8:
        raise OptionsError("--routers: 1 to 8")
    options = Options(
        policies=given.policies and _names("--policies", given.policies, CONTESTANTS),
        traces=_names("--traces", given.traces, TRACES),
        folder=folder,
        loads=loads,
        requests=given.requests,
        offset=given.offset,
        speed=given.speed,
        cache_tokens=given.cache_tokens,
        cache_share=given.cache_share,
        host_cache=given.host_cache,
        longest_tokens=given.longest,
        precise=given.precise,
        routers=given.routers,
        block_tokens=given.block_tokens,
        peers=given.peers,
        tenants=given.tenants,
        twin=not given.no_twin,
        realtime=not given.no_realtime,
        out=given.out,
    )
    for trace in options.traces:
        options.path(trace)
    deaf = [name for name in options.policies or () if CONTESTANTS[name].events and not options.precise]
    if deaf:
        raise OptionsError(f"--policies: {', '.join(deaf)} hears KV events: --precise")
    return options


def _names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    allowed = tuple(known)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise OptionsError(f"{option}: no {', '.join(unknown)}; there are {', '.join(allowed)}")
    return names
