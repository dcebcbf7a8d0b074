"""The rules of Prometheus: they are valid, every alert is shown to fire and to be quiet, and says what to do."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.cases.promql import CONFIG, ROOT, RULES, program, rules

TESTS = RULES.with_name("rules.test.yml")
RUNBOOK = (ROOT / "docs/alerts.md").read_text()
ALERTS = [rule for rule in rules() if "alert" in rule]


def promtool(*arguments: str, cwd: Path = RULES.parent) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, cwd=cwd, check=False, timeout=60)


def test_promtool_finds_the_rules_valid() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_the_configuration_valid(tmp_path: Path) -> None:
    text = CONFIG.read_text()
    assert "/etc/prometheus/rules.yml" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules.yml", str(RULES)))
    done = promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_every_alert_does_what_its_tests_say() -> None:
    done = promtool("test", "rules", TESTS.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_is_wrong_is_found_by_these_tests(tmp_path: Path) -> None:
    wrong = RULES.read_text().replace("> 0.9\n        for: 5m", "> 0.99\n        for: 5m")
    assert wrong != RULES.read_text()
    (tmp_path / RULES.name).write_text(wrong)
    cases = YAML(typ="safe").load(TESTS)
    cases["tests"] = [case for case in cases["tests"] if case["name"].startswith("BatonDecodeMemorySaturated")]
    with (tmp_path / TESTS.name).open("w") as file:
        YAML().dump(cases, file)
    done = promtool("test", "rules", TESTS.name, cwd=tmp_path)
    assert done.returncode != 0
    assert "BatonDecodeMemorySaturated" in done.stdout + done.stderr


def test_every_alert_is_shown_to_fire_and_to_be_quiet() -> None:
    shown: dict[str, set[bool]] = defaultdict(set)
    for case in YAML(typ="safe").load(TESTS)["tests"]:
        for expected in case["alert_rule_test"]:
            shown[expected["alertname"]].add(bool(expected.get("exp_alerts")))
    assert {rule["alert"]: shown[rule["alert"]] for rule in ALERTS} == {rule["alert"]: {True, False} for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_every_alert_says_how_bad_it_is_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    name, notes = rule["alert"], rule["annotations"]
    assert re.fullmatch(r"Baton[A-Z]\w+", name)
    assert rule["labels"]["severity"] in ("page", "warning")
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/alerts.md#{name.lower()}"
    section = re.search(rf"^### {name}\n\n(.+?)(?=^#|\Z)", RUNBOOK, re.M | re.S)
    assert section is not None, "docs/alerts.md has no section of this name"
    for part in ("**Means**", "**See it**", "**Do**"):
        assert part in section[1], part


def test_the_runbook_has_no_alert_that_is_gone() -> None:
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, re.M)) == {rule["alert"] for rule in ALERTS}
