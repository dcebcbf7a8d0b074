"""The routing bench's precise mode: the engines' tokenizer, an oracle that sees what they hold, demands judged rightly."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from bench.routing import options, report
from bench.routing.beliefs import Beliefs, parse, together
from bench.routing.oracle import Looking
from bench.routing.tokenizer import write_tokenizer
from bench.routing.twin import Twin
from extproc.routing.holdings import Held
from extproc.routing.token_chain import TokenChain
from extproc.tokens.cache import Pieces
from extproc.tokens.tokenizer import Tokenizer
from tests.unit.test_bench_routing import _result
from workers.sim import tokens
from workers.sim.main import SimOptions
from workers.sim.options import worker_options
from workers.sim.worker import Worker
from workers.trace_text import prompt_text
from workers.traces import Request


def test_the_written_tokenizer_makes_the_engines_own_ids(tmp_path: Path) -> None:
    text = prompt_text(Request(0.0, 5_000, 1, tuple(range(10))))
    found = Tokenizer(write_tokenizer(tmp_path / "m"), Pieces(1 << 20)).ids(text, special=True)
    assert found.tolist() == [tokens.BOS, *tokens.encode(text)]


async def test_the_oracle_says_what_an_engine_holds_at_that_moment() -> None:
    (made,) = worker_options(SimOptions(port=0, speed=0.0, block_size=16, served_model_name=("m",)))
    async with Worker(made) as worker, aiohttp.ClientSession() as http:
        prompt = list(range(1_000, 1_100))
        looking = _Counting(1_024)
        looking.addresses_asked = (worker.address,)
        await looking.see(prompt)
        assert looking.seen == {}
        async with http.post(f"{worker.url}/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 1}) as answer:
            assert answer.status == 200
        await looking.see(prompt)
        assert looking.seen == {worker.address: Held(96)}
        await looking.see([*prompt[:40], 7, *prompt[40:]])
        assert looking.seen == {worker.address: Held(32)}
        await worker.reset()
        await looking.see(prompt)
        assert looking.seen == {}
        looking.close()


class _Counting(Looking):
    """Asked from a thread, as the engine is on this one's loop."""

    seen: dict[str, Held]

    async def see(self, prompt: list[int]) -> None:
        self.seen = await asyncio.to_thread(self.lookup, TokenChain(array("I", prompt)))


METRICS = """
baton_prefix_prompt_tokens_total 5000.0
baton_prefix_predicted_tokens_total 1000.0
baton_prefix_reported_tokens_total 900.0
baton_cache_lookups_total{by="events"} 12.0
baton_cache_lookups_total{by="placed"} 0.0
baton_token_chain_missing_total{reason="timeout"} 1.0
"""


def test_what_filters_believed_is_read_and_added() -> None:
    one = parse(METRICS)
    assert one == Beliefs(5000, 1000, 900, {"events": 12}, {"timeout": 1})
    both = together([one, one])
    assert both == Beliefs(10_000, 2000, 1800, {"events": 24}, {"timeout": 2})
    assert "held 1,800 of 10,000" in str(both) and "expected were 2,000" in str(both)


@pytest.mark.parametrize(("precise", "met"), [(0.0981, True), (0.0979, False)])
def test_two_percent_of_the_oracles_own_figure(precise: float, met: bool) -> None:
    results = [_hit("precise", precise), _hit("oracle", 0.10), _hit("baton", 0.05)]
    (verdict,) = [each for each in report.precise_verdicts(results, []) if "of the oracle" in each.text]
    assert verdict.met is met


def test_replays_are_judged_beside_the_runs() -> None:
    results = [_hit("precise", 0.10), _hit("oracle", 0.10), _hit("baton", 0.05)]
    goodput = {"precise": 0.6, "oracle": 0.6, "baton": 0.5}
    twins = [(each, Twin((0.0, goodput[each.contestant], 1.0), (0.0, 0.1, 1.0))) for each in results]
    verdicts = {each.text.partition(": ")[2]: each.met for each in report.precise_verdicts(results, twins)}
    assert [met for text, met in verdicts.items() if "which predicts, replayed" in text] == [True]
    assert [met for text, met in verdicts.items() if "which predicts: " in text] == [False]


def _hit(name: str, ratio: float) -> report.RunResult:
    return replace(_result(name, 0.9, 0.8), hit_ratio=ratio)


def test_precise_mode_has_pressure_small_blocks_and_who_hears_events() -> None:
    found = options.parse(["--precise"])
    assert (found.cache_share, found.block_tokens, found.loads, found.traces) == (0.1, 16, (1.1,), ("synthetic",))
    assert set(found.policies_at(1.1)) >= {"baton", "precise", "oracle", "vllm-router-events"}
    assert found.host_cache > 0 and found.routers > 1, "as meshes are: hosts with memory, more than one gateway"
    usual = options.parse([])
    assert (usual.cache_share, usual.block_tokens, usual.host_cache, usual.routers) == (None, 128, 0, 1)
    assert not {"precise", "oracle", "vllm-router-events"} & set(usual.policies_at(0.9))


def test_who_hears_events_needs_engines_that_publish() -> None:
    with pytest.raises(options.OptionsError, match="precise hears KV events: --precise"):
        options.parse(["--policies", "precise"])
