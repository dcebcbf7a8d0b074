"""The budget of a request can be measured, written and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.decision import POLICIES, Clock, dispatcher_of, jobs_of, one
from bench.phases import main, measure, sum_us


def test_every_phase_has_a_cost_and_the_sum_leaves_out_other_ways_to_decide() -> None:
    found = measure(2 << 10, 3, seed=1)
    assert {"body: JSON", "decide: submit, note", "decode: body", "end: log line"} <= set(found)
    assert all(each.p50_us >= 0 for each in found.values())
    beside = found["decide: the same with 64 workers"].p50_us + found["decide: sent at once, mode disaggregate"].p50_us
    assert sum_us(found) == pytest.approx(sum(each.p50_us for each in found.values()) - beside)


def test_what_is_written_can_be_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    assert main(["--size", "1", "--rounds", "2", "--json", str(before)]) == 0
    assert set(json.loads(before.read_text())["sizes"]) == {"1"}
    assert main(["--size", "1", "--rounds", "2", "--against", str(before)]) == 0
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--rounds", "0"], "--rounds"), (["--size", "4096"], "--size"), (["--against", "nowhere.json"], "nowhere.json")],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_every_kind_of_decision_is_measured_alone_and_goes_the_way_that_its_name_says() -> None:
    for name, aims in POLICIES.items():
        now = Clock()
        dispatcher, jobs = dispatcher_of(2, now), jobs_of(aims)
        cost = one(dispatcher, [next(jobs) for _ in range(20)], now)
        assert 0 < cost.submit_us < cost.cycle_us, name
        decisions = [each["decision"] for each in dispatcher.noted(20)]
        assert len(decisions) == 20 and all(each.queued_s == 0 for each in decisions), f"{name}: nobody waits"
        assert all((each.prefill is None) == name.endswith("whole") for each in decisions), name
