"""NIXL push on real vLLM: both legs at once, and the prefill worker writes the blocks. Two workers of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec
import pytest

from extproc.config import Handoff, PushPeer
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, kv_use, kv_use_since
from tests.engine.openai_api import MODEL, Endpoint, ask
from tests.engine.system import UP_TIMEOUT_S
from workers import cores, vllm
from workers.process import Child
from workers.ready import free_ports, wait_ready

LEASE_S = 60


def push_worker(role: Literal["prefill", "decode"], tiny_model: Path, port: int, side_channel_port: int) -> vllm.WorkerSpec:
    transfer = {
        "kv_connector": "NixlPushConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
        "engine_id": f"push-{role}",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    return vllm.WorkerSpec(
        role=role,
        model=str(tiny_model),
        local_model=True,
        served_model_name=MODEL,
        port=port,
        side_channel_port=side_channel_port,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),  # the last one counts
    )


@pytest.fixture(scope="module")
def urls(tiny_model: Path) -> Iterator[tuple[str, str, str]]:
    """Front, prefill and decode. Ended before the shared system starts: two cores do not carry both."""
    front, admin, envoy_admin, *ports = free_ports(7)
    prefill, decode = (push_worker("prefill", tiny_model, *ports[:2]), push_worker("decode", tiny_model, *ports[2:]))
    addresses = [f"127.0.0.1:{spec.port}" for spec in (prefill, decode)]
    peer = PushPeer(engine_id="push-prefill", host="127.0.0.1", port=prefill.side_channel_port)
    with ExitStack() as parts:
        # Not pytest's own temporary folder: a unix socket's path has at most 107 bytes.
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        workers = []
        for spec in (prefill, decode):
            command = vllm.command(spec)
            child = Child(spec.role, command.argv, log=folder / f"{spec.role}.log", env=command.env)
            workers.append(parts.enter_context(child))
        for child, address in zip(workers, addresses, strict=True):
            wait_ready(child, f"http://{address}/health", UP_TIMEOUT_S)
        for child, share in zip(workers, cores.spread(2, cores.usable()), strict=True):
            cores.pin(child.pids(), share)
        config = stack_config(
            folder,
            prefill=addresses[:1],
            decode=addresses[1:],
            listen=f"127.0.0.1:{front}",
            admin=f"127.0.0.1:{admin}",
            envoy_admin=f"127.0.0.1:{envoy_admin}",
        )
        handoff = Handoff(connector="nixl_push", lease_s=LEASE_S, nixl_push={addresses[0]: peer})
        config = msgspec.structs.replace(config, handoff=handoff)
        config_file, envoy_file = write_configs(config, folder)
        filter_ = parts.enter_context(Child("filter", filter_command(config_file), log=folder / "filter.log"))
        await_endpoints(config, filter_)
        wait_ready(filter_, f"http://{config.admin}/healthz", UP_TIMEOUT_S)  # the two have made a handoff by then
        envoy = parts.enter_context(Child("envoy", envoy_command(find_envoy(), envoy_file), log=folder / "envoy.log"))
        wait_ready(envoy, f"http://{config.envoy.admin}/ready", 60)
        yield f"http://127.0.0.1:{front}", f"http://{addresses[0]}", f"http://{addresses[1]}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ["chat", "completions", "messages"])
def test_a_pushed_prompt_is_answered_as_by_one_worker_and_computed_by_none_but_the_prefill(
    urls: tuple[str, str, str], endpoint: Endpoint, stream: bool
) -> None:
    front_url, prefill_url, decode_url = urls
    # A prompt of its own for each case: a decode that finds it in its cache registers nowhere (vLLM 0.32).
    prompt = f"{endpoint} {stream}: " + " ".join(f"Stone {number} weighs {number * 31 % 97} pounds." for number in range(12))
    expected = ask(prefill_url, endpoint, prompt)
    before = kv_use(decode_url)

    answer = ask(front_url, endpoint, prompt, stream=stream)

    assert answer == expected
    assert answer.headers["x-kv-transfer"].startswith("nixl-push;prefill=")
    use = kv_use_since(decode_url, before, prompt_tokens=expected.prompt_tokens)
    assert use.computed_tokens == 0
    assert use.external_tokens + use.cached_tokens == expected.prompt_tokens
    assert use.external_tokens > 3 * BLOCK_SIZE_TOKENS
