"""compose.yaml, profile cpu, as processes: real vLLM started by `baton worker`, a real LMCache server, a real handoff."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from tests.engine.metrics import scrape
from tests.engine.openai_api import MODEL
from tests.stack.topology import chat, topology

UP_S = 240.0
PROMPT = " ".join(f"Barge {number} carries {number * 31 % 89} barrels." for number in range(60))


async def test_the_cpu_profile_hands_a_prompt_over_and_both_stores_of_kv_see_it(tiny_model: Path, run_dir: Path) -> None:
    with topology(run_dir, "--profile", "cpu", env={"CPU_MODEL": str(tiny_model)}) as running:
        await running.until_up(UP_S)
        answer = await chat(running.url("envoy"), MODEL, PROMPT)
        assert answer["choices"][0]["message"]["content"]
        async with asyncio.timeout(10):
            while not (requests := [entry for entry in running.requests() if entry.get("prefill")]):
                await asyncio.sleep(0.1)
        prefill, decode = requests[-1]["prefill"], requests[-1]["decode"]
        assert prefill != decode

        async with aiohttp.ClientSession() as http:
            plain = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
            async with http.post(f"http://{decode}/v1/chat/completions", json=plain) as response:
                alone = await response.json()
        assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]

        moved = await asyncio.to_thread(scrape, f"http://{decode}")
        assert moved.total("vllm:nixl_bytes_transferred_sum") > 0, "no KV block came by NIXL"
        host = prefill.rpartition(".")[0]
        stored = [f"{host}.{number}:8080" for number in range(2, 6)]
        assert any([await lmcache_holds(address) for address in stored]), "the LMCache server holds nothing of the prompt"
        await asyncio.to_thread(running.child.stop)


async def lmcache_holds(address: str) -> bool:
    """Whether an LMCache server there has memory in use for KV."""
    try:
        found = await asyncio.to_thread(scrape, f"http://{address}")
    except OSError:
        return False
    return found.total("lmcache_mp_l1_memory_usage_bytes") > 0
