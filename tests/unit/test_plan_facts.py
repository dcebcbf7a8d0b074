"""Facts of planning: GPUs, links and models against what is published of them, and what is said of names nobody knows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from extproc.plan.dtypes import WEIGHT_BYTES, weight_dtype
from extproc.plan.engines import engine, fewest_gpus
from extproc.plan.errors import PlanError
from extproc.plan.gpus import GPUS, gpu
from extproc.plan.links import LINKS, link
from extproc.plan.parameters import attention_width, count, routed
from extproc.plan.shapes import kv_copies, model_names, shape_of
from workers.sim.timing import Profile

LLAMA = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_each_gpu_and_link_says_where_its_numbers_come_from_and_is_plausible() -> None:
    for each in GPUS.values():
        assert each.source and each.price_usd_a_hour > 0
        assert 20e9 <= each.memory_bytes <= 300e9 and 0.2e12 <= each.memory_bytes_a_s <= 10e12
        assert each.dense_flops_a_s["bf16"] > 0
        if "fp8" in each.dense_flops_a_s:  # tensor cores do twice as many of half the bits
            assert each.dense_flops_a_s["fp8"] == pytest.approx(2 * each.dense_flops_a_s["bf16"], rel=0.02)
    for line in LINKS.values():
        assert line.source and 0 < line.efficiency < 1 and line.bytes_a_s < line.peak_bytes_a_s


def test_weights_in_a_format_that_a_gpu_does_not_multiply_are_small_but_no_faster() -> None:
    a100, h100 = gpu("a100"), gpu("h100")
    assert (a100.compute_dtype("fp8"), a100.flops_a_s("fp8")) == ("bf16", 312e12)
    assert (h100.compute_dtype("nvfp4"), h100.compute_dtype("fp8_e4m3")) == ("bf16", "fp8")
    assert gpu("b200").flops_a_s("fp4") == 9e15


def test_names_may_be_short_or_spelt_otherwise() -> None:
    assert gpu("H200") is GPUS["h200-sxm"] and gpu("H100_SXM") is GPUS["h100-sxm"]
    assert link("IB_400") is LINKS["ib-400"]
    assert (weight_dtype("bfloat16"), weight_dtype("torch.float16"), weight_dtype("FP8_e4m3")) == ("bf16", "bf16", "fp8")
    assert shape_of("meta-llama/Llama-3.3-70B-Instruct").name == "llama-3.3-70b"
    assert shape_of("deepseek-r1-0528").name == "deepseek-v3"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: gpu("tpu"), ("the GPU 'tpu'", "h100-sxm", "mi300x")),
        (lambda: link("pigeon"), ("the link 'pigeon'", "eth-25", "nvlink-4")),
        (lambda: weight_dtype("fp3"), ("the weight dtype 'fp3'", "bf16", "fp8")),
        (lambda: shape_of("gpt-5"), ("the model 'gpt-5'", "llama-3.3-70b", "no such file")),
    ],
)
def test_an_unknown_name_gets_the_list_of_those_that_are_known(ask, said) -> None:
    with pytest.raises(PlanError) as raised:
        ask()
    assert [text for text in said if text not in str(raised.value)] == []


def test_parameters_counted_from_config_json_are_those_of_the_model_cards() -> None:
    uncounted = []
    for name in model_names():
        shape = shape_of(name)
        try:
            counted = count(shape.config)
        except ValueError:
            uncounted.append(name)
            continue
        assert counted.total == pytest.approx(shape.parameters, rel=0.002), name
        if not name.startswith("gpt-oss"):  # its card leaves the embedding out, which is much of it
            assert counted.active == pytest.approx(shape.active_parameters, rel=0.03), name
    assert uncounted == ["jamba-v0.1", "qwen3-next-80b-a3b"]


def test_a_file_or_a_folder_is_a_model_too_and_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = shape_of(str(folder)), shape_of(str(folder / "config.json"))
    assert by_folder == by_file and by_folder.name == "my-llama"
    assert by_folder.parameters == pytest.approx(70.55e9, rel=0.001)
    assert shape_of(str(folder), parameters=70e9).active_parameters == 70e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json: Input data was truncated"),
        ("\udcff", "config.json: "),
        ("[1]", "config.json: a JSON object is needed"),
        (json.dumps({**LLAMA, "num_hidden_layers": "many"}), "num_hidden_layers must be a whole number"),
        (json.dumps({key: value for key, value in LLAMA.items() if key != "vocab_size"}), "vocab_size is missing"),
        (json.dumps({**LLAMA, "layer_types": ["mamba"] * 80}), "give the number of parameters"),
        (json.dumps({**LLAMA, "num_experts": 8, "moe_intermediate_size": 4096}), "num_experts_per_tok or "),
        (json.dumps({**LLAMA, "num_experts": 8, "mlp_only_layers": 3}), "mlp_only_layers must be a list, not 3"),
        (json.dumps({**LLAMA, "num_experts": 8, "first_k_dense_replace": "two"}), "first_k_dense_replace must be a whole"),
    ],
)
def test_a_broken_config_json_is_said_with_its_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanError) as raised:
        shape_of(str(tmp_path))
    assert said in str(raised.value)
    assert tmp_path.name in str(raised.value)


def test_what_is_said_of_parameters_must_make_sense() -> None:
    assert shape_of("jamba-v0.1", parameters=52e9, active_parameters=12e9).active_parameters == 12e9
    for total, active in ((10e9, 11e9), (0.0, None), (1e9, None)):
        with pytest.raises(PlanError, match="make no sense"):
            shape_of("mixtral-8x7b", parameters=total, active_parameters=active)


def test_gpus_that_share_a_head_have_copies_of_its_kv() -> None:
    llama = shape_of("llama-3.3-70b")
    assert [llama.kv_copies(gpus) for gpus in (1, 2, 8, 16)] == [1, 1, 1, 2]
    assert [shape_of("deepseek-v3").kv_copies(gpus) for gpus in (1, 8)] == [1, 8]
    assert kv_copies("falcon-7b", {**shape_of("falcon-7b").config, "num_attention_heads": 72}, 4) == 4
    for gpus, said in ((0, "at least 1, not 0"), (3, "64 attention heads cannot be shared out to 3")):
        with pytest.raises(PlanError, match=said):
            llama.kv_copies(gpus)


def test_the_engine_of_the_simulated_workers_is_one_of_ours() -> None:
    """Two H200, a 70B model in FP8, a BF16 cache: the twin's own profile, which rounds the parameters, and its transfers."""
    ours = asdict(
        engine(shape_of("llama-3.3-70b"), gpu("h200"), tensor_parallel=2, weight_dtype="fp8", kv_dtype="auto").profile
    )
    theirs = asdict(Profile())
    for name in ("parameters", "weight_bytes"):
        assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=0.001)
    assert (ours.pop("transfer_bytes_a_s"), theirs.pop("transfer_bytes_a_s")) == (90e9, 80e9)
    assert (ours.pop("attention_apart"), theirs.pop("attention_apart")) == (True, False)
    assert ours == theirs


def test_the_kv_cache_of_an_engine_is_the_memory_that_weights_leave() -> None:
    shape, each = shape_of("llama-3.3-70b"), gpu("h200")
    made = engine(shape, each, tensor_parallel=4, weight_dtype="bf16", kv_dtype="fp8")
    assert made.kv_tokens == int((4 * 141e9 * 0.85 - 2 * shape.parameters) / 163_840)
    # `baton worker profiles llama-3.3-70b-h200` says 2,090,454 with 6 GB a GPU for other things, where this takes 7.
    assert made.kv_tokens == pytest.approx(2_090_454, rel=0.02)


def test_a_vector_that_is_whole_on_every_gpu_takes_room_and_reading_on_every_gpu() -> None:
    made = engine(shape_of("deepseek-v3"), gpu("h200"), tensor_parallel=8, weight_dtype="auto", kv_dtype="auto")
    assert (made.profile.kv_bytes_a_token, made.profile.kv_copies) == (70_272, 8)
    assert made.kv_tokens == int((8 * 141e9 * 0.85 - 671e9) / (8 * 70_272))
    read = made.profile.step_bytes(tokens=1000, decode_context_tokens=10) - made.profile.step_bytes(
        tokens=1000, decode_context_tokens=0
    )
    assert read == pytest.approx(10 * 8 * 70_272)
    one_port = made.profile.transfer_s(8192) - made.profile.transfer_s(0)
    assert one_port == pytest.approx(8192 * 70_272 / 45e9), "each GPU gets all of it over its own port"


def test_a_small_batch_reads_a_few_experts_and_a_large_one_all() -> None:
    shape = shape_of("gpt-oss-120b")
    assert routed(shape.config).share == 4 / 128
    profile = engine(shape, gpu("h200"), tensor_parallel=2, weight_dtype="bf16", kv_dtype="auto").profile
    one = profile.step_bytes(tokens=1, decode_context_tokens=0)
    # All active weights, and the embedding, which the card does not count as active.
    assert one == pytest.approx(2 * (5.13e9 + 201_088 * 2880), rel=0.02)
    assert profile.step_bytes(tokens=1000, decode_context_tokens=0) == pytest.approx(2 * 116.83e9, rel=0.001)
    # By hand: two of 128 that are drawn 4 at a time leave (124 / 128)^2 untouched.
    untouched = 2 * routed(shape.config).parameters * (124 / 128) ** 2
    assert profile.step_bytes(tokens=2, decode_context_tokens=0) == pytest.approx(2 * 116.83e9 - untouched, rel=1e-6)


def test_windows_make_attention_cheaper_in_prefill_and_heads_need_not_be_as_wide_as_the_model() -> None:
    gemma = shape_of("gemma-3-27b")
    assert gemma.prefill_layers(None) == 62
    share = 1024 / 32768
    assert gemma.prefill_layers(32768) == pytest.approx(10 + 52 * (2 * share - share**2))
    # Counted token by token for a small window: pairs that are looked at, of all of them.
    tokens, window = 1000, 100
    pairs = sum(min(at + 0.5, window) for at in range(tokens)) / (tokens**2 / 2)
    assert pairs == pytest.approx(2 * window / tokens - (window / tokens) ** 2, rel=1e-9)
    assert attention_width(shape_of("qwen3-32b").config) == 64 * 128 != shape_of("qwen3-32b").hidden
    assert attention_width(shape_of("deepseek-v3").config) == 128 * (192 + 128) / 2


def test_what_does_not_fit_is_said_with_numbers_and_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"141.1 GB of weights, and the usable 85% of 1 x h100-sxm are 68.0 GB; use more GPUs"):
        engine(shape_of("llama-3.3-70b"), gpu("h100"), tensor_parallel=1, weight_dtype="bf16", kv_dtype="auto")
    small = {"weight_dtype": "bf16", "kv_dtype": "auto"}
    assert fewest_gpus(shape_of("llama-3.3-70b"), gpu("h100"), **small) == 4
    assert fewest_gpus(shape_of("llama-3.3-70b"), gpu("h100"), **small, hold_tokens=400_000) == 8
    with pytest.raises(PlanError, match="tokens of KV, and not 100,000,000"):
        fewest_gpus(shape_of("llama-3.3-70b"), gpu("h100"), **small, hold_tokens=100_000_000)
    with pytest.raises(PlanError, match="the usable 85% of 16 x l4 are"):
        fewest_gpus(shape_of("kimi-k2"), gpu("l4"), weight_dtype="fp8", kv_dtype="auto")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefill_efficiency": 0.0}, "prefill efficiency: above 0 and at most 1, not 0"),
        ({"decode_efficiency": 1.2}, "decode efficiency: above 0 and at most 1, not 1.2"),
        ({"tp_efficiency": float("nan")}, "tp efficiency"),
        ({"step_overhead_s": -1.0}, "step overhead: from 0 to 1 s, not -1 s"),
        ({"memory_utilization": 0.01}, "memory utilization"),
        ({"kv_dtype": "fp7"}, "KV dtype 'fp7' is not known; known are auto, fp8"),
        ({"weight_dtype": "fp7"}, "the weight dtype 'fp7' is not known"),
    ],
)
def test_assumptions_that_cannot_be_are_refused(given, said) -> None:
    asked = {"tensor_parallel": 8, "weight_dtype": "bf16", "kv_dtype": "auto", **given}
    with pytest.raises(PlanError) as raised:
        engine(shape_of("llama-3.3-70b"), gpu("h200"), **asked)
    assert said in str(raised.value)


def test_gpus_of_a_worker_cost_a_share_of_what_they_do() -> None:
    made = {
        gpus: engine(
            shape_of("llama-3.1-8b"), gpu("h100"), tensor_parallel=gpus, weight_dtype="bf16", kv_dtype="auto", tp_efficiency=0.9
        ).profile
        for gpus in (1, 2, 4)
    }
    assert made[4].flops_a_s == pytest.approx(4 * 0.81 * made[1].flops_a_s)
    assert made[2].memory_bytes_a_s == pytest.approx(2 * 0.9 * made[1].memory_bytes_a_s)


def test_a_port_for_each_gpu_moves_more_and_a_shared_one_does_not() -> None:
    assert link("ib-400").worker_bytes_a_s(4) == pytest.approx(180e9)
    assert link("eth-100").worker_bytes_a_s(4) == link("eth-100").bytes_a_s
    assert link("ib-400").transfer_s(45e9, gpus=2) == pytest.approx(0.5 + link("ib-400").overhead_s)
    with pytest.raises(PlanError, match="at least 1, not 0"):
        link("ib-400").worker_bytes_a_s(0)


@pytest.mark.parametrize(
    ("quantisation", "dtype"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "int"}}}}, "int8"),
        ({"quant_method": "something new"}, "bf16"),
    ],
)
def test_weights_are_taken_as_they_come(tmp_path: Path, quantisation, dtype) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantisation}))
    shape = shape_of(str(tmp_path))
    assert shape.weight_dtype("auto") == dtype
    assert shape.weight_dtype("fp8") == "fp8"
    assert shape.weight_bytes("auto") == shape.weight_bytes(dtype)


def test_published_sizes_of_weights_that_come_quantised() -> None:
    assert shape_of("deepseek-v3").weight_bytes("auto") == pytest.approx(671e9)
    assert shape_of("gpt-oss-120b").weight_bytes("auto") == pytest.approx(65.2e9, rel=0.02), "its repository's 65.2 GB"


def test_every_weight_dtype_has_a_size() -> None:
    shape = shape_of("llama-3.1-8b")
    assert {dtype: shape.weight_bytes(dtype) / shape.parameters for dtype in WEIGHT_BYTES} == WEIGHT_BYTES
