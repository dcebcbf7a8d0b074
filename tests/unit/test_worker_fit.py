"""`baton worker check`: every rule has an example that breaks it, and one that does not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.cli import app
from workers import fit
from workers.profile import Hardware, ModelFacts, Profile, worker_spec

FACTS = ModelFacts(weights_gb=10, layers=10, kv_heads=8, head_dim=128)
HYBRID = msgspec.structs.replace(FACTS, hybrid=True)
MLA = msgspec.structs.replace(FACTS, mla=True)


def side(
    role: Any, facts: ModelFacts | None = None, *, version: str = "0.32.0", gpu_gb: float = 80, **changes: Any
) -> fit.Side:
    profile = Profile(
        title="t",
        model="m",
        vllm_version=version,
        sources=("s",),
        facts=facts or FACTS,
        hardware=Hardware(gpu="G", memory_gb=gpu_gb),
    )
    return fit.Side(name=role, profile=profile, spec=worker_spec(profile, role, None, changes))


def rules(prefill: fit.Side, decode: fit.Side) -> dict[str, str]:
    return {each.rule: each.severity.value for each in fit.misfits(prefill, decode)}


def transfer(connector: str, role: str, *children: str) -> dict[str, Any]:
    extra = {"connectors": [{"kv_connector": child, "kv_role": role} for child in children]} if children else {}
    return {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }


LMCACHE_V1 = transfer("MultiConnector", "kv_producer", "NixlConnector", "LMCacheConnectorV1")

# rule, severity, the model, what the prefill worker has, what the decode worker has
WRONG: list[tuple[str, str, ModelFacts, dict[str, Any], dict[str, Any]]] = [
    ("model", "error", FACTS, {"model": "/models/m"}, {}),
    ("vllm-version", "error", FACTS, {"version": "0.31.0"}, {}),
    ("kv-dtype", "error", FACTS, {"kv_cache_dtype": "fp8"}, {}),
    ("kv-dtype", "error", FACTS, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
    ("dtype", "error", FACTS, {"dtype": "float16"}, {}),
    ("attention-backend", "error", FACTS, {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "FLASHINFER"}),
    ("device", "error", FACTS, {}, {"device": "cpu"}),
    ("transfer-mode", "error", FACTS, {"transfer_config": transfer("NixlPushConnector", "kv_producer")}, {}),
    ("speculative", "error", FACTS, {}, {"speculative": {"method": "eagle3", "model": "d"}, "max_num_seqs": 8}),
    ("hma", "error", FACTS, {"transfer_config": LMCACHE_V1}, {}),
    ("hma", "error", FACTS, {"hybrid_kv_cache_manager": False}, {}),
    ("host-cache", "warn", FACTS, {"host_cache_gib": 1.0}, {}),
    ("kv-role", "error", FACTS, {"transfer_config": transfer("NixlConnector", "kv_consumer")}, {}),
    (
        "connector",
        "error",
        FACTS,
        {"transfer_config": transfer("OffloadingConnector", "kv_producer")},
        {"transfer_config": transfer("OffloadingConnector", "kv_consumer")},
    ),
    ("block-size", "error", FACTS, {"block_size_tokens": 64}, {"block_size_tokens": 96}),
    ("block-size", "error", HYBRID, {"block_size_tokens": 64}, {"block_size_tokens": 128}),
    ("block-size", "info", FACTS, {"block_size_tokens": 64}, {"block_size_tokens": 128}),
    ("tp-divides", "error", FACTS, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 6}),
    ("tp-replicated", "error", FACTS, {"tensor_parallel_size": 16}, {"tensor_parallel_size": 8}),
    (
        "layout-tp",
        "error",
        FACTS,
        {"tensor_parallel_size": 4, "kv_cache_layout": "NHD"},
        {"tensor_parallel_size": 2, "kv_cache_layout": "NHD"},
    ),
    ("layout", "error", FACTS, {"kv_cache_layout": "NHD"}, {}),
    ("pipeline", "error", FACTS, {}, {"extra_args": ("--pipeline-parallel-size", "2")}),
    ("pipeline", "error", FACTS, {"extra_args": ("-pp=2",)}, {}),
    ("dcp", "error", FACTS, {}, {"extra_args": ("--decode-context-parallel-size", "2"), "tensor_parallel_size": 2}),
    ("dcp", "error", MLA, {}, {"extra_args": ("-dcp", "2"), "tensor_parallel_size": 4}),
    ("command", "error", FACTS, {"kv_events_port": 5600}, {}),
    ("command", "error", FACTS, {}, {"extra_args": ("--speculative-model", "d")}),
    ("command", "error", FACTS, {"env": (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)}, {}),
    ("command", "error", FACTS, {"transfer_config": transfer("PyNcclConnector", "kv_producer")}, {}),
    ("served-name", "error", FACTS, {"served_model_name": "a"}, {"served_model_name": "b"}),
    ("speculative-batch", "warn", FACTS, {}, {"speculative": {"method": "ngram"}, "max_num_seqs": 256}),
    ("speculative-batch", "warn", FACTS, {}, {"speculative": {"method": "ngram"}}),
    ("speculative-hybrid", "warn", HYBRID, {}, {"speculative": {"method": "ngram"}, "max_num_seqs": 8}),
    ("load-failure", "info", FACTS, {}, {"kv_load_failure_policy": "fail"}),
    ("load-failure-hybrid", "warn", HYBRID, {}, {}),
    ("lease", "warn", FACTS, {"kv_lease_s": 30}, {}),
    ("next-turn-one-side", "error", FACTS, {}, {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl_s": 60}),
    ("next-turn-one-side", "warn", FACTS, {"bidirectional_kv_xfer": True}, {}),
    ("next-turn-ttl", "info", FACTS, {"bidirectional_kv_xfer": True}, {"bidirectional_kv_xfer": True}),
    ("next-turn-hybrid", "warn", HYBRID, {"bidirectional_kv_xfer": True}, {"bidirectional_kv_xfer": True}),
    ("prefix-caching", "warn", FACTS, {}, {"prefix_caching": False}),
    ("block-hash", "warn", FACTS, {"hash_seed": 1}, {}),
    ("block-hash", "warn", FACTS, {"prefix_hash_algo": "sha256"}, {}),
    ("eager", "warn", FACTS, {}, {"enforce_eager": True}),
    ("max-model-len", "warn", FACTS, {"max_model_len_tokens": 4096}, {"max_model_len_tokens": 8192}),
    ("quantization", "warn", FACTS, {"quantization": "fp8"}, {}),
    ("queue-limit", "warn", FACTS, {}, {"max_num_seqs": 64, "max_num_queued_reqs": 32}),
    ("step-size", "error", FACTS, {}, {"max_num_seqs": 64, "max_num_batched_tokens": 32}),
    ("same-gpu", "warn", FACTS, {"device_ids": (0, 1), "tensor_parallel_size": 2}, {"device_ids": (1,)}),
    ("same-port", "warn", FACTS, {"device_ids": (0,)}, {"device_ids": (1,), "side_channel_port": 5600}),
    ("memory", "error", FACTS, {"gpu_gb": 16}, {}),
    ("memory", "error", FACTS, {}, {"max_model_len_tokens": 10_000_000}),
]


@pytest.mark.parametrize(("rule", "severity", "facts", "prefill", "decode"), WRONG)
def test_a_wrong_pair_is_found(rule: str, severity: str, facts: ModelFacts, prefill: Any, decode: Any) -> None:
    assert rules(side("prefill", facts, **prefill), side("decode", facts, **decode)).get(rule) == severity


def test_the_seed_of_a_random_hash_is_asked_for() -> None:
    p, d = (side(role, prefix_hash_algo="xxhash") for role in ("prefill", "decode"))
    assert "block-hash-seed" not in rules(p, d), "both have the seed of the role's defaults"
    unseeded = [changed(each, hash_seed=None) for each in (p, d)]
    assert rules(*unseeded)["block-hash-seed"] == "warn"


def changed(given: fit.Side, **changes: Any) -> fit.Side:
    """The side with fields of its worker changed, None included."""
    return replace(given, spec=replace(given.spec, **changes))


@pytest.mark.parametrize(
    ("facts", "prefill", "decode"),
    [
        (FACTS, {}, {}),
        (FACTS, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}),
        (FACTS, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 16}),  # decode reads a head that it then has twice
        (MLA, {"tensor_parallel_size": 16}, {"tensor_parallel_size": 1}),  # nothing is cut, so nothing is there twice
        (MLA, {"kv_cache_layout": "NHD"}, {}),
        (FACTS, {"device_ids": (0,)}, {"device_ids": (1,)}),
        (FACTS, {"kv_cache_layout": "HND"}, {"kv_cache_layout": "LBHNC"}),  # two names of the same
        (FACTS, {"cache_server": "10.0.0.9:5555"}, {}),  # LMCacheMPConnector leaves the hybrid manager on
        (FACTS, {"speculative": {"method": "ngram"}}, {"speculative": {"method": "ngram"}, "max_num_seqs": 8}),
        (FACTS, {}, {"speculative": {"method": "ngram"}, "max_num_seqs": 8}),  # has no KV of its own
    ],
)
def test_a_pair_that_works_is_let_through(facts: ModelFacts, prefill: Any, decode: Any) -> None:
    assert rules(side("prefill", facts, **prefill), side("decode", facts, **decode)) == {}


def test_every_finding_says_why_where_from_and_what_to_do() -> None:
    for _, _, facts, prefill, decode in WRONG:
        for each in fit.misfits(side("prefill", facts, **prefill), side("decode", facts, **decode)):
            assert each.why
            assert each.source
            assert each.fix


def test_the_worst_comes_first_and_sets_the_exit_status() -> None:
    warned = fit.misfits(side("prefill", kv_lease_s=30), side("decode"))
    broken = fit.misfits(side("prefill", kv_lease_s=30, kv_cache_dtype="fp8"), side("decode"))
    assert [each.rule for each in broken] == ["kv-dtype", "lease"]
    assert (fit.exit_status([]), fit.exit_status(warned), fit.exit_status(warned, strict=True)) == (0, 0, 1)
    assert fit.exit_status(broken) == 2


def test_every_rule_has_a_wrong_example_and_a_line_in_the_docs() -> None:
    repository = Path(__file__).parents[2]
    code = "".join(file.read_text() for file in (repository / "workers/fit").glob("*.py"))
    # A rule's name is the first argument of what makes a finding.
    made = re.findall(r"(?:misfit|_differs)\(\s*\"([a-z-]+)\"|rule=\"([a-z-]+)\"", code)
    known = {first or second for first, second in made}
    assert known == {rule for rule, *_ in WRONG} | {"block-hash-seed"}
    table = (repository / "docs/workers.md").read_text().rpartition("| rule |")[2]
    assert set(re.findall(r"`([a-z-]+)`", table.replace("`fail`", ""))) >= known


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["worker", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_compares_a_profile_with_itself_for_every_way_to_decode() -> None:
    status, output = run("check", "llama-3.3-70b-h200")
    assert status == 0
    assert "llama-3.3-70b-h200:prefill -> llama-3.3-70b-h200:tp4: everything fits" in output


def test_the_command_shows_what_does_not_fit_and_exits_by_it() -> None:
    status, output = run("check", "llama-3.3-70b-h100", "llama-3.3-70b-h200:tp4")
    assert status == 2
    assert "error" in output
    assert "RedHatAI/Llama-3.3-70B-Instruct" in output
    status, output = run("check", "llama-3.3-70b-h100", "llama-3.3-70b-h200:tp4", "--json")
    (pair,) = json.loads(output)["pairs"]
    assert status == 2
    assert pair["findings"][0]["rule"] == "model"


def test_the_command_refuses_roles_in_the_wrong_place() -> None:
    status, output = run("check", "llama-3.3-70b-h100:decode", "llama-3.3-70b-h100:prefill")
    assert status == 2
    assert "a prefill worker is wanted in this place" in output


def test_the_table_of_profiles_has_all_of_them() -> None:
    status, output = run("profiles")
    assert status == 0
    for name in ("cpu-demo", "deepseek-r1-h200", "llama-3.1-8b-gpu-pair", "llama-3.3-70b-h100"):
        assert name in output
    status, output = run("profiles", "--json")
    entry = next(each for each in json.loads(output) if each["name"] == "deepseek-r1-h200")
    assert (entry["roles"]["decode"]["gpus"], entry["roles"]["dp8"]["gpus"]) == (16, 8)


def test_a_profile_in_full_says_whether_it_fits_and_what_a_handoff_takes() -> None:
    status, output = run("profiles", "llama-3.3-70b-h200")
    assert status == 0
    assert "KV cache of a token: 163,840 bytes; of 8,192 tokens: 1.34 GB, 27 ms over the link of one GPU" in output
    assert "tp4: 4 x 141 GB" in output
    assert "not run here:" in output
