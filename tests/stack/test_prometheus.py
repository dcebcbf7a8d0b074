"""A real Prometheus, fed by a real run, answers every query of every dashboard and of every rule.

Envoy, the filter and simulated engines serve requests that end in all the ways there are; Prometheus scrapes the three with the
repository's own configuration. What cannot have data in such a run is named below, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.cases.promql import CONFIG, DASHBOARDS, Asked, Prometheus, asked_by_dashboards, rules, selectors
from tests.cases.sims import SimStack
from workers.sim.faults import Fault
from workers.sim.options import SimOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "m"
OPTIONS = SimOptions(
    served_model_name=(MODEL,),
    speed=2.0,
    num_blocks=8000,
    max_model_len=8192,
    handshake_s=0.0,
    enable_prompt_tokens_details=True,
)
_COMMON: dict[str, Any] = {"tenant_header": "x-tenant", "slo": {"ttft_s": 2.0, "itl_s": 0.05}}


def _when(case: str) -> dict[str, Any]:
    return {**_COMMON, "name": case, "match": {"headers": {"x-case": {"exact": case}}}}


SETTINGS: dict[str, Any] = {
    "policies": [
        {**_when("falls-back"), "mode": "disaggregate", "on_prefill_failure": "aggregate"},
        {**_when("whole"), "mode": "aggregate"},
        {**_when("late"), "mode": "disaggregate", "slo": {"ttft_s": 0.000001}, "when_late": "reject"},
        {**_COMMON, "name": "default", "mode": "disaggregate"},
    ],
    "scrape": {"interval_s": 0.2},
    "observe": {"sample": 1.0},
}
PROMPT = "the quick brown fox jumps over the lazy dog and runs away into the deep dark wood " * 60

NO_CACHE_SERVER = "there is no cache server in this run"
WITHOUT_DATA = {
    "baton_cache_server_up": NO_CACHE_SERVER,
    "baton_cache_server_lookup_tokens_total": NO_CACHE_SERVER,
    "baton_cache_server_hit_tokens_total": NO_CACHE_SERVER,
    "baton_cache_server_usage_ratio": NO_CACHE_SERVER,
}
"""Metrics that only a fault, or a part that is not here, brings."""

VARIABLES = {"$__rate_interval": "10m", "$__range": "10m", "$price_prompt": "1", "$price_cached": "1", "$price_completion": "1"}
_ANY = re.compile(r"\$(model|policy|role|endpoint|tenant)\b")


def plain(expr: str) -> str:
    """With the variables of Grafana filled in: all of everything."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    expr = _ANY.sub(".*", expr)
    assert "$" not in expr, expr
    return expr


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fed() -> AsyncIterator[Prometheus]:
    async with SimStack(prefill=2, decode=2, options=OPTIONS, settings=SETTINGS) as stack:
        targets = {
            "filter": [stack.admin.removeprefix("http://")],
            "envoy": [stack.envoy_admin.removeprefix("http://")],
            "prefill": [sim.address for sim in stack.prefill],
            "decode": [sim.address for sim in stack.decode],
        }
        async with Prometheus(stack.directory, targets) as prometheus:
            async with asyncio.timeout(30):  # its first look takes some seconds; every counter is to be seen at 0
                while len(await prometheus.query("count_over_time(up[1m]) >= 2")) < 6:
                    await asyncio.sleep(0.1)
            await run(stack)
            async with asyncio.timeout(20):  # a line of Envoy's log, a look at a worker and a scrape later
                while not await prometheus.query('ALERTS{alertname="BatonForgedTransferKeys",alertstate="firing"}'):
                    await asyncio.sleep(0.2)
            await asyncio.sleep(3)
            yield prometheus


async def run(stack: SimStack) -> None:
    """Requests that end in all the ways there are, and more at once than two prefill workers can take."""
    forged = {"kv_transfer_params": {"do_remote_prefill": True}}
    await asyncio.gather(ask(stack, **forged), ask(stack, "late"))
    await asyncio.gather(*(ask(stack, prompt=f"{n} {PROMPT * 4}", tenant=f"tenant-{n % 3}") for n in range(24)))
    await asyncio.gather(*(ask(stack, prompt=f"{n} {PROMPT * 4}") for n in range(4)))  # known to a cache by now
    await asyncio.gather(ask(stack, "whole"), ask(stack, n=2), ask(stack, model="no-such-model"))
    stack.prefill[0].worker.inject(Fault(kind="status", phase="prefill", count=1))
    await asyncio.gather(*(ask(stack, prompt=f"again {n}") for n in range(2)))
    for sim in stack.prefill:
        sim.worker.inject(Fault(kind="status", phase="prefill", count=1))
    await ask(stack, "falls-back", prompt="nobody has asked this before")
    for sim in stack.prefill:
        sim.worker.faults.clear()
    stack.decode[0].worker.inject(Fault(kind="reset", phase="decode", count=1))
    stack.decode[1].worker.inject(Fault(kind="reset", phase="decode", count=1))
    with pytest.raises(aiohttp.ClientError):
        await ask(stack)
    for sim in stack.decode:
        sim.worker.faults.clear()
    await leave(stack)
    await asyncio.sleep(1.5)
    await asyncio.gather(ask(stack, wish="2", **forged), ask(stack, "late"))


async def ask(stack: SimStack, case: str = "", tenant: str = "acme", wish: str = "", **body: Any) -> int:
    sent = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    headers = {"x-tenant": tenant, "x-case": case, **({"x-baton-priority": wish} if wish else {})}
    async with stack.http.post("/v1/completions", json=sent, headers=headers) as response:
        await response.read()
        return response.status


async def leave(stack: SimStack) -> None:
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with stack.http.post("/v1/completions", json=sent) as response:
        await response.content.readany()
        response.close()


def excused(expr: str) -> bool:
    return any(name in expr for name in WITHOUT_DATA)


async def test_everything_is_scraped(fed: Prometheus) -> None:
    up = {(labels["job"], labels["instance"]): value for labels, value in await fed.query("up")}
    assert len(up) == 6
    assert set(up.values()) == {1.0}


@pytest.mark.parametrize("asked", list(asked_by_dashboards()), ids=lambda asked: asked.where)
async def test_every_panel_shows_something(fed: Prometheus, asked: Asked) -> None:
    found = await fed.query(plain(asked.expr))
    if excused(asked.expr):
        return
    assert any(math.isfinite(value) for _, value in found), f"no data: {plain(asked.expr)}"
    shown = set(re.findall(r"{{(\w+)}}", asked.legend))
    for labels, _ in found:
        assert shown <= labels.keys(), f"{asked.legend} of {labels}"


async def test_every_variable_of_a_dashboard_has_values(fed: Prometheus) -> None:
    for file in DASHBOARDS:
        for variable in json.loads(file.read_text())["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", variable["query"])
            assert match is not None, variable["query"]
            metric = plain(match[1] + (match[2] or ""))
            assert await fed.api(f"label/{match[3]}/values", **{"match[]": metric}), variable["query"]


async def test_every_rule_is_evaluated_and_every_metric_it_reads_is_there(fed: Prometheus) -> None:
    state = await fed.api("rules")
    loaded = [rule for group in state["groups"] for rule in group["rules"]]
    assert len(loaded) == len(rules())
    assert [(rule["name"], rule["lastError"]) for rule in loaded if rule["health"] != "ok"] == []
    missing = [
        (rule.get("record") or rule["alert"], selector)
        for rule in rules()
        for selector in selectors(rule["expr"])
        if not excused(selector) and not await fed.query(f"count(last_over_time({selector}[5m]))")
    ]
    assert missing == []


async def test_every_recorded_series_has_a_value(fed: Prometheus) -> None:
    for rule in rules():
        if "record" in rule:
            assert any(math.isfinite(value) for _, value in await fed.query(rule["record"])), rule["record"]


async def test_what_clients_got_is_what_the_dashboards_say(fed: Prometheus) -> None:
    verdicts = {labels["slo"]: value for labels, value in await fed.query("sum by (slo) (baton_client_slo_requests_total)")}
    assert verdicts["met"] + verdicts.get("ttft_missed", 0) + verdicts.get("itl_missed", 0) >= 24
    assert verdicts["failed"] >= 2, "the one that was late from the start, and the one that a worker broke off"
    [(_, goodput)] = await fed.query('baton:goodput:ratio_rate5m{policy="late"}')
    assert goodput == 0


async def test_the_excuses_hold(fed: Prometheus) -> None:
    for name, why in WITHOUT_DATA.items():
        assert not await fed.query(f"count({name})"), f"{name} has data, although {why}"


async def test_the_configuration_names_the_jobs_of_the_rules() -> None:
    text = Path(CONFIG).read_text()
    for rule in rules():
        for job in re.findall(r'job="(\w+)"', rule["expr"]):
            assert f"job_name: {job}\n" in text
