"""What is compared: Baton's policies as fragments of its configuration, and the peers. All times are simulated seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from ruamel.yaml import YAML

from extproc.routing.settings import Routing
from workers.sim.timing import Profile

BATON = "baton"
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


def _immediate(objective: str) -> str:
    return f"{{mode: disaggregate, objective: {objective}, dispatch: immediate, explain: true}}"


CONTESTANTS = {
    each.name: each
    for each in (
        Contestant(BATON, "baton", "{slo: {ttft_s: 2.5, itl_s: 0.045}, tenant_header: x-tenant, explain: true}"),
        Contestant(ROUND_ROBIN, "baton", _immediate("round-robin")),
        Contestant("random", "baton", _immediate("random")),
        Contestant("least-load", "baton", _immediate("least-load")),
        Contestant("prefix", "baton", _immediate("prefix")),
        Contestant("vllm-router", "vllm-router"),
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


def sections(contestant: Contestant, *, block_tokens: int, cache_tokens: int, speed: float) -> dict[str, Any]:
    """The sections of Baton's configuration that decide, for engines ``speed`` times faster than their profile."""
    policy = YAML(typ="safe").load(contestant.fragment)
    routing = msgspec.to_builtins(Routing())
    routing |= {
        "block_tokens": block_tokens,
        "kv_bytes_per_token": float(Profile.kv_bytes_a_token),
        "worker_kv_tokens": cache_tokens,
    }
    return {
        "routing": scaled(routing, speed),
        "scrape": scaled({"interval_s": 1.0}, speed),
        "policies": [scaled({"name": "default", **policy}, speed)],
    }
