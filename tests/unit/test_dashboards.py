"""What Prometheus scrapes and Grafana shows: made from the code, of Grafana's own schema, with names that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from ruamel.yaml import YAML

from compose.grafana.make_dashboards import texts
from extproc import topology
from tests.cases.promql import CONFIG, DASHBOARDS, ROOT, asked_by_dashboards, panels, rules

PROMETHEUS = YAML(typ="safe").load(CONFIG)
PROVISIONING = ROOT / "compose/grafana/provisioning"
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")
ASKED = list(asked_by_dashboards())
PANELS = [(file, panel) for file in DASHBOARDS for panel in panels(file)]
EVERY_PANEL = pytest.mark.parametrize(
    ("file", "panel"), PANELS, ids=[f"{file.stem}: {panel['title']}" for file, panel in PANELS]
)
TYPES = {"timeseries", "stat", "table"}
"""Panels of today's Grafana; `graph`, `singlestat` and `table-old` are gone from it."""


def names(prefix: str, expressions: list[str]) -> set[str]:
    found = {name for expr in expressions for name in re.findall(rf"\b{prefix}\w+", expr)}
    assert found, prefix
    return found


def test_the_files_are_what_the_code_makes() -> None:
    assert {file.name: file.read_text() for file in DASHBOARDS} == texts(), "run `make generate`"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_is_one_of_grafanas_own_schema(file: Path) -> None:
    """What Grafana's classes read and write again is what was there: no field that they do not know."""
    tree = json.loads(file.read_text())
    assert json.loads(json.dumps(Dashboard.from_json(tree), cls=JSONEncoder)) == tree


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_lie_beside_and_below_each_other(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    ids: list[int] = []
    for panel in json.loads(file.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another one"
        taken |= cells
        ids.append(panel["id"])
    assert len(set(ids)) == len(ids)


@EVERY_PANEL
def test_a_panel_says_what_it_shows_and_in_which_unit(file: Path, panel: dict[str, Any]) -> None:
    assert panel["type"] in TYPES
    assert len(panel["description"]) > 5
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]} == {"${datasource}"}
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    if len(refs) > 1:
        assert all(target.get("legendFormat") for target in panel["targets"] if target.get("format") != "table")


def test_variables_that_a_query_uses_are_there() -> None:
    for file in DASHBOARDS:
        tree = json.loads(file.read_text())
        known = {variable["name"] for variable in tree["templating"]["list"]}
        used = {name for panel in panels(file) for t in panel["targets"] for name in re.findall(r"\$(\w+)", t["expr"])}
        assert used - known <= {"__rate_interval", "__range"}, file.name
        assert known - used == {"datasource"}, f"{file.name}: a variable that does nothing"


def test_every_metric_of_ours_is_in_the_reference() -> None:
    documented = set(re.findall(r"`(baton_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    asked = names("baton_", [each.expr for each in ASKED] + [rule["expr"] for rule in rules()])
    assert {name for name in asked if name not in documented and SUFFIX.sub("", name) not in documented} == set()


def test_every_recorded_series_that_is_read_is_recorded() -> None:
    asked = names("baton:", [each.expr for each in ASKED] + [rule["expr"] for rule in rules()])
    read = {
        name for expr in [*(e.expr for e in ASKED), *(r["expr"] for r in rules())] for name in re.findall(r"baton:[\w:]+", expr)
    }
    assert asked
    assert read <= {rule["record"] for rule in rules() if "record" in rule}


def test_every_metric_of_an_engine_is_one_that_the_installed_version_has() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = "\n".join(path.read_text(errors="replace") for path in Path(spec.origin).parent.rglob("*.py"))
    for name in names("vllm:", [each.expr for each in ASKED]):
        assert re.search(rf'"{re.escape(SUFFIX.sub("", name))}(?:_total)?"', source), name


def test_prometheus_scrapes_names_that_compose_yaml_has() -> None:
    services = topology.parse((ROOT / "compose.yaml").read_text(), {}).services
    known = {*services, *(alias for service in services.values() for alias in service.aliases)}
    for job in PROMETHEUS["scrape_configs"]:
        for static in job.get("static_configs", []):
            assert {target.partition(":")[0] for target in static["targets"]} <= known, job
        for look_up in job.get("dns_sd_configs", []):
            assert set(look_up["names"]) <= known, job


def test_jobs_that_a_rule_or_a_panel_names_are_scraped() -> None:
    jobs = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    asked = [*(each.expr for each in ASKED), *(rule["expr"] for rule in rules())]
    assert {job for expr in asked for job in re.findall(r'job="([^"]+)"', expr)} <= jobs


def test_compose_gives_prometheus_the_rules() -> None:
    volumes = topology.parse((ROOT / "compose.yaml").read_text(), {}).services["prometheus"].volumes
    [rules_file] = PROMETHEUS["rule_files"]
    assert f"./compose/prometheus/rules.yml:{rules_file}:ro" in volumes


def test_grafana_finds_the_datasource_and_the_folder_that_the_files_name() -> None:
    source = YAML(typ="safe").load(PROVISIONING / "datasources/prometheus.yml")
    assert source["apiVersion"] == 1
    [source] = source["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    provider = YAML(typ="safe").load(PROVISIONING / "dashboards/baton.yml")["providers"][0]
    assert provider["type"] == "file"
    volumes = topology.parse((ROOT / "compose.yaml").read_text(), {}).services["grafana"].volumes
    assert f"./compose/grafana/dashboards:{provider['options']['path']}:ro" in volumes
    assert "./compose/grafana/provisioning:/etc/grafana/provisioning:ro" in volumes
