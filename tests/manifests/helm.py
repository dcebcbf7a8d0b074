"""Helm itself, from the tools of the virtual environment."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = ROOT / "deploy" / "examples"
NAMESPACE = "inference"
RELEASE = "baton"

Object = dict[str, Any]


class HelmError(Exception):
    """What Helm said on standard error."""


def run(*arguments: str) -> str:
    """Standard output of a command of Helm. Raises HelmError."""
    binary = Path(sys.executable).parent / "helm"
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def template(*names: str, values: tuple[str, ...] = (), sets: tuple[str, ...] = ()) -> list[Object]:
    """The objects that an installation makes, with example files by name and single values on top. Raises HelmError."""
    return list(_template(names + values, sets))


@cache
def _template(names: tuple[str, ...], sets: tuple[str, ...]) -> tuple[Object, ...]:
    options = [part for name in names for part in ("--values", str(EXAMPLES / f"{name}.yaml"))]
    options += [part for each in sets for part in ("--set", each)]
    text = run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *options)
    return tuple(each for each in YAML(typ="safe", pure=True).load_all(text) if each is not None)


def examples() -> list[str]:
    """Names of the sets of values."""
    return sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def find(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of this kind (and name)."""
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def pod(of: Object) -> Object:
    """Pod template of a Deployment or LeaderWorkerSet."""
    if of["kind"] == "LeaderWorkerSet":
        return dict(of["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    return dict(of["spec"]["template"])


def container(of: Object) -> Object:
    """Its only container."""
    (found,) = pod(of)["spec"]["containers"]
    return dict(found)


def environment(of: Object) -> dict[str, str]:
    """Variables with a value in the manifest."""
    return {each["name"]: each["value"] for each in container(of)["env"] if "value" in each}
