"""Scheduling, handoffs and timing of the simulated engine, without I/O and with a clock of our own."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.blocks import BlockPool
from workers.sim.core import Core, CoreConfig, Identity, Plan, Pull, Release
from workers.sim.handoff import Handoffs
from workers.sim.request import Sequence, Status
from workers.sim.text import Step, Stop, expected_text
from workers.sim.timing import Profile


class Bench:
    """A core, and what came out of it."""

    def __init__(self, **config: Any) -> None:
        self.config = CoreConfig(**{"block_size": 4, "num_blocks": 65, "mean_answer_tokens": 0, **config})
        self.pool = BlockPool(self.config.num_blocks, self.config.block_size, caching=self.config.prefix_caching)
        self.handoffs = Handoffs(self.pool, lease_s=self.config.lease_s)
        self.leaks: list[tuple[str, str]] = []
        self.core = Core(
            self.config,
            self.pool,
            self.handoffs,
            Identity("engine-p", "127.0.0.1", 5600),
            on_leak=lambda kind, request_id, _: self.leaks.append((kind, request_id)),
        )
        self.text: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        self.now_s = 0.0

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> Sequence:
        def on_steps(steps: list[Step]) -> None:
            self.text[name] = self.text.get(name, "") + "".join(step.text for step in steps)

        sequence = Sequence(
            name,
            prompt,
            Stop(max_tokens),
            on_steps=on_steps,
            on_end=lambda reason: self.ends.__setitem__(name, reason),
            **more,
        )
        self.core.add(sequence, self.now_s)
        return sequence

    def step(self) -> Plan:
        plan = self.core.plan(self.now_s)
        self.core.commit(plan, self.now_s)
        return plan

    def run(self, steps: int = 100) -> None:
        for _ in range(steps):
            if not self.core.has_work() or not self.step().work:
                return

    def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        sequence = self.add(name, prompt, kv_params={"do_remote_decode": True})
        self.run()
        assert sequence.kv_result is not None
        return sequence.kv_result


PROMPT = list(range(200, 218))


def test_an_answer_is_the_expected_one_however_the_prefill_is_chunked() -> None:
    for budget in (3, 7, 8192):
        bench = Bench(max_num_batched_tokens=budget)
        bench.add("a", PROMPT, 9)
        bench.run()
        assert bench.text["a"] == expected_text(PROMPT, 9, mean_answer_tokens=0)
        assert bench.ends == {"a": "length"}
        assert bench.pool.free_blocks == 64


def test_who_was_preempted_and_finds_all_but_a_token_in_the_cache_has_blocks_for_what_it_gets() -> None:
    bench = Bench(decode_burst_tokens=16)
    prompt = list(range(200, 220))
    sequence = bench.add("a", prompt, 60)
    bench.run(steps=2)
    assert len(sequence.token_ids) == 37, "nine full blocks, and one token that has no KV yet"
    assert not bench.core._grow(sequence, 10_000), "there are no blocks for so much: it is preempted"
    bench.run()
    assert (sequence.preemptions, bench.text["a"]) == (1, expected_text(prompt, 60, mean_answer_tokens=0))


def test_a_chunked_prefill_takes_no_more_than_the_budget_a_step() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", PROMPT, 2)
    assert [bench.step().prefill_tokens for _ in range(3)] == [8, 8, 2]
    assert bench.step().decodes == 1


def test_decodes_go_before_prefills_and_share_their_step() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", [1, 2, 3], 5)
    bench.step()
    bench.add("b", PROMPT, 1)
    plan = bench.step()
    assert (plan.decodes, plan.prefill_tokens) == (1, 7)
    assert plan.decode_context_tokens == 4
    assert plan.prefill_context_tokens == 7 * 7 // 2


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, [1, 2, 3, ord(name)], 3)
    bench.step()
    assert len(bench.core.running) == 2 and len(bench.core.waiting) == 1
    bench.run()
    assert set(bench.ends) == {"a", "b", "c"}


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    bench = Bench()
    bench.add("a", PROMPT, 1)
    bench.run()
    second = bench.add("b", [*PROMPT[:16], 5, 6], 4)
    assert bench.step().prefill_tokens == 2
    bench.run()
    assert second.cached_tokens == 16
    assert bench.text["b"] == expected_text([*PROMPT[:16], 5, 6], 4, mean_answer_tokens=0)
    assert (bench.core.counters.prefix_queries, bench.core.counters.prefix_hits) == (36, 16)
    assert bench.core.counters.local_compute_tokens == 20


def test_the_last_prompt_token_is_always_computed() -> None:
    bench = Bench()
    bench.add("a", PROMPT[:16], 1)
    bench.run()
    assert bench.add("b", PROMPT[:16], 1) and bench.step().prefill_tokens == 4


def test_another_salt_or_adapter_has_no_hit() -> None:
    bench = Bench()
    bench.add("a", PROMPT, 1)
    bench.run()
    salted = bench.add("b", PROMPT, 1, cache_salt="s")
    adapted = bench.add("c", PROMPT, 1, adapter="ada")
    bench.run()
    assert salted.cached_tokens == adapted.cached_tokens == 0
    assert bench.text["a"] == bench.text["b"] != bench.text["c"]


def test_a_next_turn_finds_the_answer_in_the_cache() -> None:
    bench = Bench()
    first = bench.add("a", PROMPT, 8)
    bench.run()
    turn = [*first.token_ids, 9, 9]
    second = bench.add("b", turn, 3)
    bench.run()
    assert second.cached_tokens == 24, "six full blocks of prompt and answer"
    assert bench.text["b"] == expected_text(turn, 3, mean_answer_tokens=0)


def test_a_sequence_that_is_preempted_answers_the_same() -> None:
    bench = Bench(num_blocks=11)
    bench.add("a", list(range(100, 112)), 20)
    bench.add("b", list(range(300, 312)), 20)
    bench.run()
    assert bench.core.counters.preemptions > 0
    assert bench.text["a"] == expected_text(list(range(100, 112)), 20, mean_answer_tokens=0)
    assert bench.text["b"] == expected_text(list(range(300, 312)), 20, mean_answer_tokens=0)
    assert bench.pool.free_blocks == 10


def test_an_abort_frees_everything_whenever_it_comes() -> None:
    for steps in range(4):
        bench = Bench(max_num_batched_tokens=8)
        sequence = bench.add("a", PROMPT, 9, kv_params={"do_remote_decode": True})
        for _ in range(steps):
            bench.step()
        bench.core.abort(sequence)
        assert bench.pool.free_blocks == 64 and not bench.core.has_work() and bench.ends == {"a": "abort"}


def test_a_prefill_says_where_its_blocks_are_and_keeps_them() -> None:
    bench = Bench()
    params = bench.prefill("p-0", PROMPT)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5]],
        "remote_engine_id": "engine-p",
        "remote_request_id": "p-0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 18,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert bench.pool.usage == pytest.approx(5 / 64)


def pull(decode: Bench, prefill: Bench, params: dict[str, Any], prompt: list[int], max_tokens: int = 6) -> str:
    """A decode leg; returns the kind of violation that the read was, or ''."""
    name = f"d-{len(decode.text)}-{len(decode.ends)}"
    decode.add(name, prompt, max_tokens, kv_params=dict(params))
    decode.step()
    (effect,) = decode.core.effects
    decode.core.effects.clear()
    assert isinstance(effect, Pull)
    read = prefill.handoffs.read(params["remote_request_id"], effect.remote_blocks)
    decode.core.pulled(effect.sequence, read.kv)
    decode.run()
    decode.text["last"] = decode.text[name]
    return read.wrong or ""


def test_a_correct_handoff_answers_as_one_worker_would() -> None:
    prefill, decode = Bench(), Bench()
    assert pull(decode, prefill, prefill.prefill("p", PROMPT), PROMPT) == ""
    assert decode.text["last"] == expected_text(PROMPT, 6, mean_answer_tokens=0)
    assert prefill.pool.free_blocks == 64 and decode.pool.free_blocks == 64
    assert decode.core.counters.pulled_tokens == 18 and decode.core.counters.local_compute_tokens == 0


def test_a_decode_worker_that_holds_the_start_pulls_only_the_rest() -> None:
    prefill, decode = Bench(), Bench()
    decode.add("warm", PROMPT[:12], 1)
    decode.run()
    params = prefill.prefill("p", PROMPT)
    decode.add("d", PROMPT, 6, kv_params=params)
    decode.step()
    (effect,) = decode.core.effects
    assert isinstance(effect, Pull)
    assert effect.remote_blocks == [4, 5] and effect.tokens == 6
    decode.core.pulled(effect.sequence, prefill.handoffs.read("p", effect.remote_blocks).kv)
    decode.run()
    assert decode.text["d"] == expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_a_second_use_reads_wrong_text() -> None:
    prefill, decode, other = Bench(), Bench(), Bench()
    params = prefill.prefill("p", PROMPT)
    assert pull(decode, prefill, params, PROMPT) == ""
    assert pull(other, prefill, params, PROMPT) == "second_use"
    assert other.text["last"] != decode.text["last"]


def test_a_read_after_the_lease_is_wrong_even_before_the_blocks_are_reused() -> None:
    prefill, decode = Bench(lease_s=30.0), Bench()
    params = prefill.prefill("p", PROMPT)
    prefill.core.expire(29.9)
    assert prefill.leaks == []
    prefill.core.expire(30.0)
    assert prefill.leaks == [("leaked_blocks", "p")] and prefill.pool.free_blocks == 64
    assert pull(decode, prefill, params, PROMPT) == "use_after_expiry"
    assert decode.text["last"] != expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_reused_blocks_read_as_what_they_hold_now() -> None:
    prefill, decode = Bench(num_blocks=6), Bench()
    params = prefill.prefill("p", PROMPT)
    prefill.core.expire(1000.0)
    prefill.add("other", list(range(900, 918)), 1)
    prefill.run()
    assert pull(decode, prefill, params, PROMPT) == "use_after_expiry"
    assert decode.text["last"] != expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_heartbeats_keep_the_lease() -> None:
    prefill, decode = Bench(lease_s=30.0), Bench()
    params = prefill.prefill("p", PROMPT)
    for now_s in (5.0, 20.0, 35.0, 50.0):
        prefill.handoffs.heartbeat(["p"], now_s)
        prefill.core.expire(now_s)
    prefill.core.expire(69.9)
    assert prefill.leaks == []
    assert pull(decode, prefill, params, PROMPT) == ""
    assert decode.text["last"] == expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_blocks_of_a_decode_worker_that_died_are_not_the_routers_leak() -> None:
    prefill = Bench(lease_s=30.0)
    prefill.prefill("p", PROMPT)
    prefill.handoffs.heartbeat(["p"], 5.0)
    prefill.core.expire(100.0)
    assert prefill.leaks == [("peer_lost", "p")]


def test_a_handoff_for_another_prompt_gives_that_prompts_answer() -> None:
    prefill, decode = Bench(), Bench()
    params = prefill.prefill("p", PROMPT)
    other = [*PROMPT[:-2], 1, 2]
    assert pull(decode, prefill, params, other) == ""
    assert decode.text["last"] != expected_text(other, 6, mean_answer_tokens=0)


def test_a_prefill_of_several_tokens_shifts_the_blocks() -> None:
    prefill, decode = Bench(), Bench()
    sequence = prefill.add("p", PROMPT, 5, kv_params={"do_remote_decode": True})
    prefill.run()
    assert sequence.kv_result is not None and len(sequence.kv_result["remote_block_ids"][0]) == 6
    pull(decode, prefill, sequence.kv_result, PROMPT)
    assert decode.text["last"] != expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_wrong_blocks_pulled_poison_the_decode_workers_own_cache() -> None:
    prefill, decode = Bench(), Bench()
    params = prefill.prefill("p", PROMPT)
    prefill.core.expire(1000.0)
    pull(decode, prefill, params, PROMPT)
    decode.add("local", PROMPT, 6)
    decode.run()
    assert decode.text["local"] != expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_a_failed_pull_fails_the_request_or_is_computed_here() -> None:
    for recompute, text_wanted, end in (
        (False, None, "error"),
        (True, expected_text(PROMPT, 6, mean_answer_tokens=0), "length"),
    ):
        prefill, decode = Bench(), Bench(recompute_on_load_failure=recompute)
        decode.add("d", PROMPT, 6, kv_params=prefill.prefill("p", PROMPT))
        decode.step()
        (effect,) = decode.core.effects
        assert isinstance(effect, Pull)
        decode.core.pulled(effect.sequence, None)
        decode.run()
        assert decode.text.get("d") == text_wanted and decode.ends["d"] == end
        assert decode.pool.free_blocks == 64


def test_a_decode_that_leaves_the_queue_gives_its_handoff_back() -> None:
    prefill, decode = Bench(), Bench()
    params = prefill.prefill("p", PROMPT)
    decode.core.abort(decode.add("d", PROMPT, 6, kv_params=dict(params)))
    assert decode.core.effects == [Release("d", params)]
    assert prefill.handoffs.release("p") and prefill.pool.free_blocks == 64 and not prefill.handoffs.release("p")


def test_a_decode_that_leaves_while_it_pulls_keeps_its_blocks_until_the_transfer_is_over() -> None:
    prefill, decode = Bench(), Bench()
    sequence = decode.add("d", PROMPT, 6, kv_params=prefill.prefill("p", PROMPT))
    decode.step()
    decode.core.abort(sequence)
    assert sequence.status is Status.FINISHED and decode.pool.free_blocks == 59
    decode.core.pulled(sequence, [])
    assert decode.pool.free_blocks == 64


def test_a_decode_that_needs_the_whole_prompt_computed_gives_its_handoff_back() -> None:
    prefill, decode = Bench(), Bench()
    params = prefill.prefill("p", PROMPT)
    decode.add("d", PROMPT, 6, kv_params=params, prompt_logprobs=1)
    assert decode.step().prefill_tokens == 18
    assert decode.core.effects == [Release("d", params)]
    decode.run()
    assert decode.text["d"] == expected_text(PROMPT, 6, mean_answer_tokens=0)


def test_a_pull_does_not_take_a_running_slot() -> None:
    prefill, decode = Bench(), Bench(max_num_seqs=1)
    decode.add("d", PROMPT, 6, kv_params=prefill.prefill("p", PROMPT))
    decode.add("local", [1, 2, 3], 1)
    decode.run()
    assert decode.ends == {"local": "length"}


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_answers_are_right_and_blocks_come_back(dice: random.Random) -> None:
    """Shared prefixes, a pool too small for all, preemptions, aborts, handoffs that are used, given back or left to expire."""
    blocks = dice.randint(18, 40)
    config = {"num_blocks": blocks, "max_num_batched_tokens": dice.choice((5, 16, 8192)), "max_num_seqs": dice.randint(1, 6)}
    prefill = Bench(**config, lease_s=50.0)
    decode = Bench(**config, decode_burst_tokens=dice.choice((1, 7)))
    prompts: dict[str, tuple[list[int], int]] = {}
    live: list[tuple[Bench, Sequence]] = []
    handoffs: list[tuple[list[int], dict[str, Any]]] = []

    def turn() -> None:
        for bench in (prefill, decode):
            bench.now_s += 1.0
            bench.step()
            bench.core.expire(bench.now_s)
        for effect in decode.core.effects:
            if isinstance(effect, Release):
                prefill.handoffs.release(effect.params["remote_request_id"])
                continue
            params = effect.sequence.kv_params or {}
            read = prefill.handoffs.read(params["remote_request_id"], effect.remote_blocks)
            # A stale read is wrong on purpose; here it fails instead, as with a worker that is gone.
            decode.core.pulled(effect.sequence, None if read.wrong else read.kv)
        decode.core.effects.clear()
        for bench, sequence in live:
            if bench is prefill and sequence.kv_result is not None:
                handoffs.append((sequence.prompt, sequence.kv_result))
        live[:] = [(bench, sequence) for bench, sequence in live if sequence.status is not Status.FINISHED]

    for number in range(dice.randint(5, 40)):
        name = str(number)
        start, length = dice.choice((100, 500)), dice.randint(1, 40)
        prompt = [*range(start, start + length), dice.randint(0, 3)]
        max_tokens = dice.randint(1, 20)
        action = dice.random()
        if action < 0.3:
            live.append((prefill, prefill.add(name, prompt, kv_params={"do_remote_decode": True})))
        elif action < 0.7 and handoffs:
            prompt, params = handoffs.pop(dice.randrange(len(handoffs)))
            live.append((decode, decode.add(name, prompt, max_tokens, kv_params=dict(params))))
            prompts[name] = (prompt, max_tokens)
        elif action < 0.9:
            live.append((decode, decode.add(name, prompt, max_tokens)))
            prompts[name] = (prompt, max_tokens)
        elif live:
            bench, sequence = live.pop(dice.randrange(len(live)))
            bench.core.abort(sequence)
        for _ in range(dice.randint(0, 4)):
            turn()
    for _ in range(1500):
        if not live and not prefill.handoffs.pinned:
            break
        turn()
    assert not live, "a deadlock"
    assert prefill.pool.free_blocks == decode.pool.free_blocks == blocks - 1
    for name, (prompt, max_tokens) in prompts.items():
        if decode.ends[name] == "length":
            assert decode.text[name] == expected_text(prompt, max_tokens, mean_answer_tokens=0)
        else:
            assert decode.ends[name] in ("abort", "error")


def test_a_burst_gives_the_same_answer() -> None:
    bench = Bench(decode_burst_tokens=16)
    bench.add("a", PROMPT, 37)
    bench.run()
    assert bench.text["a"] == expected_text(PROMPT, 37, mean_answer_tokens=0)
    assert bench.pool.free_blocks == 64


def test_the_default_profile_is_what_its_description_says() -> None:
    profile = Profile()
    prefill_s = profile.step_s(prefill_tokens=8192, prefill_context_tokens=8192 * 512, decodes=0, decode_context_tokens=0)
    assert 8192 / prefill_s == pytest.approx(12_600, rel=0.05)
    decode_s = profile.step_s(prefill_tokens=0, prefill_context_tokens=0, decodes=4, decode_context_tokens=4000)
    assert decode_s == pytest.approx(0.0145, rel=0.05)
    assert profile.transfer_s(1000) - profile.transfer_overhead_s == pytest.approx(0.0041, rel=0.01)


def test_a_decode_step_grows_with_batch_and_context_and_stalls_behind_a_prefill() -> None:
    profile = Profile()

    def step(decodes: int, context: int, prefill: int = 0) -> float:
        return profile.step_s(
            prefill_tokens=prefill,
            prefill_context_tokens=prefill * prefill // 2,
            decodes=decodes,
            decode_context_tokens=context,
        )

    assert step(1, 1000) < step(64, 64_000) < step(256, 512_000)
    assert step(8, 8000, 8192) > 10 * step(8, 8000)
    assert step(0, 0) == 0.0
