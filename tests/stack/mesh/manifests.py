"""The manifests of the repository, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[3]


def load(*names: str) -> list[dict[str, Any]]:
    """All objects of these files, paths from the root of the repository."""
    found: list[dict[str, Any]] = []
    for name in names:
        with (ROOT / name).open(encoding="utf-8") as file:
            found += [each for each in YAML(typ="safe", pure=True).load_all(file) if each is not None]
    return found


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of one kind."""
    return [each for each in objects if each["kind"] == kind]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one of this kind."""
    (found,) = of_kind(objects, kind)
    return found
