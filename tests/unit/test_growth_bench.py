"""The bench of growth: what it calls too steep."""

from __future__ import annotations

import pytest

from bench.growth.judge import Cost, Growth, steps
from bench.growth.series import Series

LINEAR = Cost(name="cpu", unit="ms", expected=Growth.LINEAR, floor=1.0)
FLAT = Cost(name="latency", unit="ms", expected=Growth.FLAT, floor=1.0)


@pytest.mark.parametrize(
    ("cost", "values", "steep"),
    [
        (LINEAR, {10: 10, 100: 100, 1000: 1000}, []),
        (LINEAR, {10: 10, 100: 10, 1000: 12}, []),
        (LINEAR, {10: 10, 100: 100, 1000: 10_000}, [1000]),
        (LINEAR, {10: 0.001, 100: 0.9, 1000: 5}, []),  # all but the last is noise
        (LINEAR, {10: 0.001, 100: 200, 1000: 250}, [100]),  # 200 times the floor at ten times the input
        (FLAT, {10: 5, 1000: 5.5}, []),
        (FLAT, {10: 5, 1000: 50}, [1000]),
        (Cost(name="wall", unit="s", expected=None), {10: 1, 100: 1000}, []),
        (LINEAR, {10: -3, 100: 5}, []),  # memory that was given back
    ],
)
def test_a_step_is_too_steep_where_the_cost_outgrows_its_input(
    cost: Cost, values: dict[float, float], steep: list[float]
) -> None:
    assert [step.larger for step in steps(cost, values) if step.too_steep] == steep


def test_the_exponent_of_a_quadratic_cost_is_two() -> None:
    assert [step.exponent for step in steps(LINEAR, {n: n * n for n in (10, 100, 5000)})] == pytest.approx([2, 2])


def test_of_several_rounds_the_least_counts() -> None:
    series = Series(title="t", input="n", costs=(LINEAR,))
    for values in ({10: 10.0, 100: 400.0}, {10: 30.0, 100: 100.0}):
        for size, value in values.items():
            series.note(size, {"cpu": value})
    assert series.rows == {10: {"cpu": 10.0}, 100: {"cpu": 100.0}}
    assert [step.exponent for step in series.steps()] == pytest.approx([1.0])
    assert Series(title="t", input="n", costs=()).rows == {}
