"""Facts and what is asked for -> findings. Pure: no file is read here and nothing is called."""

from __future__ import annotations

from workers.preflight.ask import Ask
from workers.preflight.checks import gpu, handoff, host, net, pair, rdma, ucx
from workers.preflight.facts import Facts
from workers.preflight.findings import Finding, Measurement, Report, sorted_findings
from workers.preflight.identity import identity_of
from workers.preflight.routes import route_of


def judge(facts: Facts, ask: Ask, measurement: Measurement | None = None) -> Report:
    """All checks that apply to this device and this model."""
    route = route_of(facts, ask, measurement)
    findings: list[Finding] = []
    if ask.device == "gpu":
        findings += gpu.check(facts, ask)
    findings += rdma.check(facts, ask)
    findings += ucx.check(facts, ask)
    findings += host.check(facts, ask)
    findings += net.check(facts, ask)
    findings += pair.check(facts, ask)
    findings += handoff.check(facts, ask, route, measurement)
    return Report(
        findings=sorted_findings(findings),
        route=route,
        kv_bytes_per_token=None if ask.model is None else ask.model.kv_bytes_per_token,
        handoffs=handoff.table(ask, route),
        measurement=measurement,
        identity=identity_of(facts, ask),
    )
