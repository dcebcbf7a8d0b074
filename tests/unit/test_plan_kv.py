"""``baton plan kv``: sizes and times against what is published, for each kind of attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.plan.errors import PlanError
from extproc.plan.kv import attention_of, plan_kv
from extproc.plan.links import LINKS, link
from extproc.plan.shapes import config_of, shape_of


def handoff_s(name: str, kv_dtype: str, tokens: int = 8192) -> float:
    """The bytes of a Llama 3.3 70B prompt over one port of the link."""
    (prompt,) = plan_kv("llama-3.3-70b", tokens=[tokens], kv_dtypes=[kv_dtype], links=[link(name)]).prompts
    return prompt.handoffs[0].move_s


def test_llama_70b_is_327680_bytes_a_token_and_8192_tokens_are_2_68_gb_which_tables_with_mixed_units_call_2_62() -> None:
    (bf16, fp8) = plan_kv("llama-3.3-70b", tokens=[8192], kv_dtypes=["auto", "fp8"], links=[link("ib-400")]).prompts
    assert bf16.bytes_per_token == 2 * 80 * 8 * 128 * 2 == 327_680
    assert bf16.size_bytes == pytest.approx(2.68e9, rel=0.002)
    assert (round(bf16.gb, 2), round(bf16.gib, 2), round(bf16.mixed_gb, 2)) == (2.68, 2.50, 2.62)
    assert (bf16.kv_dtype, fp8.kv_dtype) == ("bfloat16", "fp8")
    assert fp8.size_bytes == bf16.size_bytes / 2


def test_fp8_takes_about_29_ms_at_45_gb_a_second() -> None:
    assert link("ib-400").bytes_a_s == pytest.approx(45e9)
    assert handoff_s("ib-400", "fp8") == pytest.approx(0.0298, abs=0.0001)
    (fp8,) = plan_kv("llama-3.3-70b", tokens=[8192], kv_dtypes=["fp8"], links=[]).prompts
    assert fp8.mixed_gb / 45 == pytest.approx(0.029, abs=0.0002), "the published 29 ms, which take the mixed size"


def test_25_gigabit_ethernet_takes_most_of_a_second_for_bf16() -> None:
    assert 0.8 < handoff_s("eth-25", "bfloat16") < 1.0


def test_host_staging_is_11_gb_a_second_as_in_the_profiles_of_workers() -> None:
    assert handoff_s("pcie-staged", "fp8") == pytest.approx(0.122, abs=0.001)


def test_a_faster_link_of_a_kind_is_faster_and_rdma_beats_tcp_on_the_same_wire() -> None:
    families = ("eth-10", "eth-25", "eth-100", "eth-400"), ("roce-100", "roce-200", "roce-400"), ("nvlink-3", "nvlink-4")
    for names in families:
        rates = [LINKS[name].bytes_a_s for name in names]
        assert rates == sorted(rates)
    assert LINKS["roce-100"].bytes_a_s > LINKS["eth-100"].bytes_a_s > LINKS["tcp"].bytes_a_s > LINKS["tcp-fallback"].bytes_a_s


@pytest.mark.parametrize(
    ("model", "tokens", "size_bytes", "published"),
    [
        ("llama-3.1-405b", 1, 516_096, "GQA: 516.096 KB a token, in DeepSeek's paper on the hardware behind V3"),
        ("deepseek-v3", 1, 70_272, "MLA: 70.272 KB a token, in the same paper"),
        ("falcon-7b", 1, 2 * 32 * 1 * 64 * 2, "MQA: one head of 64 in each of 32 layers"),
        ("jamba-v0.1", 262_144, 4 * 2**30, "hybrid: 4 GB for 256K tokens, in Jamba's paper"),
        ("mixtral-8x7b", 262_144, 32 * 2**30, "GQA: 32 GB for 256K tokens, in Jamba's paper"),
        ("mistral-7b-v0.1", 131_072, 4096 * 131_072, "window: the rolling buffer of 4,096 tokens that its paper describes"),
        ("qwen3-next-80b-a3b", 1, 12 * 2 * 2 * 256 * 2, "hybrid: 12 of 48 layers have full attention"),
        ("gpt-oss-120b", 1, 36 * 2 * 8 * 64 * 2, "every layer, while the prompt is shorter than the window"),
        ("gpt-oss-120b", 131_072, 18 * 2048 * (131_072 + 128), "half of the layers have a window of 128"),
        ("gemma-3-27b", 131_072, 8192 * (10 * 131_072 + 52 * 1024), "one of six layers sees everything"),
    ],
)
def test_the_size_that_is_published_for_each_kind_of_attention(model, tokens, size_bytes, published) -> None:
    (prompt,) = plan_kv(model, tokens=[tokens], kv_dtypes=["auto"], links=[]).prompts
    assert prompt.size_bytes == pytest.approx(size_bytes, rel=1e-9), published


@pytest.mark.parametrize(
    ("model", "said", "windows"),
    [
        ("llama-3.3-70b", "80 layers with full attention; grouped-query attention: 8 of 64 heads", False),
        ("falcon-7b", "multi-query attention: 1 of 71 heads", False),
        ("deepseek-v3", "one vector of 512 + 64 for keys and values of all heads", False),
        ("gpt-oss-20b", "24 layers: 12 with full attention, 12 with a window", True),
        ("mistral-7b-v0.1", "32 layers with a window", True),
        ("jamba-v0.1", "32 layers: 4 with full attention, 28 with no KV cache of their own", False),
    ],
)
def test_what_a_model_keeps_is_said_in_words(model, said, windows) -> None:
    words, has_windows = attention_of(model, config_of(model)[1])
    assert said in words
    assert has_windows is windows


def test_a_vector_that_every_gpu_needs_whole_goes_over_the_link_as_often() -> None:
    one, eight = (
        plan_kv("deepseek-v3", tokens=[8192], kv_dtypes=["auto"], links=[link("ib-400"), link("eth-100")], gpus=gpus).prompts[0]
        for gpus in (1, 8)
    )
    assert eight.size_bytes == one.size_bytes
    assert eight.moved_bytes == 8 * one.moved_bytes
    assert eight.handoffs[0].move_s == pytest.approx(one.handoffs[0].move_s), "eight ports carry eight copies"
    assert eight.handoffs[1].move_s == pytest.approx(8 * one.handoffs[1].move_s), "one port carries all of them"


def test_heads_that_are_shared_out_go_over_the_ports_of_all_gpus() -> None:
    (four,) = plan_kv("llama-3.3-70b", tokens=[8192], kv_dtypes=["fp8"], links=[link("ib-400")], gpus=4).prompts
    assert four.moved_bytes == four.size_bytes
    assert four.handoffs[0].move_s == pytest.approx(handoff_s("ib-400", "fp8") / 4)
    assert four.handoffs[0].handoff_s == pytest.approx(four.handoffs[0].move_s + 0.002)


def test_a_length_of_no_tokens_is_refused() -> None:
    for tokens in (0, -5):
        with pytest.raises(PlanError, match=f"at least 1 and at most .*, not {tokens}"):
            plan_kv("llama-3.3-70b", tokens=[8192, tokens], kv_dtypes=["auto"], links=[])


def test_the_size_needs_no_parameters_so_that_models_that_cannot_be_counted_have_one(tmp_path: Path) -> None:
    config = {**config_of("jamba-v0.1")[1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (prompt,) = plan_kv(str(tmp_path), tokens=[100], kv_dtypes=["fp8"], links=[]).prompts
    assert prompt.bytes_per_token == shape_of("jamba-v0.1").kv_bytes_per_token("fp8") == 8192


def baton(*arguments: str) -> tuple[int, str, str]:
    """The command's exit status, and what it prints on both."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_json_has_what_the_tables_have() -> None:
    code, out, _ = baton("kv", "--model", "llama-3.3-70b", "--kv-dtype", "fp8", "--link", "ib-400", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["prompts"][0]["bytes_per_token"] == 163_840
    assert found["prompts"][0]["handoffs"][0]["move_s"] == pytest.approx(0.0298, abs=0.0001)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-5"], "the model 'gpt-5' is not known, and there is no such file; known are deepseek-v3"),
        (["--model", "llama-3.3-70b", "--link", "string"], "the link 'string' is not known; known are eth-10"),
        (["--model", "llama-3.3-70b", "--tokens", "0"], "tokens of a prompt: at least 1 and at most 1,000,000,000,000, not 0"),
        (["--model", "llama-3.3-70b", "--tokens", "9" * 399], "not 999,"),
        (["--model", "llama-3.3-70b", "--kv-dtype", "bf17"], "known are auto, fp8*"),
        (["--model", "llama-3.3-70b", "--gpus", "3"], "64 attention heads cannot be shared out to 3 GPUs"),
    ],
)
def test_bad_input_ends_with_one_line_that_says_what_is_wrong(arguments, said) -> None:
    code, out, err = baton("kv", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("baton: ") and said in err and "Traceback" not in err


def test_models_and_links_are_listed_without_a_model() -> None:
    code, out, _ = baton("kv", "--models")
    assert code == 0 and "qwen3-next-80b-a3b" in out and "70,272" in out
    code, out, _ = baton("kv", "--links")
    assert code == 0 and all(name in out for name in LINKS)
