"""Workers that want a key: what the filter asks of them by itself carries it; clients carry their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from extproc import worker_key
from tests.cases.sims import SimStack
from tests.stack.harness import Stack
from tests.stack.test_warm_up import start
from tests.stack.test_workers_change import status
from workers.sim.faults import Fault
from workers.sim.main import SimOptions

KEY = "k-3f9a"
OPTIONS = SimOptions(
    served_model_name=("m",),
    num_blocks=2000,
    max_model_len=8192,
    handshake_s=0.0,
    speed=0,
    api_key=KEY,
    kv_lease_duration_s=30.0,
)
BODY = {"model": "m", "prompt": "word " * 300, "max_tokens": 4}


def stack_of(key_file: Path, *, started: bool = True) -> SimStack:
    stack = SimStack(
        prefill=1,
        decode=2,
        options=OPTIONS,
        started=started,
        settings={"warm_up": {"enabled": True, "attempts": 1}, "handoff": {"release_delay_s": 0.1, "lease_s": 30.0}},
    )
    stack.configure(policies=[{"name": "default", "mode": "disaggregate"}], workers={"api_key_file": str(key_file)})
    return stack


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    return file


async def post(stack: Stack, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with stack.http.post("/v1/completions", json=BODY, headers=headers) as response:
        await response.read()
        return response.status


async def test_the_filter_has_the_key_and_clients_need_their_own(key_file: Path) -> None:
    async with stack_of(key_file) as stack:  # it is ready once the pairs have met, which takes the key
        async with stack.http.get("/v1/models") as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["m"]
        assert await post(stack, KEY) == 200
        assert await post(stack, None) == 401, "the filter's key opens nothing to a client"
        assert await post(stack, "another") == 401


async def test_blocks_that_nobody_fetches_are_given_back_by_workers_that_want_a_key(key_file: Path) -> None:
    async with stack_of(key_file) as stack:
        for sim in stack.decode:
            sim.worker.inject(Fault(kind="status", phase="decode", status=500, count=1))
        assert await post(stack, KEY) == 500
        assert await stack.released(10.0), "long before their lease ends"
        async with asyncio.timeout(20):  # the engine is told before the answer to that is counted
            while (await stack.metrics()).get('baton_releases_total{outcome="released"}') != 1:
                await asyncio.sleep(0.02)


async def test_without_the_key_nobody_is_ready_and_the_status_says_why(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    empty.write_text("")
    async with stack_of(empty, started=False) as stack:
        await start(stack, *stack.prefill, *stack.decode)
        async with asyncio.timeout(20):
            while not (failing := (await status(stack))["warm_up"]["failing"]):
                await asyncio.sleep(0.05)
        assert all("401" in each["reason"] for each in failing), failing
        assert not (await status(stack))["ready"]


def test_a_file_that_holds_no_key_is_refused_by_name(tmp_path: Path) -> None:
    for raw in (b"two words", b"a\nb", b"\xff\xfe", b"x" * 20_000):
        (tmp_path / "key").write_bytes(raw)
        with pytest.raises(OSError, match=r"key: (one key, printable and without spaces|over 16384 bytes)"):
            worker_key.headers(str(tmp_path / "key"))
    with pytest.raises(OSError, match="no-such-file"):
        worker_key.headers(str(tmp_path / "no-such-file"))
    assert worker_key.headers(None) == {}
