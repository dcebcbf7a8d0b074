"""Several models, tenants and pools behind one gateway: the real Envoy, in every body mode, workers as files and over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc.envoy_yaml import render
from tests.stack import harness
from tests.stack.fake_worker import FakeWorker, Received, begun_until
from tests.stack.harness import Stack
from tests.stack.test_errors import error_of

PROMPT = "Once upon a time there were several pools. " * 10

POOLS: list[dict[str, Any]] = [
    {"name": "gold", "labels": {"tier": "gold"}, "max_requests": 500},
    {"name": "next", "labels": {"release": "next"}},
    {"name": "llama", "labels": {"family": "llama"}, "models": ["llama*"]},
    {"name": "qwen", "models": ["qwen"]},
]
"""Of each the prefill and the decode worker with its number; the last one takes its workers by what they say they serve."""

LABELS = [{"tier": "gold"}, {"release": "next"}, {"family": "llama"}, {}]
MODELS = ("llama-7b", "llama-7b", "llama-7b", "qwen")

_FORCED = {"mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"}
POLICIES: list[dict[str, Any]] = [
    {"name": "acme", "match": {"headers": {"x-tenant": {"exact": "acme"}}}, "pool": "gold", **_FORCED},
    {
        "name": "trial",
        "match": {"headers": {"x-trial": {"present": True}}},
        "pool": {"llama": 50, "next": 50},
        "session_header": "x-session",
        **_FORCED,
    },
    {"name": "asked-for", "match": {"path": {"exact": "/never"}}, "pool": "gold", "allow_overrides": ["policy"], **_FORCED},
    {"name": "default", "session_header": "x-session", "explain": True, **_FORCED},
]

SETTINGS: dict[str, Any] = {
    "pools": POOLS,
    "policies": POLICIES,
    "routes": {"model_header": True},
    "models": {"aliases": {"chat": "qwen", "mixed": [{"model": "llama-7b"}, {"model": "qwen"}]}},
}

Served = tuple[int, bytes, str | None]
"""Status, body, and the pool of the decode worker that served it."""


def make(**more: Any) -> Stack:
    stack = Stack(prefill=4, decode=4)
    for workers in (stack.prefill, stack.decode):
        for worker, model in zip(workers, MODELS, strict=True):
            worker.models = (model,)
    stack.configure(**{**SETTINGS, "workers": listed(stack), **more})
    return stack


def listed(stack: Stack, only: str | None = None) -> dict[str, list[Any]]:
    """All workers with their labels, or those of all pools but one."""
    return {
        role: [
            {"address": worker.address, "labels": labels}
            for worker, labels, pool in zip(workers, LABELS, POOLS, strict=True)
            if pool["name"] != only
        ]
        for role, workers in (("prefill", stack.prefill), ("decode", stack.decode))
    }


WAYS = {
    "buffered, files": {"body_mode": "buffered"},
    "full_duplex, gRPC": {"body_mode": "full_duplex", "eds": "grpc"},
    "full_duplex_both, files": {"body_mode": "full_duplex_both"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=WAYS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with make(envoy=WAYS[request.param]) as stack:
        await settled(stack)
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.reset()
    return shared


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.05)


async def settled(stack: Stack) -> None:
    """Until Envoy knows the workers of every pool, also those that say themselves where they belong."""

    async def known() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/clusters?format=json") as response:
            clusters = {each["name"]: each for each in (await response.json(content_type=None))["cluster_statuses"]}
        names = [f"{role}-{pool['name']}" for role in ("decode", "prefill") for pool in POOLS]
        return all(len(clusters.get(name, {}).get("host_statuses", [])) == 1 for name in names)

    await until(known)


async def ask(
    stack: Stack, model: str | None, path: str = "/v1/completions", *, body: dict[str, Any] | None = None, **headers: str
) -> Served:
    before = [len(served_by(worker)) for worker in stack.decode]
    sent = {"prompt": PROMPT, "max_tokens": 5, **({} if model is None else {"model": model}), **(body or {})}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with stack.http.post(path, json=sent, headers=named) as response:
        answer = await response.read()
    served = [number for number, worker in enumerate(stack.decode) if len(served_by(worker)) > before[number]]
    assert len(served) <= 1
    return response.status, answer, POOLS[served[0]]["name"] if served else None


_RELEASE = "baton-release-no-such-model"


def served_by(worker: FakeWorker) -> list[Received]:
    """What a worker got but releases, by which the filter gives blocks back that nobody fetches."""
    return [each for each in worker.received if _RELEASE.encode() not in each.body]


def prefilled_by(stack: Stack) -> list[str]:
    return [POOLS[number]["name"] for number, worker in enumerate(stack.prefill) for _ in worker.received]


async def through(stack: Stack, cluster: str) -> int:
    """Requests that Envoy has sent by a cluster."""
    name = f"cluster.{cluster}.upstream_rq_total"
    async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/stats?filter=^{name}$") as response:
        return int((await response.text()).rpartition(": ")[2] or 0)


async def test_each_model_is_served_by_both_workers_of_its_own_pool_through_the_cluster_of_that_pool(stack: Stack) -> None:
    for model, pool in (("llama-7b", "llama"), ("qwen", "qwen")):
        clusters = (f"decode-{pool}", f"prefill-{pool}")
        before = [await through(stack, each) for each in clusters]
        for stream in (False, True):
            stack.reset()
            status, _, served = await ask(stack, model, body={"stream": stream})
            assert (status, served, prefilled_by(stack)) == (200, pool, [pool])
        assert [await through(stack, each) for each in clusters] == [count + 2 for count in before]
    assert await through(stack, "decode") == 0


async def test_the_worker_sees_the_name_of_the_model_that_serves_and_no_name_of_a_pool(stack: Stack) -> None:
    status, _, served = await ask(stack, "chat")
    assert (status, served) == (200, "qwen")
    received = stack.decode[3].last
    assert received.headers["x-gateway-model-name"] == "qwen" and received.json["model"] == "qwen"
    assert not [name for name in received.headers if name.startswith("x-baton")]


async def test_a_large_body_arrives_whole_in_its_pool(stack: Stack) -> None:
    prompt = "words without end, amen. " * 40_000
    status, _, served = await ask(stack, "qwen", body={"prompt": prompt})
    assert (status, served) == (200, "qwen")
    assert stack.decode[3].last.json["prompt"] == prompt and stack.prefill[3].last.json["prompt"] == prompt


async def test_a_model_that_nobody_serves_is_404_with_those_that_there_are(stack: Stack) -> None:
    for model in ("gpt-oss", "llama-70b"):  # of no pool, and of a pool whose workers have others
        status, answer, served = await ask(stack, model)
        assert (status, served) == (404, None)
        error = error_of(answer)
        assert error["code"] == "model_not_found" and all(each in error["message"] for each in ("llama-7b", "qwen", "chat"))
    assert not prefilled_by(stack)


async def test_a_tenant_is_served_by_its_pool_whatever_the_model_says(stack: Stack) -> None:
    status, _, served = await ask(stack, "llama-7b", x_tenant="acme")
    assert (status, served, prefilled_by(stack)) == (200, "gold", ["gold"])
    status, _, served = await ask(stack, "llama-7b", x_tenant="other")
    assert (status, served) == (200, "llama")
    status, answer, served = await ask(stack, "qwen", x_tenant="acme")  # which is not served there
    assert (status, served, error_of(answer)["code"]) == (404, None, "model_not_found")


async def test_a_policy_can_be_asked_for_by_its_name_where_it_says_so(stack: Stack) -> None:
    status, _, served = await ask(stack, "llama-7b", x_baton_policy="asked-for")
    assert (status, served) == (200, "gold")
    name = 'baton_ignored_overrides_total{name="policy"}'
    before = (await stack.metrics()).get(name, 0)
    for policy in ("acme", "nobody"):  # one that does not say so, and none
        status, _, served = await ask(stack, "llama-7b", x_baton_policy=policy)
        assert (status, served) == (200, "llama")
    assert (await stack.metrics())[name] == before + 2


@pytest.mark.parametrize("header", ["x-gateway-model-name", "x-baton-pool", "x-gateway-destination-endpoint"])
async def test_a_header_of_the_client_moves_no_request(stack: Stack, header: str) -> None:
    values = {"x-gateway-model-name": "qwen", "x-baton-pool": "gold", "x-gateway-destination-endpoint": stack.decode[0].address}
    for path in ("/v1/completions", "/tokenize"):
        status, _, served = await ask(stack, "llama-7b", path, **{header: values[header]})
        assert (status, served) == (200, "llama")
        assert stack.decode[2].last.headers["x-gateway-model-name"] == "llama-7b"
    async with stack.http.get("/version", headers={header: values[header]}) as response:
        assert response.status == 200
    served_by = [worker for worker in stack.decode if any(each.path == "/version" for each in worker.received)]
    assert len(served_by) == 1


async def test_what_is_no_prompt_goes_to_the_model_that_it_names_too(stack: Stack) -> None:
    for model, pool in (("qwen", "qwen"), ("chat", "qwen"), ("llama-7b", "llama")):
        status, _, served = await ask(stack, model, "/v1/embeddings")
        assert (status, served) == (200, pool)
    assert stack.decode[3].last.json["model"] == "qwen"
    status, _, served = await ask(stack, "llama-7b", "/v1/embeddings", x_tenant="acme")
    assert (status, served) == (200, "gold")
    status, answer, _ = await ask(stack, "gpt-oss", "/v1/embeddings")
    assert (status, error_of(answer)["code"]) == (404, "model_not_found")


async def test_a_canary_between_pools_takes_its_share_and_keeps_conversations_together(stack: Stack) -> None:
    for model, header, pools in (("llama-7b", {"x-trial": "1"}, {"llama", "next"}), ("mixed", {}, {"llama", "qwen"})):
        first = {each: (await ask(stack, model, **header, x_session=f"s{each}"))[2] for each in range(24)}
        again = {each: (await ask(stack, model, **header, x_session=f"s{each}"))[2] for each in range(24)}
        assert first == again and set(first.values()) == pools


async def test_the_models_of_all_pools_are_listed_together(stack: Stack) -> None:
    async with stack.http.get("/v1/models") as response:
        assert {each["id"] for each in (await response.json())["data"]} == {"llama-7b", "qwen", "chat", "mixed"}


async def test_a_name_of_a_model_that_cannot_be_a_header_breaks_nothing(stack: Stack) -> None:
    for model in ("llama-\x07bell", "llämä", " qwen", "x\r\ny", "q" * 5_000):
        status, answer, _ = await ask(stack, model)
        assert (status, error_of(answer)["code"]) == (404, "model_not_found")


async def test_logs_metrics_the_live_document_and_explain_say_the_pool(stack: Stack) -> None:
    name = 'baton_pool_requests_total{pool="gold"}'
    before = (await stack.metrics()).get(name, 0)
    _, _, _ = await ask(stack, "llama-7b", x_tenant="acme", x_request_id="the-one-of-acme")

    async def logged() -> bool:
        return any(each.get("request_id") == "the-one-of-acme" and each.get("pool") == "gold" for each in stack.log_lines())

    await until(logged)
    metrics = await stack.metrics()
    assert metrics[name] == before + 1
    assert metrics['baton_pool_workers{pool="qwen",role="decode"}'] == 1
    async with aiohttp.ClientSession(stack.admin) as session:
        async with session.get("/live") as response:
            workers = {each["address"]: each for each in (await response.json())["workers"]}
        assert [workers[worker.address]["pool"] for worker in stack.decode] == ["gold", "next", "llama", "qwen"]
        async with session.get("/healthz") as response:
            assert (await response.json())["pools"]["gold"] == {"prefill": 1, "decode": 1}
        question = {"headers": {"x-tenant": "acme"}, "body": {"model": "llama-7b", "prompt": "Hello"}}
        async with session.post("/debug/explain", json=question) as response:
            report = await response.json()
    assert report["policy"]["pool"] == "gold" and report["decision"]["decision"]["decode"] == stack.decode[0].address
    out = {each["endpoint"]: each["why"] for each in report["decision"]["left_out"]}
    assert out[stack.decode[2].address] == "in the pool llama"


async def test_a_pool_goes_to_zero_and_comes_back() -> None:
    stack = make()
    file = stack.directory / "workers.json"
    write(file, listed(stack))
    stack.configure(workers={"prefill": [], "decode": [], "file": str(file)})
    async with stack:
        await settled(stack)
        assert (await ask(stack, "llama-7b"))[2] == "llama"
        write(file, listed(stack, only="llama"))

        async def refused() -> bool:
            return (await ask(stack, "llama-7b"))[0] == 503

        await until(refused)
        _, answer, _ = await ask(stack, "llama-7b")
        error = error_of(answer)
        assert error["code"] in ("no_decode_worker", "no_prefill_worker") and "of the pool 'llama' is live" in error["message"]
        assert (await ask(stack, "qwen"))[2] == "qwen"  # the others go on
        assert (await ask(stack, "llama-7b", x_tenant="acme"))[2] == "gold"  # it has the model, too
        stack.reset()
        write(file, listed(stack))

        async def served() -> bool:
            return (await ask(stack, "llama-7b"))[2] == "llama"

        await until(served)


def write(file: Path, workers: dict[str, list[Any]]) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(workers))
    temporary.replace(file)


async def test_a_pool_that_is_full_in_envoy_is_no_matter_of_the_others() -> None:
    async with make(pools=[{**POOLS[0], "max_requests": 1}, *POOLS[1:]]) as stack:
        await settled(stack)
        gate = asyncio.Event()
        stack.decode[0].answer = begun_until(gate)
        async with stack.http.post(
            "/v1/completions", json={"model": "llama-7b", "prompt": PROMPT}, headers={"x-tenant": "acme"}
        ) as first:
            assert first.status == 200  # and its answer goes on
            status, answer, _ = await ask(stack, "llama-7b", x_tenant="acme")
            assert (status, error_of(answer)["code"]) == (503, "upstream_unavailable")
            assert (await ask(stack, "llama-7b"))[::2] == (200, "llama")
            gate.set()
            assert await first.read() == b"begun done"

        async def released() -> bool:  # the blocks that nobody fetched, through a worker that knows the one which has them
            return len(stack.decode[0].received) > len(served_by(stack.decode[0]))

        await until(released)
        assert all(worker.received == served_by(worker) for worker in stack.decode[1:])
        assert (await stack.metrics())["baton_unknown_to_envoy_total"] == 0  # that is another thing


async def test_several_processes_of_the_filter_agree_on_the_pools() -> None:
    async with make(processes=2) as stack:
        await settled(stack)

        async def served() -> bool:  # each process asks the workers by itself what they serve
            return all([(await ask(stack, "qwen"))[::2] == (200, "qwen") for _ in range(8)])

        await until(served)
        for model, headers, pool in (
            ("llama-7b", {}, "llama"),
            ("llama-7b", {"x-tenant": "acme"}, "gold"),
            ("qwen", {}, "qwen"),
        ):
            for _ in range(8):
                assert (await ask(stack, model, **headers))[::2] == (200, pool)


async def test_pools_go_with_a_pin_that_needs_no_list_of_workers() -> None:
    async with make(envoy={"pin": "original_dst"}) as stack:

        async def served() -> bool:  # the last pool has its workers when they have said what they serve
            return (await ask(stack, "qwen"))[::2] == (200, "qwen")

        await until(served)
        assert (await ask(stack, "llama-7b"))[::2] == (200, "llama")
        assert await through(stack, "decode-llama") == 1 == await through(stack, "prefill-llama")


async def test_a_route_that_does_not_know_the_pool_is_a_503_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Envoy still has the configuration from before there were pools: all that it knows is the default one.
    monkeypatch.setattr(harness, "render", lambda config: render(msgspec.structs.replace(config, pools=[], policies=[])))
    stack = make(prefill={"via": "direct"}, envoy={"eds": "grpc"})
    async with stack:
        status, answer, served = await ask(stack, "qwen")
        assert (status, served, error_of(answer)["code"]) == (503, None, "upstream_unavailable")
        assert (await stack.metrics())["baton_unknown_to_envoy_total"] == 1
        await stack.logged("unknown_to_envoy", pool="qwen")
