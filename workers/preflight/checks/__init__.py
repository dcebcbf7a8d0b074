"""Facts and what is asked for -> findings. Pure: no file is read here and nothing is called."""

from __future__ import annotations

import msgspec

from workers.preflight.ask import Ask
from workers.preflight.checks import gpu, handoff, host, net, pair, rdma, ucx
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Outcome, Report, sorted_findings
from workers.preflight.identity import identity_of
from workers.preflight.routes import route_of


def judge(facts: Facts, ask: Ask, outcome: Outcome | None = None) -> Report:
    """All checks that apply to this device and this model. ``outcome``: what the peer said and what was measured to it."""
    measurement = outcome.measurement if outcome is not None else None
    if outcome is not None and outcome.identity is not None:
        ask = msgspec.structs.replace(ask, peer_identity=outcome.identity)
    route = route_of(facts, ask, measurement)
    findings: list[Finding] = []
    if ask.device == "gpu":
        findings += gpu.check(facts, ask)
    findings += rdma.check(facts, ask)
    findings += ucx.check(facts, ask)
    findings += host.check(facts, ask)
    findings += net.check(facts, ask)
    if outcome is not None and outcome.reached_side_channel is not None:
        findings.append(net.check_reverse(outcome.reached_side_channel))
    findings += pair.check(facts, ask)
    if outcome is not None and outcome.error:
        findings.append(handoff.not_measured(outcome.error))
    findings += handoff.check(facts, ask, route, measurement)
    return Report(
        findings=sorted_findings(findings),
        route=route,
        kv_bytes_per_token=None if ask.model is None else ask.model.kv_bytes_per_token,
        handoffs=handoff.table(ask, route),
        measurement=measurement,
        identity=identity_of(facts, ask),
    )
