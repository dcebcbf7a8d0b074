"""API keys at the real Envoy: who has none gets nothing, who has one is named by it, and the key goes no further."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ruamel.yaml import YAML

from tests.stack.harness import Stack

EXAMPLE = Path(__file__).parents[2] / "envoy" / "api-keys.yaml"
KEY_A, KEY_B, KEY_OF_WORKERS = "key-of-team-a-4711", "key-of-team-b-0815", "key-of-the-workers-2342"
BODY = {"model": "m", "prompt": "a prompt that is long enough", "max_tokens": 3}
POLICY = {
    "name": "default",
    "mode": "disaggregate",
    "objective": "round-robin",
    "tenant_header": "x-tenant",
    "weight": 1.0,
}


def keys(**clients: str) -> str:
    """The example in envoy/, with these keys (client -> key) in place of its own."""
    tree = YAML(typ="safe").load(EXAMPLE.read_text(encoding="utf-8"))
    (resource,) = tree["resources"]
    resource["typed_config"]["credentials"] = [
        {"client": client.replace("_", "-"), "key": key} for client, key in clients.items()
    ]
    return json.dumps(tree)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)


def guarded(directory: Path, *, api_keys: dict[str, Any] | None = None, settings: dict[str, Any] | None = None) -> Stack:
    """Envoy asks for keys; the workers want one of their own, which the filter puts in the place of the client's."""
    put(directory / "keys" / "api-keys.yaml", keys(team_a=KEY_A, team_b=KEY_B))
    put(directory / "workers.key", KEY_OF_WORKERS)
    stack = Stack(settings=settings)
    stack.configure(
        workers={"api_key_file": str(directory / "workers.key"), "replace_credentials": True},
        envoy={"api_keys": {"file": str(directory / "keys" / "api-keys.yaml"), **(api_keys or {})}},
        policies=[POLICY],
    )
    return stack


async def ask(stack: Stack, headers: dict[str, str], path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    async with stack.http.post(path, json=BODY, headers=headers) as response:
        return response.status, await response.json(content_type=None)


NO_GOOD: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": f"Bearer {KEY_A}x"},
    {"authorization": f"Basic {KEY_A}"},
    {"x-api-key": ""},
    {"x-tenant": "team-a"},
    {"authorization": f"Bearer {KEY_OF_WORKERS}"},
    # The first source in which there is anything counts, not the one that fits.
    {"x-api-key": KEY_A, "authorization": "Bearer no"},
]


async def test_without_a_good_key_nobody_is_asked(tmp_path: Path) -> None:
    """401 in the shape of OpenAI's errors, by Envoy: neither the filter nor a worker hears of it."""
    async with guarded(tmp_path) as stack:
        for headers in NO_GOOD:
            status, answer = await ask(stack, headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), headers
            async with stack.http.get("/v1/models", headers=headers) as response:
                assert response.status == 401
        assert [worker.received for worker in (*stack.prefill, *stack.decode)] == [[], [], []]
        # In full duplex the filter is shown the answer, and nothing of the request.
        assert not [line for line in stack.log_lines() if line["event"] == "request" and line["method"]]


@pytest.mark.parametrize(
    ("via", "headers"),
    [("envoy", {"authorization": f"Bearer {KEY_A}"}), ("direct", {"x-api-key": KEY_A})],
)
async def test_key_names_the_client_and_goes_no_further(tmp_path: Path, headers: dict[str, str], via: str) -> None:
    """Both legs carry the workers' key; the tenant is the key's, whatever the client says; no log has the key."""
    settings = {"prefill": {"via": "direct"}} if via == "direct" else {}
    async with guarded(tmp_path, settings=settings) as stack:
        lies = {"x-tenant": "team-b", "X-Tenant": "team-b", "x_tenant": "team-b"}
        status, _ = await ask(stack, {**lies, **headers})
        assert status == 200
        legs = [record for worker in (*stack.prefill, *stack.decode) for record in worker.received]
        assert len(legs) == 2
        for leg in legs:
            assert leg.headers["authorization"] == f"Bearer {KEY_OF_WORKERS}"
            assert "x-api-key" not in leg.headers
            assert KEY_A not in str(leg)
        decode = legs[-1].headers
        assert decode["x-tenant"] == "team-a"
        async with asyncio.timeout(10):  # it is counted when the filter has heard of its end
            while not (series := [name for name in await stack.metrics() if 'tenant="team-' in name]):
                await asyncio.sleep(0.05)
        assert all('tenant="team-a"' in name for name in series)
        for log in stack.directory.glob("*.log"):
            text = log.read_text()
            assert KEY_A not in text and KEY_OF_WORKERS not in text


async def test_request_without_a_body_carries_the_key_of_the_workers_too(tmp_path: Path) -> None:
    """Whatever goes to a worker by any path."""
    async with guarded(tmp_path) as stack:
        async with stack.http.get("/version", headers={"authorization": f"Bearer {KEY_B}"}) as response:
            assert response.status == 200
        (record,) = stack.decode_received
        assert record.headers["authorization"] == f"Bearer {KEY_OF_WORKERS}"


async def test_keys_change_without_a_restart(tmp_path: Path) -> None:
    """A client gets a second key, then the first one goes; and the workers' key changes, too."""
    async with guarded(tmp_path) as stack:
        file = tmp_path / "keys" / "api-keys.yaml"
        put(file, keys(team_a="a-new-key", team_b=KEY_B))
        async with asyncio.timeout(15):
            while (await ask(stack, {"authorization": "Bearer a-new-key"}))[0] != 200:
                await asyncio.sleep(0.05)
        assert (await ask(stack, {"authorization": f"Bearer {KEY_A}"}))[0] == 401
        put(tmp_path / "workers.key", "another-key-of-the-workers")
        async with asyncio.timeout(15):
            while True:
                assert (await ask(stack, {"authorization": "Bearer a-new-key"}))[0] == 200
                if stack.decode_received[-1].headers["authorization"] == "Bearer another-key-of-the-workers":
                    break
                await asyncio.sleep(0.05)
        assert stack.prefill[0].last.headers["authorization"] == "Bearer another-key-of-the-workers"


async def test_faulty_file_of_keys_changes_nothing(tmp_path: Path) -> None:
    """Envoy keeps the keys that it had."""
    async with guarded(tmp_path) as stack:
        put(tmp_path / "keys" / "api-keys.yaml", "resources: [oh no")
        await rejected(stack)
        assert (await ask(stack, {"authorization": f"Bearer {KEY_A}"}))[0] == 200
        assert (await ask(stack, {}))[0] == 401


async def test_client_that_asks_too_often_is_told_and_others_are_not_slowed(tmp_path: Path) -> None:
    """A bucket for each client, by its key and not by what it says of itself."""
    async with guarded(tmp_path, api_keys={"requests_per_s": 0.01, "burst": 3}) as stack:
        mine = [await ask(stack, {"authorization": f"Bearer {KEY_A}", "x-tenant": f"another-{i}"}) for i in range(5)]
        assert [status for status, _ in mine] == [200, 200, 200, 429, 429]
        assert mine[-1][1]["error"]["code"] == "rate_limit_exceeded"
        assert (await ask(stack, {"authorization": f"Bearer {KEY_B}"}))[0] == 200


async def rejected(stack: Stack) -> None:
    """Until Envoy has refused a file."""
    async with asyncio.timeout(15), aiohttp.ClientSession() as session:
        while True:
            url = f"{stack.envoy_admin}/stats?filter=api_key_auth.*(config_fail|update_rejected|update_failure)"
            async with session.get(url) as response:
                counts = [int(line.rpartition(":")[2]) for line in (await response.text()).splitlines() if line]
            if any(counts):
                return
            await asyncio.sleep(0.05)
