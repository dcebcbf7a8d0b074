"""Profiles: what their files may say, what they render to, and whether their numbers add up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from extproc.worker_reports import memory_lines
from tests.cases.worker_commands import ADDRESS, FOLDER, all_roles, file_of, planned, rendered
from workers import fit
from workers.memory import kv_bytes_per_token, memory_of
from workers.profile import (
    ModelFacts,
    ProfileError,
    Settings,
    builtin_names,
    load_profile,
    role_of,
    worker_spec,
)
from workers.spec import WorkerSpec

MINIMAL = "title: t\nvllm_version: 0.32.0\nsources: [s]\nmodel: m\n"


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(("name", "role"), list(all_roles()))
def test_a_profile_renders_to_the_command_that_is_kept_for_it(name: str, role: str) -> None:
    kept = file_of(name, role).read_text()
    assert rendered(name, role) == kept, "if this is meant: python -m tests.cases.worker_commands"


def test_no_command_is_kept_for_a_profile_that_is_not_there() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {file_of(*each).name for each in all_roles()}


def test_every_setting_of_a_profile_is_a_field_of_the_worker() -> None:
    fields = {field.name for field in dataclasses.fields(WorkerSpec)}
    assert set(Settings.__struct_fields__) <= fields
    # And only these are said elsewhere: by the profile itself, by the flags, or by the machine.
    elsewhere = {"role", "model", "served_model_name", "device", "host", "side_channel_host", "local_model"}
    elsewhere |= {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}
    assert fields - set(Settings.__struct_fields__) == elsewhere | {"cache_server", "threads", "dev_endpoints"}


@pytest.mark.parametrize("name", builtin_names())
def test_the_comment_of_a_profile_has_the_memory_that_its_numbers_give(name: str) -> None:
    text = (Path(__file__).parents[2] / "workers/profiles" / f"{name}.yaml").read_text()
    for line in memory_lines(load_profile(name)):
        assert f"#   {line}" in text.splitlines()


@pytest.mark.parametrize("name", builtin_names())
def test_a_profile_of_ours_fits_itself(name: str) -> None:
    profile = load_profile(name)
    for role in ("decode", *profile.decode_variants):
        sides = [
            fit.Side(name=each, profile=profile, spec=worker_spec(profile, *role_of(each), {"model": profile.model or "m"}))
            for each in ("prefill", role)
        ]
        assert fit.misfits(*sides) == []


def test_a_gpu_profile_says_where_its_numbers_are_from_and_that_it_was_not_run() -> None:
    for name in builtin_names():
        profile = load_profile(name)
        assert profile.sources
        assert bool(profile.not_run_here) == (profile.device == "gpu")


def test_a_key_that_is_unknown_is_refused_with_file_line_and_field(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL + "decode:\n  max_num_seqs: 4\n  max_num_seq: 5\n")
    with pytest.raises(ProfileError) as caught:
        load_profile(file)
    assert str(caught.value) == f"{file}:7: decode.max_num_seq: unknown field; did you mean max_num_seqs?"


def test_a_value_out_of_range_is_refused_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL + "common:\n  gpu_memory_utilization: 1.5\n")
    with pytest.raises(ProfileError, match=r"p\.yaml:6: common\.gpu_memory_utilization: 1\.5"):
        load_profile(file)


def test_a_profile_without_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="say where the numbers come from"):
        load_profile(write(tmp_path, MINIMAL.replace("[s]", "[]")))


def test_a_name_that_is_no_profile_is_answered_with_those_that_are() -> None:
    with pytest.raises(ProfileError, match=r"no profile 'llama'; there are cpu-demo, .*default"):
        load_profile("llama")


def test_layers_win_in_turn_and_environment_and_extra_arguments_add_up(tmp_path: Path) -> None:
    text = MINIMAL + (
        "common: {max_num_seqs: 1, kv_lease_s: 11, env: {A: '1', B: '1'}, extra_args: [--a]}\n"
        "decode: {max_num_seqs: 2, env: {B: '2'}, extra_args: [--b]}\n"
        "decode_variants: {wide: {max_num_seqs: 3}}\n"
    )
    profile = load_profile(write(tmp_path, text))
    plain = worker_spec(profile, "decode")
    assert (plain.max_num_seqs, plain.kv_lease_s, plain.prefix_caching) == (2, 11, True)
    assert dict(plain.env) == {"A": "1", "B": "2"}
    assert plain.extra_args == ("--a", "--b")
    assert worker_spec(profile, "decode", "wide").max_num_seqs == 3
    assert worker_spec(profile, "decode", "wide", {"max_num_seqs": 4}).max_num_seqs == 4
    assert worker_spec(profile, "prefill").max_num_seqs == 1


def test_a_variant_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProfileError, match="no decode variant 'tp16' in this profile; there are: tp4"):
        worker_spec(load_profile("llama-3.3-70b-h200"), "decode", "tp16")


def test_an_event_port_of_zero_means_no_events() -> None:
    assert "--kv-events-config" not in planned("default", "decode", kv_events_port=0).command.argv


def test_roles_have_what_each_needs() -> None:
    prefill, decode = (planned("llama-3.3-70b-h100", role).spec for role in ("prefill", "decode"))
    assert (prefill.max_num_batched_tokens or 0) > 4 * (decode.max_num_batched_tokens or 0)
    assert (decode.max_num_seqs or 0) > (prefill.max_num_seqs or 0)
    assert prefill.max_num_queued_tokens is not None
    assert decode.prefix_caching is True
    assert not decode.enforce_eager
    assert decode.kv_load_failure_policy == "recompute"
    assert decode.shutdown_timeout_s > 0
    assert prefill.kv_cache_dtype == decode.kv_cache_dtype == "fp8"


def test_the_ranks_of_a_second_node_listen_on_ports_of_their_own() -> None:
    made = planned("deepseek-r1-h200", "decode")
    assert list(made.spec.ranks) == list(range(8, 16))
    assert made.spec.peer_host == ADDRESS
    events = json.loads(made.command.argv[made.command.argv.index("--kv-events-config") + 1])
    assert events["endpoint"] == "tcp://*:5580"  # vLLM adds the rank


def test_bytes_of_kv_cache_a_token() -> None:
    llama = ModelFacts(weights_gb=1, layers=80, kv_heads=8, head_dim=128)
    assert kv_bytes_per_token(llama, "fp8") == 163_840
    assert kv_bytes_per_token(llama, "auto", 4) == 81_920
    assert kv_bytes_per_token(llama, "fp8", 16) == kv_bytes_per_token(llama, "fp8", 8), "a head is never cut"
    deepseek = ModelFacts(weights_gb=1, layers=61, head_dim=576, mla=True)
    assert kv_bytes_per_token(deepseek, "auto", 8) == 70_272, "the latent vector is whole on every GPU"


def test_experts_are_spread_over_the_whole_group_and_all_else_is_not() -> None:
    profile = load_profile("deepseek-r1-h200")
    wide, narrow = (memory_of(profile, worker_spec(profile, "decode", variant)) for variant in (None, "dp8"))
    assert wide is not None
    assert narrow is not None
    assert wide.weights_gb == pytest.approx(19 + 654 / 16)
    assert narrow.weights_gb == pytest.approx(19 + 654 / 8)
