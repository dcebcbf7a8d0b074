"""What real vLLM workers say of their caches decides. A prompt that others drove out is known to be gone, and a worker that was
started again holds nothing; what a decode worker holds after an answer counts for the next turn; missed events are made up."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from extproc.config import Workers
from extproc.observe.kv_events.settings import KvEvents
from extproc.policy_config import PolicyRule
from extproc.routing.endpoint_spec import EndpointSpec
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from extproc.tokens.settings import TokenSettings
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, kv_use, kv_use_since
from tests.engine.metrics import scrape, until
from tests.engine.openai_api import MODEL, PATHS, Answer, ask, body_of
from tests.engine.system import UP_TIMEOUT_S
from workers import cores, vllm
from workers.process import Child
from workers.ready import free_ports, wait_ready

CACHE_BLOCKS = 64
CACHE_TOKENS = CACHE_BLOCKS * BLOCK_SIZE_TOKENS
MAX_MODEL_LEN = 1024
KNOWN_WITHIN_S = 1.0
WHOLE_BELOW_TOKENS = 160
"""A prompt of which the decode worker lacks less than this goes there whole."""

_FIELDS = re.compile(r";([a-z-]+)=\"?([^;\"]*)\"?")


class Cut:
    """A TCP relay in front of a publisher; :meth:`off` breaks the connection and lets none through until :meth:`on`."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._passing = True
        threading.Thread(target=self._accept, daemon=True).start()

    def off(self) -> None:
        self._passing = False
        while self._open:
            one = self._open.pop()
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def on(self) -> None:
        self._passing = True

    def close(self) -> None:
        self.off()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._passing:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target, 5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        source.close()


@dataclass
class Told:
    """The running parts."""

    front_url: str
    prefill_url: str
    decode_url: str
    admin_url: str
    cut: Cut
    folder: Path
    specs: dict[str, vllm.WorkerSpec]
    shares: dict[str, tuple[int, ...]]
    workers: dict[str, Child] = field(default_factory=dict)

    def start(self, role: str) -> None:
        command = vllm.command(self.specs[role])
        self.workers[role] = Child(role, command.argv, log=self.folder / f"{role}.log", env=command.env)

    def ready(self, role: str) -> None:
        wait_ready(self.workers[role], f"http://127.0.0.1:{self.specs[role].port}/health", UP_TIMEOUT_S)
        cores.pin(self.workers[role].pids(), self.shares[role])

    def kill(self, role: str) -> None:
        for pid in self.workers[role].pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.workers[role].stop()

    def explained(self, prompt: list[int]) -> dict[str, Any]:
        """What would become of a prompt now."""
        question = {"path": PATHS["completions"], "body": body_of("completions", prompt, max_tokens=4)}
        request = urllib.request.Request(f"{self.admin_url}/debug/explain", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            report: dict[str, Any] = json.load(reply)
        assert report["prompt"]["token_ids"] == "whole"
        return report["decision"]

    def held(self, prompt: list[int]) -> dict[str, int]:
        """Tokens of a prompt that each worker holds, as the filter knows it from their events."""
        candidates = self.explained(prompt)["candidates"]
        (pair,) = [each for each in candidates if each["prefill"] is not None]
        return {"prefill": pair["cached_prefill_tokens"], "decode": pair["cached_decode_tokens"]}

    def in_step(self, url: str) -> bool:
        """Whether the filter knows all that a worker holds."""
        return scrape(self.admin_url).total("baton_kv_in_step", endpoint=url.removeprefix("http://")) == 1

    def goes_whole(self, prompt: list[int]) -> bool:
        """Whether the decode worker would get it all."""
        found = self.explained(prompt)
        assert found["outcome"] == "placed"
        return found["decision"]["prefill"] is None


@pytest.fixture(scope="module")
def told(tiny_model: Path) -> Iterator[Told]:
    """Ended before the shared system starts: two cores do not carry both."""
    front, admin, envoy_admin, *ports = free_ports(11)
    roles = ("prefill", "decode")
    specs = {
        role: vllm.WorkerSpec(
            role=role,
            model=str(tiny_model),
            local_model=True,
            served_model_name=MODEL,
            port=own[0],
            side_channel_port=own[1],
            kv_events_port=own[2],
            kv_events_replay_port=own[3],
            block_size_tokens=BLOCK_SIZE_TOKENS,
            max_model_len_tokens=MAX_MODEL_LEN,
            extra_args=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        )
        for role, own in zip(roles, (ports[:4], ports[4:]), strict=True)
    }
    prefill, decode = (f"127.0.0.1:{specs[role].port}" for role in roles)
    with ExitStack() as parts:
        # Not pytest's own temporary folder: a unix socket's path has at most 107 bytes.
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        publisher = specs["prefill"].kv_events_port
        assert publisher is not None
        cut = Cut(publisher)
        parts.callback(cut.close)
        shares = dict(zip(roles, map(tuple, cores.spread(2, cores.usable())), strict=True))
        running = Told(
            *(f"http://127.0.0.1:{front}", f"http://{prefill}", f"http://{decode}", f"http://127.0.0.1:{admin}"),
            *(cut, folder, specs, shares),
        )
        parts.callback(lambda: [child.stop() for child in running.workers.values()])
        for role in roles:
            running.start(role)
        for role in roles:
            running.ready(role)
        label = f"{cut.port}/{specs['prefill'].kv_events_replay_port}"
        config = stack_config(
            folder,
            prefill=[prefill],
            decode=[decode],
            listen=f"127.0.0.1:{front}",
            admin=f"127.0.0.1:{admin}",
            envoy_admin=f"127.0.0.1:{envoy_admin}",
            lease_s=60.0,
        )
        config = msgspec.structs.replace(
            config,
            workers=Workers(prefill=[EndpointSpec(address=prefill, labels={"kv-events": label})], decode=[decode]),
            policies=[PolicyRule(name="known", threshold_uncached_tokens=WHOLE_BELOW_TOKENS, explain=True)],
            kv_events=KvEvents(enabled=True, check_interval_s=0.5),
            tokens=TokenSettings(),
        )
        config_file, envoy_file = write_configs(config, folder)
        filter_ = parts.enter_context(Child("filter", filter_command(config_file), log=folder / "filter.log"))
        await_endpoints(config, filter_)
        wait_ready(filter_, f"http://{config.admin}/healthz", 60)
        envoy = parts.enter_context(Child("envoy", envoy_command(find_envoy(), envoy_file), log=folder / "envoy.log"))
        wait_ready(envoy, f"http://{config.envoy.admin}/ready", 60)
        yield running


def decision(answer: Answer) -> dict[str, str]:
    """The fields of the header that explains it; `how` is its first word."""
    header = answer.headers["x-baton-decision"]
    return {"how": header.partition(";")[0], **dict(_FIELDS.findall(header))}


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Token ids of the tiny model; no other prompt begins with these."""
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(tokens)]


def full(tokens: int) -> int:
    """Of so many tokens those in full blocks."""
    return tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS


def drive_out(url: str, seed: int) -> None:
    """Others use the worker, past the filter, until nothing of what it held can be left."""
    for number in range(CACHE_TOKENS // 900 + 1):
        ask(url, "completions", prompt_of(seed + number, 900), max_tokens=1)


def test_a_prompt_that_others_drove_out_is_known_to_be_gone_and_goes_elsewhere(told: Told) -> None:
    prompt = prompt_of(1, 400)
    first = ask(told.front_url, "completions", prompt, max_tokens=4)
    assert decision(first)["how"] == "disaggregate"
    assert decision(first)["cached"] == "0"
    until(lambda: told.held(prompt) == {"prefill": full(400), "decode": full(400)}, KNOWN_WITHIN_S)
    assert told.goes_whole(prompt), "the decode worker lacks but a few tokens of it"

    drive_out(told.decode_url, 100)
    took_s = until(lambda: told.held(prompt)["decode"] == 0, KNOWN_WITHIN_S)
    found = told.explained(prompt)["decision"]
    assert found["prefill"] is not None, "the decode worker has lost it: the prefill worker has not"
    assert (found["cached_tokens"], found["cached_by"]) == (full(400), "events")

    drive_out(told.prefill_url, 200)
    took_s = max(took_s, until(lambda: told.held(prompt)["prefill"] == 0, KNOWN_WITHIN_S))
    before = kv_use(told.prefill_url)
    again = ask(told.front_url, "completions", prompt, max_tokens=4)
    assert decision(again)["how"] == "disaggregate"
    assert (decision(again)["cached"], decision(again)["cached-by"]) == ("0", "events")
    assert kv_use_since(told.prefill_url, before, prompt_tokens=400).computed_tokens == 400, "so it was"
    assert again.text == first.text
    print(f"known to be gone {took_s * 1e3:.0f} ms after the last answer to another prompt")


def test_the_next_turn_goes_back_to_the_decode_worker_that_holds_the_answer_while_it_does(told: Told) -> None:
    question = prompt_of(2, 300)
    answer = ask(told.front_url, "completions", question, max_tokens=60, ignore_eos=True, return_token_ids=True)
    assert decision(answer)["how"] == "disaggregate"
    said = answer.raw[0]["choices"][0]["token_ids"]
    assert len(said) == 60
    turn = [*question, *said, *prompt_of(3, 50)]
    # The last token of an answer is computed by nobody.
    held = full(300 + 59)
    until(lambda: told.held(turn) == {"prefill": full(300), "decode": held}, KNOWN_WITHIN_S)
    before = kv_use(told.decode_url)
    second = ask(told.front_url, "completions", turn, max_tokens=4)
    assert decision(second)["how"] == "aggregate", "what is missing there is too little for a handoff"
    assert int(decision(second)["cached"]) == held
    used = kv_use_since(told.decode_url, before, prompt_tokens=len(turn))
    assert (used.cached_tokens, used.computed_tokens) == (held, len(turn) - held)

    drive_out(told.decode_url, 300)
    until(lambda: told.held(turn)["decode"] == 0, KNOWN_WITHIN_S)
    third = ask(told.front_url, "completions", turn, max_tokens=4)
    assert decision(third)["how"] == "disaggregate"
    assert third.text == second.text


def test_events_that_were_missed_are_made_up_from_the_replay(told: Told) -> None:
    address = told.prefill_url.removeprefix("http://")

    def replayed() -> float:
        return scrape(told.admin_url).total("baton_kv_event_batches_total", endpoint=address, outcome="replayed")

    kept, before = prompt_of(4, 200), replayed()
    ask(told.prefill_url, "completions", kept, max_tokens=1)
    until(lambda: told.held(kept)["prefill"] == full(200), KNOWN_WITHIN_S)
    told.cut.off()
    missed = prompt_of(5, 200)
    ask(told.prefill_url, "completions", missed, max_tokens=1)
    assert told.held(missed)["prefill"] == 0, "nobody has told the filter"
    told.cut.on()
    # The next batch that comes shows that one is missing; if none comes, the filter asks whether that is right.
    ask(told.prefill_url, "completions", prompt_of(6, 200), max_tokens=1)
    until(lambda: told.held(missed)["prefill"] == full(200), 20.0)
    assert told.held(kept)["prefill"] == full(200), "nothing was forgotten for it"
    until(lambda: replayed() > before)


def test_a_worker_that_was_started_again_holds_nothing(told: Told) -> None:
    prompt = prompt_of(7, 400)
    first = ask(told.front_url, "completions", prompt, max_tokens=4)
    until(lambda: told.held(prompt)["prefill"] == full(400), KNOWN_WITHIN_S)
    told.kill("prefill")
    told.start("prefill")
    told.ready("prefill")
    drive_out(told.decode_url, 400)
    took_s = until(lambda: told.in_step(told.prefill_url), 30.0, every_s=0.1)
    until(lambda: any(each["prefill"] for each in told.explained(prompt)["candidates"]), 30.0, every_s=0.1)
    assert told.held(prompt) == {"prefill": 0, "decode": 0}
    print(f"in step {took_s * 1e3:.0f} ms after it was ready again")
    before = kv_use(told.prefill_url)
    again = ask(told.front_url, "completions", prompt, max_tokens=4)
    assert decision(again)["how"] == "disaggregate"
    assert decision(again)["cached"] == "0"
    # The filter's own first handoffs with the new engine are among these.
    assert kv_use_since(told.prefill_url, before, prompt_tokens=400).computed_tokens >= 400
    assert again.text == first.text
    until(lambda: told.held(prompt)["prefill"] == full(400), 20.0)
    assert told.explained(prompt)["outcome"] == "placed"
