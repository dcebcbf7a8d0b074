"""`baton worker` against the installed vLLM: it accepts every profile's command, and a worker of the CPU profile serves."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.cases.worker_commands import all_roles, planned
from tests.engine.system import UP_TIMEOUT_S
from workers import host_cache, obsolete
from workers.lmcache import connector
from workers.ready import free_ports
from workers.spec import Command

_PLAIN = ("default", "prefill")
_EVERYTHING: dict[str, Any] = {
    "quantization": "fp8",
    "dtype": "bfloat16",
    "attention_backend": "FLASHINFER",
    "enforce_eager": True,
    "hybrid_kv_cache_manager": True,
    "speculative": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
    "data_parallel_size": 4,
    "data_parallel_rank": 1,
    "data_parallel_address": "10.0.0.6",
    "data_parallel_rpc_port": 13345,
    "device_ids": (3,),
    "kv_events_topic": "kv",
    "prefix_caching": False,
    "gpu_memory_utilization": 0.85,
}
"""What no profile of ours says."""


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, Command]]:
    """Every profile's, one with host memory behind the GPU cache, and one with a cache server."""
    made = [(f"{name}:{role}", planned(name, role).command) for name, role in all_roles()]
    whole = planned(*_PLAIN, **_EVERYTHING)
    hosted = planned(*_PLAIN, host_cache_gib=64.0)
    cached = planned(*_PLAIN, cache_server="10.0.0.9:5555")
    return [*made, ("everything", whole.command), ("host cache", hosted.command), ("cache server", cached.command)]


@pytest.fixture(scope="module")
def judged(commands: list[tuple[str, Command]]) -> dict[str, Any]:
    """What vLLM makes of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.vllm_judge"],
        input=json.dumps([list(each.argv) for _, each in commands]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)


def test_vllm_accepts_every_flag_and_every_key_of_every_profile(
    commands: list[tuple[str, Command]], judged: dict[str, Any]
) -> None:
    refused = {name: each["refused"] for (name, _), each in zip(commands, judged["commands"], strict=True) if "refused" in each}
    assert refused == {}


def test_vllm_understands_the_flags_as_they_are_meant(judged: dict[str, Any]) -> None:
    for (name, role), each in zip(all_roles(), judged["commands"], strict=False):
        spec, seen = planned(name, role).spec, each["is"]
        assert each["model"] == spec.model
        assert (seen["block_size"], seen["tensor_parallel_size"]) == (spec.block_size_tokens, spec.tensor_parallel_size)
        assert seen["data_parallel_size"] == spec.data_parallel_size
        assert seen["kv_cache_dtype"] == (spec.kv_cache_dtype or "auto")
        assert seen["shutdown_timeout"] == spec.shutdown_timeout_s
        assert seen["enable_prefix_caching"] is True
        assert seen["enforce_eager"] is (spec.device == "cpu")
        assert seen["enable_expert_parallel"] is spec.expert_parallel
        assert seen["device_ids"] == (list(spec.device_ids) or None)
        for ours, theirs in (
            ("max_num_seqs", "max_num_seqs"),
            ("max_num_batched_tokens", "max_num_batched_tokens"),
            ("max_num_queued_reqs", "max_num_queued_reqs"),
            ("max_num_queued_tokens", "max_num_queued_tokens"),
            ("max_model_len_tokens", "max_model_len"),
        ):
            assert seen[theirs] == getattr(spec, ours), (name, role, theirs)
        if len(spec.ranks) < spec.data_parallel_size:
            assert (seen["data_parallel_size_local"], seen["data_parallel_start_rank"]) == (8, 8)
        transfer = each["kv_transfer_config"]
        assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[spec.role]
        assert transfer["kv_connector_extra_config"]["kv_lease_duration"] == spec.kv_lease_s
        assert transfer["kv_load_failure_policy"] == (spec.kv_load_failure_policy or "fail")
        assert each["kv_events_config"]["publisher"] == "zmq"


def test_vllm_has_the_variables_that_are_set(commands: list[tuple[str, Command]], judged: dict[str, Any]) -> None:
    set_here = {name for _, each in commands for name in each.env if name.startswith("VLLM_")}
    assert set_here - set(judged["variables"]) == set()


def test_what_is_called_obsolete_is_so_and_what_replaced_it_is_there(judged: dict[str, Any]) -> None:
    flags = set(judged["flags"])
    gone = {*obsolete.DROPPED_FLAGS, *obsolete.RENAMED_FLAGS}
    assert gone & flags == set()
    for flag, why in {**obsolete.RENAMED_FLAGS, **{flag: why for flag, (_, why) in obsolete.DROPPED_FLAGS.items()}}.items():
        named = {word.strip(",;:'(){}") for word in why.split() if word.startswith("--") and len(word) > 2}
        assert named - {"--device"} <= flags, f"{flag}: vLLM has no {named - flags}"
    assert set(judged["connectors"]) == obsolete.CONNECTORS
    assert not obsolete.CONNECTORS & obsolete.GONE_CONNECTORS.keys()
    assert set(judged["transfer_keys"]) == obsolete.TRANSFER_KEYS
    assert judged["refused_keys"] == ["kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip"]
    for name in ("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"):
        assert name not in judged["variables"]


def test_a_cache_servers_connector_is_one_that_vllm_has(judged: dict[str, Any]) -> None:
    assert connector("10.0.0.9:5555")["kv_connector"] in judged["connectors"]
    children = judged["commands"][-1]["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "LMCacheMPConnector"]


def test_host_memory_behind_the_gpu_cache_is_a_connector_that_vllm_has(judged: dict[str, Any]) -> None:
    assert host_cache.CONNECTOR in judged["connectors"]
    children = judged["commands"][-2]["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "OffloadingConnector"]
    assert {"--kv-offloading-size", "--kv-offloading-backend"} <= set(judged["flags"]), "which would replace NIXL"


@dataclasses.dataclass(frozen=True)
class Worker:
    """A running ``baton worker``."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    events: str
    """Where it publishes what its prefix cache holds."""


@pytest.fixture
def worker(tiny_model: Path, run_dir: Path) -> Iterator[Worker]:
    port, side_channel, events, replay = free_ports(4)
    argv = [sys.executable, "-m", "extproc", "worker", "--role", "decode", "--profile", "cpu-demo", "--model", str(tiny_model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--side-channel-port", str(side_channel)]
    argv += ["--kv-events-port", str(events), "--kv-events-replay-port", str(replay), "--max-model-len", "1024"]
    log = run_dir / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + UP_TIMEOUT_S
        while "baton worker: ready after" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Worker(process, f"http://127.0.0.1:{port}", log, f"tcp://127.0.0.1:{events}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def complete(worker: Worker, model: Path, prompt: str) -> dict[str, Any]:
    """The usage of one answer of four tokens."""
    body = json.dumps({"model": model.name, "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{worker.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.load(reply)["usage"])


def test_a_worker_of_the_cpu_profile_serves_publishes_events_and_ends_on_sigterm_with_nothing_left(
    worker: Worker, tiny_model: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.linger = 0
        listener.subscribe(b"")
        listener.connect(worker.events)
        # A subscription takes a moment to arrive, and nothing says when: an event is asked for until one comes.
        for attempt in range(20):
            usage = complete(worker, tiny_model, f"Prompt {attempt}: " + "The capital of France is a city. " * 20)
            assert usage["completion_tokens"] == 4
            assert usage["prompt_tokens"] > 128, "a whole block, or there is no event"
            if listener.poll(1000):
                break
        else:
            raise AssertionError("no KV event came")
    family = [psutil.Process(worker.process.pid), *psutil.Process(worker.process.pid).children(recursive=True)]
    engine = [each for each in family if each.name().startswith("VLLM::EngineCor")]
    assert engine, "the engine is a process below it"
    assert "runs on core" in worker.log.read_text()

    worker.process.send_signal(signal.SIGTERM)

    assert worker.process.wait(90) == 0, worker.log.read_text()[-3000:]
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert "SIGTERM: the engine has 40 s to end" in worker.log.read_text()
