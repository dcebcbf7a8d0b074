"""What Prometheus scrapes and Grafana shows: names that exist, jobs that are scraped."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from extproc import topology

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "compose/grafana/dashboards").glob("*.json"))
PROMETHEUS = YAML(typ="safe").load(ROOT / "compose/prometheus.yml")
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")


def expressions(file: Path) -> list[str]:
    return [target["expr"] for panel in json.loads(file.read_text())["panels"] for target in panel["targets"]]


def names(prefix: str) -> set[str]:
    found = {name for file in DASHBOARDS for expr in expressions(file) for name in re.findall(rf"\b{prefix}\w+", expr)}
    assert found, prefix
    return found


def test_every_metric_of_ours_on_a_dashboard_is_in_the_reference() -> None:
    documented = set(re.findall(r"`(baton_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert {name for name in names("baton_") if name not in documented and SUFFIX.sub("", name) not in documented} == set()


@pytest.mark.parametrize(("package", "prefix"), [("vllm", "vllm:"), ("lmcache", "lmcache_mp_")])
def test_every_metric_of_an_engine_on_a_dashboard_is_one_that_the_installed_version_has(package: str, prefix: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = "\n".join(path.read_text(errors="replace") for path in Path(spec.origin).parent.rglob("*.py"))
    for name in names(prefix):
        # LMCache names its metrics with dots; the exporter makes underscores of them.
        bare = SUFFIX.sub("", name).removeprefix("lmcache_mp_")
        assert re.search(rf'"(?:[\w.]*\.)?{re.sub("_", "[_.]", re.escape(bare))}(?:_total)?"', source), name


def test_prometheus_scrapes_names_that_compose_yaml_has() -> None:
    services = topology.parse((ROOT / "compose.yaml").read_text(), {}).services
    known = {*services, *(alias for service in services.values() for alias in service.aliases)}
    for job in PROMETHEUS["scrape_configs"]:
        for static in job.get("static_configs", []):
            assert {target.partition(":")[0] for target in static["targets"]} <= known, job
        for look_up in job.get("dns_sd_configs", []):
            assert set(look_up["names"]) <= known, job


def test_jobs_on_a_dashboard_are_scraped() -> None:
    jobs = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    assert {job for file in DASHBOARDS for expr in expressions(file) for job in re.findall(r'job="([^"]+)"', expr)} <= jobs


def test_grafana_finds_the_datasource_and_the_folder_that_the_files_name() -> None:
    source = YAML(typ="safe").load(ROOT / "compose/grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    for file in DASHBOARDS:
        panels = json.loads(file.read_text())["panels"]
        assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    provider = YAML(typ="safe").load(ROOT / "compose/grafana/provisioning/dashboards/baton.yml")["providers"][0]
    volumes = topology.parse((ROOT / "compose.yaml").read_text(), {}).services["grafana"].volumes
    assert f"./compose/grafana/dashboards:{provider['options']['path']}:ro" in volumes
