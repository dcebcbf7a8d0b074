"""`baton bench` through the real Envoy and the real filter: its numbers are those that the engines themselves counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from extproc.loadgen import bench
from extproc.loadgen.account import Report
from extproc.loadgen.arrivals import parse_gaps, parse_stages
from extproc.loadgen.headers import parse_drawn
from extproc.loadgen.target import Target
from extproc.plan import lengths
from extproc.plan.workload import Workload
from tests.cases.sims import RecordingSim, SimStack
from workers.sim.options import SimOptions

OPTIONS = SimOptions(
    served_model_name=("m",),
    speed=20.0,
    num_blocks=8_000,
    max_model_len=8192,
    enable_prompt_tokens_details=True,
    handshake_s=0.0,
)
ASKED = 2
"""Requests that find out how the engine counts."""


def system(**settings: Any) -> SimStack:
    return SimStack(prefill=1, decode=2, options=OPTIONS, settings=settings)


async def counted(sims: list[RecordingSim], name: str) -> int:
    """The sum of a counter over engines, as they show it to Prometheus."""
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for sim in sims:
            async with http.get(f"http://{sim.address}/metrics") as response:
                lines = (await response.text()).splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return round(total)


async def run(stack: SimStack, load: bench.Load, **more: Any) -> Report:
    found, _ = await bench.run(bench.Options(target=Target(base=stack.base), load=load, **more))
    return found


async def test_tokens_and_requests_are_what_the_engines_counted() -> None:
    async with system() as stack:
        found = await run(
            stack,
            bench.Load(
                gaps=parse_gaps("poisson"),
                stages=parse_stages("5-40:2,40:1"),
                workload=Workload(inputs=lengths.parse("uniform:20-900", ""), outputs=lengths.parse("uniform:2-60", "")),
            ),
            drawn=[parse_drawn("x-tenant=gold:1,bronze:2")],
            ttft_slo_s=60.0,
            itl_slo_s=60.0,
        )
        count = found.all.requests
        assert count > 40 and found.all.served == count and found.all.good == count, found.failures
        # A prompt is worked on by a prefill worker, which makes one token, and by a decode worker, which makes all of them.
        # The two requests that ask how the engine counts want one token, for which nothing is handed over.
        assert await counted(stack.prefill, "vllm:request_success_total") == count
        assert await counted(stack.prefill, "vllm:generation_tokens_total") == count
        assert await counted(stack.prefill, "vllm:prompt_tokens_total") == found.tokens.prompt
        assert await counted(stack.decode, "vllm:request_success_total") == count + ASKED
        assert await counted(stack.decode, "vllm:generation_tokens_total") == found.tokens.output + ASKED
        probes = [json.loads(each.reply) for sim in stack.decode for each in sim.received if each.reply is not None]
        asked_tokens = sum(probe["usage"]["prompt_tokens"] for probe in probes)
        assert len(probes) == ASKED
        assert await counted(stack.decode, "vllm:prompt_tokens_total") == found.tokens.prompt + asked_tokens
        assert (found.tokens.prompt, found.tokens.output) == (found.tokens.asked_prompt, found.tokens.asked_output)
        tenants = Counter(
            each.headers["x-tenant"] for sim in stack.decode for each in sim.received if "x-tenant" in each.headers
        )
        assert {value: some.requests for value, some in found.groups["x-tenant"].items()} == tenants


async def test_prompts_of_a_trace_share_in_the_engine_what_they_share_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1_500, (1, 2, 3)), (1_500, (1, 2, 4)), (700, (1, 5)), (1_024, (6, 7)), (1_300, (6, 7, 8))]
    shared_tokens = 2 * 512 + 512 + 2 * 512
    lines = [
        {"timestamp": 700 * number, "input_length": length, "output_length": 5, "hash_ids": ids}
        for number, (length, ids) in enumerate(rows)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with system() as stack:
        found = await run(stack, bench.Load(gaps=parse_gaps("poisson"), trace=trace), api="completions")
        assert found.all.served == len(rows), found.failures
        assert found.tokens.prompt == sum(length for length, _ in rows)
        assert await counted(stack.prefill, "vllm:prefix_cache_hits_total") == shared_tokens
        again = await run(stack, bench.Load(gaps=parse_gaps("poisson"), trace=trace, seed=1), api="completions")
        # Another seed, other texts: what they share among themselves, and nothing of the run before.
        assert again.tokens.prompt == found.tokens.prompt
        assert await counted(stack.prefill, "vllm:prefix_cache_hits_total") == 2 * shared_tokens


async def test_what_the_filter_turns_away_is_counted_by_status_and_reaches_no_engine() -> None:
    limited = {"name": "default", "mode": "disaggregate", "limits": {"max_in_flight": 4}}
    async with system(policies=[limited]) as stack:
        found = await run(
            stack,
            bench.Load(
                gaps=parse_gaps("constant"),
                rate_per_s=1e5,
                limit=12,
                workload=Workload(inputs=lengths.parse("2000", ""), outputs=lengths.parse("200", "")),
            ),
            tokens_per_word=1.0,
        )
        assert 0 < found.all.served < 12
        assert sum(each.count for each in found.failures) == 12 - found.all.served
        assert {each.kind for each in found.failures} == {"refused"} and {each.status for each in found.failures} <= {429, 503}
        assert await counted(stack.decode, "vllm:request_success_total") == found.all.served
        assert await counted(stack.decode, "vllm:generation_tokens_total") == found.tokens.output == 200 * found.all.served
