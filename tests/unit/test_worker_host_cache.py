"""`--host-cache-gib`: NIXL and vLLM's tier in host memory in one line, and what of it cannot be is refused before a start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from workers.host_cache import GIB
from workers.launch import LaunchError, Plan, plan
from workers.memory import Memory, memory, memory_of
from workers.preflight.ask import Ask
from workers.preflight.checks import host
from workers.preflight.facts import Facts
from workers.preflight.findings import Severity
from workers.preflight.of_worker import ask_of
from workers.profile import Hardware, ModelFacts, ProfileError, load_profile, worker_spec
from workers.spec import WorkerSpec

HOST = {"host": "10.0.0.5"}


def made(*arguments: str, profile: str = "default", engine: Any = "vllm", role: Any = "prefill", **changes: Any) -> Plan:
    changes = {**({"model": "a/b"} if profile == "default" else {}), **HOST, **changes}
    return plan(load_profile(profile), role, changes=changes, arguments=arguments, environ={}, prepare=False, engine=engine)


def transfer(planned: Plan) -> dict[str, Any]:
    argv = planned.command.argv
    found: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return found


def behind(planned: Plan) -> dict[str, Any]:
    """What vLLM's tier in host memory is told."""
    children = transfer(planned)["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in children] == ["NixlConnector", "OffloadingConnector"]
    extra: dict[str, Any] = children[1]["kv_connector_extra_config"]
    return extra


def test_host_memory_stands_behind_nixl_and_its_events_have_tokens() -> None:
    config = transfer(made(host_cache_gib=64))
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_producer")
    assert [each["kv_role"] for each in config["kv_connector_extra_config"]["connectors"]] == ["kv_producer", "kv_both"]
    assert behind(made(host_cache_gib=64)) == {"cpu_bytes_to_use": 64 * GIB, "self_describing_kv_events": True}
    assert behind(made(host_cache_gib=64, kv_events_port=0)) == {"cpu_bytes_to_use": 64 * GIB}, "nobody listens"
    assert "kv_load_failure_policy" not in config, "a copy from host memory does not fail"


def test_vllm_counts_tensor_parallel_ranks_together_and_data_parallel_ones_apart() -> None:
    assert behind(made(host_cache_gib=64, tensor_parallel_size=4))["cpu_bytes_to_use"] == 64 * GIB
    assert behind(made(host_cache_gib=64, data_parallel_size=8))["cpu_bytes_to_use"] == 8 * GIB
    ranks: dict[str, Any] = {
        "data_parallel_size": 16,
        "data_parallel_local": 8,
        "data_parallel_rank": 8,
        "data_parallel_address": "10.0.0.6",
    }
    assert behind(made(host_cache_gib=64, **ranks))["cpu_bytes_to_use"] == 8 * GIB, "of those that run here"


def test_zero_is_none() -> None:
    assert transfer(made(host_cache_gib=0.0))["kv_connector"] == "NixlConnector"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host_cache_gib": -1.0}, "host_cache_gib: -1.0 is not a positive number of GiB"),
        ({"host_cache_gib": float("nan")}, "host_cache_gib: nan is not"),
        ({"host_cache_gib": float("inf")}, "host_cache_gib: inf is not"),
        ({"host_cache_gib": 1e300}, r"host_cache_gib: 1e\+300 is not"),
        ({"host_cache_gib": 1e-10}, "host_cache_gib: 1e-10 is not"),  # of which an engine would get no byte
        ({"host_cache_gib": 8.0, "role": "decode"}, "host_cache_gib: for prefill workers"),
        ({"host_cache_gib": 8.0, "device": "cpu"}, "host_cache_gib: .* works on GPUs only"),
        ({"host_cache_gib": 8.0, "prefix_caching": False}, "host_cache_gib: goes with prefix_caching"),
        ({"host_cache_gib": 8.0, "cache_server": "10.0.0.9:5555"}, "host_cache_gib and cache_server: one of them"),
    ],
)
def test_what_cannot_be_is_refused_and_the_reason_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        made(**changes)


def test_a_transfer_config_of_ones_own_is_all_of_it() -> None:
    with pytest.raises(LaunchError, match="--host-cache-gib and --kv-transfer-config"):
        made('--kv-transfer-config={"kv_connector": "NixlConnector"}', host_cache_gib=8.0)


def test_vllms_own_flag_would_put_host_memory_in_nixls_place() -> None:
    for flag in ("--kv-offloading-size=8", "--kv_offloading_size=8", "--kv-offloading-backend=native"):
        with pytest.raises(LaunchError, match="--host-cache-gib"):
            made(flag)


def test_a_profile_says_it_for_its_prefill_workers(tmp_path: Any) -> None:
    text = "title: t\nmodel: a/b\nvllm_version: 0.32.0\nsources: [here]\nprefill: {host_cache_gib: %s}\n"
    file = tmp_path / "p.yaml"
    file.write_text(text % 32)
    assert worker_spec(load_profile(str(file)), "prefill").host_cache_gib == 32
    assert worker_spec(load_profile(str(file)), "decode").host_cache_gib is None
    file.write_text(text % -3)
    with pytest.raises(ProfileError, match=r"p\.yaml:5.*host_cache_gib: -3 is not"):
        load_profile(str(file))


def test_a_profile_with_a_cache_server_asks_for_none_where_there_is_host_memory() -> None:
    wanted: list[tuple[dict[str, Any], bool]] = [({}, True), ({"host_cache_gib": 64.0}, False)]
    for changes, noted in wanted:
        notes = made(profile="llama-3.3-70b-h200", **changes).notes
        assert any("--cache-server" in note for note in notes) is noted


def test_the_simulated_engine_gets_as_many_tokens_as_would_fit() -> None:
    argv = made(host_cache_gib=100.0, engine="sim", profile="llama-3.3-70b-h100").command.argv
    assert argv[argv.index("--host-cache-tokens") + 1] == "655360"
    with pytest.raises(LaunchError, match="--host-cache-tokens after the --"):
        made(host_cache_gib=8.0, engine="sim")
    with pytest.raises(LaunchError, match="for prefill workers"):
        made(host_cache_gib=8.0, engine="sim", role="decode", profile="llama-3.3-70b-h100")


def test_the_command_line_shows_it() -> None:
    asked = ["worker", "--role", "prefill", "--model", "a/b", "--side-channel-host", "10.0.0.5", "--dry-run"]
    shown = CliRunner().invoke(app, [*asked, "--host-cache-gib", "1.5"])
    assert shown.exit_code == 0
    assert f'"cpu_bytes_to_use": {3 * GIB // 2}' in shown.stdout
    assert CliRunner().invoke(app, asked, env={"BATON_HOST_CACHE_GIB": "1.5"}).stdout == shown.stdout
    refused = CliRunner().invoke(app, [*asked, "--host-cache-gib", "-2"])
    assert refused.exit_code == 2


# --- how much it holds, and whether it fits -------------------------------------------------------------------------------


def test_memory_says_how_many_tokens_it_holds() -> None:
    profile = load_profile("llama-3.3-70b-h100")
    spec = replace(worker_spec(profile, "prefill"), host_cache_gib=100.0)
    found = memory_of(profile, spec)
    assert isinstance(found, Memory)
    # 80 layers x 2 x 8 heads x 128 x 1 byte, on all four GPUs together.
    assert found.host_tokens == 100 * GIB // 163_840
    assert "; 107.4 GB of host memory behind it: 655,360 tokens" in found.line("prefill", 80)
    assert "host memory" not in memory_of(profile, worker_spec(profile, "prefill")).line("prefill", 80)  # type: ignore[union-attr]


def test_heads_that_several_ranks_have_are_kept_for_each_and_a_latent_vector_once() -> None:
    hardware = Hardware(gpu="any", memory_gb=80)
    spec = replace(made(host_cache_gib=1.0, tensor_parallel_size=8).spec, kv_cache_dtype="fp8")
    few = ModelFacts(weights_gb=1, layers=32, kv_heads=4, head_dim=128)
    assert memory(spec, few, hardware).host_tokens == GIB // (32 * 2 * 8 * 128)
    latent = ModelFacts(weights_gb=1, layers=61, head_dim=576, mla=True)
    assert memory(spec, latent, hardware).host_tokens == GIB // (61 * 576)


def findings(ask: Ask, **facts: Any) -> dict[str, tuple[Severity, str]]:
    return {each.id: (each.severity, each.why or each.found) for each in host.check(Facts(**facts), ask)}


def test_preflight_looks_at_shared_memory_which_it_lies_in_and_at_what_is_free() -> None:
    spec: WorkerSpec = made(host_cache_gib=64.0).spec
    ask = ask_of(spec)
    plenty = {"shm_bytes": 100 * GIB, "memory_bytes": 200 * GIB, "available_bytes": 150 * GIB}
    assert {each: findings(ask, **plenty)[each][0] for each in ("host.shm", "host.cache")} == {
        "host.shm": Severity.OK,
        "host.cache": Severity.OK,
    }
    severity, why = findings(ask, **{**plenty, "shm_bytes": 16 * GIB})["host.shm"]
    assert severity is Severity.ERROR
    assert "The host cache of 64 GiB lies in it" in why
    assert findings(ask, **{**plenty, "available_bytes": 60 * GIB})["host.cache"][0] is Severity.ERROR
    assert "host.cache" not in findings(ask_of(made().spec), **plenty), "nobody asked for one"
