"""What `make plan-check` wrote: made again where it is cheap, and what the page says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plan_check.__main__ import PICTURE, RESULTS, draw, predict, table
from bench.plan_check.check import cases, spread

DOCS = Path(__file__).parents[2] / "docs"
FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "key",
    [
        ("llama-3.3-70b", "h100-sxm", 2048, 128),
        ("llama-3.1-8b", "h200-sxm", 2048, 128),
        ("llama-3.1-405b", "h200-sxm", 5000, 500),
    ],
)
def test_a_prediction_comes_out_as_it_was_committed(key) -> None:
    (case,) = [each for each in cases() if (each.model, each.gpu, each.input_tokens, each.output_tokens) == key]
    (committed,) = [each for each in FOUND if each["measured_a_s"] == case.measured_a_s and each["model"] == case.model]
    assert predict(case) == committed


def test_all_published_numbers_are_in_and_one_set_of_constants_is_right_for_all_within_15_per_cent() -> None:
    assert [each["measured_a_s"] for each in FOUND] == [each.measured_a_s for each in cases()]
    assert len(FOUND) == 60
    low, middle, high = spread([each["tuned_a_s"] / each["measured_a_s"] for each in FOUND])
    assert low >= 0.85 and high <= 1.15 and middle == pytest.approx(1, abs=0.05)


def test_the_defaults_are_careful_and_alike_for_every_model_and_number_of_gpus() -> None:
    middles = [
        spread([each["default_a_s"] / each["measured_a_s"] for each in FOUND if (each["model"], each["gpu"]) == key])[1]
        for key in {(each["model"], each["gpu"]) for each in FOUND}
    ]
    assert min(middles) >= 0.67 and max(middles) <= 0.73


def test_table_and_picture_of_the_page_are_these_numbers(tmp_path: Path) -> None:
    assert table(FOUND) in (DOCS / "plan.md").read_text(encoding="utf-8")
    draw(FOUND, tmp_path / "check.svg")
    assert (tmp_path / "check.svg").read_bytes() == PICTURE.read_bytes()
