"""The chaos run at a small size, in each way in which Envoy can show bodies to the filter."""

import pytest

from tests.chaos.run import run


@pytest.mark.parametrize(("body_mode", "seed"), [("buffered", 20), ("full_duplex", 21), ("full_duplex_both", 22)])
async def test_under_faults_no_answer_is_wrong_and_nothing_is_left_behind(body_mode: str, seed: int) -> None:
    report = await run(seed, requests=500, seconds=20.0, body_mode=body_mode)
    assert not report.problems, f"{body_mode}, seed {seed}, {len(report.problems)} problems: {report.problems[:5]}"
    assert report.outcomes["right"] > 150
    assert sum(report.faults.values()) > 10
