"""Workers meet before a client needs them to: the real Envoy and filter, and strict engines whose first transfer is slow."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cases.sims import RecordingSim, SimStack
from tests.stack.harness import Stack
from tests.stack.test_legs import post
from tests.stack.test_workers_change import status, write
from workers.sim.faults import Fault
from workers.sim.main import SimOptions

HANDSHAKE_S = 1.0
LEASE_S = 10.0

OPTIONS = SimOptions(
    served_model_name=("m",),
    num_blocks=2000,
    max_model_len=8192,
    kv_lease_duration_s=LEASE_S,
    side_channel_timeout_s=0.3,
    handshake_s=HANDSHAKE_S,
    enable_prompt_tokens_details=True,
)
QUICK = replace(OPTIONS, handshake_s=0.05)

WARM_UP = {"enabled": True, "timeout_s": 5.0, "attempts": 2, "retry_s": 0.5}


def stack_of(
    prefill: int, decode: int, options: SimOptions = OPTIONS, *, started: bool = True, **sections: dict[str, Any]
) -> SimStack:
    warm_up = {**WARM_UP, **sections.pop("warm_up", {})}
    stack = SimStack(
        prefill=prefill,
        decode=decode,
        options=options,
        started=started,
        settings={"warm_up": warm_up, "handoff": {"lease_s": LEASE_S}, "scrape": {"interval_s": 0.2}, **sections},
    )
    stack.configure(policies=[{"name": "default", "mode": "disaggregate"}])
    return stack


def is_warm_up(body: bytes) -> bool:
    return b'"temperature":0,"stream":false' in body


def prompts(sim: RecordingSim) -> list[dict[str, Any]]:
    """Requests of clients, as they came to an engine."""
    bodies = [each.body for each in sim.received if each.method == "POST" and not is_warm_up(each.body)]
    return [json.loads(body) for body in bodies]


def meetings(sim: RecordingSim) -> list[dict[str, Any]]:
    bodies = [each.body for each in sim.received if each.method == "POST" and is_warm_up(each.body)]
    return [json.loads(body) for body in bodies]


def clients_that_met(stack: SimStack) -> list[str]:
    """Decode workers whose first handoff from some prefill worker was a client's."""
    found = []
    for sim in stack.decode:
        engines: set[str] = set()
        for each in sim.received:
            params = json.loads(each.body).get("kv_transfer_params") if each.method == "POST" else None
            if params and params["remote_engine_id"] not in engines:
                engines.add(params["remote_engine_id"])
                found += [] if is_warm_up(each.body) else [sim.name]
    return found


async def ask(stack: SimStack, words: str = "what is it") -> tuple[int, bytes]:
    body = json.dumps({"model": "m", "prompt": f"{words} " * 40, "max_tokens": 4}).encode()
    code, answer, _ = await post(stack, "/v1/completions", body)
    return code, answer


async def health(stack: SimStack) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
        return response.status, await response.json()


async def until_warm(stack: SimStack, pairs: int) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (shown := (await status(stack))["warm_up"])["pairs_warm"] != pairs:
            await asyncio.sleep(0.02)
    return shown


async def test_a_client_never_pays_for_a_first_transfer() -> None:
    stack = stack_of(1, 2)
    stack.configure(policies=[{"name": "default", "mode": "disaggregate", "objective": "round-robin"}])
    async with stack:
        await until_warm(stack, 2)
        assert [len(meetings(sim)) for sim in stack.sims] == [2, 1, 1]
        answers = await asyncio.gather(*(ask(stack, f"question {number}") for number in range(8)))
        assert [code for code, _ in answers] == [200] * 8
        assert [len(prompts(sim)) for sim in stack.decode] == [4, 4]
        assert clients_that_met(stack) == []
        assert stack.violations() == {}
        metrics = await stack.metrics()
        assert metrics['baton_warm_up_total{outcome="ok"}'] == 2
        assert (metrics["baton_pairs_warm"], metrics["baton_pairs_cold"]) == (2, 0)
        assert metrics["baton_warm_up_seconds_sum"] > 2 * HANDSHAKE_S * 0.9


async def start(stack: SimStack, *sims: RecordingSim) -> None:
    for sim in sims or stack.sims:
        await stack._parts.enter_async_context(sim)


async def grpc_ready(stack: SimStack) -> bool:
    async with grpc.aio.insecure_channel(stack.config.listen) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def until_sample(stack: Stack, name: str, least: float = 1.0) -> float:
    async with asyncio.timeout(20):
        while (value := (await stack.metrics()).get(name, 0.0)) < least:
            await asyncio.sleep(0.02)
    return value


async def test_it_is_ready_with_the_first_pair_and_what_comes_before_waits_for_it() -> None:
    async with stack_of(2, 3, started=False) as stack:
        await start(stack)
        await until_sample(stack, "baton_endpoints_warming", 5)
        code, shown = await health(stack)
        assert (code, shown["ready"], shown["why"]) == (503, False, "warming: 0 of 6 pairs")
        assert len(shown["live"]["prefill"]) + len(shown["live"]["decode"]) == 5, "they are live all the same"
        assert not await grpc_ready(stack)

        early = asyncio.create_task(ask(stack))
        await until_sample(stack, "baton_warm_up_waiting_requests")
        assert [prompts(sim) for sim in stack.sims] == [[]] * 5
        assert (await early)[0] == 200
        code, shown = await health(stack)
        assert (code, shown["why"]) == (200, None)
        assert await grpc_ready(stack)

        await until_warm(stack, 6)
        assert sum(len(meetings(sim)) for sim in stack.decode) == 6
        assert clients_that_met(stack) == [], "it waited for another's first transfer, and made none itself"
        assert (await status(stack))["warm_up"]["warming"] == {}
        assert stack.violations() == {}


async def test_a_prompt_that_cannot_wait_is_turned_away_and_says_why() -> None:
    async with stack_of(1, 1, replace(OPTIONS, handshake_s=4.0), started=False) as stack:
        await start(stack)
        await until_sample(stack, "baton_endpoints_warming", 2)
        body = json.dumps({"model": "m", "prompt": "hello " * 40}).encode()
        code, answer, headers = await post(stack, "/v1/completions", body, **{"x-request-timeout-ms": "300"})
        assert code == 503
        assert json.loads(answer)["error"]["code"] == "warming"
        assert "(0 of 1 pairs are)" in json.loads(answer)["error"]["message"]
        assert headers["retry-after"] == "5"
        whole, answer, _ = await post(stack, "/v1/completions", json.dumps({"model": "m", "prompt": ["a", "b"]}).encode())
        assert (whole, len(json.loads(answer)["choices"])) == (200, 2), "what one worker serves has nothing to wait for"


async def test_a_pool_may_be_told_to_serve_cold() -> None:
    async with stack_of(1, 1, started=False, warm_up={"when_cold": "serve"}) as stack:
        await start(stack)
        await until_sample(stack, "baton_endpoints_warming", 2)
        assert (await ask(stack))[0] == 200
        assert (await stack.metrics())['baton_fallbacks_total{kind="unwarmed"}'] == 1


@pytest.mark.parametrize("way", ["process", "in place"])
async def test_a_decode_worker_that_was_restarted_gets_no_prompt_until_it_has_met_all_again(way: str) -> None:
    stack = stack_of(2, 2)
    stack.configure(policies=[{"name": "default", "mode": "disaggregate", "objective": "round-robin"}])
    async with stack:
        await until_warm(stack, 4)
        old, other = stack.decode
        for sim in stack.sims:
            sim.all_received.clear()
        codes: list[int] = []
        going = asyncio.Event()
        going.set()

        async def load(number: int) -> None:
            while True:
                await going.wait()
                try:
                    code, _ = await ask(stack, f"load {number} {len(codes)}")
                except aiohttp.ClientError:
                    code = 0  # its worker ended under it
                codes.append(code)
                await asyncio.sleep(0.02)

        loads = [asyncio.create_task(load(number)) for number in range(4)]
        try:
            async with asyncio.timeout(20):
                while len(prompts(old)) < 20:  # the new engine's counters are surely lower when they are first read
                    await asyncio.sleep(0.02)
            if way == "process":
                old.worker.inject(Fault(kind="crash", duration_s=1.0))
            else:
                # The filter sees it within a scrape; what comes before that would meet the new engine unwarned.
                going.clear()
                await old.worker.restart()
                await until_sample(stack, "baton_endpoints_warming")
                going.set()
            async with asyncio.timeout(20):
                while len(meetings(old)) < 2:
                    await asyncio.sleep(0.02)
            await until_warm(stack, 4)
            served = len(prompts(old))
            async with asyncio.timeout(20):
                while len(prompts(old)) <= served:
                    await asyncio.sleep(0.02)
        finally:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        posts = [each for each in old.received if each.method == "POST" and b"baton-release" not in each.body]
        own = [each for each in posts if is_warm_up(each.body)]
        assert len(own) == 2
        first_s, last_s = own[0].at_s, own[-1].answered_s
        assert last_s - first_s > HANDSHAKE_S
        assert [each for each in posts if first_s < each.at_s < last_s and each not in own] == []
        assert len(prompts(other)) > 10, "the other one served meanwhile"
        assert codes.count(200) > 20
        assert {sim: report["counts"] for sim, report in stack.violations().items() if report["count"]} == {}


async def test_a_prefill_worker_whose_blocks_nobody_can_reach_is_named_and_the_other_serves() -> None:
    async with stack_of(2, 2, QUICK, started=False) as stack:
        bad, good = stack.prefill
        await start(stack)
        bad.worker.inject(Fault(kind="side_channel_dead"))
        await until_sample(stack, 'baton_warm_up_total{outcome="given_up"}', 2)
        code, shown = await health(stack)
        assert code == 200
        [(address, why)] = shown["warm_up"]["warming"].items()
        assert address == bad.address
        assert "the decode worker answered 500" in why
        assert {(each["prefill"], each["given_up"]) for each in shown["warm_up"]["failing"]} == {(bad.address, True)}
        answers = await asyncio.gather(*(ask(stack, f"question {number}") for number in range(10)))
        assert [code for code, _ in answers] == [200] * 10
        assert (len(prompts(bad)), len(prompts(good))) == (0, 10)
        lines = await stack.logged("pair_given_up", 2)
        assert {line["prefill"] for line in lines} == {bad.address}

        await bad.worker.clear_faults()
        await until_warm(stack, 4)
        assert (await status(stack))["warm_up"]["warming"] == {}


async def test_the_blocks_of_a_warm_up_that_fails_are_given_back() -> None:
    async with stack_of(1, 1, QUICK, started=False) as stack:
        [prefill], [decode] = stack.prefill, stack.decode
        await start(stack, prefill, decode)
        decode.worker.inject(Fault(kind="status", phase="decode", status=500, count=1))
        await until_warm(stack, 1)
        assert await stack.released(LEASE_S / 4), "long before their lease ends"
        metrics = await stack.metrics()
        assert metrics['baton_releases_total{outcome="released"}'] == 1
        assert [metrics[f'baton_warm_up_total{{outcome="{each}"}}'] for each in ("failed", "ok")] == [1, 1]
        assert stack.violations() == {}


async def test_a_pool_that_cannot_be_warmed_serves_all_the_same_after_a_while() -> None:
    recompute = replace(QUICK, kv_load_failure_policy="recompute")
    async with stack_of(1, 1, recompute, started=False, warm_up={"give_up_s": 3.0}) as stack:
        [prefill], [decode] = stack.prefill, stack.decode
        await start(stack, prefill, decode)
        prefill.worker.inject(Fault(kind="side_channel_dead"))
        await until_sample(stack, 'baton_warm_up_total{outcome="failed"}')
        [failing] = (await status(stack))["warm_up"]["failing"]
        assert failing["reason"] == f"{decode.address}: it counts a failed transfer, and computed the prompt itself"
        early = asyncio.create_task(ask(stack))
        await until_sample(stack, "baton_warm_up_waiting_requests")
        assert (await early)[0] == 200
        assert (await stack.metrics())['baton_fallbacks_total{kind="unwarmed"}'] == 1
        assert (await health(stack))[0] == 200
        assert len(await stack.logged("serving_unwarmed")) == 1


async def test_a_worker_that_comes_by_discovery_is_warmed_before_it_is_used() -> None:
    stack = stack_of(1, 2)
    file = stack.directory / "workers.yaml"
    stack.configure(workers={"prefill": [], "decode": [], "file": str(file)})
    known, new = stack.decode
    write(stack, known)
    async with stack:
        await until_warm(stack, 1)
        write(stack, known, new)
        await until_sample(stack, "baton_endpoints_warming")
        answers = await asyncio.gather(*(ask(stack, f"early {number}") for number in range(6)))
        assert (await stack.metrics())["baton_endpoints_warming"] == 1, "its handshake is still under way"
        assert [code for code, _ in answers] == [200] * 6
        assert prompts(new) == []
        await stack.logged("worker_warming", endpoint=new.address)
        await until_warm(stack, 2)
        assert len(meetings(new)) == 1
        answers = await asyncio.gather(*(ask(stack, f"late {number}") for number in range(8)))
        assert [code for code, _ in answers] == [200] * 8
        assert prompts(new)
        assert stack.violations() == {}


@pytest.mark.parametrize("connector", ["nixl_push", "lmcache", "llmd_sidecar"])
async def test_workers_meet_by_the_connector_that_is_configured(connector: str) -> None:
    stack = Stack(decode=1)
    [prefill], [decode] = stack.prefill, stack.decode
    peers = {
        "nixl_push": {"nixl_push": {prefill.address: {"engine_id": "e1", "host": "127.0.0.1", "port": 5601}}},
        "lmcache": {"lmcache": {decode.address: {"host": "127.0.0.1", "init_ports": [7300], "alloc_ports": [7400]}}},
        "llmd_sidecar": {},
    }[connector]
    stack.configure(warm_up=WARM_UP, handoff={"connector": connector, **peers})
    async with stack:
        assert (await status(stack))["warm_up"]["pairs_warm"] == 1
        [second] = decode.received
        assert second.json["max_tokens"] == 4
        if connector == "llmd_sidecar":
            assert prefill.received == []
            assert second.headers["x-prefiller-host-port"] == prefill.address
            assert "kv_transfer_params" not in second.json
            return
        [first] = prefill.received
        assert first.json["prompt"] == second.json["prompt"]
        assert first.json["max_tokens"] == 1
        if connector == "lmcache":
            assert first.json["kv_transfer_params"]["disagg_spec"]["receiver_host"] == "127.0.0.1"
            assert "kv_transfer_params" not in second.json
        else:
            assert first.headers["x-request-id"] == second.headers["x-request-id"]
            assert second.json["kv_transfer_params"]["remote_engine_id"] == "e1"
