"""Queries of the dashboards and of the rules, and a Prometheus to put them to."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from ruamel.yaml import YAML

from workers.process import Child
from workers.ready import free_ports

ROOT = Path(__file__).parents[2]
RULES = ROOT / "compose/prometheus/rules.yml"
CONFIG = ROOT / "compose/prometheus.yml"
DASHBOARDS = sorted((ROOT / "compose/grafana/dashboards").glob("*.json"))

SELECTOR = re.compile(r"\b((?:baton|vllm|envoy|up|ALERTS)\b[\w:]*)(\{[^}]*\})?")
"""A metric in an expression, with its matchers."""


def program(name: str) -> Path:
    """Of Debian's package, which ``make`` put beside Python."""
    return Path(sys.executable).parent / name


@dataclass(frozen=True)
class Asked:
    """One query, where it stands, and what its series are called there."""

    where: str
    expr: str
    legend: str = ""


def panels(file: Path) -> list[dict[str, Any]]:
    """Of a dashboard, headings left out."""
    return [panel for panel in json.loads(file.read_text())["panels"] if panel["type"] != "row"]


def asked_by_dashboards() -> Iterator[Asked]:
    for file in DASHBOARDS:
        for panel in panels(file):
            for target in panel["targets"]:
                where = f"{file.stem}: {panel['title']} ({target['refId']})"
                yield Asked(where, target["expr"], target.get("legendFormat", ""))


def rules() -> list[dict[str, Any]]:
    return [rule for group in YAML(typ="safe").load(RULES)["groups"] for rule in group["rules"]]


def selectors(expr: str) -> set[str]:
    """The metrics that an expression reads, with their matchers."""
    return {match[0] for match in SELECTOR.finditer(expr)}


class Prometheus:
    """A real one, with the repository's own configuration and rules, and other targets."""

    def __init__(self, directory: Path, targets: dict[str, list[str]], *, interval_s: int = 1) -> None:
        """``targets``: name of a job of the configuration -> ``ip:port``."""
        self._directory = directory
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        tree = YAML(typ="safe").load(CONFIG)
        tree["global"] |= dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{interval_s}s")
        assert tree["rule_files"] == ["/etc/prometheus/rules.yml"]
        tree["rule_files"] = [str(RULES)]
        for job in tree["scrape_configs"]:
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": targets.get(job["job_name"], [])}]
        assert targets.keys() <= {job["job_name"] for job in tree["scrape_configs"]}
        self.config = directory / "prometheus.yml"
        with self.config.open("w") as file:
            YAML().dump(tree, file)

    async def __aenter__(self) -> Prometheus:
        async with AsyncExitStack() as parts:
            child = Child(
                "prometheus",
                [
                    str(program("prometheus")),
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={self._directory}/prometheus",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                log=self._directory / "prometheus.log",
            )
            parts.push_async_callback(asyncio.to_thread, child.stop)
            self._http = await parts.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)))
            async with asyncio.timeout(20):
                while not await self._ready():
                    assert child.poll() is None, child.tail()
                    await asyncio.sleep(0.1)
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def _ready(self) -> bool:
        try:
            async with self._http.get(f"{self.url}/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def api(self, path: str, **parameters: str) -> Any:
        """The data of an answer; a refused query raises with Prometheus' own words."""
        async with self._http.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        if answer["status"] != "success":
            raise ValueError(f"{parameters}: {answer['error']}")
        return answer["data"]

    async def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The series of an expression at this moment: (labels, value)."""
        data = await self.api("query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]
