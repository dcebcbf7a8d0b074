"""Real vLLM, both ways: the prefill of a conversation's next turn reads what the decode worker keeps of the last one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.engine.front import Front, front
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, KvUse, kv_use, kv_use_since
from tests.engine.metrics import kv_usage, until
from tests.engine.openai_api import MODEL, Answer, ask
from tests.engine.system import UP_TIMEOUT_S
from workers import cores, vllm
from workers.process import Child
from workers.ready import free_ports, wait_ready

TTL_S = 20
PROMPT, SAID, MORE = 300, 120, 40
READ = PROMPT + SAID - 1
"""Nobody computes the last token of an answer."""


@dataclass(frozen=True)
class Both:
    """The running parts."""

    front: Front
    prefill_url: str
    decode_url: str

    def outcomes(self) -> dict[str, float]:
        found = {
            dict(labels)["outcome"]: value
            for (name, labels), value in self.front.metrics().items()
            if name == "baton_next_turn_total" and value
        }
        return dict(sorted(found.items()))

    def moved(self, **wanted: float) -> None:
        """Wait until that has become of kept blocks, all since the start."""
        until(lambda: all(self.outcomes().get(name, 0) == value for name, value in wanted.items()), 20.0)


@pytest.fixture(scope="module")
def both(tiny_model: Path) -> Iterator[Both]:
    """Ended before the shared system starts: two cores do not carry both."""
    ports = free_ports(4)
    roles = ("prefill", "decode")
    specs = {
        role: vllm.WorkerSpec(
            role=role,
            model=str(tiny_model),
            local_model=True,
            served_model_name=MODEL,
            port=own[0],
            side_channel_port=own[1],
            block_size_tokens=BLOCK_SIZE_TOKENS,
            max_model_len_tokens=1024,
            bidirectional_kv_xfer=True,
            decoder_kv_blocks_ttl_s=TTL_S,
            extra_args=("--num-gpu-blocks-override", "128"),
        )
        for role, own in zip(roles, (ports[:2], ports[2:]), strict=True)
    }
    shares = dict(zip(roles, cores.spread(2, cores.usable()), strict=True))
    with ExitStack() as parts:
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        children = {}
        for role in roles:
            command = vllm.command(specs[role])
            children[role] = parts.enter_context(Child(role, command.argv, log=folder / f"{role}.log", env=command.env))
        for role in roles:
            wait_ready(children[role], f"http://127.0.0.1:{specs[role].port}/health", UP_TIMEOUT_S)
            cores.pin(children[role].pids(), shares[role])
        prefill, decode = (f"127.0.0.1:{specs[role].port}" for role in roles)
        settings: dict[str, dict[str, Any]] = {
            "tokens": {"ask_workers": "tokenize", "timeout_ms": 5000.0},
            # Reading is worth it, as it is with a model of a useful size.
            "routing": {"prefill_tokens_per_s": 50.0, "handshake_s": 0.0},
            "handoff": {
                "lease_s": 60.0,
                "next_turn": {"enabled": True, "ttl_s": float(TTL_S), "margin_s": 6.0, "timeout_s": 60.0},
            },
            "scrape": {"interval_s": 0.2},
        }
        running = parts.enter_context(front([prefill], [decode], settings))
        until(lambda: running.metrics().total("baton_scrapes_total", outcome="ok") >= 4)
        yield Both(running, f"http://{prefill}", f"http://{decode}")


def ids(seed: int, tokens: int) -> list[int]:
    """Token ids of the tiny model; no other prompt begins with these."""
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(tokens)]


def turn(both: Both, prompt: list[int], tokens: int = SAID, **more: Any) -> Answer:
    return ask(both.front.url, "completions", prompt, max_tokens=tokens, ignore_eos=True, return_token_ids=True, **more)


def said(answer: Answer) -> list[int]:
    found: list[int] = answer.raw[0]["choices"][0]["token_ids"]
    return found


def computed_anew(both: Both, prompt: list[int], tokens: int) -> str:
    """The text where one worker computes all of it: nothing that is cached has this salt."""
    body = {"cache_salt": f"{len(prompt)} {prompt[-1]}", "ignore_eos": True}
    return ask(both.decode_url, "completions", prompt, max_tokens=tokens, **body).text


def use_of(url: str, before: KvUse, prompt: list[int]) -> KvUse:
    return kv_use_since(url, before, prompt_tokens=len(prompt))


def test_the_second_and_the_third_turn_are_read_and_their_text_is_that_without(both: Both) -> None:
    prompt = ids(1, PROMPT)
    answer = turn(both, prompt)
    assert answer.raw[0]["kv_transfer_params"] is None, "no client sees them"
    for number in range(2):
        held = len(prompt) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
        known = len(prompt) + SAID - 1
        prompt = [*prompt, *said(answer), *ids(10 + number, MORE)]
        before = kv_use(both.prefill_url)
        answer = turn(both, prompt)
        used = use_of(both.prefill_url, before, prompt)
        assert (used.cached_tokens, used.external_tokens) == (held, known - held), "read from the decode worker"
        assert used.computed_tokens == len(prompt) - known and used.transfers == 1
        assert answer.text == computed_anew(both, prompt, SAID)
    assert both.outcomes() == {"kept": 3.0, "read": 2.0}


def test_a_turn_that_is_no_exact_continuation_is_computed(both: Both) -> None:
    prompt = ids(2, PROMPT)
    answer = said(turn(both, prompt))
    other = [*answer]
    other[5] += 1
    changed = [*prompt, *other, *ids(20, MORE)]
    before = kv_use(both.prefill_url)
    got = turn(both, changed, 20)
    assert use_of(both.prefill_url, before, changed).external_tokens == 0
    assert got.text == computed_anew(both, changed, 20)
    both.moved(diverged=1)


def test_a_prefill_worker_that_has_lost_its_own_part_reads_all_of_it(both: Both) -> None:
    prompt = ids(3, PROMPT)
    answer = said(turn(both, prompt))
    for number in range(6):  # others use the worker, until nothing of what it held can be left
        ask(both.prefill_url, "completions", ids(100 + number, 900), max_tokens=1)
    following = [*prompt, *answer, *ids(30, MORE)]
    before = kv_use(both.prefill_url)
    got = turn(both, following, 20)
    used = use_of(both.prefill_url, before, following)
    assert (used.cached_tokens, used.external_tokens, used.computed_tokens) == (0, READ, len(following) - READ)
    assert got.text == computed_anew(both, following, 20)


def test_what_nobody_can_use_is_given_back_at_once_and_a_stream_keeps_it_to_the_end(both: Both) -> None:
    until(lambda: kv_usage(both.decode_url) == 0, TTL_S + 15.0, every_s=0.2)
    body = {"model": MODEL, "input": "Why? " * 60, "max_output_tokens": 30}
    request = urllib.request.Request(
        f"{both.front.url}/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["kv_transfer_params"] is None
    both.moved(no_ids=1)
    until(lambda: kv_usage(both.decode_url) == 0, 10.0)
    ask(both.front.url, "completions", ids(4, PROMPT), max_tokens=20, ignore_eos=True, stream=True)
    both.moved(streamed=1)
    assert kv_usage(both.decode_url) > 0, "vLLM 0.32 keeps those of a stream, too, and names them to nobody"
    took_s = until(lambda: kv_usage(both.decode_url) == 0, TTL_S + 15.0, every_s=0.2)
    assert took_s > TTL_S / 2


_WHAT_VLLM_DOES = """
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler as Scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker as Worker

prefill = Scheduler.__new__(Scheduler)
prefill.is_bidirectional_kv_xfer_enabled, prefill.kv_recompute_threshold, prefill.use_host_buffer = False, 64, False
prefill._reqs_in_batch, prefill._reqs_need_recv = set(), {}
params = {"do_remote_decode": True, "remote_block_ids": [[1, 2, 3, 4]], "remote_engine_id": "e", "remote_request_id": "r"}
params |= {"remote_host": "h", "remote_port": 1, "remote_num_tokens": 100}
request = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=200, request_id="p", prompt_token_ids=[0] * 200)
counted_on, waits = prefill.get_num_new_matched_tokens(request, 0)
prefill.update_state_after_alloc(request, None, counted_on)
print(counted_on, waits, prefill._reqs_need_recv)
reader = Worker.__new__(Worker)
reader._has_mamba = False
print(reader._apply_prefix_caching([[7, 8, 9]], [[1, 2, 3, 4]], 1, 1)[1])
"""


def test_what_is_worked_around_is_what_vllm_does() -> None:
    """A prefill worker without the setting counts on tokens that it does not fetch; of four blocks the *last* three are read.

    If this fails, vLLM has changed, and docs/routing.md and extproc/handoff/nixl_turn.py with it.
    """
    done = subprocess.run([sys.executable, "-c", _WHAT_VLLM_DOES], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-2:] == ["100 True {}", "[[2, 3, 4]]"], done.stdout + done.stderr
