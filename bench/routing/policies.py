"""What is compared: Baton's policies as fragments of its configuration, and the peers. All times are simulated seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from ruamel.yaml import YAML

from bench.routing.engines import MODEL
from extproc.replay_index import Index
from extproc.routing.settings import Routing
from workers.sim.timing import Profile

BATON = "baton"
PRECISE = "precise"
ORACLE = "oracle"
ROUND_ROBIN = "round-robin"
_KEPT = ("timeout_s", "stale_s", "breaker_pause_s")
"""Patience with what is broken, which nothing is here; the machine's own hiccups do not shrink with simulated time."""


@dataclass(frozen=True)
class Contestant:
    """One line of the table."""

    name: str
    kind: Literal["baton", "vllm-router", "smg"]
    fragment: str = ""
    """Baton: the fields of its one policy, in YAML."""
    options: tuple[str, ...] = ()
    """A peer: what its command line has besides."""
    index: Index = Index.PREDICTED
    """Baton: how it knows what the engines' caches hold."""
    events: bool = False
    """It hears the engines' KV events, which they publish with ``--precise`` only."""


_TOKENS_TIMEOUT_MS = 300.0
"""Ten times the default: all gateways and engines share the cores of one machine."""


def _immediate(objective: str) -> str:
    return f"{{mode: disaggregate, objective: {objective}, dispatch: immediate, explain: true}}"


BEST = "{slo: {ttft_s: 2.5, itl_s: 0.045}, tenant_header: x-tenant, explain: true}"

CONTESTANTS = {
    each.name: each
    for each in (
        Contestant(BATON, "baton", BEST),
        Contestant(PRECISE, "baton", BEST, index=Index.EVENTS, events=True),
        Contestant(ORACLE, "baton", BEST, index=Index.ORACLE, events=True),
        Contestant(ROUND_ROBIN, "baton", _immediate("round-robin")),
        Contestant("random", "baton", _immediate("random")),
        Contestant("least-load", "baton", _immediate("least-load")),
        Contestant("prefix", "baton", _immediate("prefix")),
        Contestant("vllm-router", "vllm-router"),
        Contestant("vllm-router-events", "vllm-router", events=True),
        Contestant("smg", "smg"),
        # One prompt at a worker is what its admission can come to a queue of its own; it never refuses here.
        Contestant(
            "smg-admission",
            "smg",
            options=(
                *("--prefill-max-inflight-requests-per-worker", "1"),
                *("--prefill-queue-size", "100000", "--prefill-queue-timeout-secs", "3600"),
            ),
        ),
    )
}

IN_PRECISE_MODE = (BATON, PRECISE, ORACLE, ROUND_ROBIN, "vllm-router", "vllm-router-events")

PEERS = tuple(name for name, each in CONTESTANTS.items() if each.kind != "baton")


def scaled(tree: Any, speed: float) -> Any:
    """Settings for a filter that lives ``speed`` times faster than it thinks: seconds become fewer, rates a second higher."""
    if isinstance(tree, Mapping):
        return {key: _scaled_field(key, value, speed) for key, value in tree.items()}
    return [scaled(value, speed) for value in tree] if isinstance(tree, list) else tree


def _scaled_field(key: str, value: Any, speed: float) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool) or key in _KEPT:
        return scaled(value, speed)
    if key.endswith(("_per_s", "_a_s")):
        return value * speed
    return value / speed if key.endswith("_s") else value


def sections(
    contestant: Contestant, *, block_tokens: int, cache_tokens: int, speed: float, tokenizer: Path | None = None
) -> dict[str, Any]:
    """The sections of Baton's configuration that decide, for engines ``speed`` times faster than their profile. ``tokenizer``:
    folder of the model's, for one that hears events."""
    policy = YAML(typ="safe").load(contestant.fragment)
    routing = msgspec.to_builtins(Routing())
    routing |= {
        "block_tokens": block_tokens,
        "kv_bytes_per_token": float(Profile.kv_bytes_a_token),
        "worker_kv_tokens": cache_tokens,
    }
    precise: dict[str, Any] = {}
    if contestant.events:
        precise["kv_events"] = {"enabled": True}
        precise["tokens"] = {
            "learn": False,
            "learn_prefixes": False,
            "models": {MODEL: {"folder": str(tokenizer)}},
            "timeout_ms": _TOKENS_TIMEOUT_MS,
        }
    return precise | {
        "routing": scaled(routing, speed),
        "scrape": scaled({"interval_s": 1.0}, speed),
        "policies": [scaled({"name": "default", **policy}, speed)],
    }
