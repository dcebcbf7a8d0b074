"""``baton plan roofline``: published ridge points, intensities by hand, and times against the twin that simulates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.plan.engines import Engine, engine
from extproc.plan.errors import PlanError
from extproc.plan.gpus import GPUS, gpu
from extproc.plan.lengths import fixed
from extproc.plan.question import Question
from extproc.plan.roofline import Assumed, clash, decode, prefill, ridges, roofline
from extproc.plan.shapes import shape_of
from extproc.plan.simulate import Slos
from extproc.plan.workload import Workload
from workers.sim.twin import Done, TwinConfig, TwinEngine

ASSUMED = Assumed(prefill_efficiency=0.45, decode_efficiency=0.6, tp_efficiency=1.0, step_overhead_s=0.002)


def worker(model: str = "llama-3.3-70b", gpus: int = 4, on: str = "h100-sxm", dtype: str = "bf16", **more: float) -> Engine:
    return engine(shape_of(model), gpu(on), tensor_parallel=gpus, weight_dtype=dtype, kv_dtype="auto", **more)


def test_the_ridge_point_of_an_h100_is_295_flop_a_byte_in_bf16_and_twice_that_in_fp8() -> None:
    found = {each.dtype: each for each in ridges([gpu("h100-sxm")])}
    assert (found["bf16"].flops_a_s, found["bf16"].memory_bytes_a_s) == (989e12, 3.35e12)
    assert round(found["bf16"].flop_per_byte) == 295
    assert round(found["fp8"].flop_per_byte) == 591


def test_published_ridge_points_of_other_gpus() -> None:
    found = {(each.gpu, each.dtype): each.flop_per_byte for each in ridges(list(GPUS.values()))}
    assert found["a100-80gb", "bf16"] == pytest.approx(153, abs=0.5)
    assert found["h200-sxm", "bf16"] == pytest.approx(206, abs=0.5)


def test_intensity_of_a_decode_step_is_about_its_batch_in_bf16_until_the_kv_counts() -> None:
    """Two operations for each weight of two bytes, a sequence; by hand with the KV of 8,192 tokens."""
    made = worker()
    assert decode(made, 1, 1).flop_per_byte == pytest.approx(1, rel=0.001)
    assert decode(made, 32, 1).flop_per_byte == pytest.approx(32, rel=0.001)
    weights = 70_553_706_496
    assert decode(made, 32, 8192).flop_per_byte == pytest.approx(2 * weights * 32 / (2 * weights + 32 * 8192 * 327_680))
    assert decode(worker(dtype="fp8"), 32, 1).flop_per_byte == pytest.approx(64, rel=0.001), "half of the bytes"


def test_intensity_of_a_prefill_is_its_tokens_and_attention_on_top() -> None:
    found = prefill(worker(), 1000)
    weights, attention = 2 * 70_553_706_496 * 1000, 4 * 80 * 8192 * 1000**2 / 2
    assert found.flops == pytest.approx(weights + attention)
    assert found.flop_per_byte == pytest.approx((weights + attention) / (2 * 70_553_706_496))


def test_prefill_is_limited_by_compute_and_decode_by_memory_and_where_that_turns() -> None:
    made = worker()
    found = roofline(made, gpu("h100"), worker="", assumed=ASSUMED, prompts=[128, 1024], batches=[1, 128], contexts=[1024])
    assert [each.bound for each in found.points] == ["memory", "compute", "memory", "memory"]
    turn = found.compute_bound_prefill_tokens
    assert (prefill(made, turn - 1).bound, prefill(made, turn).bound) == ("memory", "compute")
    # By hand, without attention's small part: weights' seconds over a token's.
    assert turn == pytest.approx(989e12 * 0.45 / (3.35e12 * 0.60), rel=0.01)


@pytest.mark.parametrize("tokens", [100, 5000, 30_000])
def test_a_prefill_takes_as_long_as_in_the_twin(tokens: int) -> None:
    made = worker()
    twin = TwinEngine("one", TwinConfig(num_blocks=4900, max_num_batched_tokens=8192), made.profile)
    twin.submit_whole("prompt", [], tokens, 1, 0.0)
    (done,) = [event for event in twin.advance(1e9) if isinstance(event, Done)]
    assert done.first_token_s == pytest.approx(prefill(made, tokens).time_s, rel=1e-6)


@pytest.mark.parametrize(("batch", "context_tokens"), [(1, 2000), (16, 8000)])
def test_a_decode_step_takes_as_long_as_in_the_twin(batch: int, context_tokens: int) -> None:
    """The first step in which all sequences decode; each has one token more than its prompt by then."""
    made = worker()
    twin = TwinEngine("one", TwinConfig(num_blocks=4900, max_num_batched_tokens=1 << 18), made.profile)
    for number in range(batch):
        twin.submit_whole(str(number), [], context_tokens, 2, 0.0)
    done = [event for event in twin.advance(1e9) if isinstance(event, Done)]
    assert len(done) == batch
    step_s = max(event.at_s for event in done) - max(event.first_token_s for event in done)
    assert step_s == pytest.approx(decode(made, batch, context_tokens).time_s, rel=2e-3)


def test_a_prefill_in_the_same_step_makes_all_streams_wait() -> None:
    found = clash(worker(), 32, 8192, 8192)
    assert found.alone_s == decode(worker(), 32, 8192).time_s
    assert found.shared_s > 10 * found.alone_s
    assert found.shared_s >= prefill(worker(), 8192).time_s


def test_plan_ratio_computes_with_the_same_engine() -> None:
    """Same model, GPU and parallelism, nothing but defaults: the profile that `plan ratio` simulates is the one shown here."""
    shape = shape_of("llama-3.3-70b")
    slos = Slos(ttft_s=2.5, itl_s=0.045)
    workload = Workload(inputs=fixed(4096), outputs=fixed(500))
    asked = Question(shape=shape, gpu=gpu("h200"), gpus=16, workload=workload, slos=slos).engine(4, "auto", 8192, 8192)
    code, out, _ = baton("--model", "llama-3.3-70b", "--gpu", "h200", "--tp", "4", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["kv_tokens"] == asked.kv_tokens
    for point in shown["points"]:
        again = (
            prefill(asked, point["context_tokens"], chunk_tokens=8192)
            if point["what"] == "prefill"
            else decode(asked, point["batch"], point["context_tokens"])
        )
        assert point["time_s"] == pytest.approx(again.time_s)


def test_what_does_not_fit_into_the_cache_is_said() -> None:
    made = worker()
    assert decode(made, 1, made.kv_tokens).fits and not decode(made, 1, made.kv_tokens + 1).fits


def test_small_chunks_make_a_prefill_slower_and_decode_not() -> None:
    small, large = worker(step_tokens=512), worker()
    assert prefill(small, 512).time_s - 0.002 == pytest.approx((1 + 128 / 512) * (prefill(large, 512).time_s - 0.002))
    assert decode(small, 8, 8192).time_s == decode(large, 8, 8192).time_s


def test_lower_efficiencies_make_it_slower_by_as_much() -> None:
    half = worker(prefill_efficiency=0.225, decode_efficiency=0.3, step_overhead_s=0.0)
    full = worker(step_overhead_s=0.0)
    assert prefill(half, 8192).time_s == pytest.approx(2 * prefill(full, 8192).time_s)
    assert decode(half, 8, 8192).time_s == pytest.approx(2 * decode(full, 8, 8192).time_s)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(PlanError, match="in chunks of 1 are more than 100,000 steps"):
        prefill(worker(), 100_001, chunk_tokens=1)
    for ask in (lambda: prefill(worker(), 0), lambda: decode(worker(), 0, 10), lambda: decode(worker(), 1, 0)):
        with pytest.raises(PlanError, match=r"at least 1 and at most 1,000,000,000,000, not 0"):
            ask()


def baton(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", "roofline", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_without_a_model_it_prints_the_ridge_points_and_warns_of_the_mistaken_name() -> None:
    code, out, _ = baton()
    assert code == 0 and all(name in out for name in GPUS)
    assert "Some guides call the 295 of h100-sxm its FP8 ridge point. It is BF16's; FP8's is 591." in out


def test_json_and_a_picture_come_from_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    code, out, err = baton("--model", "llama-3.1-8b", "--gpu", "l40s", "--json", "--picture", str(path))
    found = json.loads(out)
    assert code == 0 and f"wrote {path}" in err and path.read_text().startswith("<?xml")
    assert found["worker"] == "llama-3.1-8b, bf16 weights, bfloat16 KV, on 1 x l40s"
    assert {point["what"] for point in found["points"]} == {"prefill", "decode"}
    assert found["assumed"]["decode_efficiency"] == 0.6


def test_a_model_with_windows_is_as_good_as_its_context() -> None:
    """Gemma's decode at 32,768 tokens reads the windows only, which `--context` decides."""
    _, short, _ = baton("--model", "gemma-3-27b", "--context", "1024", "--batch", "8", "--json")
    _, long, _ = baton("--model", "gemma-3-27b", "--context", "32768", "--batch", "8", "--json")
    assert json.loads(short)["kv_bytes_per_token"] == 507_904
    assert json.loads(long)["kv_bytes_per_token"] == 95_232


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h1"], "the GPU 'h1' is not known; known are a100-40gb"),
        (["--model", "llama-3.3-70b", "--weight-dtype", "fp3"], "the weight dtype 'fp3' is not known; known are awq"),
        (["--model", "llama-3.3-70b", "--tp", "1"], "use more GPUs a worker or a smaller weight dtype"),
        (["--model", "llama-3.3-70b", "--prompt", "0"], "tokens: at least 1 and at most 1,000,000,000,000, not 0"),
        (["--model", "llama-3.3-70b", "--batch", "-1"], "batch: at least 1 and at most 1,000,000,000,000, not -1"),
        (["--model", "llama-3.3-70b", "--context", "0"], "context tokens: at least 1, not 0"),
        (["--model", "llama-3.3-70b", "--context", "9" * 399, "--tp", "4"], "not 999,"),
        (["--model", "llama-3.3-70b", "--parameters", "inf"], "make no sense"),
        (["--model", "llama-3.3-70b", "--prefill-efficiency", "nan"], "prefill efficiency: above 0 and at most 1, not nan"),
        (["--model", "llama-3.3-70b", "--chunk-tokens", "0"], "tokens of a step: at least 1, not 0"),
        (["--model", "llama-3.3-70b", "--picture", "roofline.pdf"], "ends with .svg or .png"),
        (["--picture", "roofline.svg"], "--picture needs a --model"),
        (["--model", "llama-3.3-70b", "--picture", "/nowhere/at/all/roofline.svg"], "No such file or directory"),
    ],
)
def test_bad_input_ends_with_one_line_that_says_what_is_wrong(arguments, said) -> None:
    code, _, err = baton(*arguments)
    assert code == 1
    assert err.startswith("baton: ") and said in err and "Traceback" not in err
