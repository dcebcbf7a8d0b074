"""LMCache on real vLLM: a prefill worker with NIXL and LMCache, started by ``baton worker``, the server it keeps KV on,
started by ``baton cache-server``, and the coordinator that knows what the server holds, started by ``baton
cache-coordinator``. What LMCache itself makes of the rendered configuration is asked of its own parsers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from extproc.tokens.settings import TokenSettings
from tests.engine.front import Front
from tests.engine.front import front as another_front
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, assert_kv_moved, block_bytes, kv_use, kv_use_since
from tests.engine.metrics import scrape, until
from tests.engine.openai_api import MODEL, PATHS, Answer, ask, body_of, post
from tests.engine.system import UP_TIMEOUT_S, forget_prefixes
from workers import cores, lmcache
from workers.process import Child, stop_all
from workers.ready import free_ports, wait_ready

CHUNK_TOKENS = lmcache.CHUNK_TOKENS
SERVER = "node-1"
"""The cache server's name; workers that use it have a label with it."""
KNOWN_WITHIN_S = 40.0
"""What a server stores or drops, it reports within seconds."""
LEASE_S = 300.0
"""Of the profile."""
SERVED_S = 60.0
"""A request that meets a dead cache server is answered by then; with LMCache's own timeouts it would wait for ten minutes."""


_PARSED = """
import argparse, json, sys
from lmcache.cli.commands.server import ServerCommand
from lmcache.integration.vllm.vllm_multi_process_adapter import _resolve_extra_config
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.multiprocess.config import parse_args_to_http_frontend_config, parse_args_to_mp_server_config
from vllm.config import KVTransferConfig

def fields(thing):
    return {name: value for name, value in vars(thing).items() if value is None or isinstance(value, (str, int, float, bool))}

def tier(adapter):
    eviction = adapter.eviction_config and adapter.eviction_config.eviction_policy
    return {**fields(adapter), "type": type(adapter).__name__, "eviction": eviction, "shared": adapter.shared}

parser = argparse.ArgumentParser()
ServerCommand().add_arguments(parser)
given = json.load(sys.stdin)
found = []
for argv in given["servers"]:
    args = parser.parse_args(argv)
    http, storage = parse_args_to_http_frontend_config(args), parse_args_to_config(args)
    found.append({
        "server": fields(parse_args_to_mp_server_config(args)),
        "http": [http.http_host, http.http_port],
        "l1_bytes": storage.l1_manager_config.memory_config.size_in_bytes,
        "l1_policy": storage.eviction_config.eviction_policy,
        "tiers": [tier(each) for each in storage.l2_adapter_config.adapters],
    })
connector = _resolve_extra_config(KVTransferConfig(**given["connector"]).kv_connector_extra_config)
print("\\n" + json.dumps({"servers": found, "connector": connector}))
"""

SPECS = {
    "memory": lmcache.CacheSpec(dram_gb=2.5),
    "disk": lmcache.CacheSpec(dram_gb=1, disk=lmcache.Disk(path="/mnt/nvme/kv", gb=500)),
    "redis": lmcache.CacheSpec(dram_gb=1, remote="redis://baton:secret@kv.internal:6380"),
    "s3": lmcache.CacheSpec(dram_gb=1, remote="s3://kv.s3.eu-west-1.amazonaws.com?region=eu-west-1"),
    "all": lmcache.CacheSpec(
        dram_gb=64, disk=lmcache.Disk(path="/kv", gb=1), remote="valkey://kv", device="gpu", chunk_tokens=512
    ),
}


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    """What LMCache's and vLLM's own classes make of each command and of the connector. Slow, and slower beside workers."""
    commands = [lmcache.server_command(spec, host="10.0.0.5", port=5555, http_port=8080) for spec in SPECS.values()]
    given = {
        "servers": [command.argv[4:] for command in commands],
        "connector": lmcache.connector("10.0.0.5:5555", device="gpu"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PARSED],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **lmcache.WORKER_ENV},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {"connector": found["connector"], **dict(zip(SPECS, found["servers"], strict=True))}


def test_lmcache_reads_every_rendered_command_as_it_was_meant(parsed: dict[str, Any]) -> None:
    for name, spec in SPECS.items():
        found = parsed[name]
        assert spec.dram_gb is not None
        assert found["l1_bytes"] == spec.dram_gb * 2**30
        assert found["l1_policy"] == "LRU"
        assert found["http"] == ["127.0.0.1", 8080]
        meant = {
            "host": "10.0.0.5",
            "port": 5555,
            "chunk_size": spec.chunk_tokens,
            "hash_algorithm": "blake3",
            "supported_transfer_mode": "lmcache_driven" if spec.device == "gpu" else "auto",
            "run_script_api_enabled": False,
        }
        assert {key: found["server"][key] for key in meant} == meant
        assert len(found["tiers"]) == (spec.disk is not None) + (spec.remote is not None)


def test_lmcache_reads_the_tiers_below_memory_as_they_were_meant(parsed: dict[str, Any]) -> None:
    (disk,) = parsed["disk"]["tiers"]
    assert (disk["type"], disk["base_path"], disk["max_capacity_gb"]) == ("FSNativeL2AdapterConfig", "/mnt/nvme/kv", 500)
    assert disk["eviction"] == "LRU", "without eviction the size would bound nothing"
    (redis,) = parsed["redis"]["tiers"]
    assert (redis["type"], redis["host"], redis["port"]) == ("RESPL2AdapterConfig", "kv.internal", 6380)
    assert redis["shared"]
    assert (redis["username"], redis["password"]) == ("", ""), "they go by the environment"
    (s3,) = parsed["s3"]["tiers"]
    assert (s3["s3_endpoint"], s3["s3_region"]) == ("kv.s3.eu-west-1.amazonaws.com", "eu-west-1")
    assert [tier["type"] for tier in parsed["all"]["tiers"]] == ["FSNativeL2AdapterConfig", "RESPL2AdapterConfig"]


def test_lmcache_and_vllm_read_the_connector_as_it_was_meant(parsed: dict[str, Any]) -> None:
    found = parsed["connector"]
    assert (found["mq_timeout"], found["heartbeat_interval"], found["hash_algorithm"]) == (30.0, 2.0, "blake3")


@dataclass
class CacheServer:
    """A cache server that can be killed and started again on what it left on its disk."""

    port: int
    http_port: int
    folder: Path
    coordinator: str
    child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "extproc", "cache-server", "--dram-gb", "0.5"]
        command += ["--disk", str(self.folder / "tier"), "--disk-gb", "0.5"]
        command += ["--port", str(self.port), "--http-port", str(self.http_port)]
        command += ["--coordinator", self.coordinator, "--name", SERVER]
        self.child = Child("cache", command, log=self.folder / "cache.log")
        wait_ready(self.child, f"{self.url}/healthcheck", 60)

    def kill(self) -> None:
        """As a machine does that is gone: nobody says goodbye."""
        assert self.child is not None
        for pid in self.child.pids():
            os.kill(pid, signal.SIGKILL)
        assert self.child.stop() == 128 + signal.SIGKILL

    def stop(self) -> int:
        assert self.child is not None
        return self.child.stop()

    def total(self, name: str) -> float:
        return scrape(self.url).total(f"lmcache_mp_{name}")


@dataclass
class Coordinator:
    """What knows what the cache server holds."""

    port: int
    folder: Path
    child: Child | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "extproc", "cache-coordinator", "--port", str(self.port)]
        self.child = Child("coordinator", command, log=self.folder / "coordinator.log")
        wait_ready(self.child, f"http://{self.address}/healthz", 60)

    def stop(self) -> int:
        assert self.child is not None
        return self.child.stop()

    def lookup(self, token_ids: list[int], model: str) -> dict[str, Any]:
        """LMCache's own answer about a prompt."""
        question = {"token_ids": token_ids, "model_name": model, "world_size": 1, "cache_salt": ""}
        found, _ = post(f"http://{self.address}/directory/lookup", json.dumps(question).encode())
        answer: dict[str, Any] = json.loads(found)
        return answer


@dataclass(frozen=True)
class Cached:
    """The running parts."""

    front_url: str
    prefill_url: str
    decode_url: str
    admin_url: str
    server: CacheServer
    coordinator: Coordinator
    prefill_events: str
    """Where the prefill worker publishes what it holds, as the label for it says it: port/replay port."""

    def shown(self, name: str) -> float:
        """What the filter's metrics say of the cache server."""
        return scrape(self.admin_url).total(f"baton_cache_server_{name}", server=self.server.address)


def baton_worker(role: str, model: Path, *options: str) -> list[str]:
    """The block size is one at which short prompts have several blocks."""
    command = [sys.executable, "-m", "extproc", "worker", "--role", role, "--profile", "cpu-demo", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", *options]
    return [*command, "--", "--block-size", str(BLOCK_SIZE_TOKENS)]


@pytest.fixture(scope="module")
def cached(tiny_model: Path) -> Iterator[Cached]:
    """Ended before the shared system starts: two cores do not carry both."""
    cache_port, cache_http_port, coordinator_port, events, replay, front, admin, envoy_admin, *ports = free_ports(12)
    with ExitStack() as parts:
        # Not pytest's own temporary folder: a unix socket's path has at most 107 bytes.
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        coordinator = Coordinator(coordinator_port, folder)
        coordinator.start()
        parts.callback(coordinator.stop)
        server = CacheServer(cache_port, cache_http_port, folder, coordinator.address)
        server.start()
        parts.callback(server.stop)
        workers = []
        shares = cores.spread(2, cores.usable())
        keeps = ("--cache-server", f"127.0.0.1:{cache_port}")
        tells = ("--kv-events-port", str(events), "--kv-events-replay-port", str(replay))
        for index, (role, options) in enumerate((("prefill", keeps + tells), ("decode", ("--kv-events-port", "0")))):
            own = ",".join(map(str, shares[index]))
            ports_of = ("--port", str(ports[2 * index]), "--side-channel-port", str(ports[2 * index + 1]))
            child = Child(
                role,
                baton_worker(role, tiny_model, *ports_of, "--cores", own, *options),
                log=folder / f"{role}.log",
                env={"VLLM_SERVER_DEV_MODE": "1"},  # serves /reset_prefix_cache
                grace_s=60,
            )
            workers.append(child)
            parts.callback(child.stop)
        parts.callback(stop_all, workers)
        addresses = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[2]}"]
        for child, address in zip(workers, addresses, strict=True):
            wait_ready(child, f"http://{address}/health", UP_TIMEOUT_S)
            until(lambda log=child.log: "runs on core" in log.read_text(), 30)
        config = stack_config(
            folder,
            prefill=addresses[:1],
            decode=addresses[1:],
            listen=f"127.0.0.1:{front}",
            admin=f"127.0.0.1:{admin}",
            envoy_admin=f"127.0.0.1:{envoy_admin}",
            lease_s=LEASE_S,
        )
        config = msgspec.structs.replace(config, cache_servers=[server.address])
        config_file, envoy_file = write_configs(config, folder)
        filter_ = parts.enter_context(Child("filter", filter_command(config_file), log=folder / "filter.log"))
        await_endpoints(config, filter_)
        wait_ready(filter_, f"http://{config.admin}/healthz", 60)
        envoy = parts.enter_context(Child("envoy", envoy_command(find_envoy(), envoy_file), log=folder / "envoy.log"))
        wait_ready(envoy, f"http://{config.envoy.admin}/ready", 60)
        prefill_url, decode_url = (f"http://{address}" for address in addresses)
        urls = (f"http://127.0.0.1:{front}", prefill_url, decode_url, f"http://127.0.0.1:{admin}")
        yield Cached(*urls, server, coordinator, f"{events}/{replay}")


@dataclass(frozen=True)
class Directed:
    """A filter that asks the coordinator what the cache server holds."""

    cached: Cached
    front: Front

    def count(self, name: str, **labels: str) -> float:
        return self.front.metrics().total(name, **labels)

    def explained(self, prompt: list[int]) -> tuple[int, str]:
        """What would be found of a prompt if it came now, and who says so."""
        question = {"path": PATHS["completions"], "body": body_of("completions", prompt, max_tokens=4)}
        reply, _ = post(f"http://{self.front.config.admin}/debug/explain", json.dumps(question).encode())
        decision = json.loads(reply)["decision"]["decision"]
        return decision["cached_tokens"], decision["cached_by"]

    def expects(self, prompt: list[int], tokens: int, by: str = "cache_server") -> float:
        """Wait until so many tokens of a prompt would be found, on the word of ``by``; returns how many seconds that took."""
        found: list[tuple[int, str]] = []

        def good() -> bool:
            found.append(self.explained(prompt))
            return found[-1][0] == tokens and (not tokens or found[-1][1] == by)

        try:
            return until(good, KNOWN_WITHIN_S, every_s=0.2)
        except AssertionError:
            raise AssertionError(f"expected {tokens} by {by}, not {found[-1]}") from None

    def evict(self) -> None:
        """Both workers lose all that they hold, and say so. vLLM sends its events with a step, so it needs something to do."""
        forget_prefixes(self.cached.prefill_url, self.cached.decode_url)
        ask(self.cached.prefill_url, "completions", ids_of(0, 20), max_tokens=1, timeout_s=SERVED_S)

    def ask_and_let_store(self, prompt: list[int]) -> Answer:
        """An answer, once the coordinator knows that every whole chunk of the prompt is on the server's disk."""
        answer = ask(self.front.url, "completions", prompt, max_tokens=4)
        until(lambda: self.tiers(prompt) == [{"l1", "l2"}] * (len(prompt) // CHUNK_TOKENS), 20)
        return answer

    def tiers(self, prompt: list[int]) -> list[set[str]]:
        """Of each whole chunk, where the coordinator says that the server has it."""
        answer = self.cached.coordinator.lookup(prompt, self.model)
        places = [key["placements"] for key in answer["results"]]
        assert {each["instance_id"] for place in places for each in place} <= {SERVER}
        return [{each["tier"] for each in place} for place in places]

    @property
    def model(self) -> str:
        """What the prefill worker was started with, under which LMCache stores."""
        with urllib.request.urlopen(f"{self.cached.prefill_url}/v1/models", timeout=60) as reply:
            return str(json.load(reply)["data"][0]["root"])


def ids_of(seed: int, tokens: int) -> list[int]:
    """Token ids of the tiny model; no other prompt begins with these."""
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(tokens)]


def long_prompt(factor: int) -> str:
    """Two chunks and some; a prompt of its own for each factor."""
    return f"{factor}: " + " ".join(f"Stone {number} weighs {number * factor % 101} pounds." for number in range(28))


def chunks_tokens(prompt_tokens: int) -> int:
    """How many tokens of a prompt LMCache keeps: whole chunks."""
    return prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def plain(cached: Cached, prompt: str) -> Answer:
    """The answer of one worker that has no cache server and has computed every token of the prompt itself."""
    forget_prefixes(cached.decode_url)
    before = kv_use(cached.decode_url)
    answer = ask(cached.decode_url, "completions", prompt)
    use = kv_use_since(cached.decode_url, before, prompt_tokens=answer.prompt_tokens)
    assert use.computed_tokens == answer.prompt_tokens
    forget_prefixes(cached.decode_url)
    return answer


def ask_and_let_store(cached: Cached, prompt: str, model: Path) -> Answer:
    """A first answer, once LMCache has put every whole chunk of the prompt on its disk."""
    before = cached.server.total("l2_usage_bytes")
    answer = ask(cached.front_url, "completions", prompt)
    stored = chunks_tokens(answer.prompt_tokens) // BLOCK_SIZE_TOKENS * block_bytes(model)
    until(lambda: cached.server.total("l2_usage_bytes") == before + stored)
    return answer


def test_kv_moves_by_nixl_from_a_worker_that_has_lmcache_beside_it(cached: Cached, tiny_model: Path) -> None:
    prompt = long_prompt(31)
    expected = plain(cached, prompt)
    before = kv_use(cached.prefill_url), kv_use(cached.decode_url)

    answer = ask(cached.front_url, "completions", prompt)

    assert answer == expected
    assert f'prefill="{cached.prefill_url.removeprefix("http://")}"' in answer.headers["x-kv-transfer"]
    decode = kv_use_since(cached.decode_url, before[1], prompt_tokens=answer.prompt_tokens)
    assert_kv_moved(decode, prompt_tokens=answer.prompt_tokens, block_size_bytes=block_bytes(tiny_model))
    prefill = kv_use_since(cached.prefill_url, before[0], prompt_tokens=answer.prompt_tokens)
    assert prefill.computed_tokens == answer.prompt_tokens


def test_a_prefix_that_the_prefill_worker_has_evicted_comes_back_from_lmcache(cached: Cached, tiny_model: Path) -> None:
    prompt = long_prompt(37)
    expected = plain(cached, prompt)
    assert ask_and_let_store(cached, prompt, tiny_model) == expected
    forget_prefixes(cached.prefill_url, cached.decode_url)
    before = kv_use(cached.prefill_url), kv_use(cached.decode_url)
    hits = cached.server.total("lookup_hit_tokens_total")
    kept = chunks_tokens(expected.prompt_tokens)
    assert kept == 2 * CHUNK_TOKENS

    answer = ask(cached.front_url, "completions", prompt)

    assert answer == expected
    assert cached.server.total("lookup_hit_tokens_total") == hits + kept
    prefill = kv_use_since(cached.prefill_url, before[0], prompt_tokens=answer.prompt_tokens)
    assert prefill.external_tokens == kept, "from the cache server"
    assert prefill.computed_tokens == answer.prompt_tokens - kept, "only what is no whole chunk"
    decode = kv_use_since(cached.decode_url, before[1], prompt_tokens=answer.prompt_tokens)
    assert_kv_moved(decode, prompt_tokens=answer.prompt_tokens, block_size_bytes=block_bytes(tiny_model))


def test_the_filter_shows_what_the_cache_server_had(cached: Cached, tiny_model: Path) -> None:
    prompt = long_prompt(41)
    ask_and_let_store(cached, prompt, tiny_model)
    until(lambda: cached.shown("up") == 1, 20)
    # The filter has seen all that happened so far; the last of it was a lookup.
    until(lambda: shown_status(cached)["lookup_tokens"] == cached.server.total("lookup_requested_tokens_total"), 20)
    hits, lookups = cached.shown("hit_tokens_total"), cached.shown("lookup_tokens_total")
    forget_prefixes(cached.prefill_url, cached.decode_url)

    answer = ask(cached.front_url, "completions", prompt)

    kept = chunks_tokens(answer.prompt_tokens)
    until(lambda: cached.shown("hit_tokens_total") == hits + kept, 20)
    assert cached.shown("lookup_tokens_total") == lookups + kept
    assert 0 < cached.shown("usage_ratio") < 0.5
    assert cached.shown("below_bytes") == cached.server.total("l2_usage_bytes")


def shown_status(cached: Cached) -> dict[str, Any]:
    """What /healthz says of the cache server. The filter is ready whatever that is."""
    with urllib.request.urlopen(f"{cached.admin_url}/healthz", timeout=60) as reply:
        shown = json.load(reply)
    assert shown["ready"]
    status: dict[str, Any] = {"lookup_tokens": None, **shown["cache_servers"][cached.server.address]}
    return status


@pytest.fixture(scope="module")
def directed(cached: Cached) -> Iterator[Directed]:
    """A filter on the same workers that asks the coordinator."""
    prefill, decode = (url.removeprefix("http://") for url in (cached.prefill_url, cached.decode_url))
    labels = {"kv-events": cached.prefill_events, "cache": SERVER}
    settings: dict[str, Any] = {
        "workers": {"prefill": [{"address": prefill, "labels": labels}]},
        "kv_events": {"enabled": True, "check_interval_s": 0.5},
        "tokens": msgspec.to_builtins(TokenSettings()),
        "policies": [{"name": "shown", "mode": "disaggregate", "explain": True}],
        "handoff": {"lease_s": LEASE_S},
        # Two cores, and all of this on them: what is tried is what the answer says.
        "cache_store": {"enabled": True, "label": "cache", "directory": cached.coordinator.address, "directory_timeout_s": 2.0},
    }
    with another_front([prefill], [decode], settings) as running:
        found = Directed(cached, running)
        until(lambda: found.count("baton_kv_in_step", endpoint=prefill) == 1, 30)
        yield found


def test_a_prompt_that_only_the_cache_server_holds_is_counted_and_comes_from_it(directed: Directed) -> None:
    cached, prompt = directed.cached, ids_of(1, 600)
    kept = chunks_tokens(len(prompt))
    first = directed.ask_and_let_store(prompt)
    unknown = cached.coordinator.lookup(prompt, MODEL)
    assert (unknown["chunks"], [key["placements"] for key in unknown["results"]]) == (2, [[], []]), (
        "clients' name is not its own"
    )
    directed.evict()
    directed.expects(prompt, kept)
    before = directed.front.metrics()
    asked = before.total("baton_cache_directory_total", outcome="hit") + before.total(
        "baton_cache_directory_total", outcome="known"
    )
    use, hits = kv_use(cached.prefill_url), cached.server.total("lookup_hit_tokens_total")

    answer = ask(directed.front.url, "completions", prompt, max_tokens=4)

    assert answer == first
    decision = answer.headers["x-baton-decision"]
    assert decision.startswith("disaggregate"), decision
    assert "cached-by=cache_server" in decision and f"cached={kept}" in decision, decision
    prefill = kv_use_since(cached.prefill_url, use, prompt_tokens=len(prompt))
    assert (prefill.external_tokens, prefill.computed_tokens) == (kept, len(prompt) - kept)
    after = directed.front.metrics()
    got = sum(after.total("baton_cache_directory_total", outcome=outcome) for outcome in ("hit", "known"))
    assert got == asked + 1
    for name in ("stored_expected", "expected", "found"):
        assert after.total(f"baton_cache_{name}_tokens_total") - before.total(f"baton_cache_{name}_tokens_total") == kept, name
    assert cached.server.total("lookup_hit_tokens_total") == hits + kept
    until(lambda: cached.shown("hit_tokens_total") == cached.server.total("lookup_hit_tokens_total"), 20)


def test_requests_are_served_while_the_cache_server_is_dead_and_its_disk_is_found_again(
    cached: Cached, tiny_model: Path
) -> None:
    stored_prompt, new_prompt, later_prompt = long_prompt(43), long_prompt(47), long_prompt(53)
    expected = {prompt: plain(cached, prompt) for prompt in (stored_prompt, new_prompt, later_prompt)}
    ask_and_let_store(cached, stored_prompt, tiny_model)
    forget_prefixes(cached.prefill_url, cached.decode_url)

    cached.server.kill()
    for prompt in (new_prompt, later_prompt, stored_prompt):
        start = time.monotonic()
        assert ask(cached.front_url, "completions", prompt, timeout_s=SERVED_S) == expected[prompt]
        print(f"{time.monotonic() - start:.2f} s with a dead cache server")
    until(lambda: cached.shown("up") == 0, 20)
    status = shown_status(cached)
    assert not status["up"]
    assert status["fault"]

    cached.server.start()
    until(lambda: comes_from_the_cache(cached, stored_prompt, expected[stored_prompt]), 60, every_s=1)
    until(lambda: cached.shown("up") == 1, 20)


def comes_from_the_cache(cached: Cached, prompt: str, expected: Answer) -> bool:
    """Ask for an evicted prompt; right it is in any case."""
    forget_prefixes(cached.prefill_url, cached.decode_url)
    before = kv_use(cached.prefill_url)
    assert ask(cached.front_url, "completions", prompt) == expected
    use = kv_use_since(cached.prefill_url, before, prompt_tokens=expected.prompt_tokens)
    return use.external_tokens == chunks_tokens(expected.prompt_tokens)
