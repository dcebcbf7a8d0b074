"""The command line and environment of a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workers.vllm import Command, Role, WorkerSpec, command


def make(role: Role = "prefill", **changes: Any) -> WorkerSpec:
    values: dict[str, Any] = {"model": "/models/m", "port": 8100, "side_channel_port": 5600, "served_model_name": "m"}
    return WorkerSpec(role=role, **{**values, **changes})


def option(made: Command, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_worker_has_its_role_and_lease_in_the_transfer_config(role: Role, kv_role: str) -> None:
    assert json.loads(option(command(make(role, kv_lease_s=90)), "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"kv_lease_duration": 90},
    }


@pytest.mark.parametrize(("role", "policy"), [("prefill", "recompute"), ("decode", None)])
def test_reading_the_turn_before_is_a_setting_and_a_prefill_worker_computes_what_it_cannot_read(
    role: Role, policy: str | None
) -> None:
    made = json.loads(
        option(command(make(role, bidirectional_kv_xfer=True, decoder_kv_blocks_ttl_s=60)), "--kv-transfer-config")
    )
    extra = made["kv_connector_extra_config"]
    assert (extra["bidirectional_kv_xfer"], extra["decoder_kv_blocks_ttl"]) == (True, 60)
    assert made.get("kv_load_failure_policy") == policy


def test_prefill_and_decode_differ_only_in_role_and_ports() -> None:
    prefill = command(make("prefill"))
    decode = command(make("decode", port=8200, side_channel_port=5601))
    changed = {(a, b) for a, b in zip(prefill.argv, decode.argv, strict=True) if a != b}
    assert len(changed) == 2
    assert ("8100", "8200") in changed
    assert prefill.env | {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"} == decode.env


def test_peers_are_told_the_address_that_the_worker_serves_on() -> None:
    made = command(make(host="10.0.0.7"))
    assert option(made, "--host") == "10.0.0.7"
    assert made.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_an_address_that_peers_cannot_reach_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="peers"):
        command(make(host=host))


def test_one_port_for_both_servers_is_refused() -> None:
    with pytest.raises(ValueError, match="5600"):
        command(make(port=5600))


def test_a_block_size_that_the_cpu_cannot_do_is_refused_but_a_gpu_may_have_it() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        command(make(block_size_tokens=16))
    assert option(command(make(block_size_tokens=16, device="gpu")), "--block-size") == "16"


def test_a_cpu_worker_computes_in_float32_and_a_gpu_worker_as_it_likes() -> None:
    cpu, gpu = command(make(threads=3, kv_cache_gib=2)), command(make(device="gpu"))
    assert option(cpu, "--dtype") == "float32"
    assert cpu.env["OMP_NUM_THREADS"] == "3"
    assert cpu.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert cpu.env["UCX_TLS"] == "tcp,sm,self"
    assert "--dtype" not in gpu.argv
    assert not {"OMP_NUM_THREADS", "UCX_TLS"} & gpu.env.keys()


def test_only_a_local_model_keeps_the_worker_off_the_network() -> None:
    assert command(make(local_model=True)).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in command(make()).env


def test_development_endpoints_are_off_unless_asked_for() -> None:
    assert "VLLM_SERVER_DEV_MODE" not in command(make()).env
    assert command(make(dev_endpoints=True)).env["VLLM_SERVER_DEV_MODE"] == "1"


def test_extra_arguments_come_last_so_that_they_win() -> None:
    assert command(make(extra_args=("--block-size", "64"))).argv[-2:] == ("--block-size", "64")
