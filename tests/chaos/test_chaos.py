"""The chaos run at a small size."""

from tests.chaos.run import run


async def test_under_faults_no_answer_is_wrong_and_nothing_is_left_behind() -> None:
    seed = 20
    report = await run(seed, requests=500, seconds=20.0)
    assert not report.problems, f"seed {seed}, {len(report.problems)} problems: {report.problems[:5]}"
    assert report.outcomes["right"] > 150
    assert sum(report.faults.values()) > 10
