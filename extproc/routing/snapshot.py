"""What the decision knows at one moment, as plain data: for people, and for `baton explain`."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.routing.router import Router


def take(router: Router, now_s: float) -> dict[str, Any]:
    """Ready for JSON."""
    costs = router.costs
    endpoints = []
    for endpoint in router.pool.endpoints:
        endpoints.append(
            {
                "address": endpoint.address,
                "roles": sorted(role.value for role in endpoint.roles),
                "live": endpoint.live,
                "leaving": endpoint.leaving,
                "labels": dict(endpoint.labels),
                "models": sorted(endpoint.models) if endpoint.models is not None else None,
                "prefill_tokens_per_s": round(costs.prefill_rate(endpoint).tokens_per_s),
                "itl_s": round(costs.decode_rate(endpoint).itl_s(costs.sequences(endpoint, now_s)), 6),
                "backlog_s": round(costs.backlog_s(endpoint, now_s), 6),
                "prefix_blocks": router.index.held(endpoint.address),
                **{
                    role.value: {
                        "requests": endpoint.leg(role).requests,
                        "tokens": endpoint.leg(role).tokens,
                        "external_requests": endpoint.leg(role).external_requests,
                        "failures": endpoint.leg(role).failures,
                        "blocked_for_s": max(0.0, endpoint.leg(role).blocked_until_s - now_s),
                    }
                    for role in sorted(endpoint.roles, key=lambda each: each.value)
                },
                "reported": None if endpoint.load is None else msgspec.to_builtins(endpoint.load),
            }
        )
    return {
        "endpoints": endpoints,
        "queue": {"requests": len(router.queue), "bytes": router.queue.bytes, "work_s": round(router.queue.queued_s, 6)},
        "settings": msgspec.to_builtins(router.settings),
    }
