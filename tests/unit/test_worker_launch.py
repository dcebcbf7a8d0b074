"""From a profile and flags to what is run: addresses, ports, secrets, and what published guides still show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers import address, obsolete
from workers.address import AddressError, routable
from workers.launch import LaunchError, Plan, plan
from workers.model import ModelError
from workers.obsolete import ObsoleteError, check_arguments, check_environment, check_transfer_config
from workers.profile import load_profile
from workers.shell import as_shell
from workers.spec import ports
from workers.vllm import command

HOST = {"side_channel_host": "10.0.0.7"}


def make(*arguments: str, role: Any = "prefill", environ: dict[str, str] | None = None, **changes: Any) -> Plan:
    return plan(
        load_profile("default"),
        role,
        changes={"model": "owner/m", **HOST, **changes},
        arguments=arguments,
        environ=environ or {},
        prepare=False,
    )


def option(made: Plan, name: str) -> str:
    return made.command.argv[made.command.argv.index(name) + 1]


# --- addresses ----------------------------------------------------------------------------------------------------------


def test_the_address_is_what_is_given_then_the_pods_then_the_default_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "default_route", lambda: "10.9.9.9")
    assert routable("10.0.0.1", {"POD_IP": "10.0.0.2"})[0] == "10.0.0.1"
    assert routable(None, {"POD_IP": "10.0.0.2"}) == ("10.0.0.2", "POD_IP")
    assert routable(None, {})[0] == "10.9.9.9"


@pytest.mark.parametrize("given", ["0.0.0.0", "::", "localhost", "LOCALHOST", "224.0.0.1"])
def test_an_address_that_means_something_else_on_every_machine_is_refused(given: str) -> None:
    with pytest.raises(AddressError, match="address that peers reach"):
        routable(given, {})
    with pytest.raises(AddressError, match="POD_IP"):
        routable(None, {"POD_IP": given})


def test_without_a_route_the_flag_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "default_route", lambda: None)
    with pytest.raises(AddressError, match="--side-channel-host"):
        routable(None, {})


def test_listening_everywhere_still_tells_peers_one_address() -> None:
    made = make(host="0.0.0.0")
    assert option(made, "--host") == "0.0.0.0"
    assert made.command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"


def test_a_listeners_address_is_what_peers_are_told_if_nothing_else_is() -> None:
    made = make(host="10.0.0.8", side_channel_host=None)
    assert made.spec.peer_host == "10.0.0.8"
    made = make(side_channel_host=None, environ={"POD_IP": "10.0.0.9"})
    assert (made.spec.host, made.spec.peer_host) == ("10.0.0.9", "10.0.0.9")


def test_an_address_of_this_machine_only_is_let_through_with_a_note() -> None:
    assert any("only workers of this machine" in note for note in make(side_channel_host="127.0.0.1").notes)


# --- ports and parallelism ----------------------------------------------------------------------------------------------


def test_every_rank_has_ports_of_its_own() -> None:
    spec = make(data_parallel_size=4, data_parallel_local=2, data_parallel_rank=2, data_parallel_address="10.0.0.6").spec
    assert set(ports(spec)) == {8100, 5602, 5603, 5562, 5563, 5522, 5523}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"side_channel_port": 8099, "data_parallel_size": 2}, r"side_channel_port 8099, rank 1 and the HTTP server .* 8100"),
        ({"kv_events_port": 5600}, r"kv_events_port 5600, rank 0 and side_channel_port 5600"),
        ({"side_channel_port": 65535, "data_parallel_size": 2}, "65536 is not a port"),
        ({"data_parallel_size": 4, "data_parallel_local": 2}, "which is the first of them"),
        (
            {"data_parallel_size": 4, "data_parallel_local": 2, "data_parallel_rank": 3},
            "ranks 3 to 4 are not part of a group of 4",
        ),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, "where is rank 0 reached"),
        ({"device_ids": (0, 1), "tensor_parallel_size": 4}, "2 are given, and 4 are needed"),
    ],
)
def test_what_does_not_add_up_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        make(**changes)


def test_one_rank_of_a_group_and_some_ranks_of_it_are_said_in_vllms_two_ways() -> None:
    group = {"data_parallel_size": 4, "data_parallel_address": "10.0.0.6"}
    one = make(data_parallel_rank=3, **group)
    assert option(one, "--data-parallel-rank") == "3"
    assert "--data-parallel-hybrid-lb" not in one.command.argv
    two = make(data_parallel_rank=2, data_parallel_local=2, **group)
    assert option(two, "--data-parallel-start-rank") == "2"
    assert option(two, "--data-parallel-size-local") == "2"


def test_gpus_are_chosen_by_device_ids_so_that_the_others_stay_visible() -> None:
    made = make(device_ids=(2, 3), tensor_parallel_size=2)
    assert option(made, "--device-ids") == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in made.command.env


# --- a cache server, events, drain ----------------------------------------------------------------------------------------


def test_a_cache_server_stands_behind_nixl_and_its_loss_is_no_error() -> None:
    config = json.loads(option(make(cache_server="10.0.0.9:5555"), "--kv-transfer-config"))
    children = config["kv_connector_extra_config"]["connectors"]
    assert config["kv_connector"] == "MultiConnector"
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "LMCacheMPConnector"]
    assert config["kv_load_failure_policy"] == "recompute"
    assert all("engine_id" not in child for child in children)


def test_the_launcher_waits_longer_than_the_engine_drains() -> None:
    made = make(shutdown_timeout_s=90)
    assert option(made, "--shutdown-timeout") == "90"
    assert made.grace_s > 90


def test_an_inherited_variable_that_is_not_used_is_said() -> None:
    made = make(environ={"UCX_TLS": "rc", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7777", "PYTHONHASHSEED": "0"}, ucx_tls="rc,cuda_copy")
    assert "UCX_TLS is rc,cuda_copy for the engine, not rc as in the environment" in made.notes
    assert any(note.startswith("VLLM_NIXL_SIDE_CHANNEL_PORT is 5600") for note in made.notes)
    assert not any("PYTHONHASHSEED" in note for note in made.notes), "it is the same"
    assert "UCX_TLS" not in make(environ={"UCX_TLS": "rc"}).command.env, "and what nothing else is said of is inherited"


def test_a_prefill_worker_whose_profile_has_a_cache_says_where_to_name_the_server() -> None:
    profile = load_profile("llama-3.3-70b-h200")
    ask: dict[str, Any] = {"environ": {}, "prepare": False}
    told = [plan(profile, "prefill", changes=HOST | more, **ask).notes for more in ({}, {"cache_server": "10.0.0.9:5555"})]
    assert [any("--cache-server" in note for note in notes) for notes in told] == [True, False]


# --- secrets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("--api-key", "s3cret"), ("--api-key=s3cret",)])
def test_a_key_is_in_neither_the_process_list_nor_the_text(given: tuple[str, ...]) -> None:
    made = make(*given)
    assert "s3cret" not in " ".join(made.command.argv)
    assert made.secrets == {"VLLM_API_KEY": "s3cret"}
    text = as_shell(made.command.argv, {**made.command.env, **made.secrets})
    assert "s3cret" not in text
    assert 'VLLM_API_KEY="$VLLM_API_KEY"' in text
    assert "s3cret" not in repr(made)


def test_several_keys_are_refused_without_showing_them() -> None:
    with pytest.raises(LaunchError, match="one value") as caught:
        make("--api-key", "s3cret", "s4cret")
    assert "s3cret" not in str(caught.value)
    assert "s4cret" not in str(caught.value)


def test_a_secret_of_a_profiles_environment_is_not_shown() -> None:
    assert as_shell(["x"], {"HF_TOKEN": "t0p", "AWS_SECRET_ACCESS_KEY": "t0p"}).count("t0p") == 0
    assert "TOKENIZERS_PARALLELISM=false" in as_shell(["x"], {"TOKENIZERS_PARALLELISM": "false"})


def test_the_text_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['A'], os.environ.get('B')]))"
    text = as_shell([sys.executable, "-c", code, "--config", '{"a": "it\'s"}', "--flag"], {"A": "x y"}, unset=["B"])
    done = subprocess.run(["sh", "-c", text], env={"B": "1"}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["--config", '{"a": "it\'s"}', "--flag"], "x y", None]


# --- what guides still show -----------------------------------------------------------------------------------------------


def old(**keys: Any) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", **keys})


@pytest.mark.parametrize("key", ["kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip", "kv_port"])
def test_a_key_that_has_gone_is_left_out_with_a_note_on_what_replaced_it(key: str) -> None:
    config, notes = check_transfer_config(old(**{key: 1}), "prefill", lease_s=120)
    assert key not in config
    assert any(f"{key} is left out" in note for note in notes)


def test_the_role_of_a_pasted_config_is_the_workers_and_a_lease_is_added() -> None:
    config, notes = check_transfer_config('{"kv_connector": "NixlConnector"}', "decode", lease_s=90)
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 90}
    assert len(notes) == 2
    whole = old(kv_role="kv_producer", kv_connector_extra_config={"kv_lease_duration": 7})
    kept, notes = check_transfer_config(whole, "prefill", lease_s=90)
    assert kept["kv_connector_extra_config"]["kv_lease_duration"] == 7
    assert notes == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ("{}", "kv_connector is missing"),
        (old(kv_role="kv_consumer"), "disagree: a prefill worker is kv_producer"),
        (old(kv_conector="x"), "vLLM 0.32 refuses kv_conector"),
        (old(kv_connector="PyNcclConnector"), "PyNcclConnector has gone; NixlConnector replaced it"),
        (old(kv_connector="P2pNcclConnector"), "P2pNcclConnector has gone"),
        (old(kv_connector="SharedStorageConnector"), "ExampleConnector is its new name"),
        (old(kv_connector="LMCacheConnector"), "LMCacheMPConnector replaced it"),
        (old(kv_connector="NixlConector"), "vLLM 0.32 has no NixlConector"),
        (old(kv_connector="MultiConnector"), r"needs kv_connector_extra_config\.connectors"),
        (old(kv_connector_extra_config=[]), "must be an object"),
    ],
)
def test_what_cannot_be_translated_is_refused_and_says_what_replaced_it(text: str, said: str) -> None:
    with pytest.raises(ObsoleteError, match=said):
        check_transfer_config(text, "prefill", lease_s=120)


def test_a_connector_of_ones_own_is_let_through() -> None:
    config, _ = check_transfer_config(old(kv_connector="Mine", kv_connector_module_path="my.module"), "prefill", lease_s=120)
    assert config["kv_connector"] == "Mine"


def test_the_children_of_a_multiconnector_are_put_right() -> None:
    nixl = {"kv_connector": "NixlConnector", "engine_id": "e", "kv_rank": 0, "kv_load_failure_policy": "recompute"}
    text = json.dumps({"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": [
        nixl, {"kv_connector": "OffloadingConnector"}]}})  # fmt: skip
    config, notes = check_transfer_config(text, "prefill", lease_s=60)
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert first == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    assert second == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert config["kv_load_failure_policy"] == "recompute"
    for said in (
        "engine_id is left out",
        "kv_rank is left out",
        "moves to the MultiConnector",
        "kv_both for OffloadingConnector",
    ):
        assert any(said in note for note in notes)


def test_a_pasted_config_takes_the_place_of_ours_and_keeps_the_profiles_policy() -> None:
    made = make("--kv-transfer-config", old(kv_rank=1), role="decode")
    assert made.command.argv.count("--kv-transfer-config") == 1
    config = json.loads(option(made, "--kv-transfer-config"))
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_consumer", "recompute")
    assert any("kv_rank" in note for note in made.notes)
    with pytest.raises(LaunchError, match="give one of them"):
        make("--kv-transfer-config=" + old(), cache_server="10.0.0.9:5555")


def test_the_config_of_a_profile_is_put_right_like_a_pasted_one() -> None:
    made = make(transfer_config={"kv_connector": "NixlPushConnector", "kv_rank": 1})
    config = json.loads(option(made, "--kv-transfer-config"))
    assert config == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 120},
    }


def test_the_old_timeout_becomes_the_lease_unless_there_is_one() -> None:
    environ = {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}
    made = make(environ=environ)
    assert json.loads(option(made, "--kv-transfer-config"))["kv_connector_extra_config"] == {"kv_lease_duration": 480}
    assert made.unset == ("VLLM_NIXL_ABORT_REQUEST_TIMEOUT",)
    assert any("kv_lease_duration replaced it" in note for note in made.notes)
    assert make(environ=environ, kv_lease_s=90).spec.kv_lease_s == 90
    with pytest.raises(ObsoleteError, match="not seconds"):
        make(environ={"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "soon"})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ObsoleteError, match=rf"{name}=.*move the KV cache to other memory pages"):
        check_environment({name: "max_split_size_mb:64,expandable_segments:True"})
    assert check_environment({name: "expandable_segments:False"}) == obsolete.Environment()


def test_the_v0_engine_is_refused_and_the_v1_switch_left_out() -> None:
    with pytest.raises(ObsoleteError, match="V0 engine has gone"):
        check_environment({"VLLM_USE_V1": "0"})
    assert check_environment({"VLLM_USE_V1": "1"}).unset == ("VLLM_USE_V1",)


def test_the_backend_variable_becomes_the_flag() -> None:
    made = make(environ={"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert option(made, "--attention-backend") == "FLASHINFER"
    assert made.unset == ("VLLM_ATTENTION_BACKEND",)


def test_settings_that_the_cache_connector_does_not_read_are_named() -> None:
    made = make(environ={"LMCACHE_CONFIG_FILE": "x", "LMCACHE_CHUNK_SIZE": "1"}, cache_server="10.0.0.9:5555")
    assert any("LMCACHE_CHUNK_SIZE, LMCACHE_CONFIG_FILE: not read" in note for note in made.notes)


def test_flags_that_have_gone_are_left_out_with_their_values_or_refused() -> None:
    kept, notes = check_arguments(
        ["--disable-log-requests", "--swap-space", "4", "--num_scheduler_steps=8", "--max-logprobs", "5"]
    )
    assert kept == ("--max-logprobs", "5")
    assert len(notes) == 3
    with pytest.raises(ObsoleteError, match="--speculative-config"):
        check_arguments(["--speculative-model", "x"])
    with pytest.raises(ObsoleteError, match="--runner and --convert"):
        check_arguments(["--task=embed"])


@pytest.mark.parametrize("flag", ["--port", "--tensor-parallel-size=8", "-tp", "--kv_events_config", "--model"])
def test_what_baton_works_out_itself_cannot_be_said_behind_its_back(flag: str) -> None:
    with pytest.raises(LaunchError, match=r"before the --|in the profile"):
        make(flag, "8")


def test_all_else_goes_to_vllm_last() -> None:
    assert make("--max-logprobs", "5").command.argv[-2:] == ("--max-logprobs", "5")


def test_the_simulated_engine_takes_what_means_something_to_it() -> None:
    made = plan(
        load_profile("deepseek-r1-h200"),
        "decode",
        changes={**HOST, "host": "0.0.0.0"},
        arguments=["--speed", "0"],
        environ={},
        engine="sim",
    )
    argv = made.command.argv
    assert argv[1:3] == ("-m", "workers.sim")
    assert option(made, "--max-num-seqs") == "256"
    assert option(made, "--kv-load-failure-policy") == "recompute"
    assert option(made, "--side-channel-host") == "10.0.0.7"
    assert argv[-2:] == ("--speed", "0")
    assert not [part for part in argv if "parallel" in part or "reasoning" in part]
    assert any("one rank" in note for note in made.notes)


def test_a_models_folder_must_be_named_the_same_way_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    ask: dict[str, Any] = {"environ": {}, "prepare": True}
    made = plan(load_profile("default"), "prefill", changes={**HOST, "model": str(link)}, **ask)
    assert made.spec.model == str(link), "what a link leads to may be called something else on another machine"
    assert (made.spec.served_model_name, made.spec.local_model) == ("link", True)
    with pytest.raises(ModelError, match="whole path"):
        plan(load_profile("default"), "prefill", changes={**HOST, "model": "./m"}, **ask)


def test_a_spec_without_anything_new_renders_as_before() -> None:
    spec = make(kv_events_port=0, prefix_caching=None).spec
    bare = replace(
        spec, prefix_caching=None, prefix_hash_algo=None, hash_seed=None, shutdown_timeout_s=0, kv_events_replay_port=None
    )
    assert [part for part in command(bare).argv if part.startswith("--")] == [
        "--served-model-name",
        "--host",
        "--port",
        "--block-size",
        "--kv-transfer-config",
        "--enable-prompt-tokens-details",
        "--disable-access-log-for-endpoints",
    ]
