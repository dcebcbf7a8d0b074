"""What handing over a prompt takes: bytes, seconds, and whether that is what the link should give."""

from __future__ import annotations

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Handoff, Measurement, Route, Severity
from workers.preflight.routes import rails_bytes_per_s, rdma_works

_LEASE_SHARE = 0.5
_LINK_SHARE = 0.5


def table(ask: Ask, route: Route) -> tuple[Handoff, ...]:
    """Prompts of several lengths up to the longest that the worker takes; empty without a model."""
    if ask.model is None:
        return ()
    longest = ask.max_model_len_tokens or ask.model.max_tokens
    lengths = [tokens for tokens in numbers.HANDOFF_TOKENS if longest is None or tokens <= longest]
    if longest is not None and not lengths:
        lengths = [longest]
    # Every GPU fetches its part; with fewer heads than GPUs, or a latent cache, several fetch the same.
    ranks = min(ask.tensor_parallel, ask.model.kv_heads)
    rows = []
    for tokens in lengths:
        size_bytes = tokens * ask.model.kv_bytes_per_token
        rows.append(
            Handoff(
                tokens=tokens,
                size_bytes=size_bytes,
                route_s=size_bytes * ask.tensor_parallel / ranks / route.bytes_per_s,
                staged_s=size_bytes / (numbers.STAGED_BYTES_PER_S * ranks),
                direct_s=size_bytes / (numbers.DIRECT_BYTES_PER_S * ranks),
            )
        )
    return tuple(rows)


def check(facts: Facts, ask: Ask, route: Route, measurement: Measurement | None) -> list[Finding]:
    """All findings about time."""
    findings = [_bandwidth(facts, ask, measurement)] if measurement is not None else []
    rows = table(ask, route)
    if ask.model is None or not rows:
        return findings
    last = rows[-1]
    found = (
        f"{ask.model.kv_bytes_per_token:,.0f} bytes of KV cache a token; {last.tokens:,} tokens are "
        f"{numbers.size(last.size_bytes)}: "
        f"{numbers.seconds(last.route_s)} by {route.name} at {numbers.rate(route.bytes_per_s)} ({route.source})"
    )
    if last.route_s > ask.kv_lease_s * _LEASE_SHARE:
        findings.append(
            Finding(
                id="handoff.time",
                severity=Severity.ERROR if last.route_s > ask.kv_lease_s else Severity.WARN,
                found=found,
                why=f"The lease of the blocks is {ask.kv_lease_s:g} s. vLLM does not notice a read after its end: "
                "wrong text, status 200.",
                fix=f"A faster route, an fp8 KV cache, or kv_lease_duration of at least {last.route_s * 2:.0f} s.",
            )
        )
    else:
        findings.append(Finding(id="handoff.time", severity=Severity.OK, found=found))
    return findings


def not_measured(error: str) -> Finding:
    """It was asked for and did not work."""
    return Finding(
        id="peer.measured",
        severity=Severity.ERROR,
        found=f"the way to the peer could not be measured: {error}",
        why="What a handoff takes is only guessed, and what stopped the measurement may stop handoffs too.",
        fix="On the other node: baton preflight --serve; here the token that it prints, and its port open in between.",
    )


def _bandwidth(facts: Facts, ask: Ask, measurement: Measurement) -> Finding:
    got = measurement.bytes_per_s
    found = (
        f"{numbers.rate(got)} to {measurement.peer} with {measurement.tool} ({measurement.memory}, blocks of "
        f"{numbers.size(measurement.block_bytes)}); one block takes {numbers.seconds(measurement.latency_s)}, "
        f"the first transfer {numbers.seconds(measurement.first_transfer_s)}"
    )
    # One process has one way: the fastest of the links is what it could get.
    expected = rails_bytes_per_s(facts, ask) / max(1, ask.tensor_parallel) if rdma_works(facts, ask) else None
    if expected and got < expected * _LINK_SHARE:
        return Finding(
            id="handoff.bandwidth",
            severity=Severity.WARN,
            found=found,
            why=f"That is {got / expected:.0%} of the link's {numbers.rate(expected)}.",
            fix="gpu.direct_rdma, gpu.nic_distance and rdma.* say what is known; UCX_PROTO_INFO=y shows which "
            "transport UCX took; "
            "small blocks cost more each (--block-size 128).",
        )
    return Finding(id="handoff.bandwidth", severity=Severity.OK, found=found)
